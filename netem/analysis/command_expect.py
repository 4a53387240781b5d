"""The names that expectations may use where the workload is a command."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from netem.analysis import expect
from netem.analysis.expect import ExpectError, Kind

_LATENCY = ("mean", "p50", "p95", "p99", "max")
NAMES: dict[str, Kind] = {
    "wall": "number",
    "rounds.count": "number",
    **{f"{g}.{name}": "number" for g in ("latency", "clean_latency", "burst_latency") for name in _LATENCY},
    **{f"link.{name}": "number" for name in ("seen", "dropped", "loss", "bytes", "queue_dropped", "device_dropped")},
    "bursts.loss": "numbers",
    "bursts.seen": "numbers",
    **{name: kind for name, kind in expect.NAMES.items() if name.startswith("queue.")},
}
"""What a variant offers, over all its repeats; times in seconds, `wall` that of the longest."""


def check_all(
    texts: Sequence[str],
    variants: Sequence[str],
    error: Callable[[tuple[str | int, ...], str], Exception],
    *,
    reports: bool,
    bursts: bool,
    queues: bool = False,
) -> None:
    """Raises what `error(path, message)` makes of the first that no run of these variants can give a value.

    reports: whether the programs report rounds; bursts, queues: whether the scenario has any, records any.
    """
    known = {f"{variant}.{name}": kind for variant in variants for name, kind in NAMES.items()}
    for index, text in enumerate(texts):
        try:
            for name in expect.names_in(text, known | expect.GLOBAL_NAMES):
                _check_name(name, reports, bursts, queues)
        except ExpectError as problem:
            raise error(("expect", index), str(problem)) from problem


def _check_name(name: str, reports: bool, bursts: bool, queues: bool) -> None:
    result = name.partition(".")[2]
    if result.startswith(("rounds.", "latency.", "clean_latency.", "burst_latency.")) and not reports:
        raise ExpectError(f"{name} has no value: the programs report no rounds (workload.iterations)")
    if result.startswith("queue.") and not queues:
        raise ExpectError(f"{name} has no value: no queue is recorded (microbursts, or queues: ...)")
    if result.startswith(("bursts.", "burst_latency.")) and not bursts:
        raise ExpectError(f"{name} has no value: the scenario has no bursts")

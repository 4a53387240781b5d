"""Microbursts and recorded queues of a run: what is checked, and what the summary says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from netem.analysis.queues import BurstReport, QueueReport

MAX_LATE_S = 0.001
LENGTH_SHARE, LENGTH_S = 0.1, 0.0002
"""By how much a microburst may be longer or shorter than asked: a share, and what the last calls take."""

Value = float | None


class Run(Protocol):
    """What is needed of a run of any workload."""

    @property
    def repeat(self) -> int: ...
    @property
    def microbursts(self) -> tuple[BurstReport, ...]: ...
    @property
    def queues(self) -> tuple[QueueReport, ...]: ...


def checks(run: Run) -> Iterator[tuple[str, bool, str]]:
    """(name, ok, detail) of the fidelity checks; none where there is nothing to check."""
    if run.microbursts:
        yield _sent(run.microbursts)
    if run.queues:
        yield _accounts(run.queues)


def _sent(bursts: Sequence[BurstReport]) -> tuple[str, bool, str]:
    """Every microburst came, in time, as long as asked, with all its packets."""
    problems = [problem for burst in bursts if (problem := _problem(burst))]
    late = max((burst.late_s or 0.0 for burst in bursts), default=0.0)
    detail = f"{sum(burst.packets for burst in bursts)} packets in {len(bursts)}, at most {1e6 * late:.0f} us late"
    return "microbursts", not problems, problems[0] if problems else detail


def _problem(burst: BurstReport) -> str | None:
    name = f"microburst {burst.number} to {burst.to}"
    late, length, planned = burst.late_s, burst.duration_s, burst.planned_duration_s
    if late is None or length is None:
        return f"{name} never came: the run was over before"
    if late > MAX_LATE_S:
        return f"{name} began {1e3 * late:.2f} ms late (allowed {1e3 * MAX_LATE_S:.0f} ms): the machine is too busy"
    if burst.refused or (burst.planned_packets is not None and burst.packets != burst.planned_packets):
        asked = "" if burst.planned_packets is None else f" of {burst.planned_packets}"
        why = (
            f"{burst.refused} refused by the senders' buffers" if burst.refused else "the machine is too slow for more"
        )
        return f"{name}: {burst.packets}{asked} packets sent; {why}"
    if planned is not None and abs(length - planned) > LENGTH_SHARE * planned + LENGTH_S:
        return f"{name} took {1e3 * length:.3f} ms instead of {1e3 * planned:.3f} ms"
    return None


def _accounts(queues: Sequence[QueueReport]) -> tuple[str, bool, str]:
    """Packets that entered a queue and did not come out are those that the queue says it dropped; no queue is deeper
    than its limit.
    """
    problems = []
    for queue in queues:
        if queue.counted_drops is not None and queue.dropped != queue.counted_drops:
            what = f"{queue.dropped} packets did not come out of it, it counted {queue.counted_drops} drops"
            problems.append(f"port to {queue.host}: {what}")
        if queue.too_deep:
            problems.append(f"port to {queue.host}: {queue.peak_bytes} bytes in a queue of {queue.limit_bytes}")
    words = [
        f"port to {queue.host}: {queue.dropped} drops, {queue.dropped_of('data')} of data; "
        f"up to {queue.peak_bytes} bytes"
        + (f" in {queue.limit_bytes}" if queue.limit_bytes else "")
        + (f"; {queue.unrecorded} packets not recorded" if queue.unrecorded else "")
        for queue in queues
    ]
    return "queues", not problems, "; ".join(problems or words)


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """The part of a transport's or a variant's summary, over its repeats."""
    return {
        "microbursts": [
            {"repeat": run.repeat, **asdict(burst), "late_s": burst.late_s, "duration_s": burst.duration_s}
            for run in runs
            for burst in run.microbursts
        ],
        "queues": [{"repeat": run.repeat, **queue.to_json()} for run in runs for queue in run.queues],
    }


def values(queues: Sequence[dict[str, Any]]) -> dict[str, Value]:
    """What expectations may use of `summary`'s queues: sums and extremes over repeats and ports; None: no value."""
    shares = [queue["drops_in_burst"] for queue in queues if queue["drops_in_burst"] is not None]
    return {
        "queue.drops": _sum(queue["dropped"] for queue in queues) if queues else None,
        "queue.drops_data": _sum(_of(queue, "data") for queue in queues) if queues else None,
        "queue.drops_in_burst": min(shares, default=None),
        "queue.peak": _max(queue["peak_share"] for queue in queues),
        "queue.sojourn_max": _max(queue["sojourn_max_s"] for queue in queues),
    }


def _of(queue: dict[str, Any], kind: str) -> int:
    return sum(int(flow["dropped"]) for flow in queue["flows"] if flow["kind"] == kind)


def _sum(numbers: Iterator[int]) -> float:
    return float(sum(numbers))


def _max(numbers: Iterator[float | None]) -> float | None:
    return max((number for number in numbers if number is not None), default=None)

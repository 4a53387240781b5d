"""summary.json: a run's rows in numbers. Everything here is a pure function of `RunData`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from netem.analysis import congestion, delays, expect, load
from netem.analysis.check import Fidelity
from netem.analysis.fidelity import fidelity
from netem.analysis.merge import LossPlan
from netem.analysis.oracle import Packets, passes
from netem.analysis.records import RoundRow, counts_by_flow
from netem.analysis.run import RunData, TransportRun
from netem.analysis.stats import cost_model, latency, slowest_by_iteration

VERSION = 1
RATIOS = {
    "burst_max": ("burst_latency_s", "max"),
    "burst_mean": ("burst_latency_s", "mean"),
    "mean": ("latency_s", "mean"),
    "p95": ("latency_s", "p95"),
    "p99": ("latency_s", "p99"),
    "p99_9": ("latency_s", "p99_9"),
    "max": ("latency_s", "max"),
    "worst_1pct_mean": ("latency_s", "worst_1pct_mean"),
    "total": ("total_s", None),
}


def summarise(data: RunData) -> dict[str, Any]:
    """The content of summary.json. Ratios are plain numbers, times seconds; None (null) where there is no
    value.
    """
    checked = fidelity(data)
    transports = {name: _transport(name, data, checked) for name in data.transports}
    verdicts = [expect.evaluate(text, _values(data, transports, checked)) for text in data.expect]
    content: dict[str, Any] = _finite(
        {
            "version": VERSION,
            "scenario": data.scenario,
            "seed": data.seed,
            "backend": data.backend,
            "loss_engine": data.loss_engine,
            "transports": transports,
            "ratios": _ratios(transports),
            "cost_model": _as_dict(
                cost_model([row for name in transports for row in data.rows(name) if row.direction == "up"])
            ),
            "fidelity": _fidelity(checked),
            "captures": [asdict(capture) for capture in data.captures],
            "expectations": [asdict(verdict) for verdict in verdicts],
        }
    )
    return content


def expectations_held(summary: dict[str, Any]) -> bool:
    """Whether every expectation held; one without a value has not."""
    return all(one["held"] is True for one in summary["expectations"])


def _transport(name: str, data: RunData, checked: Fidelity) -> dict[str, Any]:
    runs = [run for run in data.runs if run.name == name]
    up = [row for row in data.rows(name) if row.direction == "up"]
    bursts = [row for row in data.rows(name) if row.burst]
    totals = [run.total_s for run in runs if run.total_s is not None]
    return {
        "kind": runs[0].kind,
        "repeats": len(runs),
        "mask": "repeatable" if all(run.mask_seed is not None for run in runs) else "none",
        "latency_s": _latency(up),
        "clean_latency_s": _latency([row for row in up if not row.burst]),
        "burst_latency_s": _latency([row for row in up if row.burst]),
        "first_iteration_s": max(
            (r.latency_s for r in up if not r.iteration and r.latency_s is not None), default=None
        ),
        "iteration_latency_s": _as_dict(latency(slowest_by_iteration(up).values())),
        "burst_rounds": burst_rounds(bursts, runs),
        **_results(runs),
        "total_s": _mean(totals),
        "communication_share": _communication_share(data.rows(name), totals),
        "rounds": {
            "count": len({(row.repeat, row.round) for row in data.rows(name)}),
            "outcomes": _count(row.outcome for row in data.rows(name)),
            "phases": _count(row.phase for row in up),
        },
        "passes": _beside_oracle(bursts, "passes"),
        "packets": _beside_oracle(bursts, "packets"),
        "overshoot_packets": _overshoot(data.rows(name)),
        "dropped_socket": _total(row.dropped_socket for row in data.rows(name)),
        "late": _total(row.late for row in data.rows(name)),
        "duplicate": _total(row.duplicate for row in data.rows(name)),
        "by_loss": _by_loss(name, bursts, runs, data.plan, checked),
        "replicas_identical": _replicas(runs),
        **congestion.summary(runs),
        "delays": delays.summary(runs),
        "burst_lengths": [{"repeat": run.repeat, **each.to_json()} for run in runs for each in run.burst_lengths],
        "machine": load.summary(data.rows(name), [run.load for run in runs]),
        "facts": runs[0].facts,
    }


def _latency(rows: Iterable[RoundRow]) -> dict[str, Any] | None:
    return _as_dict(latency(row.latency_s for row in rows if row.latency_s is not None))


def burst_rounds(rows: Sequence[RoundRow], runs: Sequence[TransportRun]) -> list[dict[str, Any]]:
    """One entry a burst iteration and direction: its latencies, phase, passes, packets and loss over all
    its workers.
    """
    groups: dict[tuple[int, int, str], list[RoundRow]] = {}
    for row in rows:
        groups.setdefault((row.repeat, row.iteration, row.direction), []).append(row)
    counts = {run.repeat: counts_by_flow(run.counts) for run in runs}
    entries = []
    for (repeat, iteration, direction), group in sorted(groups.items()):
        found = [counts[repeat].get((row.round, row.worker, row.direction)) for row in group]
        seen, dropped = sum(c.ratio_seen for c in found if c), sum(c.ratio_dropped for c in found if c)
        asked = [row.loss_requested for row in group]
        times = [row.latency_s for row in group if row.latency_s is not None]
        entries.append(
            {
                "repeat": repeat,
                "iteration": iteration,
                "direction": direction,
                "phase": group[0].phase,
                "tolerance": group[0].tolerance,
                "outcomes": _count(row.outcome for row in group),
                "latency_mean_s": _mean(times),
                "latency_max_s": max(times, default=None),
                "passes": _mean(row.passes for row in group),
                "packets_at_need": _mean(_packets(row) for row in group),
                "requested_loss": asked[0] if len(set(asked)) == 1 else None,
                "achieved_loss": dropped / seen if seen else None,
            }
        )
    return entries


def _results(runs: Sequence[TransportRun]) -> dict[str, Any]:
    """Metric and training loss after the last epoch: mean over workers and repeats."""
    last = [row for run in runs for row in run.epochs if row.epoch == max(other.epoch for other in run.epochs)]
    metric = next((row.metric for row in last if row.metric), None)
    value = _mean(row.value for row in last)
    return {
        "metric": metric,
        "value": value,
        "accuracy": value if metric == "accuracy" else None,
        "perplexity": value if metric == "perplexity" else None,
        "train_loss": _mean(row.train_loss for row in last),
    }


def _communication_share(rows: Sequence[RoundRow], totals: Sequence[float]) -> float | None:
    """Part of the total time that the slowest worker of each iteration spent sending and receiving."""
    busy = sum(
        sum(slowest_by_iteration(row for row in rows if row.direction == direction).values())
        for direction in ("up", "down")
    )
    return min(1.0, busy / sum(totals)) if totals and sum(totals) > 0 else None


def _packets(row: RoundRow) -> int | None:
    return row.packets_at_need if row.packets_at_need is not None else row.packets_sent


def _beside_oracle(rows: Sequence[RoundRow], what: str) -> dict[str, Any] | None:
    """Measured mean over completed burst rounds, and the oracle's mean with the 95 % interval of a single round.

    The interval is given where all the rounds are alike (same chunks, need and oracle).
    """
    usable = [row for row in rows if row.oracle_passes is not None and row.outcome == "ok"]
    measured = [(row.passes if what == "passes" else _packets(row)) for row in usable]
    if not usable or any(value is None for value in measured):
        return None
    expected = [(row.oracle_passes if what == "passes" else row.oracle_packets) for row in usable]
    alike = {(row.chunks, row.delivered, row.loss_requested) for row in usable}
    return {
        "rounds": len(usable),
        "measured": _mean(measured),
        "oracle": _mean(expected),
        "oracle_interval": _oracle_interval(*alike.pop(), what) if len(alike) == 1 else None,
    }


def _oracle_interval(chunks: int | None, needed: int | None, loss: float | None, what: str) -> list[float] | None:
    if not chunks or not needed or loss is None:
        return None
    if what == "packets":
        return list(Packets(needed, loss).interval())
    found = passes(chunks, needed, loss)
    return list(found.interval()) if found else None


def _overshoot(rows: Sequence[RoundRow]) -> dict[str, Any] | None:
    """Packets sent after the one that completed the round."""
    over = [
        r.packets_sent - r.packets_at_need for r in rows if r.packets_sent is not None and r.packets_at_need is not None
    ]
    return {"mean": _mean(over), "max": max(over)} if over else None


def _by_loss(
    name: str, rows: Sequence[RoundRow], runs: Sequence[TransportRun], plan: LossPlan, checked: Fidelity
) -> list[dict[str, Any]]:
    """For each loss that was asked for: what links, passes and packets were in its burst rounds.

    `low`, `high`: the widest interval of the single checks, which are by round and worker.
    """
    groups: dict[float, list[RoundRow]] = {}
    for row in rows:
        if row.loss_requested is not None:
            groups.setdefault(row.loss_requested, []).append(row)
    counts = {run.repeat: counts_by_flow(run.counts) for run in runs}
    entries = []
    for asked, group in sorted(groups.items()):
        found = [counts[row.repeat].get((row.round, row.worker, row.direction)) for row in group]
        seen, dropped = sum(c.ratio_seen for c in found if c), sum(c.ratio_dropped for c in found if c)
        same = [c for c in checked.checks if c.transport == name and c.name == "burst loss" and c.requested == asked]
        entries.append(
            {
                "requested": asked,
                "burst_loss": _burst_loss(asked, plan.base_loss.get((group[0].worker, group[0].direction), 0.0)),
                "achieved": dropped / seen if seen else None,
                "low": min((c.low for c in same if c.low is not None), default=None),
                "high": max((c.high for c in same if c.high is not None), default=None),
                "seen": seen,
                "dropped": dropped,
                "ok": all(c.ok for c in same),
                "passes": _beside_oracle(group, "passes"),
                "packets": _beside_oracle(group, "packets"),
            }
        )
    return entries


def _burst_loss(asked: float, base: float) -> float:
    """The burst's part of a loss that was asked for, beside the steady loss of the links."""
    return round(1.0 - (1.0 - asked) / (1.0 - base), 12) if 0.0 < base < 1.0 else asked


def _replicas(runs: Sequence[TransportRun]) -> bool | None:
    known = [row.replica_divergence for run in runs for row in run.epochs if row.replica_divergence is not None]
    return all(value == 0 for value in known) if known else None


def _ratios(transports: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Every pair once, the adaptive one below: mlt/dblp as in the paper; otherwise later ones over earlier ones."""
    names = sorted(transports, key=lambda name: transports[name]["kind"] != "dblp")
    pairs = [(slow, fast) for index, fast in enumerate(names) for slow in names[index + 1 :]]
    return {
        f"{slow}/{fast}": {
            name: _ratio(_pick(transports[slow], path), _pick(transports[fast], path)) for name, path in RATIOS.items()
        }
        for slow, fast in pairs
    }


def _pick(transport: dict[str, Any], path: tuple[str, str | None]) -> float | None:
    outer, inner = path
    value = transport[outer]
    found: float | None = value if inner is None or value is None else value[inner]
    return found


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def _fidelity(checked: Fidelity) -> dict[str, Any]:
    return {
        "verdict": "faithful" if checked.faithful else "unfaithful",
        "faithful": checked.faithful,
        "false_alarm": checked.false_alarm,
        "statistical_checks": checked.statistical_checks,
        "checks": [asdict(check) for check in checked.checks],
    }


def _values(data: RunData, transports: dict[str, Any], checked: Fidelity) -> dict[str, expect.Value | None]:
    """Every name that an expectation may use."""
    values: dict[str, expect.Value | None] = {"fidelity.faithful": checked.faithful}
    for name, found in transports.items():
        rows = [row for row in data.rows(name) if row.burst]
        own: dict[str, Any] = {
            "accuracy": found["accuracy"],
            "perplexity": found["perplexity"],
            "train_loss": found["train_loss"],
            "total": found["total_s"],
            "rounds.count": float(found["rounds"]["count"]),
            "rounds.ok": _mean(float(row.outcome == "ok") for row in data.rows(name)),
            "replicas.identical": found["replicas_identical"],
            "burst_rounds.phase": tuple(row.phase for row in rows),
            "burst_rounds.outcome": tuple(row.outcome for row in rows),
            "burst_rounds.tolerance": _all_floats(row.tolerance for row in rows),
            "burst_rounds.passes": _all_floats(row.passes for row in rows),
            "burst_rounds.packets": _all_floats(_packets(row) for row in rows),
            "burst_rounds.latency": _all_floats(row.latency_s for row in rows),
            "burst_rounds.loss": _all_floats(entry["achieved_loss"] for entry in found["burst_rounds"]),
            **congestion.values(found["queues"]),
        }
        for group in ("latency", "clean_latency", "burst_latency", "iteration_latency"):
            own |= {f"{group}.{key}": value for key, value in (found[f"{group}_s"] or {}).items()}
        values |= {f"{name}.{key}": own.get(key) for key in expect.NAMES}
    return values


def _all_floats(values: Iterable[float | None]) -> tuple[float, ...] | None:
    """None where one is missing: "all of them" cannot be said then."""
    known = list(values)
    return None if any(v is None for v in known) else tuple(float(v) for v in known if v is not None)


def _as_dict(value: Any) -> dict[str, Any] | None:
    return None if value is None else asdict(value)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _count(values: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return counts


def _finite(value: Any) -> Any:
    """The same with infinities, which JSON lacks, as null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

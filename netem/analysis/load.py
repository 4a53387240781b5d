"""Whether the machine was too busy for the numbers: what latencies owe to waiting for a core, not to the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from netem.analysis.records import RoundRow

MAX_RUNQUEUE = 0.10
"""Where the transport waits for a core for more than this share of its latencies, they are not the network's."""
MAX_STEAL = 0.10
"""Share of the processor time that the host of a virtual machine may have given to others."""
PROC = Path("/proc")


@dataclass(frozen=True)
class Snapshot:
    """Counters of all cores since boot (proc(5)): ticks, of them stolen; packets that the backlog of the kernel's
    receive path had no room for."""

    ticks: int
    steal_ticks: int
    backlog_dropped: int


@dataclass(frozen=True)
class Load:
    """What happened between two snapshots. Ratios 0..1."""

    steal: float
    backlog_dropped: int


def snapshot(proc: Path = PROC) -> Snapshot | None:
    """None where the kernel does not say."""
    try:
        ticks = [int(text) for text in (proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        rows = (proc / "net" / "softnet_stat").read_text().split("\n")
        return Snapshot(sum(ticks), ticks[7], sum(int(row.split()[1], 16) for row in rows if row))
    except (OSError, ValueError, IndexError):
        return None


def between(before: Snapshot | None, after: Snapshot | None) -> Load | None:
    if before is None or after is None:
        return None
    ticks = after.ticks - before.ticks
    steal = (after.steal_ticks - before.steal_ticks) / ticks if ticks else 0.0
    return Load(steal, after.backlog_dropped - before.backlog_dropped)


def summary(rows: Sequence[RoundRow], loads: Sequence[Load | None]) -> dict[str, object]:
    """Of one transport's rounds: how much it waited for a core, and what the machine did beside it."""
    burst, rest = ([row for row in rows if bool(row.burst) is wanted] for wanted in (True, False))
    shares = {"burst_rounds": runqueue_share(burst), "other_rounds": runqueue_share(rest)}
    known = [load for load in loads if load is not None]
    judged = runqueue_share(judged_rounds(rows))
    return {
        "waiting_for_a_core": shares,
        "busy": None if judged is None else judged > MAX_RUNQUEUE,
        "steal": max((load.steal for load in known), default=None),
        "backlog_dropped": sum(load.backlog_dropped for load in known) if known else None,
    }


def judged_rounds(rows: Sequence[RoundRow]) -> list[RoundRow]:
    """Those in bursts, or all where there is no burst."""
    return [row for row in rows if row.burst] or list(rows)


def runqueue_share(rows: Sequence[RoundRow]) -> float | None:
    """Of the latencies of these rounds the share in which the transport waited for a core; None: not known."""
    known = [(row.runqueue_s, row.latency_s) for row in rows if row.runqueue_s is not None and row.latency_s]
    total_s = sum(latency_s for _, latency_s in known)
    return sum(wait_s for wait_s, _ in known) / total_s if total_s else None

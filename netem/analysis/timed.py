"""Which rounds events by time fell into, from the times at which they were really in force. Pure.

Times are seconds since the first round was let go. While a change is being made, both what was before it and what is
after it may hold: a round is known to have one loss only if no change was under way in it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from netem.analysis.punctual import Moment

FlowRound = tuple[int, int, str]
"""(round, worker, direction)"""


@dataclass(frozen=True)
class Stretch:
    """A round: when the last worker asked for it, and when it was let go."""

    round: int
    asked_s: float
    let_go_s: float


@dataclass(frozen=True)
class Change:
    """From ended_s on exactly these losses by time are in force; since began_s they may be.

    bursts: as in `netem.spec`; one with loss 0 stands for a link whose rate or delay is not its own.
    """

    began_s: float
    ended_s: float
    bursts: tuple[Any, ...]


@dataclass
class History:
    """What the testbed wrote down of one job, in order. Empty where nothing happened by time."""

    rounds: list[Stretch] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    lateness_s: list[float] = field(default_factory=list)
    """Of every change by time: actual, read back, minus planned."""
    moments: list[Moment] = field(default_factory=list)
    """Of every change by time, and of the first gate."""
    missed: int = 0
    """Changes that were planned for a time that the job did not reach."""
    real_time: bool = False
    """Whether the testbed ran before all ordinary programs."""


def timed_loss(history: History, ranks: Mapping[str, int]) -> dict[FlowRound, frozenset[float]]:
    """Of each flow and round that events by time touched: all the losses that they asked for in its course."""
    found: dict[FlowRound, frozenset[float]] = {}
    states = [Change(-math.inf, -math.inf, ()), *history.changes]
    begins = [state.began_s for state in states]
    for number, stretch in enumerate(history.rounds):
        later = history.rounds[number + 1 :][:1]
        end = later[0].asked_s if later else math.inf
        last = bisect.bisect_left(begins, end)
        first = last - 1
        while first > 0 and states[first].ended_s > stretch.let_go_s:
            first -= 1
        for key, losses in _losses(states[first:last], ranks).items():
            found[(stretch.round, *key)] = losses
    return found


def _losses(states: Sequence[Change], ranks: Mapping[str, int]) -> dict[tuple[int, str], frozenset[float]]:
    """The different losses of each (worker, direction) that is touched in one of these states."""
    each = [_by_flow(state, ranks) for state in states]
    touched = {flow for state in each for flow in state}
    return {flow: frozenset(state.get(flow, 0.0) for state in each) for flow in touched}


def _by_flow(state: Change, ranks: Mapping[str, int]) -> dict[tuple[int, str], float]:
    found: dict[tuple[int, str], float] = {}
    for burst in state.bursts:
        for direction in ("up", "down") if burst.direction == "both" else (burst.direction,):
            for worker in burst.workers:
                flow = (ranks[worker], direction)
                found[flow] = max(found.get(flow, 0.0), burst.loss)
    return found


def timing(history: History) -> dict[str, Any]:
    """What summary.json says of a transport's changes by time: how many, and how late they were in place."""
    late = sorted(history.lateness_s)
    if not late and not history.missed:
        return {}
    median = late[len(late) // 2] if late else None
    worst = late[-1] if late else None
    counts = {"changes": len(late), "missed": history.missed, "real_time": history.real_time}
    return {"by_time": {**counts, "late_p50_s": median, "late_max_s": worst}}

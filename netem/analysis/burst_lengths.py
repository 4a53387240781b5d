"""Losses in a row where a Gilbert-Elliott chain was asked for: their mean and histogram, from captures on both sides.

A chain runs along the sequence numbers of one pass, so neighbours there are neighbours in the chain. Of every lost
packet whose successor was sent in the same pass it is known whether the row of losses went on. That it goes on has the
same probability q each time (a chain that loses in one state only has no other memory), so the number of continuations
is binomial: the exact interval of q is one of the mean, 1 / (1 - q), without any bias by rows that begin or end unseen.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from netem.analysis import intervals
from netem.analysis.fates import Fate, Fates, Flow
from netem.analysis.records import RoundRow
from netem.spec.loss import BurstyLoss

LONGEST = 64
"""Longer ones share a place in the histogram."""
NO_CAPTURE = "needs capture: {at: ['*'], both: true, rounds: all, snap: 64 B}"
NO_KEY = "a TCP segment does not say which one it is"
STEADY = "a link's own chain goes from packet to packet of all who send through it"


def continuation(loss: BurstyLoss) -> float:
    """Probability that the packet behind a lost one is lost as well: stationary, P(both lost) / P(lost)."""
    bad = loss.p / (loss.p + loss.r)
    state = np.array([1.0 - bad, bad])
    lost = np.diag([1.0 - loss.k, 1.0 - loss.h])
    return float((state @ lost @ _steps(loss) @ lost).sum() / (state @ lost).sum())


def expected_shares(loss: BurstyLoss, longest: int = LONGEST) -> list[float]:
    """Share of the rows of 1, 2, ..., `longest` losses, and of longer ones."""
    bad = loss.p / (loss.p + loss.r)
    steps, lost = _steps(loss), np.diag([1.0 - loss.k, 1.0 - loss.h])
    begin = np.array([1.0 - bad, bad]) @ (np.eye(2) - lost) @ steps @ lost
    if not begin.sum():
        return [0.0] * longest + [1.0]
    begin = begin / begin.sum()
    longer = [1.0]
    for _ in range(longest):
        begin = begin @ steps @ lost
        longer.append(float(begin.sum()))
    return [more - less for more, less in itertools.pairwise(longer)] + [longer[-1]]


def _steps(loss: BurstyLoss) -> Any:
    return np.array([[1.0 - loss.p, loss.p], [loss.r, 1.0 - loss.r]])


@dataclass(frozen=True)
class Lengths:
    """Of one worker's packets in one direction, in all rounds with this loss.

    trials: lost packets whose successor was sent; continued: how many of these successors were lost, too. rows: length
    -> number of rows of losses in first passes that were seen from the packet before to the one behind. doubt: why
    nothing is known.
    """

    worker: int
    direction: str
    loss: BurstyLoss
    trials: int = 0
    continued: int = 0
    rows: Mapping[int, int] = field(default_factory=dict)
    doubt: str = ""

    @property
    def requested(self) -> float | None:
        """Mean number of losses in a row; None where they never end."""
        return _mean(continuation(self.loss))

    @property
    def achieved(self) -> float | None:
        return _mean(self.continued / self.trials) if self.trials else None

    def interval(self, false_alarm: float) -> intervals.Interval:
        """Of the probability that a row goes on. Where packets are lost in both states the trials depend on each other:
        as many fewer would scatter like that.
        """
        scatter = 1.0 if self.loss.k == 1.0 else self.loss.clustering
        trials, continued = max(1, round(self.trials / scatter)), round(self.continued / scatter)
        return intervals.clopper_pearson(min(continued, trials), trials, false_alarm)

    def to_json(self) -> dict[str, Any]:
        count = sum(self.rows.values())
        shares = expected_shares(self.loss) if self.rows else []
        longer = sum(n for length, n in self.rows.items() if length > LONGEST)
        seen = [self.rows.get(length, 0) for length in range(1, LONGEST + 1)] + [longer]
        last = max((n for n, each in enumerate(seen) if each), default=-1)
        return {
            "worker": self.worker,
            "direction": self.direction,
            "requested_loss": float(self.loss),
            "requested_mean": self.requested,
            "achieved_mean": self.achieved,
            "bursts": count,
            "histogram": seen[: last + 1],
            "expected": [round(count * share, 2) for share in shares[: last + 1]],
            "doubt": self.doubt or None,
        }


def _mean(going_on: float) -> float | None:
    return 1.0 / (1.0 - going_on) if going_on < 1.0 else None


class Plan(Protocol):
    @property
    def base_loss(self) -> Mapping[tuple[int, str], float]: ...


def burst_lengths(rows: Iterable[RoundRow], fates: Fates | None, plan: Plan, *, keyed: bool) -> tuple[Lengths, ...]:
    """Of one job. `fates` None: nothing was captured. `keyed`: packets say which transmission they are."""
    asked: dict[tuple[int, str, BurstyLoss], list[Fate]] = {}
    for row in rows:
        if isinstance(row.loss_requested, BurstyLoss):
            found = asked.setdefault((row.worker, row.direction, row.loss_requested), [])
            fate = fates.flows.get(Flow(row.direction, row.worker, row.round)) if fates is not None else None
            if fate is not None:
                found.append(fate)
    lengths = []
    for (worker, direction, loss), group in asked.items():
        doubt = NO_CAPTURE
        if not keyed:
            doubt = NO_KEY
        elif isinstance(plan.base_loss.get((worker, direction)), BurstyLoss):
            doubt = STEADY
        elif fates is not None and fates.missed:
            doubt = f"the captures missed {fates.missed} packets"
        elif group:
            lengths.append(_counted(worker, direction, loss, group))
            continue
        lengths.append(Lengths(worker, direction, loss, doubt=doubt))
    return tuple(lengths)


def _counted(worker: int, direction: str, loss: BurstyLoss, fates: Iterable[Fate]) -> Lengths:
    trials = continued = 0
    rows: Counter[int] = Counter()
    for fate in fates:
        order = np.lexsort((fate.keys >> np.uint64(16), fate.keys & np.uint64(0xFFFF)))  # pass by pass
        sequence, number = (fate.keys >> np.uint64(16))[order].astype(np.int64), (fate.keys & np.uint64(0xFFFF))[order]
        lost = ~fate.arrived[order]
        beside = (np.diff(sequence) == 1) & (number[1:] == number[:-1])
        trials += int(np.count_nonzero(lost[:-1] & beside))
        continued += int(np.count_nonzero(lost[:-1] & beside & lost[1:]))
        whole = number == number.min(initial=0xFFFF)  # what later passes send is a few neighbours here and there
        rows.update(_whole_rows(lost[whole], beside[: int(np.count_nonzero(whole)) - 1]))
    return Lengths(worker, direction, loss, trials, continued, dict(sorted(rows.items())))


def _whole_rows(lost: np.ndarray[Any, np.dtype[np.bool_]], beside: np.ndarray[Any, np.dtype[np.bool_]]) -> list[int]:
    """Lengths of the rows of losses between two packets that got through, all of them neighbours."""
    lengths, length = [], -1  # -1: the packet before is not known to have got through
    for each, next_to_last in zip(lost.tolist(), [False, *beside.tolist()], strict=True):
        if not next_to_last:
            length = -1
        if not each:
            if length > 0:
                lengths.append(length)
            length = 0
        elif length >= 0:
            length += 1
    return lengths


def detail(lengths: Lengths, low: float | None, high: float | None) -> str:
    """A sentence with the numbers."""
    where = f"worker {lengths.worker} {lengths.direction}: mean burst requested {_packets(lengths.requested)}"
    if lengths.doubt:
        return f"{where}, not measured: {lengths.doubt}"
    if not lengths.trials:
        return f"{where}, no packet was lost"
    return (
        f"{where}, achieved {_packets(lengths.achieved)} packets ({sum(lengths.rows.values())} whole bursts; "
        f"interval {_packets(low)} to {_packets(high)})"
    )


def _packets(value: float | None) -> str:
    return "any number" if value is None else f"{value:.2f}"

"""Do two runs of a scenario agree, where chance or another link backend chose other packets? Pure.

Of each transport and loss, over the burst rounds that both runs completed: achieved loss, passes and packets up to the
one that completes the round. Two faithful runs differ by chance alone, and by how much the oracle says; what is more
than that is a difference. All comparisons of two runs together call faithful ones different in 0.1 % of cases.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import NormalDist

import numpy as np

from netem.analysis import oracle
from netem.analysis.intervals import false_alarm_each

ROUNDS = "rounds.csv"


@dataclass(frozen=True)
class Round:
    """The part of a line of rounds.csv that is needed here. dropped_link: None where the link cannot tell."""

    transport: str
    repeat: int
    round: int
    worker: int
    direction: str
    chunks: int
    delivered: int
    loss_requested: float
    packets_sent: int
    packets_at_need: int | None
    passes: int
    dropped_link: int | None

    @property
    def key(self) -> tuple[int, int, int, str]:
        return self.repeat, self.round, self.worker, self.direction


@dataclass(frozen=True)
class Compared:
    """`difference` of the two means, first minus second, and how large it may be by chance."""

    transport: str
    loss: float
    what: str
    rounds: int
    means: tuple[float, float]
    allowed: float

    @property
    def difference(self) -> float:
        return self.means[0] - self.means[1]

    @property
    def agrees(self) -> bool:
        return abs(self.difference) <= self.allowed + 1e-12


def read_rounds(path: Path) -> list[Round]:
    """Completed rounds of one known loss above 0, of a run's folder; none where it has no rounds.csv.

    Rounds under losses that are not independent have no oracle, and are left out. Raises ValueError, KeyError.
    """
    if not (path / ROUNDS).is_file():
        return []
    with (path / ROUNDS).open(newline="", encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["outcome"] == "ok" and line["oracle_packets"]]
    return [_round(line) for line in lines if float(line["loss_requested"] or 0.0) > 0.0]


def _round(line: dict[str, str]) -> Round:
    values: dict[str, object] = {}
    for field in fields(Round):
        text = line[field.name]
        if field.name in ("transport", "direction"):
            values[field.name] = text
        elif field.name == "loss_requested":
            values[field.name] = float(text)
        else:
            values[field.name] = int(text) if text else None
    return Round(**values)  # type: ignore[arg-type]


def compare(one: Sequence[Round], other: Sequence[Round], *, passes: bool) -> list[Compared]:
    """`passes`: the transport waits for an answer after each pass, so that the oracle knows their number."""
    groups = _groups(one, other)
    kinds: list[tuple[str, Callable[[Sequence[tuple[Round, Round]], float], _Means | None]]]
    kinds = [("loss", _losses), ("packets", _packets), *([("passes", _passes)] if passes else [])]
    false_alarm = false_alarm_each(len(groups) * len(kinds))
    return [
        Compared(transport, loss, what, len(pairs), *found)
        for (transport, loss), pairs in groups.items()
        for what, judge in kinds
        if (found := judge(pairs, false_alarm)) is not None
    ]


_Means = tuple[tuple[float, float], float]


def _groups(one: Sequence[Round], other: Sequence[Round]) -> dict[tuple[str, float], list[tuple[Round, Round]]]:
    """Rounds that both have, under the same loss and with as much to deliver."""
    known = {(row.transport, row.key): row for row in other}
    found: dict[tuple[str, float], list[tuple[Round, Round]]] = {}
    for row in one:
        match = known.get((row.transport, row.key))
        alike = match is not None and (row.loss_requested, row.chunks, row.delivered) == (
            match.loss_requested,
            match.chunks,
            match.delivered,
        )
        if match is not None and alike:
            found.setdefault((row.transport, row.loss_requested), []).append((row, match))
    return found


def _losses(pairs: Sequence[tuple[Round, Round]], false_alarm: float) -> _Means | None:
    """Packets lost of those sent: two shares of one probability, the one that was asked for."""
    if any(row.dropped_link is None for pair in pairs for row in pair):
        return None
    sent = [sum(pair[side].packets_sent for pair in pairs) for side in (0, 1)]
    lost = [sum(pair[side].dropped_link or 0 for pair in pairs) for side in (0, 1)]
    loss = pairs[0][0].loss_requested
    std = math.sqrt(loss * (1.0 - loss) * (1.0 / sent[0] + 1.0 / sent[1]))
    return (lost[0] / sent[0], lost[1] / sent[1]), _sigmas(false_alarm) * std


def _packets(pairs: Sequence[tuple[Round, Round]], false_alarm: float) -> _Means | None:
    if any(row.packets_at_need is None for pair in pairs for row in pair):
        return None
    means = tuple(sum(pair[side].packets_at_need or 0 for pair in pairs) / len(pairs) for side in (0, 1))
    variance = sum(oracle.Packets(row.delivered, row.loss_requested).std ** 2 for pair in pairs for row in pair)
    return (means[0], means[1]), _sigmas(false_alarm) * math.sqrt(variance) / len(pairs)


def _passes(pairs: Sequence[tuple[Round, Round]], false_alarm: float) -> _Means | None:
    """From the exact distribution of the difference of two sums."""
    known = [oracle.passes(row.chunks, row.delivered, row.loss_requested) for row, _ in pairs]
    usable = [each for each in known if each is not None]
    if len(usable) < len(known):
        return None
    total = np.array([1.0])
    for each in usable:
        total = np.convolve(total, each.pmf)
    total = np.convolve(total, total[::-1])
    _, high = oracle.pmf_interval(total / total.sum(), 1.0 - false_alarm)
    means = tuple(sum(pair[side].passes for pair in pairs) / len(pairs) for side in (0, 1))
    return (means[0], means[1]), (high - len(total) // 2) / len(pairs)


def _sigmas(false_alarm: float) -> float:
    return NormalDist().inv_cdf(1.0 - false_alarm / 2)

"""Links that damage or copy packets, and what that means for the sums of a run. Pure.

sch_netem does not count what it damages or copies. A damaged packet is one with a flipped bit: the receiver's kernel
refuses it (the checksums of UDP and IP, another's address), which it counts, or a switch knows no way for it. A copy
arrives like any packet, and counts as duplicate or late. So the sums close within what was asked for: copies and damage
are binomial, and six standard deviations are left to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from netem.analysis.accounts import Group

SIGMAS = 6.0


@dataclass(frozen=True)
class Ratios:
    """Of one flow: share of packets copied and damaged in front of the link that counts them, and by it or behind."""

    copied: tuple[float, float] = (0.0, 0.0)
    damaged: tuple[float, float] = (0.0, 0.0)

    def __bool__(self) -> bool:
        return any((*self.copied, *self.damaged))


@dataclass(frozen=True)
class Altered:
    """`ratios`: by (worker, direction), of flows that have any. `refused`: direction -> packets of any kind that the
    receivers' kernels refused. `overflowed`: direction -> those that UDP sockets had no room for; a socket's own count
    has the damaged ones in it. Both are empty where nothing is damaged.
    """

    ratios: Mapping[tuple[int, str], Ratios] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    overflowed: Mapping[str, int] = field(default_factory=dict)

    @property
    def in_front(self) -> bool:
        """Whether packets are damaged before links count them, who may then take them for something else."""
        return any(one.damaged[0] for one in self.ratios.values())

    def of(self, direction: str) -> bool:
        return any(way == direction for _, way in self.ratios)


def one_of(ratios: Sequence[float]) -> float:
    """Share of packets that at least one of several independent processes hits."""
    return 1.0 - reduce(lambda kept, ratio: kept * (1.0 - ratio), ratios, 1.0)


def balance(altered: Altered, direction: str, groups: Sequence[Group], elsewhere: int) -> tuple[bool, str]:
    """Whether the sums of one direction close, and in words what closes them.

    elsewhere: packets that queues and devices are known to have dropped, whoever sent them.
    """
    copies = _Count.of((group, altered.ratios.get((group.worker, direction), Ratios()).copied) for group in groups)
    damage = _Count.of((group, altered.ratios.get((group.worker, direction), Ratios()).damaged) for group in groups)
    unread = sum(group.unread for group in groups)
    gap = sum(group.sent - group.dropped + group.gained - group.received for group in groups)
    if direction in altered.overflowed:
        gap += sum(row.dropped_socket or 0 for group in groups for row in group.rows)
        elsewhere += altered.overflowed[direction]
    # copies - damage - elsewhere - unread <= -gap <= copies
    ok = copies.low - damage.high - elsewhere - unread <= -gap <= copies.high - damage.low
    what = f"{abs(gap)} {'more' if gap < 0 else 'fewer'} arrived than sent and not dropped"
    refused = altered.refused.get(direction, 0)
    return ok, (
        f"{what}; asked for: copies {copies.low:.0f} to {copies.high:.0f}, damaged {damage.low:.0f} to "
        f"{damage.high:.0f}, of which receivers' kernels refused {refused}; "
        f"queues, devices and sockets dropped {elsewhere}"
    )


@dataclass(frozen=True)
class _Count:
    low: float
    high: float

    @classmethod
    def of(cls, pairs: Iterable[tuple[Group, tuple[float, float]]]) -> _Count:
        mean = variance = 0.0
        for group, (before, behind) in pairs:
            for packets, ratio in ((group.sent, before), (group.seen - group.dropped, behind)):
                mean += packets * ratio
                variance += packets * ratio * (1.0 - ratio)
        slack = SIGMAS * math.sqrt(variance)
        return cls(max(0.0, math.floor(mean - slack)), math.ceil(mean + slack))

"""Accounts of the `netem` backend: from counters of bands to counters of senders (pure).

A stretch is a time in which a band has one owner and one loss ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from netem.kernel.qdisc import Stats
from netem.links.base import Counter, Kind

SIGMAS = 6.0  # a false alarm in 10**9 stretches


def split_drops(seen: int, dropped: int, loss_ratio: float) -> tuple[int, int]:
    """(injected, overflow): netem counts both in one number.

    Without loss every drop is an overflow of the limit: exact. With loss, drops within six standard deviations of
    `seen * loss_ratio` are taken for injected ones and only the excess for overflow: a lower bound.
    """
    if loss_ratio <= 0.0:
        return 0, dropped
    expected = seen * loss_ratio
    bound = math.ceil(expected + SIGMAS * math.sqrt(expected * (1.0 - loss_ratio)))
    return min(dropped, bound), max(0, dropped - bound)


@dataclass(frozen=True)
class Stretch:
    """`owner` is the sender whose packets the band gets, "*" for several, None when no filter points there."""

    owner: str | None
    kind: Kind
    loss_ratio: float


@dataclass
class _Sum:
    seen: int = 0
    dropped: int = 0
    bytes_seen: int = 0
    overflow: int = 0

    def add(self, stretch: Stretch, change: Stats) -> None:
        injected, overflow = split_drops(change.seen, change.dropped, stretch.loss_ratio)
        self.seen += change.seen
        self.dropped += injected
        self.overflow += overflow
        passed = change.seen - change.dropped
        # The kernel counts no dropped bytes: the mean length of those that passed stands for them.
        self.bytes_seen += round(change.bytes_kept * change.seen / passed) if passed else 0


@dataclass
class Ledger:
    """Sums of the stretches that ended, and where the running ones began."""

    _closed: dict[tuple[str, Kind], _Sum] = field(default_factory=dict)
    _running: dict[int, tuple[Stretch, Stats]] = field(default_factory=dict)

    def start(self, band: int, stretch: Stretch, before: Stats, after: Stats) -> None:
        """A band changes. Where the loss ends, drops up to the reading after the change belong to the old stretch;
        where it begins or grows, those from the reading before it to the new one.
        """
        running = self._running.get(band)
        if running is not None and running[0] == stretch:
            return
        now = after if stretch.loss_ratio == 0.0 else before
        if running is not None:
            _add(self._closed, *running, now)
        self._running[band] = (stretch, now)

    def counters(self, now: Mapping[int, Stats]) -> list[Counter]:
        sums = self._sums(now)
        return [
            Counter(source, None, total.seen, total.dropped, total.bytes_seen, kind)
            for (source, kind), total in sorted(sums.items())
            if total.seen
        ]

    def queue_dropped(self, now: Mapping[int, Stats]) -> int:
        return sum(total.overflow for total in self._sums(now).values())

    def _sums(self, now: Mapping[int, Stats]) -> dict[tuple[str, Kind], _Sum]:
        sums = {
            key: _Sum(total.seen, total.dropped, total.bytes_seen, total.overflow)
            for key, total in self._closed.items()
        }
        for band, (stretch, start) in self._running.items():
            if band in now:
                _add(sums, stretch, start, now[band])
        return sums


def _add(sums: dict[tuple[str, Kind], _Sum], stretch: Stretch, start: Stats, end: Stats) -> None:
    change = end.since(start)
    if change.seen:
        sums.setdefault((stretch.owner or "*", stretch.kind), _Sum()).add(stretch, change)

"""Accounts of the `netem` backend: from counters of bands and hits of filters to counters of senders (pure).

A stretch is a time in which a band has one loss ratio and the packets of the same parts. The band's qdisc counts what
it got and dropped; where several parts share it, the filters that steer them say how many packets each had, and the
band's drops are shared out in proportion. What no filter hit is the rest, sender "*".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from netem.kernel.qdisc import Stats
from netem.links.base import Counter, Kind

SIGMAS = 6.0  # a false alarm in 10**9 stretches
ANY = "*"


def split_drops(seen: int, dropped: int, loss_ratio: float, clustering: float = 1.0) -> tuple[int, int]:
    """(injected, overflow): netem counts both in one number.

    Without loss every drop is an overflow of the limit: exact. With loss, drops within six standard deviations of
    `seen * loss_ratio` are taken for injected ones and only the excess for overflow: a lower bound. `clustering` is
    how much more than independent losses they vary.
    """
    if loss_ratio <= 0.0:
        return 0, dropped
    expected = seen * loss_ratio
    bound = math.ceil(expected + SIGMAS * math.sqrt(expected * (1.0 - loss_ratio) * clustering))
    return min(dropped, bound), max(0, dropped - bound)


def share(total: int, weights: Sequence[int]) -> list[int]:
    """Split a total in proportion to weights, by largest remainder: the parts add up."""
    if not sum(weights):
        return [0] * len(weights)
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [math.floor(x) for x in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


@dataclass(frozen=True, order=True)
class Part:
    """Packets that are counted together. `index` is their index field where a rule's window has one value only."""

    source: str
    index: int | None = None
    kind: Kind = "data"


@dataclass(frozen=True)
class Stretch:
    """`parts`: whose packets the band gets; none: nobody's, or in band 0 what no filter names.

    held: below a rate limiter, which takes its next packet out and puts it back until it may go. netem counts that one
    twice, as passed and as waiting (net/sched/sch_netem.c; qdisc_peek_dequeued in net/sch_generic.h).
    """

    loss_ratio: float
    parts: tuple[Part, ...] = ()
    rest: Kind = "data"
    clustering: float = 1.0
    held: bool = False


@dataclass(frozen=True)
class Reading:
    """Counters of all bands, and the hits of the filters of each (band, part), at one time."""

    stats: Mapping[int, Stats] = field(default_factory=dict)
    hits: Mapping[tuple[int, Part], int] = field(default_factory=dict)


@dataclass
class _Sums:
    seen: dict[Part, int] = field(default_factory=dict)
    dropped: dict[Part, int] = field(default_factory=dict)
    bytes_seen: dict[Part, int] = field(default_factory=dict)
    overflow: int = 0

    def copy(self) -> _Sums:
        return _Sums(dict(self.seen), dict(self.dropped), dict(self.bytes_seen), self.overflow)

    def add(self, stretch: Stretch, change: Stats, hits: Sequence[int]) -> None:
        """`hits`: of each part in this stretch. A band of one part needs none, but for a packet that is held."""
        if stretch.held and len(stretch.parts) == 1 and stretch.rest == "data":
            change = _once(change, hits[0])
        injected, overflow = split_drops(change.seen, change.dropped, stretch.loss_ratio, stretch.clustering)
        self.overflow += overflow
        passed = change.seen - change.dropped
        # The kernel counts no dropped bytes: the mean length of those that passed stands for them.
        frames = round(change.bytes_kept * change.seen / passed) if passed else 0
        if len(stretch.parts) == 1 and stretch.rest == "data":
            parts, seen = list(stretch.parts), [change.seen]
        else:
            parts = [*stretch.parts, Part(ANY, None, stretch.rest)]
            seen = [*hits, max(0, change.seen - sum(hits))]
        for part, count, drops, size in zip(parts, seen, share(injected, seen), share(frames, seen), strict=True):
            self.seen[part] = self.seen.get(part, 0) + count
            self.dropped[part] = self.dropped.get(part, 0) + drops
            self.bytes_seen[part] = self.bytes_seen.get(part, 0) + size


def _once(change: Stats, hits: int) -> Stats:
    """Without the packet that was held at the end of the stretch, with the one held at its start: the filters know."""
    if abs(change.seen - hits) != 1 or change.seen == change.dropped:
        return change
    mean_bytes = change.bytes_kept / (change.seen - change.dropped)
    kept = round(mean_bytes * max(0, hits - change.dropped))
    return Stats(hits, min(change.dropped, hits), change.waiting, kept)


@dataclass
class Ledger:
    """Sums of the stretches that ended, and where the running ones began."""

    _closed: _Sums = field(default_factory=_Sums)
    _running: dict[int, tuple[Stretch, Stats, tuple[int, ...]]] = field(default_factory=dict)

    def start(self, band: int, stretch: Stretch, before: Reading, after: Reading) -> None:
        """A band changes. Where the loss ends, drops up to the reading after the change belong to the old stretch;
        where it begins or grows, those from the reading before it to the new one.
        """
        running = self._running.get(band)
        if running is not None and running[0] == stretch:
            return
        now = (after if stretch.loss_ratio == 0.0 else before).stats[band]
        if running is not None:
            _add(self._closed, band, running, now, before)
        hits = tuple(after.hits.get((band, part), 0) for part in stretch.parts)
        self._running[band] = (stretch, now, hits)

    def counters(self, now: Reading) -> list[Counter]:
        """Sorted by sender, index (None first) and kind."""
        sums = self._sums(now)
        found = [
            Counter(part.source, part.index, seen, sums.dropped[part], sums.bytes_seen[part], part.kind)
            for part, seen in sums.seen.items()
            if seen
        ]
        return sorted(found, key=lambda c: (c.source, -1 if c.index is None else c.index, c.kind))

    def queue_dropped(self, now: Reading) -> int:
        return self._sums(now).overflow

    def _sums(self, now: Reading) -> _Sums:
        sums = self._closed.copy()
        for band, running in self._running.items():
            if band in now.stats:
                _add(sums, band, running, now.stats[band], now)
        return sums


def _add(sums: _Sums, band: int, running: tuple[Stretch, Stats, tuple[int, ...]], end: Stats, hits_at: Reading) -> None:
    stretch, start, before = running
    hits = [
        max(0, hits_at.hits.get((band, part), 0) - count) for part, count in zip(stretch.parts, before, strict=True)
    ]
    change = end.since(start)
    if change.seen:
        sums.add(stretch, change, hits)

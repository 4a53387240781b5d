"""What several links in a row have counted of one flow, as one count. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

Counted = tuple[int, int, int]
"""Packets seen and dropped, and bytes seen, by one link."""


class Tally(NamedTuple):
    """Packets of a flow on its way: seen by the first link that counts, and dropped by the losses of all.

    trials, hits: what is left of both without the packets that queues between these links took: the share
        hits / trials is that of the losses alone.
    duplicated, corrupted: of what got through, by the last link.
    """

    seen: int = 0
    dropped: int = 0
    bytes_seen: int = 0
    trials: int = 0
    hits: int = 0
    duplicated: int = 0
    corrupted: int = 0

    @classmethod
    def of(cls, seen: int, dropped: int, bytes_seen: int) -> Tally:
        """One link."""
        return cls(seen, dropped, bytes_seen, seen, dropped)

    def behind(self, seen: int, dropped: int, bytes_seen: int) -> Tally:
        """This one with a link in front of it.

        With nothing dropped between them that link saw as many as the others and its own drops; else its share of drops
        is taken of as many packets as had to enter it for the others to see what they saw.
        """
        if not self.seen:
            return Tally.of(seen, dropped, bytes_seen)._replace(duplicated=self.duplicated, corrupted=self.corrupted)
        kept = seen - dropped
        trials = round(self.trials * seen / kept) if kept else seen
        hits = self.hits + trials - self.trials
        return Tally(seen, dropped + self.dropped, bytes_seen, trials, hits, self.duplicated, self.corrupted)

    def plus(self, other: Tally) -> Tally:
        return Tally(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: Tally) -> Tally:
        return Tally(*(a - b for a, b in zip(self, other, strict=True)))


def by_known_rounds(counted: Mapping[int | None, Counted], known: Collection[int | None]) -> dict[int | None, Counted]:
    """What a link that knows every round has counted, for one behind it that knows only some (netem): the rest as one.

    `known` are the rounds of the link behind, with None where it has packets of which it does not know the round.
    """
    if None not in known:
        return dict(counted)
    found: dict[int | None, Counted] = {}
    for index, (seen, dropped, size) in counted.items():
        place = index if index in known else None
        before = found.get(place, (0, 0, 0))
        found[place] = (before[0] + seen, before[1] + dropped, before[2] + size)
    return found

"""Which packets have to add up: what senders sent, links saw and dropped, and receivers got, flow by flow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from netem.analysis.records import LinkCount, RoundRow
from netem.analysis.run import TransportRun


@dataclass(frozen=True)
class Group:
    """Rounds of one flow whose packets are compared with what the link counted."""

    worker: int
    direction: str
    where: str
    rows: Sequence[RoundRow]
    counts: Sequence[LinkCount]
    unread: int
    """Packets that nobody may have read: sent behind the need of the last round."""

    @property
    def seen(self) -> int:
        return sum(count.seen for count in self.counts)

    @property
    def dropped(self) -> int:
        return sum(count.dropped for count in self.counts)

    @property
    def gained(self) -> int:
        """Copies that the link made, less the packets that it damaged so that no socket gets them."""
        return sum(count.duplicated - count.corrupted for count in self.counts)

    @property
    def sent(self) -> int:
        return sum(row.packets_sent or 0 for row in self.rows)

    @property
    def received(self) -> int:
        return sum(
            (row.delivered or 0) + (row.duplicate or 0) + (row.late or 0) + (row.dropped_socket or 0)
            for row in self.rows
        )

    @property
    def missing(self) -> int:
        """Packets that passed the link and did not arrive; negative: more arrived than passed."""
        gap = self.seen - self.dropped + self.gained - self.received
        return gap if gap < 0 else max(0, gap - self.unread)

    def problem(self) -> str:
        place = f"worker {self.worker} {self.direction}, {self.where}"
        if self.sent != self.seen:
            return f"{place}: sent {self.sent}, the link saw {self.seen}"
        return f"{place}: {self.seen} seen - {self.dropped} dropped by the link, {self.received} arrived"


def flows(run: TransportRun) -> list[tuple[int, str]]:
    """Flows whose packets both ends count; TCP's are the kernel's."""
    return sorted({(row.worker, row.direction) for row in run.rows if row.packets_sent is not None})


def groups_of(run: TransportRun, flow: tuple[int, str]) -> list[Group]:
    """Round by round where the counts allow it, else the whole run at once.

    A socket's drops have no header: with any of them only the sum over the run can close. A round that was given up
    ends without its tail being read.
    """
    worker, direction = flow
    rows = [row for row in run.rows if (row.worker, row.direction) == flow and row.chunks is not None]
    counts = [count for count in run.counts if (count.worker, count.direction) == flow]
    by_round = {count.round: count for count in counts if count.round is not None}
    ok = [row for row in rows if row.outcome == "ok"]
    if not rows or not counts:
        return []
    at_need = rows[-1].packets_at_need
    unread = max(0, (rows[-1].packets_sent or 0) - at_need) if at_need is not None else 0
    if run.by_round and not any(row.dropped_socket for row in rows) and all(row.round in by_round for row in ok):
        return [
            Group(
                worker, direction, f"round {row.round}", [row], [by_round[row.round]], unread if row is rows[-1] else 0
            )
            for row in ok
        ]
    return [Group(worker, direction, "the run", rows, counts, unread)] if len(ok) == len(rows) else []

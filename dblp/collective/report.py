"""What sender and receiver report of a round: the two halves of a row of rounds.csv, as events."""

from __future__ import annotations

from typing import Any

from dblp.chunks import Layout
from dblp.collective.bounded import Sent
from dblp.events import Events
from dblp.receiver import Receiver
from dblp.sender import Sender


def report_received(events: Events, machine: Receiver, *, worker: int, direction: str, **fields: Any) -> None:
    """The receiver's half of a row of rounds.csv."""
    sequence, pass_ = machine.completing or (None, None)
    events.emit(
        "received",
        round=machine.round,
        worker=worker,
        direction=direction,
        chunks=machine.chunks,
        delivered=machine.delivered,
        passes=machine.passes,
        completing_sequence=sequence,
        completing_pass=pass_,
        duplicate=machine.duplicate,
        after_need=machine.late,
        delivered_digest=machine.digest(),
        **fields,
    )


def report_late(events: Events, other_round: dict[int, int], worker: int, direction: str) -> None:
    """Datagrams that came after their round, by the round in their header; forgets them."""
    for round_, count in sorted(other_round.items()):
        events.emit("late", round=round_, worker=worker, direction=direction, count=count)
    other_round.clear()


def report_sent(
    events: Events,
    round_: int,
    worker: int,
    direction: str,
    machine: Sender,
    sent: Sent,
    *,
    wait_s: float,
    **place: Any,
) -> None:
    """The sender's half of a row of rounds.csv."""
    stop = machine.stop
    complete = stop is not None and stop.outcome == 0
    events.emit(
        "sent",
        round=round_,
        worker=worker,
        direction=direction,
        packets=machine.sent,
        bytes=sent.bytes,
        passes=machine.passes,
        packets_at_need=machine.packets_at(stop) if stop is not None and complete else None,
        latency_s=sent.latency_s,
        runqueue_s=sent.runqueue_s,
        wait_s=wait_s,
        outcome="ok" if complete else "deadline",
        rtt_s=machine.rtt_s,
        **place,
    )


def report_stream(
    events: Events, round_: int, worker: int, direction: str, sent: Sent, outcome: str, wait_s: float, **place: Any
) -> None:
    """As report_sent, for a stream: the kernel cuts it into packets, so those are not known here."""
    events.emit(
        "sent",
        round=round_,
        worker=worker,
        direction=direction,
        packets=None,
        bytes=sent.bytes,
        passes=None,
        packets_at_need=None,
        latency_s=sent.latency_s,
        wait_s=wait_s,
        outcome=outcome,
        **place,
    )


def report_stream_received(
    events: Events,
    round_: int,
    worker: int,
    direction: str,
    layout: Layout,
    delivered_bytes: int,
    *,
    phase: str,
    outcome: str,
) -> None:
    """As report_received, for a stream: what arrived counts as whole chunks, so that it can be compared."""
    events.emit(
        "received",
        round=round_,
        worker=worker,
        direction=direction,
        phase=phase,
        tolerance=0.0,
        chunks=layout.chunks,
        need=layout.chunks,
        delivered=-(-delivered_bytes // layout.chunk_bytes),
        outcome=outcome,
    )

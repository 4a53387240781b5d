"""How the server's thread of one worker receives and broadcasts: over UDP with bounded loss, or over TCP."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dblp.chunks import BoolArray, need
from dblp.collective.bounded import DOWN, UP, ReceiveLoop, Sent, make_sender, send_round
from dblp.collective.deadline import SharedDeadline
from dblp.collective.link import Link
from dblp.collective.report import (
    report_late,
    report_received,
    report_sent,
    report_stream,
    report_stream_received,
)
from dblp.collective.stream import StreamBroken, StreamReceive, send_stream
from dblp.dtypes import WireArray
from dblp.errors import RoundTimeout
from dblp.io import clock, socket_drops
from dblp.receiver import Receiver, ReceiverState
from dblp.wire import Bye, Epoch, Frame, Start, Stop

if TYPE_CHECKING:
    from dblp.collective.server import Server


SENDER_PATIENCE = 1.5
"""Deadlines are the receiver's: the sender waits longer, so that it learns what the receiver has made of the round."""


@dataclass
class Uplink:
    """What one worker delivered in a round. `unusable`: nothing of it may go into the mean."""

    start: Start
    values: WireArray
    received: BoolArray
    outcome: str
    unusable: bool = False


class Begin:
    """Watches for the frames with which a worker goes on: a round, the end of an epoch, or of the run.

    One that belongs behind this round says that the worker has given the round up by itself: it is kept for later.
    """

    def __init__(self, round_: int, deadline: SharedDeadline) -> None:
        self.round, self.deadline = round_, deadline
        self.start: Start | None = None
        self.other: Epoch | Bye | None = None
        self.left = False

    @property
    def begun(self) -> bool:
        return self.start is not None

    @property
    def over(self) -> bool:
        return self.other is not None

    def take(self, frame: Frame) -> bool:
        if not isinstance(frame, Start | Epoch | Bye):
            return False
        at = frame.round if isinstance(frame, Start) else frame.rounds
        if at > self.round:
            self.left = True
            self.deadline.leave()
            return False
        if not isinstance(frame, Start):
            self.other = self.other or frame
        elif at == self.round:
            self.start = frame
        return isinstance(frame, Epoch | Bye) or at == self.round


def await_start(link: Link, begin: Begin, deadline: SharedDeadline) -> None:
    """Waits for the frame with which the worker goes on, until the deadline; whether it came is in `begin`.

    Raises RoundTimeout when no worker has begun the round: then none has left its computing.
    """
    link.replay()
    while not (begin.begun or begin.over):
        for frame, came_as_hint in link.poll():
            if not begin.take(frame):
                link.stray(frame, came_as_hint)
        if clock() >= deadline.at():
            break
        if not (begin.begun or begin.over):
            link.rest(deadline.look(), data=False)
    if begin.begun:
        deadline.begin()
    if not (begin.over or deadline.begun):
        raise RoundTimeout(link.peer, begin.round, "computing", deadline.first_limit_s)


def start_of(begin: Begin) -> Start:
    """The worker's start of the round; without values that count when it has not come."""
    return begin.start or Start(begin.round, 0.0, 0)


class BoundedServer:
    """Bounded-loss transport over UDP."""

    def __init__(self, server: Server, rank: int, link: Link, window: int) -> None:
        assert server.terms is not None
        assert link.data is not None
        self.server, self.rank, self.link, self.window = server, rank, link, window
        self.config, self.layout = server.config, server.terms.layout
        self.required = self.layout.required(server.terms.tensors, self.config.profile.always_reliable)
        self.values = self.layout.matrix()
        self._drops = socket_drops(link.data.sock)

    def receive(self, round_: int) -> Uplink | Epoch | Bye:
        """One round up, or the frame that says that there is none now."""
        decision, limits = self.server.decision, self.config.deadlines
        goal = need(self.layout.chunks, decision.tolerance, self.config.profile.threshold)
        machine = Receiver(round_, UP, self.layout.chunks, goal, self.required)
        deadline = SharedDeadline(self.server.rounds, round_, limits.step_s, limits.round_s)
        begin = Begin(round_, deadline)
        loop = ReceiveLoop(self.link, machine, self.values, begin)
        loop.run(deadline)
        await_start(self.link, begin, deadline)
        if begin.other is not None:
            return begin.other
        self.values[~machine.received] = 0  # older rounds' values
        outcome = "ok" if machine.state is ReceiverState.COMPLETE else "deadline"
        self._report(loop, goal, decision.phase, decision.tolerance, outcome)
        unusable = begin.start is None or begin.left
        return Uplink(start_of(begin), self.values, machine.received, outcome, unusable)

    def broadcast(self, round_: int, up: Uplink) -> bool:
        """The mean to this worker; False when it could not be delivered before the deadline."""
        assert self.server.packets is not None
        tolerance = self.server.decision.tolerance if self.config.profile.broadcast == "bounded" else 0.0
        machine = make_sender(self.config, self.link, round_, DOWN, self.rank, window=self.window, tolerance=tolerance)
        sent = send_round(
            self.link, machine, self.server.packets, clock() + SENDER_PATIENCE * self.config.deadlines.round_s
        )
        ok = machine.stop is not None and machine.stop.outcome == 0
        report_sent(self.server.events, round_, self.rank, "down", machine, sent, wait_s=0.0)
        return ok or (machine.stop is not None and self.config.profile.on_deadline == "accept")

    def close(self, rounds: int) -> None:
        """Counts what still arrived after the last round."""
        data = self.link.data
        assert data is not None
        while data.receive(rounds) is not None:
            pass
        self._report_late()

    def _report(self, loop: ReceiveLoop, goal: int, phase: str, tolerance: float, outcome: str) -> None:
        data = self.link.data
        assert data is not None
        drops = socket_drops(data.sock)
        report_received(
            self.server.events,
            loop.machine,
            worker=self.rank,
            direction="up",
            need=goal,
            runqueue_s=loop.runqueue_s,
            phase=phase,
            tolerance=tolerance,
            outcome=outcome,
            foreign=data.counts.foreign,
            malformed=data.counts.malformed,
            dropped_socket=drops - self._drops,
        )
        self._drops = drops
        self._report_late()

    def _report_late(self) -> None:
        assert self.link.data is not None
        report_late(self.server.events, self.link.data.counts.other_round, self.rank, "up")


class StreamServer:
    """The same reduce and broadcast over TCP."""

    def __init__(self, server: Server, rank: int, link: Link, window: int) -> None:
        assert server.terms is not None
        self.server, self.rank, self.link = server, rank, link
        self.config, self.layout = server.config, server.terms.layout
        self.values = self.layout.matrix()
        self.sock: socket.socket | None = None

    def receive(self, round_: int) -> Uplink | Epoch | Bye:
        limits = self.config.deadlines
        deadline = SharedDeadline(self.server.rounds, round_, limits.step_s, limits.round_s)
        begin = Begin(round_, deadline)
        await_start(self.link, begin, deadline)
        if begin.other is not None:
            return begin.other
        machine = self._stream(round_, deadline, begin)
        complete = machine is not None and machine.complete and begin.start is not None and not begin.left
        outcome = "ok" if complete else "censored"
        report_stream_received(
            self.server.events,
            round_,
            self.rank,
            "up",
            self.layout,
            machine.delivered_bytes if machine else 0,
            phase=self.server.decision.phase,
            outcome=outcome,
        )
        received = np.full(self.layout.chunks, complete)
        return Uplink(start_of(begin), self.values, received, outcome, unusable=not complete)

    def _stream(self, round_: int, deadline: SharedDeadline, begin: Begin) -> StreamReceive | None:
        """Receives until the deadline; afterwards a connection that did not finish is gone."""
        fresh = self.server.data_connections.take(self.rank, 0.0 if self.sock else deadline.at() - clock())
        if fresh is not None:
            self._drop()
            fresh.setblocking(False)
            self.sock = fresh
        if self.sock is None:
            self.link.finish(Stop(round_, UP, 1, 0xFFFFFFFF, 0, 0, b""), clock() + self.config.deadlines.round_s)
            return None
        machine = StreamReceive(self.link, self.sock, self.server.session, round_, UP, self.values, begin)
        try:
            machine.run(deadline)
        except StreamBroken:
            machine.finish(self.config.deadlines.round_s)
        if not machine.complete:
            self._drop()
        return machine

    def broadcast(self, round_: int, up: Uplink) -> bool:
        if self.sock is None:
            return False
        deadline = clock() + SENDER_PATIENCE * self.config.deadlines.round_s
        stop: Stop | None = None
        sent = Sent(began_s=clock(), ended_s=clock())
        try:
            sent, stop = send_stream(
                self.link, self.sock, self.server.session, round_, DOWN, self.server.mean, deadline
            )
        except StreamBroken:
            sent.ended_s = clock()
        ok = stop is not None and stop.outcome == 0
        if not ok:
            self._drop()
        report_stream(self.server.events, round_, self.rank, "down", sent, "ok" if ok else "censored", 0.0)
        return ok

    def close(self, rounds: int) -> None:
        self._drop()

    def _drop(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None

"""How a worker sends its gradient and receives the mean: over UDP with bounded loss, or over TCP."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import numpy as np

from dblp import wire
from dblp.chunks import BoolArray, need, unpack_bits
from dblp.collective.bounded import DOWN, UP, ReceiveLoop, Sent, make_sender, send_round
from dblp.collective.deadline import Deadline
from dblp.collective.handshake import DATA, check_welcome, connect, first_frame, hello
from dblp.collective.report import (
    report_late,
    report_received,
    report_sent,
    report_stream,
    report_stream_received,
)
from dblp.collective.stream import StreamBroken, StreamReceive, send_stream
from dblp.datagrams import PacketBuffer
from dblp.errors import ConnectError, PeerLost, RoundTimeout
from dblp.io import Control, clock, socket_drops
from dblp.receiver import Receiver
from dblp.sender import Sender
from dblp.wire import End, Frame, Stop

if TYPE_CHECKING:
    from dblp.collective.worker import Worker


SILENCE_ROUNDS = 2.0
"""Deadlines of a round that a worker bears in a round in which it hears nothing of the server."""
BROADCAST_ROUNDS = 1.5
"""Deadlines of a round from the stop of the gradient to the broadcast: the server may still wait for other workers."""


class Ending:
    """Watches for the end of a round: it comes without a broadcast when the round is skipped."""

    begun = False

    def __init__(self, round_: int) -> None:
        self.round = round_
        self.end: End | None = None

    @property
    def over(self) -> bool:
        return self.end is not None

    def take(self, frame: Frame) -> bool:
        if not isinstance(frame, End) or frame.round != self.round:
            return False
        self.end = frame
        return True


class BoundedWorker:
    """Bounded-loss transport over UDP. `send` sends what `gradient` (chunks, chunk_values) holds; `mean` (the same
    shape) is what the last broadcast left."""

    def __init__(self, worker: Worker, session: int, window: int) -> None:
        assert worker.link.data is not None
        self.worker, self.link, self.window = worker, worker.link, window
        self.config, self.layout = worker.config, worker.terms.layout
        self.required = self.layout.required(worker.terms.tensors, self.config.profile.always_reliable)
        self.mean = self.layout.matrix()
        self.packets = PacketBuffer(self.layout)
        self.gradient = self.packets.values
        self._drops = socket_drops(worker.link.data.sock)
        self._up: tuple[Sender, Sent] | None = None
        self._down: ReceiveLoop | None = None

    def send(self, round_: int) -> None:
        """The gradient up, until the server says stop, or is silent for so long that nothing can get through."""
        tolerance = self.worker.decision.tolerance
        machine = make_sender(
            self.config, self.link, round_, UP, self.worker.rank, window=self.window, tolerance=tolerance
        )
        # The server's deadline comes first and tells the outcome; this one is for frames that cannot get through.
        sent = send_round(self.link, machine, self.packets, clock() + SILENCE_ROUNDS * self.config.deadlines.round_s)
        self._up = machine, sent

    def delivered(self) -> BoolArray:
        """Which chunks of the gradient the server has, from its final bitmap; none where that did not come."""
        assert self._up is not None
        stop = self._up[0].stop
        return np.zeros(self.layout.chunks, np.bool_) if stop is None else unpack_bits(stop.bits, self.layout.chunks)

    def receive(self, round_: int) -> End | None:
        """The mean down, into `mean`; returns when the round is over for everybody.

        None: it is over because it cannot count without the stop of the broadcast that this worker has not told.
        """
        assert self._up is not None
        worker, profile = self.worker, self.config.profile
        tolerance = worker.decision.tolerance if profile.broadcast == "bounded" else 0.0
        goal = need(self.layout.chunks, tolerance, profile.threshold)
        if profile.broadcast == "bounded" and profile.broadcast_fill == "zero":
            self.mean[:] = 0
        machine = Receiver(round_, DOWN, self.layout.chunks, goal, self.required)
        ending = Ending(round_)
        loop = ReceiveLoop(self.link, machine, self.mean, ending, quiet=True)
        limit_s = self.config.deadlines.round_s
        loop.run(Deadline(BROADCAST_ROUNDS * limit_s if self._up[0].stop is not None else 0.0, limit_s))
        self._down = loop
        if loop.told is not None:
            self.link.stand_by(loop.told)
            outcome = "ok" if loop.told.outcome == 0 else "deadline"
            self._report_received(loop, goal, worker.decision.phase, tolerance, outcome)
        if ending.end is not None:
            return ending.end
        if loop.told is not None and (loop.told.outcome == 0 or profile.on_deadline == "accept"):
            return worker.verdict_of(round_)
        return worker.end_of(round_, limit_s if loop.told is not None else 0.0)

    def report(self, round_: int, gate_s: float, place: dict[str, Any]) -> None:
        """The worker's half of the round's row; `place` says iteration, bucket and epoch."""
        assert self._up is not None
        assert self._down is not None
        machine, sent = self._up
        first = self._down.first_at
        straggling_s = max(0.0, first - sent.ended_s) if first is not None else 0.0
        events = self.worker.events
        report_sent(events, round_, self.worker.rank, "up", machine, sent, wait_s=gate_s + straggling_s, **place)
        assert self.link.data is not None
        report_late(events, self.link.data.counts.other_round, self.worker.rank, "down")

    def close(self, rounds: int) -> None:
        assert self.link.data is not None
        while self.link.data.receive(rounds) is not None:
            pass
        report_late(self.worker.events, self.link.data.counts.other_round, self.worker.rank, "down")

    def _report_received(self, loop: ReceiveLoop, goal: int, phase: str, tolerance: float, outcome: str) -> None:
        data = self.link.data
        assert data is not None
        drops = socket_drops(data.sock)
        report_received(
            self.worker.events,
            loop.machine,
            worker=self.worker.rank,
            direction="down",
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


class StreamWorker:
    """The same over TCP. A connection that missed its deadline is replaced before the next round."""

    def __init__(self, worker: Worker, session: int, window: int) -> None:
        self.worker, self.link, self.session = worker, worker.link, session
        self.config, self.layout = worker.config, worker.terms.layout
        self.mean, self.gradient = self.layout.matrix(), self.layout.matrix()
        self.sock: socket.socket | None = None
        self._sent = Sent()
        self._outcome = "ok"
        self._silent_until = 0.0
        self._straggling_s = 0.0

    def send(self, round_: int) -> None:
        self._silent_until = clock() + SILENCE_ROUNDS * self.config.deadlines.round_s
        self._sent, self._outcome = Sent(began_s=clock(), ended_s=clock()), "censored"
        sock = self._connected()
        if sock is None:
            return
        stop: Stop | None = None
        try:
            self._sent, stop = send_stream(self.link, sock, self.session, round_, UP, self.gradient, self._silent_until)
        except StreamBroken:
            self._sent.ended_s = clock()  # the server's stop or end comes on the control connection
        if stop is not None and stop.outcome == 0:
            self._outcome = "ok"
        else:
            self._drop()

    def delivered(self) -> BoolArray:
        return np.full(self.layout.chunks, self._outcome == "ok")

    def receive(self, round_: int) -> End | None:
        """The mean down, or the end of a round that was given up.

        None: it is over because it cannot count without the broadcast that this worker has not confirmed.
        """
        if self.sock is None:
            return self.worker.end_of(round_, max(0.0, self._silent_until - clock()))
        limit_s, began = self.config.deadlines.round_s, clock()
        ending = Ending(round_)
        loop = StreamReceive(self.link, self.sock, self.session, round_, DOWN, self.mean, ending)
        try:
            loop.run(Deadline(BROADCAST_ROUNDS * limit_s, limit_s))
        except StreamBroken:
            self._drop()
        if not loop.complete and (loop.first_at is not None or ending.end is None):
            self._drop()  # the server has given this connection up, or will; only a skip before the broadcast keeps it
        self._straggling_s = max(0.0, (loop.first_at or clock()) - began)
        if ending.end is None:
            report_stream_received(
                self.worker.events,
                round_,
                self.worker.rank,
                "down",
                self.layout,
                loop.delivered_bytes,
                phase=self.worker.decision.phase,
                outcome="ok" if loop.complete else "censored",
            )
        if ending.end is not None:
            return ending.end
        return self.worker.verdict_of(round_) if loop.complete else self.worker.end_of(round_, limit_s)

    def report(self, round_: int, gate_s: float, place: dict[str, Any]) -> None:
        wait_s = gate_s + self._straggling_s
        events, rank = self.worker.events, self.worker.rank
        report_stream(events, round_, rank, "up", self._sent, self._outcome, wait_s, **place)

    def close(self, rounds: int) -> None:
        self._drop()

    def _connected(self) -> socket.socket | None:
        """The data connection, made anew when there is none; None when that fails before the round's deadline."""
        if self.sock is not None:
            return self.sock
        env, limit_s = self.worker.env, self.config.deadlines.round_s
        deadline = clock() + limit_s
        try:
            sock = connect(env, env.master_port + wire.TCP_DATA_OFFSET, limit_s)
        except ConnectError:
            return None
        try:
            control = Control(sock, self.link.peer)
            control.send(hello(self.config, self.worker.rank, DATA, None), deadline)
            check_welcome(first_frame(control, deadline), control.peer, needs=())
        except (ConnectError, PeerLost, RoundTimeout):
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        self.sock = sock
        return sock

    def _drop(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None

"""How a worker sends its gradient and receives the mean: over UDP with bounded loss, or over TCP."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import numpy as np

from dblp import wire
from dblp.chunks import BoolArray, FloatArray, need, unpack_bits
from dblp.collective.bounded import DOWN, UP, ReceiveLoop, Sent, make_sender, send_round
from dblp.collective.handshake import DATA, check_welcome, connect, first_frame, hello
from dblp.collective.report import (
    report_late,
    report_received,
    report_sent,
    report_stream,
    report_stream_received,
)
from dblp.collective.stream import StreamBroken, StreamReceive, send_stream
from dblp.errors import ConnectError, PeerLost, RoundTimeout
from dblp.io import Control, clock, socket_drops
from dblp.receiver import Receiver, ReceiverState
from dblp.sender import Sender
from dblp.wire import End, Frame, Stop

if TYPE_CHECKING:
    from dblp.collective.worker import Worker


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
    """Bounded-loss transport over UDP. `mean` (chunks, chunk_values) is what the last broadcast left."""

    def __init__(self, worker: Worker, session: int, window: int) -> None:
        assert worker.link.data is not None
        self.worker, self.link, self.window = worker, worker.link, window
        self.config, self.layout = worker.config, worker.terms.layout
        self.required = self.layout.required(worker.terms.tensors, self.config.profile.always_reliable)
        self.mean = self.layout.matrix()
        self._drops = socket_drops(worker.link.data.sock)
        self._up: tuple[Sender, Sent] | None = None
        self._down: ReceiveLoop | None = None

    def send(self, round_: int, values: FloatArray) -> None:
        """The gradient up. Raises RoundTimeout when the server never says stop."""
        limits = self.config.deadlines
        machine = make_sender(self.config, self.link, round_, UP, self.worker.rank, self.window)
        # The server's deadline comes first and tells the outcome; this one is for a server that is gone.
        sent = send_round(self.link, machine, values, clock() + 2 * limits.round_s + limits.step_s)
        if machine.stop is None:
            raise RoundTimeout(self.link.peer, round_, "sending the gradient", 2 * limits.round_s + limits.step_s)
        self._up = machine, sent

    def delivered(self) -> BoolArray:
        """Which chunks of the gradient the server has, from its final bitmap."""
        assert self._up is not None
        assert self._up[0].stop is not None
        return unpack_bits(self._up[0].stop.bits, self.layout.chunks)

    def receive(self, round_: int) -> End:
        """The mean down, into `mean`; returns when the round is over for everybody."""
        worker, profile, limits = self.worker, self.config.profile, self.config.deadlines
        tolerance = worker.decision.tolerance if profile.broadcast == "bounded" else 0.0
        goal = need(self.layout.chunks, tolerance, profile.threshold)
        if profile.broadcast == "bounded" and profile.broadcast_fill == "zero":
            self.mean[:] = 0.0
        machine = Receiver(round_, DOWN, self.layout.chunks, goal, self.required)
        ending = Ending(round_)
        loop = ReceiveLoop(self.link, machine, self.mean, ending)
        loop.run(limits.step_s + 3 * limits.round_s, limits.round_s)
        self._down = loop
        if machine.finished:
            self.link.stand_by(machine.stop())
        if ending.end is None:
            outcome = "ok" if machine.state is ReceiverState.COMPLETE else "deadline"
            self._report_received(machine, goal, worker.decision.phase, tolerance, outcome)
        return ending.end or worker.end_of(round_)

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

    def _report_received(self, machine: Receiver, goal: int, phase: str, tolerance: float, outcome: str) -> None:
        data = self.link.data
        assert data is not None
        drops = socket_drops(data.sock)
        report_received(
            self.worker.events,
            machine,
            worker=self.worker.rank,
            direction="down",
            need=goal,
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
        self.mean = self.layout.matrix()
        self.sock: socket.socket | None = None
        self._sent = Sent()
        self._outcome = "ok"
        self._straggling_s = 0.0

    def send(self, round_: int, values: FloatArray) -> None:
        limits = self.config.deadlines
        self._sent, self._outcome = Sent(began_s=clock(), ended_s=clock()), "censored"
        sock = self._connected()
        if sock is None:
            return
        stop: Stop | None = None
        try:
            self._sent, stop = send_stream(
                self.link, sock, self.session, round_, UP, values, clock() + 2 * limits.round_s
            )
        except StreamBroken:
            stop = self.link.wait_for(
                Stop, lambda s: s.round == round_, 2 * limits.round_s, "waiting for the stop of a broken stream"
            )
            self._sent.ended_s = clock()
        if stop is not None and stop.outcome == 0:
            self._outcome = "ok"
        else:
            self._drop()

    def delivered(self) -> BoolArray:
        return np.full(self.layout.chunks, self._outcome == "ok")

    def receive(self, round_: int) -> End:
        """The mean down, or the end of a round that was given up."""
        if self.sock is None:
            return self.worker.end_of(round_)
        limits, began = self.config.deadlines, clock()
        ending = Ending(round_)
        loop = StreamReceive(self.link, self.sock, self.session, round_, DOWN, self.mean, ending)
        try:
            loop.run(limits.step_s + 3 * limits.round_s, limits.round_s)
        except StreamBroken:
            self._drop()
        if not loop.complete and loop.first_at is not None:
            self._drop()
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
        return ending.end or self.worker.end_of(round_)

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
            control = Control(connect(env, env.master_port + wire.TCP_DATA_OFFSET, limit_s), self.link.peer)
            control.send(hello(self.config, self.worker.rank, DATA, None), deadline)
            check_welcome(first_frame(control, deadline), control.peer, needs=())
        except (ConnectError, PeerLost, RoundTimeout):
            return None
        self.sock = control.sock
        return self.sock

    def _drop(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None

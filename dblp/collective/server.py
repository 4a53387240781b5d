"""The server, rank 0: one thread and one UDP port a worker; mean over the workers; broadcast."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
from typing import Any

import numpy as np

from dblp import wire
from dblp.chunks import FloatArray
from dblp.collective.admission import Admission
from dblp.collective.deadline import Rounds
from dblp.collective.handshake import (
    CONTROL,
    DATA,
    Terms,
    config_differences,
    refuse,
)
from dblp.collective.link import Link, open_link
from dblp.collective.meeting import Meeting
from dblp.collective.reduce import divergence, mean_into, norm
from dblp.collective.server_flow import BoundedServer, StreamServer, Uplink
from dblp.config import Config, Env
from dblp.datagrams import PacketBuffer
from dblp.dtypes import WireArray
from dblp.errors import ConnectError, DblpError, HandshakeError, PeerProtocolError
from dblp.events import Events
from dblp.io import Control, clock, receive_window
from dblp.tolerance import Decision, policy_from
from dblp.wire import Bye, End, Epoch, Hello, Ready, Replicas, State, Welcome

LISTEN_STEP_S = 0.2
WELCOME_LIMIT_S = 5.0


class Server:
    """Serves one run: `run` returns when every worker has said goodbye."""

    def __init__(self, env: Env, config: Config, events: Events) -> None:
        self.env, self.config, self.events = env, config, events
        self.session = secrets.randbits(32)
        self.meeting = Meeting(env.workers)
        self.rounds = Rounds()
        self.policy = policy_from(config.transport)
        self.decision: Decision = self.policy.first()
        self.following: Decision = self.decision
        self.terms: Terms | None = None
        self.mean: WireArray = np.zeros((0, 0), np.float32)
        self.packets: PacketBuffer | None = None  # what carries the mean, where that are datagrams
        self.data_connections = Connections()
        self.links: list[Link] = []
        self._controls: dict[int, Control] = {}
        self._failures: list[BaseException] = []
        self._over = threading.Event()

    def run(self) -> None:
        """Raises DblpError: the first failure of any worker's thread."""
        listener = self._listen(self.env.master_port)
        stream = self._listen(self.env.master_port + wire.TCP_DATA_OFFSET) if self.config.is_tcp else None
        try:
            self._gather(listener)
            if stream is not None:
                threading.Thread(target=self._accept_data, args=(stream,), daemon=True).start()
            self._serve()
        except DblpError as error:
            self._tell_all(str(error))
            raise
        finally:
            self._over.set()
            for closable in (listener, stream, *self.links, *self._controls.values()):
                if closable is not None:
                    closable.close()

    def _listen(self, port: int) -> socket.socket:
        try:
            return socket.create_server(("", port), backlog=self.env.workers + 8)
        except OSError as error:
            raise ConnectError(f"TCP port {port}: {error.strerror}") from error

    # Before the first round

    def _gather(self, listener: socket.socket) -> None:
        """Accepts every worker, and checks that all mean the same run. A stranger is refused and does not count."""
        limit_s = self.config.deadlines.connect_s
        deadline = clock() + limit_s
        with contextlib.closing(Admission(listener, self.config, self.env.workers)) as admission:
            while len(self._controls) < self.env.workers:
                let_in = admission.next(deadline)
                if let_in is None:
                    missing = sorted(set(range(1, self.env.world_size)) - set(self._controls))
                    raise ConnectError(f"worker(s) {missing} did not connect within {limit_s:g} s")
                self._take_in(*let_in)

    def _take_in(self, control: Control, hello: Hello) -> None:
        if hello.rank in self._controls or hello.purpose != CONTROL:
            refuse(control, f"rank {hello.rank} is already connected")
            control.close()
            return
        control.peer = f"worker {hello.rank} ({control.peer.rpartition(':')[0]})"
        self._controls[hello.rank] = control
        self._agree(control, Terms.parse(hello.metadata, control.peer))

    def _agree(self, control: Control, terms: Terms) -> None:
        differences = config_differences(self.config, terms)
        if self.terms is not None:
            differences += self.terms.differences(terms)
        if differences:
            raise HandshakeError(f"{control.peer} does not agree with the server; {'; '.join(differences)}")
        self.terms = terms

    def _accept_data(self, listener: socket.socket) -> None:
        """The thread that hands new data connections of the `tcp` transport to the threads of their workers.

        It ends with the run; when it fails before, the run does.
        """
        try:
            with contextlib.closing(Admission(listener, self.config, self.env.workers)) as admission:
                while not self._over.is_set():
                    let_in = admission.next(clock() + LISTEN_STEP_S)
                    if let_in is not None:
                        self._take_data(*let_in)
        except BaseException as error:
            if not self._over.is_set():
                self._fail(error)

    def _take_data(self, control: Control, hello: Hello) -> None:
        try:
            if hello.purpose != DATA:
                raise HandshakeError("not a data connection")
            # The worker sends values only after this, so the Hello is read without a byte of them.
            control.send(Welcome(self.session, b"{}"), clock() + WELCOME_LIMIT_S)
        except DblpError:
            control.close()
            return
        self.data_connections.put(hello.rank, control.sock)

    # Rounds

    def _serve(self) -> None:
        assert self.terms is not None
        if self.config.is_tcp:
            self.mean = self.terms.layout.matrix()
        else:
            self.packets = PacketBuffer(self.terms.layout)
            self.mean = self.packets.values
        threads = [
            threading.Thread(target=self._thread, args=(rank,), name=f"worker-{rank}", daemon=True)
            for rank in sorted(self._controls)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failures:
            first = self._failures[0]
            raise first if isinstance(first, DblpError) else DblpError(f"{type(first).__name__}: {first}") from first

    def _thread(self, rank: int) -> None:
        try:
            WorkerThread(self, rank, self._controls[rank]).run()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """A thread has failed: the first failure is the run's, and nobody waits for the others any longer."""
        self._failures.append(error)
        self.meeting.fail(error)

    def _tell_all(self, reason: str) -> None:
        for control in self._controls.values():
            refuse(control, reason)

    # What the last thread of a meeting does for all

    def reduce(self, round_: int, uplinks: dict[int, Uplink]) -> bool:
        """Mean over the workers, and the decision for the next round. Whether the round was skipped."""
        ranks = sorted(uplinks)
        skipped = self.config.profile.on_deadline == "skip" and any(uplinks[r].outcome != "ok" for r in ranks)
        skipped = skipped or any(uplinks[r].unusable for r in ranks)
        measured: float | None = None
        if not skipped:
            gradients = [uplinks[r].values for r in ranks]
            assert self.terms is not None
            dtype = self.terms.layout.dtype
            mean_into(self.mean, gradients, [uplinks[r].received for r in ranks], self.config.profile.mean, dtype)
            own = self.config.profile.norm == "workers"
            measured = float(np.mean([uplinks[r].start.norm for r in ranks])) if own else norm(self.mean, dtype)
        epoch_end = any(uplinks[r].start.epoch_end for r in ranks)  # a start may be missing in a skipped round
        self.following = self.policy.next(round_ + 1, epoch_end, measured)
        return skipped

    def conclude(self, round_: int, skipped: bool, downlinks: dict[int, bool]) -> End:
        """The End frame of a round: it counts only when every worker has got its broadcast."""
        skipped = skipped or not all(downlinks.values())
        if self.following != self.decision:
            following = self.following
            self.events.emit(
                "phase",
                round=round_ + 1,
                phase=following.phase,
                tolerance=following.tolerance,
                reason=following.reason,
            )
        self.decision = self.following
        return End(round_, int(skipped), int(self.decision.phase == "critical"), self.decision.tolerance)

    def compare(self, digests: dict[int, bytes]) -> bool:
        return len(set(digests.values())) == 1

    def measure_divergence(self, epoch: int, states: dict[int, FloatArray | None]) -> float:
        present = [state for state in states.values() if state is not None]
        value = divergence(present) if len(present) > 1 else 0.0
        self.events.emit("replicas", epoch=epoch, identical=not present, divergence=value)
        return value


class Connections:
    """Data connections by rank, as they come in; a newer one replaces an older one."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._by_rank: dict[int, socket.socket] = {}

    def put(self, rank: int, sock: socket.socket) -> None:
        with self._condition:
            old = self._by_rank.pop(rank, None)
            if old is not None:
                old.close()
            self._by_rank[rank] = sock
            self._condition.notify_all()

    def take(self, rank: int, limit_s: float) -> socket.socket | None:
        with self._condition:
            self._condition.wait_for(lambda: rank in self._by_rank, limit_s)
            return self._by_rank.pop(rank, None)


class WorkerThread:
    """One worker's side of the server."""

    def __init__(self, server: Server, rank: int, control: Control) -> None:
        self.server, self.rank = server, rank
        self.config = server.config
        self.limit_s = self.config.deadlines.step_s + 2 * self.config.deadlines.round_s
        self.link = self._open(control)

    def _open(self, control: Control) -> Link:
        """Opens the data plane and welcomes the worker."""
        server, config = self.server, self.config
        assert server.terms is not None
        base, rank = server.env.master_port, self.rank
        link = open_link(
            control,
            config,
            server.events,
            server.terms.layout,
            server.session,
            own_ports=(wire.server_data_port(base, rank), wire.server_hint_port(base, rank)),
            peer_ports=(wire.worker_data_port(base, rank), wire.worker_hint_port(base, rank)),
        )
        server.links.append(link)
        window = receive_window(link.data.sock) if link.data else 0
        first = server.decision
        metadata = {"phase": first.phase, "tolerance": first.tolerance, "window": window}
        deadline = clock() + config.deadlines.connect_s
        control.send(Welcome(server.session, json.dumps(metadata).encode()), deadline)
        return link

    def run(self) -> None:
        flow_type: Any = StreamServer if self.config.is_tcp else BoundedServer
        ready = self.link.wait_for(Ready, lambda _: True, self.config.deadlines.connect_s, "waiting for its sockets")
        flow = flow_type(self.server, self.rank, self.link, ready.window)
        round_ = 0
        while True:
            self.link.advance(round_)
            up = flow.receive(round_)
            if isinstance(up, Bye):
                self.server.meeting.meet(self.rank, "bye", self._all_alike, self.limit_s)
                flow.close(round_)
                return
            if isinstance(up, Epoch):
                self._epoch(up)
                continue
            self._finish(flow, round_, up)
            round_ += 1

    def _finish(self, flow: BoundedServer | StreamServer, round_: int, up: Uplink) -> None:
        """The second half of a round: mean, broadcast, end."""
        server, meet = self.server, self.server.meeting.meet
        skipped = meet(self.rank, up, lambda offers: self._reduce(round_, offers), self.limit_s)
        got = flow.broadcast(round_, up) if not skipped else True
        end = meet(self.rank, got, lambda offers: server.conclude(round_, skipped, offers), self.limit_s)
        self.link.end(end, clock() + self.config.deadlines.round_s)

    def _reduce(self, round_: int, offers: dict[int, Any]) -> bool:
        self._all_alike(offers)
        return self.server.reduce(round_, offers)

    def _all_alike(self, offers: dict[int, Any]) -> None:
        kinds = {rank: "a round" if isinstance(offer, Uplink) else str(offer) for rank, offer in offers.items()}
        if len(set(kinds.values())) > 1:
            raise PeerProtocolError(f"the workers are not at the same point: {kinds}")

    def _epoch(self, frame: Epoch) -> None:
        """Compares the replicas; when they differ, every worker sends its state, to measure how far."""
        server, limit_s = self.server, self.limit_s
        identical = server.meeting.meet(self.rank, frame.digest, server.compare, limit_s)
        answer_by = clock() + self.config.deadlines.round_s
        self.link.control.send(Replicas(frame.epoch, int(identical)), answer_by, self.link.round)
        state: FloatArray | None = None
        if not identical:
            answer = self.link.wait_for(
                State, lambda f: f.epoch == frame.epoch, self.config.deadlines.round_s, "sending its state"
            )
            state = np.frombuffer(answer.values, "<f4")
        server.meeting.meet(self.rank, state, lambda s: server.measure_divergence(frame.epoch, s), limit_s)

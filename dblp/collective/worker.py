"""A worker, ranks 1..n: sends its gradient up and gets the mean back."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from dblp import wire
from dblp.chunks import FloatArray, TensorSpec
from dblp.collective.handshake import CONTROL, Terms, check_welcome, connect, first_frame, hello
from dblp.collective.link import Link, open_link
from dblp.collective.reduce import norm
from dblp.collective.worker_flow import BoundedWorker, StreamWorker
from dblp.config import Config, Env
from dblp.dtypes import FLOAT32, blocks
from dblp.errors import DblpError, RoundTimeout
from dblp.events import Events
from dblp.io import Control, clock, receive_window
from dblp.reducer import EpochRow, Reduced
from dblp.tolerance import Decision
from dblp.wire import Bye, End, Epoch, Ready, Replicas, Start, State

VERDICT_ROUNDS = 6
"""Limit in deadlines of a round for the verdict: three are what the server may need, the rest is for lost frames."""


def told_by(end: End) -> Decision:
    """What the end of a round says about the next one."""
    return Decision("critical" if end.critical else "normal", end.tolerance, "told by the server")


class Worker:
    """One worker's connection to the server; a Reducer. Use `connect`, and as a context manager."""

    def __init__(
        self, env: Env, config: Config, events: Events, terms: Terms, link: Link, welcome: dict[str, Any], session: int
    ) -> None:
        self.env, self.config, self.events, self.terms, self.link = env, config, events, terms, link
        self.rank, self.round = env.rank, 0
        self.decision = Decision(welcome["phase"], float(welcome["tolerance"]), "told by the server")
        shape = terms.layout.chunks, terms.layout.chunk_values
        self.residual = np.zeros(shape, np.float32) if config.profile.error_feedback else None
        flow_type: Any = StreamWorker if config.is_tcp else BoundedWorker
        self.flow: BoundedWorker | StreamWorker = flow_type(self, session, int(welcome["window"]))

    @classmethod
    def connect(cls, env: Env, config: Config, tensors: Sequence[TensorSpec], events: Events) -> Worker:
        """Connects to the server and agrees with it on the run.

        Raises ConnectError when the server is not there in time, HandshakeError when it means another run.
        """
        limit_s = config.deadlines.connect_s
        control = Control(connect(env, env.master_port, limit_s), f"server ({env.master_addr})")
        terms = Terms.of(config, tensors)
        # The server gathers for as long, and then says who is missing: leave it the time to say so.
        deadline = clock() + 2 * limit_s
        link: Link | None = None
        try:
            control.send(hello(config, env.rank, CONTROL, terms), deadline)
            session, welcome = check_welcome(first_frame(control, deadline), control.peer)
            own = (wire.worker_data_port(env.master_port, env.rank), wire.worker_hint_port(env.master_port, env.rank))
            peer = (wire.server_data_port(env.master_port, env.rank), wire.server_hint_port(env.master_port, env.rank))
            link = open_link(control, config, events, terms.layout, session, own_ports=own, peer_ports=peer)
            control.send(Ready(receive_window(link.data.sock) if link.data else 0), deadline)
            return cls(env, config, events, terms, link, welcome, session)
        except BaseException:
            (link or control).close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.flow.close(self.round)
                self.link.control.send(Bye(self.round), clock() + self.config.deadlines.round_s, self.round)
        finally:
            self.link.close()

    def all_reduce(self, flat: FloatArray, *, iteration: int, epoch: int, epoch_start_next: bool) -> Reduced:
        """Replaces `flat` (values,) by the mean over the workers, unless the round is skipped by all.

        When nothing gets through, the worker skips the round by itself: it is what all do, because the server counts
        a round only when every worker has told it that its broadcast is complete. A worker that has told so never
        skips by itself: it waits for the end of the round, the server's verdict.

        Raises PeerLost, RoundTimeout or HandshakeError with the server's reason when the run cannot go on.
        """
        round_, layout = self.round, self.terms.layout
        waited_s = self._gate(round_)
        self.link.advance(round_)
        limit = clock() + self.config.deadlines.round_s
        saturated = self._pack(flat)
        start = Start(round_, norm(flat), int(epoch_start_next))
        self.link.tell(start, limit)
        self.link.stand_by(start)
        self.flow.send(round_)
        late = self.link.last_heard
        if late is not None and late.round == round_ - 1:  # the end of a round that this worker has left
            self.decision = told_by(late)
        end = self.flow.receive(round_)
        place = {"iteration": iteration, "bucket": 0, "epoch": epoch}
        self.flow.report(round_, waited_s, place if layout.dtype is FLOAT32 else {**place, "saturated": saturated})
        reduced = Reduced(end is None or bool(end.skipped), self.decision.phase, self.decision.tolerance)
        if self.residual is not None:
            self._keep_residual(reduced.skipped)
        if end is not None:
            self.decision = told_by(end)
        self.round += 1
        if not reduced.skipped:
            layout.collect(self.flow.mean, flat)
        return reduced

    def _pack(self, flat: FloatArray) -> int:
        """What is to be sent, into its packets: the gradient, and what error feedback has kept of earlier ones.

        How many finite numbers the wire's format is too small for.
        """
        if self.residual is None:
            return self.terms.layout.spread(flat, self.flow.gradient)
        whole = self.residual.reshape(-1)[: len(flat)]
        whole += flat
        return self.terms.layout.spread(whole, self.flow.gradient)

    def _gate(self, round_: int) -> float:
        if round_ not in self.events.gates:
            return 0.0
        began = clock()
        self.events.gate(round_)
        return clock() - began

    def _keep_residual(self, skipped: bool) -> None:
        """Error feedback: what was not applied is added to the next gradient; of a skipped round that is all of it.

        Of what was applied it is what the wire's format has rounded away; nothing with float32.
        """
        assert self.residual is not None
        if skipped:
            return
        layout, delivered = self.terms.layout, self.flow.delivered()
        for part in blocks(layout.chunks, layout.chunk_values):
            rows = part.start + np.flatnonzero(delivered[part])
            rest = self.residual[rows] - layout.dtype.decode(self.flow.gradient[rows])
            rest[~np.isfinite(rest)] = 0.0  # of an infinity nothing is left over
            self.residual[rows] = rest

    def end_of(self, round_: int, limit_s: float) -> End | None:
        """The end of a round that the server cannot count without this worker; None when it does not come in time."""
        try:
            return self._end_of(round_, limit_s)
        except RoundTimeout:
            return None

    def verdict_of(self, round_: int) -> End:
        """The end of a round that may count: only the server knows. Raises RoundTimeout when it does not say."""
        return self._end_of(round_, VERDICT_ROUNDS * self.config.deadlines.round_s)

    def _end_of(self, round_: int, limit_s: float) -> End:
        return self.link.wait_for(End, lambda end: end.round == round_, limit_s, "waiting for the end of the round")

    def report_epoch(self, epoch: int, row: EpochRow, state: FloatArray) -> None:
        """Reports an epoch, and compares this replica with the others.

        Args:
            state: parameters and optimiser state, shape (n,); sent only when the digests of the replicas differ.
        """
        self.events.emit(
            "epoch",
            epoch=epoch,
            worker=self.rank,
            train_loss=row.train_loss,
            metric=row.metric,
            value=row.value,
            wall_s=row.wall_s,
            digest=row.digest,
        )
        limits = self.config.deadlines
        try:
            digest = bytes.fromhex(row.digest)[:32].ljust(32, b"\0")
        except ValueError as error:
            raise DblpError(f"the digest of epoch {epoch} is not hexadecimal: {row.digest!r}") from error
        self.link.control.send(Epoch(epoch, self.round, digest), clock() + limits.round_s, self.round)
        verdict = self.link.wait_for(
            Replicas, lambda frame: frame.epoch == epoch, limits.step_s, "comparing the replicas"
        )
        if not verdict.identical:
            values = np.ascontiguousarray(state, "<f4").tobytes()
            self.link.control.send(State(epoch, values), clock() + limits.round_s)

"""A network in virtual time between one Sender and one Receiver: seeded, without sockets, clocks or threads.

It plays the IO shell (`send_round`, `ReceiveLoop`) with an event queue. The data plane serialises batches at a
fixed rate, then loses datagrams by the repeatable mask on (round, sequence, pass), reorders, duplicates and
delays them. The control channel is reliable and ordered; hints are datagrams that may be lost. The whole state
is plain data: `copy.deepcopy` is a snapshot from which both copies go on alike.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dblp.chunks import BoolArray, IntArray, need, pack_bits, send_order
from dblp.receiver import Receiver
from dblp.sender import Batch, Sender
from dblp.wire import Bitmap, Frame, Probe, Stop
from netem.links import mask

UP = 0
MAX_STEPS = 200_000


@dataclass(frozen=True)
class Conditions:
    """What the network does. Times in seconds, ratios 0..1, rate in datagrams a second (one direction)."""

    loss_ratio: float = 0.0
    reorder_ratio: float = 0.0
    reorder_s: float = 0.002
    """A reordered datagram comes later by up to this time."""
    duplicate_ratio: float = 0.0
    delay_s: float = 0.0
    """One way; data, control and hints alike."""
    rate_hz: float = 1e5
    control_stall_s: float = 0.0
    """The reliable channel takes up to this time longer (a retransmission time-out)."""
    hint_loss_ratio: float = 0.0

    @property
    def rtt_s(self) -> float:
        return 2 * self.delay_s


@dataclass(frozen=True)
class Protocol:
    """How sender and receiver are set up."""

    pipelined: bool = False
    window: int = 1 << 20
    hints: bool = True
    batch: int = 32
    probe_every: int = 64
    order: str = "rotate"
    tolerance: float = 0.0
    threshold: str = "integer"
    pass_overhead_s: float = 0.0
    required: tuple[int, ...] = ()
    foresight: bool = True
    """The sender knows what completes the round, and the round-trip time."""


@dataclass
class Observed:
    """What the network saw of a round, beside the machines' own counts."""

    sent_mask: BoolArray
    transmissions: list[tuple[int, int]] = field(default_factory=list)
    """(sequence, pass) in order of sending."""
    lost: int = 0
    too_early: int = 0
    """Transmissions of a chunk whose last one might still have been on its way, or unread in an answer."""
    wasted: int = 0
    """Transmissions of a chunk that the receiver had already."""
    most_unanswered: int = 0
    hinted_probes: int = 0
    late_other_round: int = 0


class VirtualNetwork:
    """One direction of consecutive rounds over the same links. `run` plays one round to its end."""

    def __init__(self, conditions: Conditions, protocol: Protocol, chunks: int, *, seed: int, rank: int = 1) -> None:
        self.conditions, self.protocol, self.chunks, self.seed = conditions, protocol, chunks, seed
        self.rank = rank
        self.now = 0.0
        self.trace: list[tuple[float, str, int]] = []
        self._random = np.random.default_rng([seed, rank, chunks])
        self._state = mask.port_state(seed, "up", rank)
        self._limit = mask.threshold(conditions.loss_ratio)
        self._queue: list[tuple[float, int, str, Any]] = []
        self._serial = 0
        self._wire_free_at = 0.0
        self._ordered_until = {"to_receiver": 0.0, "to_sender": 0.0}
        self._wake = 0

    # The round

    def run(self, round_: int, limit_s: float) -> tuple[Sender, Receiver, Observed]:
        """Plays round `round_` until the sender has read the stop. Fails at the limit in virtual time."""
        self.begin(round_)
        deadline = self.now + limit_s
        steps = 0
        while not self.sender.finished:
            self.step()
            steps += 1
            assert self.now <= deadline, f"round {round_} did not end within {limit_s:g} s of virtual time"
            assert steps < MAX_STEPS, f"round {round_}: no progress at {self.now:g} s"
        return self.sender, self.receiver, self.observed

    def begin(self, round_: int) -> None:
        """New machines; what is still on its way stays so."""
        protocol = self.protocol
        goal = need(self.chunks, protocol.tolerance, protocol.threshold)
        order = send_order(protocol.order, self.chunks, seed=self.seed, round_=round_, rank=self.rank, direction=UP)
        self.sender = Sender(
            round_,
            UP,
            order,
            window=protocol.window,
            pipelined=protocol.pipelined,
            probe_every=protocol.probe_every,
            reprobe_s=0.001 if protocol.hints else None,
            pass_overhead_s=protocol.pass_overhead_s,
            need=goal if protocol.foresight else None,
            path_rtt_s=self.conditions.rtt_s if protocol.foresight else None,
            overrun=2 * protocol.batch,
        )
        required = None
        if protocol.required:
            required = np.zeros(self.chunks, np.bool_)
            required[list(protocol.required)] = True
        self.receiver = Receiver(round_, UP, self.chunks, goal, required)
        self.observed = Observed(np.zeros(self.chunks, np.bool_))
        self._answered = 0
        self._probe_answered = -1
        self._settled_at = np.full(self.chunks, -1.0)  # until then a copy of the chunk may be on its way
        if self.receiver.finished:
            self._tell(self.receiver.stop())
        self._wake_at(self.now)

    def step(self) -> None:
        """Handles the earliest event."""
        self.now, _, kind, payload = heapq.heappop(self._queue)
        getattr(self, f"_on_{kind}")(payload)

    def _at(self, when: float, kind: str, payload: Any) -> None:
        self._serial += 1
        heapq.heappush(self._queue, (when, self._serial, kind, payload))

    # The sender's shell

    def _wake_at(self, when: float) -> None:
        """The sender's next turn; one that was planned before is off."""
        self._wake += 1
        self._at(max(when, self.now), "wake", self._wake)

    def _on_wake(self, number: int) -> None:
        """One turn of send_round: a batch, its probes, and then to sleep or to the next turn."""
        if self.sender.finished or number != self._wake:
            return
        self.sender.handle_timer(self.now)
        batch = self.sender.take(self.now, self.protocol.batch)
        if batch is not None:
            self._transmit(batch)
        for effect in self.sender.effects():
            leaves = max(self.now, self._wire_free_at)
            if self.protocol.hints:
                self._hint("to_receiver", effect.probe, leaves)
                self.observed.hinted_probes += effect.again
            if not effect.again:
                self._reliable("to_receiver", effect.probe, leaves)
        if batch is not None:
            self._wake_at(self._wire_free_at)
        else:
            timer = self.sender.next_timer()
            if timer is not None:
                self._wake_at(timer)

    def _transmit(self, batch: Batch) -> None:
        conditions, seen, count = self.conditions, self.observed, len(batch.sequences)
        leaves = max(self.now, self._wire_free_at) + np.arange(1, count + 1) / conditions.rate_hz
        self._wire_free_at = float(leaves[-1])
        seen.too_early += int((self._settled_at[batch.sequences] > self.now).sum())
        seen.sent_mask[batch.sequences] = True
        seen.transmissions += zip(batch.sequences.tolist(), batch.passes.tolist(), strict=True)
        seen.most_unanswered = max(seen.most_unanswered, self.sender.sent - self._answered)
        if not self.receiver.finished:
            seen.wasted += int(self.receiver.received[batch.sequences].sum())
        self._settled_at[batch.sequences] = leaves + conditions.delay_s
        words = (self.sender.round, batch.sequences, batch.passes << 16)
        lost = mask.drops(self._state, words, self._limit)
        seen.lost += int(lost.sum())
        self._deliver(batch.sequences[~lost], batch.passes[~lost], leaves[~lost] + conditions.delay_s)

    def _deliver(self, sequences: IntArray, passes: IntArray, arrive: Any) -> None:
        """On-time datagrams come as one burst at the time of the last (as a coalescing card hands them over)."""
        conditions, count = self.conditions, len(sequences)
        moved = self._random.random(count) < conditions.reorder_ratio
        twice = self._random.random(count) < conditions.duplicate_ratio
        last = float(arrive[-1]) if count else 0.0
        if not moved.all():
            self._data(last, sequences[~moved], passes[~moved])
        for index in np.flatnonzero(moved):
            self._data(float(arrive[index]) + self._extra(), sequences[index : index + 1], passes[index : index + 1])
        for index in np.flatnonzero(twice):
            self._data(last + self._extra(), sequences[index : index + 1], passes[index : index + 1])

    def _extra(self) -> float:
        return self.conditions.reorder_s * float(self._random.random())

    def _data(self, when: float, sequences: IntArray, passes: IntArray) -> None:
        self._settled_at[sequences] = np.maximum(self._settled_at[sequences], when)
        self._at(when, "data", (self.sender.round, sequences, passes))

    def _on_to_sender(self, frame: Frame) -> None:
        assert isinstance(frame, Bitmap | Stop)
        if isinstance(frame, Bitmap):
            if frame.round == self.sender.round and not self.sender.finished:
                self._answered = max(self._answered, frame.sent)
            self.sender.on_bitmap(frame, self.now)
        else:
            self.sender.on_stop(frame)
        if not self.sender.finished and self._wire_free_at <= self.now:
            self._wake_at(self.now)

    # The receiver's shell

    def _on_data(self, payload: tuple[int, IntArray, IntArray]) -> None:
        round_, sequences, passes = payload
        if round_ != self.receiver.round:
            self.observed.late_other_round += len(sequences)
            return
        before = self.receiver.finished
        self.receiver.accept(sequences, passes)
        self.trace.append((self.now, "data", len(sequences)))
        if self.receiver.finished and not before:
            self._tell(self.receiver.stop())

    def _on_to_receiver(self, frame: Frame) -> None:
        """A probe over the reliable channel."""
        self._probe(frame, hinted=False)

    def _on_hint_to_receiver(self, frame: Frame) -> None:
        self._probe(frame, hinted=True)

    def _on_hint_to_sender(self, frame: Frame) -> None:
        self._on_to_sender(frame)

    def _probe(self, frame: Frame, hinted: bool) -> None:
        """As ReceiveLoop._answer and Link.stray: the first copy gets both answers, a repetition a hint."""
        assert isinstance(frame, Probe)
        if frame.round != self.receiver.round:
            return
        repeated = frame.probe <= self._probe_answered
        if repeated and not hinted:
            return
        answer = self.receiver.on_probe(frame)
        assert answer is not None
        self.trace.append((self.now, type(answer).__name__, self.receiver.delivered))
        if isinstance(answer, Stop) or repeated:
            if hinted:
                self._hint("to_sender", answer, self.now)
            return
        self._probe_answered = frame.probe
        self._tell(answer)

    # The channels

    def _tell(self, frame: Frame) -> None:
        if self.protocol.hints:
            self._hint("to_sender", frame, self.now)
        self._reliable("to_sender", frame, self.now)

    def _reliable(self, way: str, frame: Frame, leaves: float) -> None:
        stall = self.conditions.control_stall_s * float(self._random.random())
        when = max(leaves + self.conditions.delay_s + stall, self._ordered_until[way])
        self._ordered_until[way] = when
        self._at(when, way, frame)

    def _hint(self, way: str, frame: Frame, leaves: float) -> None:
        if self._random.random() >= self.conditions.hint_loss_ratio:
            self._at(leaves + self.conditions.delay_s, f"hint_{way}", frame)

    def digest(self) -> tuple[Any, ...]:
        """Equal for equal histories."""
        return self.now, tuple(self.trace), pack_bits(self.receiver.received), self.sender.sent

"""Sender and receiver against a network that does what it likes: any order, any loss, any repetition.

Hypothesis chooses the steps. Whatever has happened, a network that is reliable from then on ends the round.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dblp.receiver import Receiver, ReceiverState
from dblp.sender import Sender, SenderState
from dblp.wire import Bitmap, Probe, Stop, encode, parse_body, parse_prefix

ROUND, UP = 7, 0


def wired(frame: Any) -> Any:
    """The frame as it comes out of the wire at the other end."""
    data = encode(frame)
    return parse_body(parse_prefix(data)[1], data[6:])


def plain(machine: object) -> Any:
    values = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in vars(machine).items()}
    return copy.deepcopy(values)


class AnyNetwork(RuleBasedStateMachine):
    @initialize(
        chunks=st.integers(1, 12),
        window=st.integers(1, 14),
        pipelined=st.booleans(),
        probe_every=st.integers(1, 6),
        seed=st.integers(0, 5),
        data=st.data(),
    )
    def begin(
        self, chunks: int, window: int, pipelined: bool, probe_every: int, seed: int, data: st.DataObject
    ) -> None:
        self.order = np.random.default_rng(seed).permutation(chunks)
        need = data.draw(st.integers(1, chunks), label="need")
        self.sender = Sender(
            ROUND,
            UP,
            self.order,
            window=window,
            pipelined=pipelined,
            probe_every=probe_every,
            reprobe_s=0.001,
            need=data.draw(st.sampled_from([None, need]), label="the sender knows"),
            path_rtt_s=data.draw(st.sampled_from([None, 0.0, 0.01]), label="round trip"),
            overrun=data.draw(st.integers(1, 4), label="overrun"),
        )
        required = data.draw(st.one_of(st.none(), st.lists(st.booleans(), min_size=chunks, max_size=chunks)))
        self.receiver = Receiver(ROUND, UP, chunks, need, None if required is None else np.array(required))
        self.now = 0.0
        self.flying: list[tuple[int, int]] = []
        self.gone: list[tuple[int, int]] = []
        self.probes: list[Probe] = []
        self.answers: list[Bitmap | Stop] = []
        self.all_sent: list[tuple[int, int]] = []
        self.accepted = 0
        self.answered = 0

    @rule(limit=st.integers(1, 6))
    def take(self, limit: int) -> None:
        self.now += 0.001
        batch = self.sender.take(self.now, limit)
        if batch is not None:
            assert 1 <= len(batch.sequences) <= limit
            both = list(zip(batch.sequences.tolist(), batch.passes.tolist(), strict=True))
            self.flying += both
            self.all_sent += both
        self.probes += [effect.probe for effect in self.sender.effects()]

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), copies=st.integers(0, 2))
    def datagrams_arrive(self, data: st.DataObject, copies: int) -> None:
        """Some of what is on its way, in any order, none, once or twice."""
        chosen = data.draw(st.lists(st.sampled_from(self.flying), min_size=1, max_size=5, unique=True))
        self.flying = [item for item in self.flying if item not in chosen]
        self.gone += chosen
        self.arrive(chosen * copies)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def old_datagram_arrives(self, data: st.DataObject) -> None:
        self.arrive([data.draw(st.sampled_from(self.gone))])

    def arrive(self, items: list[tuple[int, int]]) -> None:
        before = self.receiver.finished
        stored = self.receiver.accept(
            np.array([sequence for sequence, _ in items], np.int64), np.array([pass_ for _, pass_ in items], np.int64)
        )
        self.accepted += len(items)
        assert len(stored) <= len(items)
        if self.receiver.finished and not before:
            self.answers.append(self.receiver.stop())

    @precondition(lambda self: self.probes)
    @rule(data=st.data(), keep=st.booleans())
    def probe_arrives(self, data: st.DataObject, keep: bool) -> None:
        """Any probe, an old one too, and again where `keep`."""
        probe = data.draw(st.sampled_from(self.probes))
        if not keep:
            self.probes.remove(probe)
        answer = self.receiver.on_probe(wired(probe))
        assert answer is not None
        self.answers.append(answer)

    @precondition(lambda self: self.answers)
    @rule(data=st.data(), keep=st.booleans())
    def answer_arrives(self, data: st.DataObject, keep: bool) -> None:
        answer = data.draw(st.sampled_from(self.answers))
        if not keep:
            self.answers.remove(answer)
        self.hand_in(answer)

    def hand_in(self, answer: Bitmap | Stop) -> None:
        self.now += 0.001
        if isinstance(answer, Stop):
            self.sender.on_stop(wired(answer))
        else:
            if not self.sender.finished:
                self.answered = max(self.answered, answer.sent)
            self.sender.on_bitmap(wired(answer), self.now)
        self.probes += [effect.probe for effect in self.sender.effects()]

    @rule(seconds=st.sampled_from([0.0, 0.002, 0.1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.sender.handle_timer(self.now)
        self.probes += [effect.probe for effect in self.sender.effects()]

    @rule(round_=st.sampled_from([0, ROUND - 1, ROUND + 1]), probe=st.integers(0, 9), sent=st.integers(0, 99))
    def frames_of_other_rounds_arrive(self, round_: int, probe: int, sent: int) -> None:
        before = plain(self.sender), plain(self.receiver)
        self.sender.on_bitmap(Bitmap(round_, UP, probe, sent, b"\xff"), self.now)
        self.sender.on_bitmap(Bitmap(ROUND, 1, probe, sent, b"\xff"), self.now)
        self.sender.on_stop(Stop(round_, UP, 0, 0, 0, 0, b"\xff"))
        self.sender.on_stop(Stop(ROUND, 1, 0, 0, 0, 0, b"\xff"))
        assert self.receiver.on_probe(Probe(round_, UP, probe, sent)) is None
        assert (plain(self.sender), plain(self.receiver)) == before

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "sender"):
            return
        sender, receiver = self.sender, self.receiver
        assert len(self.all_sent) == len(set(self.all_sent)) == sender.sent
        assert sender.sent - self.answered <= sender.window
        assert set(np.flatnonzero(receiver.received)) <= {sequence for sequence, _ in self.all_sent}
        assert receiver.delivered + receiver.duplicate + receiver.late == self.accepted
        assert receiver.delivered == receiver.received.sum()
        first = [sequence for sequence, pass_ in self.all_sent if pass_ == 0]
        if not sender.pipelined:
            assert first == self.order[: len(first)].tolist()
        if sender.state is SenderState.STOPPED:
            assert receiver.state is ReceiverState.COMPLETE

    def teardown(self) -> None:
        """From now on the network is reliable, and the round ends."""
        if not hasattr(self, "sender"):
            return
        for _ in range(200):
            self.take(64)
            if self.sender.finished:
                break
            self.arrive(self.flying)
            self.gone, self.flying = self.gone + self.flying, []
            self.time_passes(1.0)
            for probe in self.probes:
                answer = self.receiver.on_probe(probe)
                assert answer is not None
                self.answers.append(answer)
            self.probes = []
            for answer in self.answers:
                self.hand_in(answer)
            self.answers = []
            self.counts_agree()
        assert self.sender.state is SenderState.STOPPED
        assert self.receiver.delivered >= self.receiver.need
        assert self.sender.stop == self.receiver.stop()


AnyNetwork.TestCase.settings = settings(derandomize=True, deadline=None, max_examples=80, stateful_step_count=40)
TestAnyNetwork = AnyNetwork.TestCase

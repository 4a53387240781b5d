"""The receiver's state machine: what it stores, when it is complete, and what it answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.chunks import pack_bits
from dblp.errors import LocalProtocolError
from dblp.receiver import Receiver, ReceiverState
from dblp.wire import Bitmap, Probe, Stop

UP, DOWN = 0, 1
ROUND = 0xFFFFFFFF
QUICK = settings(derandomize=True, deadline=None, max_examples=150)


def make(chunks: int = 8, need: int = 5, required: list[int] | None = None) -> Receiver:
    mask = None
    if required is not None:
        mask = np.zeros(chunks, np.bool_)
        mask[required] = True
    return Receiver(ROUND, UP, chunks, need, mask)


def accept(receiver: Receiver, *sequences: int, pass_: int = 0) -> list[int]:
    return receiver.accept(np.array(sequences, np.int64), np.full(len(sequences), pass_, np.int64)).tolist()


def test_freezes_at_exactly_the_chunk_that_completes_the_round() -> None:
    receiver = make()
    assert accept(receiver, 7, 0, 7) == [0, 1]
    assert accept(receiver, 1, 2, 2, 3, 4, 5, pass_=2) == [0, 1, 3]
    assert receiver.state is ReceiverState.COMPLETE
    assert (receiver.delivered, receiver.duplicate, receiver.late) == (5, 2, 2)
    assert (receiver.completing, receiver.passes) == ((3, 2), 3)
    assert np.flatnonzero(receiver.received).tolist() == [0, 1, 2, 3, 7]
    assert accept(receiver, 4, 5, 0) == []
    assert (receiver.late, receiver.duplicate, receiver.delivered) == (5, 2, 5)
    assert receiver.stop() == Stop(ROUND, UP, 0, 3, 2, 5, b"\xf1")
    assert receiver.missing_share == pytest.approx(3 / 8)


def test_chunks_that_must_arrive_hold_the_round_open() -> None:
    receiver = make(required=[6, 7])
    assert accept(receiver, 0, 1, 2, 3, 4, 5) == [0, 1, 2, 3, 4, 5]
    assert not receiver.finished
    assert accept(receiver, 7, 6, 5) == [0, 1]
    assert (receiver.delivered, receiver.completing, receiver.late) == (8, (6, 0), 1)


def test_chunks_that_must_arrive_and_have_do_not_complete_alone() -> None:
    receiver = make(required=[6, 7])
    accept(receiver, 6, 7)
    assert not receiver.finished
    accept(receiver, 0, 1, 2, 3)
    assert (receiver.delivered, receiver.completing, receiver.late) == (5, (2, 0), 1)


def test_nothing_needed_is_complete_at_once() -> None:
    receiver = make(need=0)
    assert receiver.stop() == Stop(ROUND, UP, 0, 0xFFFFFFFF, 0, 0, b"\x00")
    assert accept(receiver, 1) == []
    assert not make(need=0, required=[1]).finished
    assert Receiver(0, UP, 0, 0).missing_share == 0.0


def test_answers_to_a_probe() -> None:
    receiver, probe = make(), Probe(ROUND, UP, 3, 9)
    accept(receiver, 0, 7)
    assert receiver.on_probe(probe) == Bitmap(ROUND, UP, 3, 9, b"\x81")
    assert receiver.on_probe(Probe(0, UP, 3, 9)) is None
    assert receiver.on_probe(Probe(ROUND, DOWN, 3, 9)) is None
    accept(receiver, 1, 2, 3)
    assert receiver.on_probe(probe) == receiver.stop()


def test_giving_up_freezes_what_there_is() -> None:
    receiver = make()
    accept(receiver, 0, 1)
    receiver.give_up()
    assert receiver.state is ReceiverState.GIVEN_UP
    assert accept(receiver, 2, 3, 4, 5) == []
    assert receiver.stop() == Stop(ROUND, UP, 1, 0xFFFFFFFF, 0, 2, b"\xc0")
    assert receiver.on_probe(Probe(ROUND, UP, 0, 0)) == receiver.stop()
    complete = make(need=0)
    complete.give_up()
    assert complete.state is ReceiverState.COMPLETE


def test_stop_before_the_end_is_the_callers_error() -> None:
    with pytest.raises(LocalProtocolError, match="no stop before it is complete"):
        make().stop()


@pytest.mark.parametrize("need", [-1, 9])
def test_impossible_need_is_the_callers_error(need: int) -> None:
    with pytest.raises(LocalProtocolError, match=r"not in 0\.\.8"):
        make(need=need)


def test_equal_sets_have_equal_digests() -> None:
    one, other = make(), make()
    accept(one, 3, 1)
    accept(other, 1)
    assert one.digest() != other.digest()
    accept(other, 3, 3)
    assert one.digest() == other.digest()
    assert len(one.digest()) == 16


class Model:
    """The same, one datagram at a time, in words of sets."""

    def __init__(self, need: int, required: set[int]) -> None:
        self.need, self.required = need, required
        self.have: set[int] = set()
        self.duplicate = self.late = 0
        self.completing: tuple[int, int] | None = None
        self.done = need == 0 and not required

    def accept(self, sequence: int, pass_: int) -> bool:
        if self.done:
            self.late += 1
            return False
        if sequence in self.have:
            self.duplicate += 1
            return False
        self.have.add(sequence)
        self.done = len(self.have) >= self.need and self.required <= self.have
        if self.done:
            self.completing = (sequence, pass_)
        return True


@QUICK
@given(st.data())
def test_batches_do_what_single_datagrams_would(data: st.DataObject) -> None:
    chunks = data.draw(st.integers(1, 20))
    need = data.draw(st.integers(0, chunks))
    required = data.draw(st.lists(st.integers(0, chunks - 1), max_size=4))
    datagram = st.tuples(st.integers(0, chunks - 1), st.integers(0, 5))
    batches = data.draw(st.lists(st.lists(datagram, max_size=12), max_size=8))
    receiver = Receiver(1, UP, chunks, need, _mask(chunks, required))
    model = Model(need, set(required))
    for batch in batches:
        stored = [position for position, (sequence, pass_) in enumerate(batch) if model.accept(sequence, pass_)]
        sequences, passes = (np.array([item[k] for item in batch], np.int64) for k in (0, 1))
        assert receiver.accept(sequences, passes).tolist() == stored
        assert set(np.flatnonzero(receiver.received).tolist()) == model.have
        assert (receiver.duplicate, receiver.late) == (model.duplicate, model.late)
        assert (receiver.finished, receiver.completing) == (model.done, model.completing)
        assert receiver.delivered == len(model.have) == int(np.unpackbits(_bits(receiver)).sum())


def _mask(chunks: int, required: list[int]) -> Any:
    if not required:
        return None
    mask = np.zeros(chunks, np.bool_)
    mask[required] = True
    return mask


def _bits(receiver: Receiver) -> Any:
    return np.frombuffer(pack_bits(receiver.received), np.uint8)

"""The sender's state machine: its table of states, one case after the other."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from dblp.chunks import pack_bits
from dblp.errors import LocalProtocolError, PeerProtocolError
from dblp.sender import MAX_PASS, Sender, SenderState, SendProbe
from dblp.wire import Bitmap, Probe, Stop

UP, DOWN = 0, 1
ROUND = 0xFFFFFFFF


def make(chunks: int = 8, **options: Any) -> Sender:
    options = {"window": 1000, "pipelined": False, **options}
    return Sender(ROUND, UP, np.arange(chunks), **options)


def bits(chunks: int, *received: int) -> bytes:
    mask = np.zeros(chunks, np.bool_)
    mask[list(received)] = True
    return pack_bits(mask)


def bitmap(probe: int, sent: int, *received: int, chunks: int = 8, round_: int = ROUND, direction: int = UP) -> Bitmap:
    return Bitmap(round_, direction, probe, sent, bits(chunks, *received))


def stop(round_: int = ROUND, direction: int = UP, sequence: int = 7, outcome: int = 0) -> Stop:
    return Stop(round_, direction, outcome, sequence, 0, 8, b"\xff")


def taken(sender: Sender, now: float = 0.0, limit: int = 64) -> list[int]:
    batch = sender.take(now, limit)
    return [] if batch is None else batch.sequences.tolist()


def snapshot(sender: Sender) -> Any:
    return copy.deepcopy({k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(sender).items()})


def test_round_in_passes() -> None:
    sender = make()
    assert taken(sender, limit=5) == [0, 1, 2, 3, 4]
    assert sender.effects() == []
    assert taken(sender, limit=5) == [5, 6, 7]
    assert sender.effects() == [SendProbe(Probe(ROUND, UP, 0, 8), again=False)]
    assert sender.state is SenderState.WAITING
    assert taken(sender) == []
    sender.on_bitmap(bitmap(0, 8, 0, 2, 4, 6), 0.5)
    assert (sender.state, sender.rtt_s) == (SenderState.SENDING, 0.5)
    batch = sender.take(1.0, 64)
    assert batch is not None
    assert (batch.sequences.tolist(), batch.passes.tolist()) == ([1, 3, 5, 7], [1, 1, 1, 1])
    assert sender.effects() == [SendProbe(Probe(ROUND, UP, 1, 12), again=False)]
    sender.on_stop(stop())
    assert (sender.state, sender.passes, sender.sent) == (SenderState.STOPPED, 2, 12)
    assert sender.packets_at(stop()) == 12
    assert sender.packets_at(stop(sequence=0)) == 1
    assert sender.packets_at(stop(sequence=0xFFFFFFFF)) == 12


def test_retransmission_keeps_the_send_order() -> None:
    order = np.array([3, 1, 2, 0])
    sender = Sender(0, UP, order, window=100, pipelined=False)
    assert taken(sender) == [3, 1, 2, 0]
    sender.on_bitmap(Bitmap(0, UP, 0, 4, bits(4, 1)), 0.0)
    assert taken(sender) == [3, 2, 0]


def test_window_holds_back_what_the_buffer_cannot_take() -> None:
    sender = make(window=3)
    assert taken(sender) == [0, 1, 2]
    assert (sender.state, [e.probe.sent for e in sender.effects()]) == (SenderState.WAITING, [3])
    sender.on_bitmap(bitmap(0, 3, 0), 0.0)
    assert taken(sender) == [3, 4, 5]  # what was lost waits for the end of the pass
    sender.on_bitmap(bitmap(1, 6, 0, 3, 4, 5), 0.0)
    assert taken(sender) == [6, 7]
    sender.on_bitmap(bitmap(2, 8, 0, 3, 4, 5, 6, 7), 0.0)
    assert taken(sender) == [1, 2]
    assert sender.passes == 2


def test_pipelined_sends_on_while_a_probe_is_outstanding_and_knows_what_is_on_its_way() -> None:
    sender = make(pipelined=True, probe_every=3)
    assert taken(sender, limit=3) == [0, 1, 2]
    assert [e.probe.sent for e in sender.effects()] == [3]
    assert taken(sender, limit=3) == [3, 4, 5]
    assert sender.effects() == []  # one probe at a time
    sender.on_bitmap(bitmap(0, 3, 0), 0.0)  # 1 and 2 are lost; 3, 4, 5 may still be on their way
    assert taken(sender, limit=64) == [6, 7, 1, 2]
    assert [e.probe.sent for e in sender.effects()] == [10]
    sender.on_bitmap(bitmap(1, 10, 0, 1, 3, 4, 5, 6, 7), 0.0)
    assert taken(sender) == [2]


def test_chunk_that_came_late_is_taken_from_the_queue() -> None:
    sender = make(pipelined=True, probe_every=2, window=1000)
    assert taken(sender, limit=2) == [0, 1]
    sender.on_bitmap(bitmap(0, 2), 0.0)
    assert taken(sender, limit=2) == [2, 3]
    assert [e.probe.probe for e in sender.effects()] == [0, 1]
    sender.on_bitmap(bitmap(1, 4, 0, 1, 2), 0.0)  # 0 and 1 had only been overtaken
    assert taken(sender) == [4, 5, 6, 7, 3]


def test_overdue_probe_is_repeated_as_a_hint_and_gives_no_sample() -> None:
    sender = make(reprobe_s=0.001)
    assert sender.next_timer() == 0.0
    taken(sender)
    first = sender.effects()[0]
    assert sender.next_timer() == pytest.approx(0.05)  # the round trip is not known yet
    sender.handle_timer(0.049)
    assert sender.effects() == []
    sender.handle_timer(0.051)
    assert sender.effects() == [SendProbe(first.probe, again=True)]
    sender.on_bitmap(bitmap(0, 8, 0), 0.052)
    assert sender.rtt_s == pytest.approx(0.052)  # since the first copy: rather too long than too short
    taken(sender, 1.0)
    assert sender.next_timer() == pytest.approx(1.0 + 2 * 0.052)
    sender.handle_timer(1.2)
    sender.on_bitmap(bitmap(1, 15, 0, 1), 1.201)
    assert sender.rtt_s == pytest.approx(0.052)
    taken(sender, 2.0)
    sender.on_bitmap(bitmap(2, 21, 0, 1, 2), 2.020)
    assert sender.rtt_s == pytest.approx(0.020)  # the shortest counts
    taken(sender, 3.0)
    sender.on_bitmap(bitmap(3, 26, 0, 1, 2, 3), 3.030)
    assert sender.rtt_s == pytest.approx(1.05 * 0.020)  # and is forgotten slowly


def test_each_repetition_of_a_probe_waits_longer() -> None:
    sender = make(reprobe_s=0.001, rtt_s=0.002)
    taken(sender, 0.0)
    waits = []
    for _ in range(14):
        due, before = sender.next_timer(), waits[-1][1] if waits else 0.0
        assert due is not None
        waits.append((due - before, due))
        sender.handle_timer(due)
    steps = [step for step, _ in waits]
    assert steps[0] == pytest.approx(0.004)
    assert all(later >= earlier - 1e-12 for earlier, later in pairwise(steps))
    assert steps[-1] == pytest.approx(0.004 * 1.25**10)


@pytest.mark.parametrize("pipelined", [False, True])
def test_sender_asks_where_the_round_may_be_over_and_waits_for_the_answer(pipelined: bool) -> None:
    sender = make(chunks=100, need=40, overrun=10, path_rtt_s=0.0, pipelined=pipelined)
    assert len(taken(sender, limit=30)) == 30
    assert sender.effects() == []  # it cannot be over yet
    assert len(taken(sender, limit=30)) == 20  # 40 may be enough, and 10 may be sent in vain
    assert [e.probe.sent for e in sender.effects()] == [50]
    assert sender.state is SenderState.WAITING
    assert taken(sender, limit=30) == []
    assert sender.effects() == []  # one question is enough
    # 20 of 50 arrived: the missing 20 are expected to take 50 more, two standard deviations less are 32.
    sender.on_bitmap(bitmap(0, 50, *range(20), chunks=100), 0.0)
    assert len(taken(sender, limit=100)) == 42
    assert [e.probe.sent for e in sender.effects()] == [92]
    sender.on_bitmap(bitmap(1, 92, *range(37), chunks=100), 0.0)  # 3 to go: they may be the next 3
    assert len(taken(sender, limit=100)) == (13 if pipelined else 8)  # without pipelining the pass ends at 100


def test_sender_runs_ahead_as_far_as_a_round_trip_holds() -> None:
    sender = make(chunks=200, need=40, overrun=10, path_rtt_s=0.5)
    assert len(taken(sender, 1.0, 30)) == 30
    assert len(taken(sender, 1.25, 100)) == 80  # 120 a second, so 60 in a round trip; 40 + 10 + 60 - 30
    unknown = make(chunks=200, need=40, overrun=10)
    assert len(taken(unknown, limit=150)) == 150  # nothing to hold it back by


def on_a_long_path(**options: Any) -> Sender:
    """100 chunks, 90 are enough; 100 datagrams a second, of which a round trip holds 50: more than two overruns."""
    options = {"need": 90, "overrun": 10, "path_rtt_s": 0.5, "pipelined": True, **options}
    return make(chunks=100, **options)


def test_what_is_missing_goes_out_again_on_a_long_path_the_longest_unsent_first() -> None:
    sender = on_a_long_path()
    for now in range(4):
        assert len(taken(sender, 10 + now / 4, 25)) == 25
    assert sender.state is SenderState.WAITING  # before any answer it does not know that anything is lost
    probe = sender.effects()[0].probe
    sender.on_bitmap(bitmap(probe.probe, 50, *range(20), chunks=100), 11.0)
    assert taken(sender, 11.0, 30) == list(range(20, 50))  # these are lost
    batch = sender.take(11.25, 30)  # nothing else to send: the others may be under way
    assert batch is not None
    assert batch.sequences.tolist() == list(range(50, 80))
    assert set(batch.passes.tolist()) == {1}
    sender.on_bitmap(bitmap(probe.probe + 1, 100, *range(20), *range(50, 75), chunks=100), 11.5)
    assert taken(sender, 11.5, 64) == list(range(80, 100))  # 75 to 79 were sent again, and are not lost for sure


@pytest.mark.parametrize(
    "options", [{"path_rtt_s": 0.1}, {"pass_overhead_s": 0.01}, {"path_rtt_s": None}, {"need": None}]
)
def test_nothing_under_way_is_repeated_where_the_path_is_not_long(options: dict[str, Any]) -> None:
    sender = on_a_long_path(**options)
    for now in range(4):
        taken(sender, 10 + now / 4, 25)
    while (probes := sender.effects()) and probes[-1].probe.sent < 100:
        sender.on_bitmap(bitmap(probes[-1].probe.probe, probes[-1].probe.sent, *range(20), chunks=100), 10.9)
        taken(sender, 10.9, 25)
    sent = [*taken(sender, 11.0, 200), *taken(sender, 11.25, 200)]
    assert len(sent) == len(set(sent))
    assert sender.sent - 100 <= 30
    assert sender.passes <= 2


def test_packets_up_to_a_transmission_that_was_not_the_last_of_its_chunk() -> None:
    sender = on_a_long_path(window=200)
    for now in range(4):
        taken(sender, 10 + now / 4, 25)
    probe = sender.effects()[0].probe.probe
    sender.on_bitmap(bitmap(probe, 50, *range(30), chunks=100), 11.0)
    assert taken(sender, 11.0, 20) == list(range(30, 50))
    assert taken(sender, 11.0, 5)[:3] == [50, 51, 52]

    def completed_by(sequence: int, pass_: int) -> Stop:
        return Stop(ROUND, UP, 0, sequence, pass_, 90, bits(100))

    assert sender.packets_at(completed_by(50, 0)) == 51
    assert sender.packets_at(completed_by(50, 1)) == 121
    assert sender.packets_at(completed_by(52, 1)) == 123
    assert sender.packets_at(completed_by(7, 0)) == 8


def test_answer_that_counts_chunks_behind_its_probe_does_not_end_the_round_earlier() -> None:
    """Without loss 90 datagrams complete the round, whenever the answer was given: nothing is held back before."""
    sender = make(chunks=100, need=90, overrun=10, path_rtt_s=0.0, pipelined=True, probe_every=10)
    taken(sender, limit=10)
    taken(sender, limit=10)
    sender.on_bitmap(bitmap(0, 10, *range(20), chunks=100), 0.0)
    assert len(taken(sender, limit=100)) == 80  # 90, and an overrun of 10; less 20


def test_question_inside_a_pass_repeats_nothing_under_stop_and_wait() -> None:
    """Its answer may come after the last chunk of the pass; only the question at the end tells what is lost."""
    sender = make(chunks=20, need=10, overrun=30, path_rtt_s=0.0)
    assert len(taken(sender, limit=12)) == 12
    assert len(taken(sender, limit=12)) == 8
    assert [e.probe.sent for e in sender.effects()] == [12, 20]
    sender.on_bitmap(bitmap(0, 12, 0, 1, chunks=20), 0.0)
    assert taken(sender) == []
    sender.on_bitmap(bitmap(1, 20, 0, 1, chunks=20), 0.0)
    assert taken(sender, limit=64) == list(range(2, 20))


def test_a_paced_sender_sends_so_many_a_second_and_makes_up_for_being_late() -> None:
    sender = make(chunks=4000, pace_hz=10_000.0, window=10_000)
    assert len(taken(sender, 5.0, 100)) == 10  # what one millisecond holds
    assert taken(sender, 5.0005, 100) == []
    assert sender.next_timer() == pytest.approx(5.001)
    assert len(taken(sender, 5.001, 100)) == 10
    assert len(taken(sender, 5.0045, 100)) == 30  # at once: it was late by 2 ms
    assert taken(sender, 5.0045, 100) == []
    late = 0
    while got := taken(sender, 6.0, 100):  # almost a second late: only the last 20 ms are made up for
        late += len(got)
    assert 200 <= late <= 210
    assert taken(make(chunks=4, pace_hz=10.0), 1.0) == [0]  # never nothing at all


def test_without_hints_no_probe_is_repeated() -> None:
    sender = make()
    taken(sender)
    sender.effects()
    assert sender.next_timer() is None
    sender.handle_timer(1e9)
    assert sender.effects() == []


def test_pause_between_passes() -> None:
    sender = make(pass_overhead_s=0.11)
    taken(sender)
    sender.on_bitmap(bitmap(0, 8, 0), 1.0)
    assert sender.next_timer() == pytest.approx(1.11)
    assert taken(sender, 1.1) == []
    assert sender.state is SenderState.SENDING
    assert len(taken(sender, 1.2)) == 7


STALE = {
    "other round": bitmap(0, 8, round_=ROUND - 1),
    "next round": bitmap(0, 8, round_=0),
    "other direction": bitmap(0, 8, direction=DOWN),
}


@pytest.mark.parametrize("case", STALE)
def test_stale_bitmap_changes_nothing(case: str) -> None:
    sender = make()
    taken(sender)
    before = snapshot(sender)
    sender.on_bitmap(STALE[case], 1.0)
    assert snapshot(sender) == before


def test_repeated_and_overtaken_bitmaps_change_nothing() -> None:
    sender = make(pipelined=True, probe_every=4)
    taken(sender, limit=4)
    taken(sender, limit=4)
    sender.on_bitmap(bitmap(1, 8, 0, 1), 1.0)
    before = snapshot(sender)
    for old in (bitmap(0, 4), bitmap(1, 8), bitmap(1, 8, 0, 1, 2)):
        sender.on_bitmap(old, 2.0)
        assert snapshot(sender) == before


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (bitmap(1, 8), "bitmap for probe 1, 1 were sent"),
        (bitmap(0, 9), "bitmap for probe 0"),
        (bitmap(0, 8, chunks=9), "bitmap of 2 bytes for 8 chunks"),
        (Bitmap(ROUND, UP, 0, 8, b""), "bitmap of 0 bytes for 8 chunks"),
        (Stop(ROUND, UP, 0, 0, 0, 0, b""), "bitmap of 0 bytes for 8 chunks"),
    ],
)
def test_impossible_answer_is_the_peers_error_and_changes_nothing(bad: Any, words: str) -> None:
    sender = make()
    taken(sender)
    before = snapshot(sender)
    with pytest.raises(PeerProtocolError, match=words):
        sender.on_stop(bad) if isinstance(bad, Stop) else sender.on_bitmap(bad, 1.0)
    assert snapshot(sender) == before


def test_answer_that_takes_back_an_older_one_is_the_peers_error() -> None:
    sender = make(pipelined=True, probe_every=4)
    taken(sender, limit=4)
    taken(sender, limit=4)
    sender.on_bitmap(bitmap(0, 4), 1.0)
    with pytest.raises(PeerProtocolError):
        sender.on_bitmap(bitmap(1, 3), 1.0)


@pytest.mark.parametrize("end", ["stop", "abort"])
def test_nothing_happens_after_the_end(end: str) -> None:
    sender = make(reprobe_s=0.001)
    taken(sender)
    sender.on_stop(stop()) if end == "stop" else sender.abort()
    before = snapshot(sender)
    assert sender.effects() == []  # a probe that has not gone out yet is not needed any more
    assert sender.next_timer() is None
    sender.on_bitmap(bitmap(0, 8), 1.0)
    sender.on_bitmap(bitmap(5, 99), 1.0)
    sender.on_stop(stop(outcome=1))
    sender.abort()
    sender.handle_timer(1e9)
    assert taken(sender, 1e9) == []
    assert snapshot(sender) == before
    assert (sender.stop is None) == (end == "abort")


@pytest.mark.parametrize("other", [stop(round_=0), stop(direction=DOWN)])
def test_stop_of_another_round_is_ignored(other: Stop) -> None:
    sender = make()
    sender.on_stop(other)
    assert not sender.finished


@pytest.mark.parametrize("options", [{"window": 0}, {"probe_every": 0}, {"window": -1}])
def test_impossible_options_are_the_callers_error(options: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        make(**options)


def test_chunk_that_the_pass_field_cannot_count_is_refused() -> None:
    sender = make(chunks=1)
    sender._times_sent[0] = sender._queue_passes[0] = MAX_PASS
    batch = sender.take(0.0, 64)
    assert batch is not None
    assert batch.passes.tolist() == [MAX_PASS]
    sender.on_bitmap(bitmap(0, 1, chunks=1), 0.0)
    before = snapshot(sender)
    with pytest.raises(LocalProtocolError, match="was sent 65535 times"):
        sender.take(0.0, 64)
    assert snapshot(sender) == before

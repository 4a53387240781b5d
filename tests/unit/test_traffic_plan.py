"""What a packet source sends and when: numbers of packets, phases, and the loop over a stream's time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.traffic.plan import NS, Burst, Sent, Stream, due, from_json, on_off
from netem.traffic.source import MAX_BEHIND_NS, StreamState

GBIT = 10**9
FRAME_NS = 1514 * 8  # at 1 Gbit/s


@pytest.mark.parametrize(
    ("elapsed_ns", "packets"), [(-1, 0), (0, 1), (FRAME_NS - 1, 1), (FRAME_NS, 2), (1000 * FRAME_NS, 1001)]
)
def test_a_rate_lets_one_packet_go_every_time_of_a_frame(elapsed_ns: int, packets: int) -> None:
    assert due(elapsed_ns, GBIT, 1500) == packets


@given(st.integers(1, 10**11), st.integers(29, 9000), st.integers(0, 10**10))
def test_a_rate_is_kept_to_a_packet(rate_bps: int, packet_bytes: int, elapsed_ns: int) -> None:
    sent_bits = (due(elapsed_ns, rate_bps, packet_bytes) - 1) * 8 * (packet_bytes + 14)
    allowed = elapsed_ns * rate_bps / NS
    assert sent_bits <= allowed < sent_bits + 8 * (packet_bytes + 14) + 1


def test_planned_packets() -> None:
    assert Burst(3, 1500, packets=7).planned == 7
    assert Burst(3, 1500, rate_bps=GBIT, duration_ns=10 * FRAME_NS).planned == 11
    assert Burst(3, 1500, rate_bps=1000, duration_ns=1).planned == 1
    assert Burst(3, 1500, duration_ns=10**6).planned is None, "as fast as the machine: only the clock ends it"


@pytest.mark.parametrize("wrong", [{}, {"packets": 1, "duration_ns": 1}, {"packets": 1, "senders": 0}])
def test_bursts_that_make_no_sense(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a burst has"):
        Burst(**{"senders": 1, "packet_bytes": 1500, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("plan", [Burst(3, 1500, packets=7), Stream(1500, GBIT, 0.1, 0.2, "exponential", 5)])
def test_plans_and_reports_survive_the_control_socket(plan: Burst | Stream) -> None:
    assert from_json(plan.to_json()) == plan
    sent = Sent(2, 10, 11, 12, (3, 4), refused=1)
    assert Sent.from_json({**vars(sent), "packets": [3, 4]}) == sent


def test_phases_repeat_with_the_seed_and_have_their_means() -> None:
    stream = Stream(1500, GBIT, 0.01, 0.03, "exponential", seed=4)
    first = list(itertools.islice(on_off(stream), 2000))
    assert first == list(itertools.islice(on_off(stream), 2000))
    assert first != list(itertools.islice(on_off(Stream(1500, GBIT, 0.01, 0.03, "exponential", 5)), 2000))
    for index, mean in ((0, 0.01), (1, 0.03)):
        assert sum(pair[index] for pair in first) / 2000 == pytest.approx(mean, rel=0.1)
    assert list(itertools.islice(on_off(Stream(1500, GBIT, 0.1, 0.2)), 2)) == [(0.1, 0.2)] * 2


def run_stream(stream: Stream, steps_ns: list[int], start_ns: int = 10**12) -> tuple[int, StreamState]:
    state = StreamState(stream, start_ns)
    sent = 0
    for now in itertools.accumulate(steps_ns):
        packets, wait_s = state.step(start_ns + now)
        assert packets >= 0
        assert wait_s > 0
        sent += packets
    return sent, state


@given(st.lists(st.integers(0, MAX_BEHIND_NS - 1), min_size=1, max_size=300))
def test_a_constant_stream_sends_what_its_rate_allows(steps_ns: list[int]) -> None:
    sent, state = run_stream(Stream(1500, 100 * 10**6), steps_ns)
    assert sent == due(sum(steps_ns), 100 * 10**6, 1500)
    assert state.skipped == 0


@given(st.lists(st.integers(0, 4_000_000), min_size=1, max_size=300))
def test_on_and_off_in_turn(steps_ns: list[int]) -> None:
    """10 ms on, 30 ms off: by any time the packets of the time that was on."""
    sent, _ = run_stream(Stream(1500, 100 * 10**6, 0.01, 0.03), steps_ns)
    cycles, rest = divmod(sum(steps_ns), 40_000_000)
    on_ns = cycles * 10_000_000 + min(rest, 10_000_000)
    assert sent == due(on_ns, 100 * 10**6, 1500)


def test_a_source_that_was_late_does_not_catch_up_with_a_flood() -> None:
    sent, state = run_stream(Stream(1500, GBIT), [0, NS])
    allowed = due(MAX_BEHIND_NS, GBIT, 1500)
    assert sent == 1 + allowed
    assert sent + state.skipped == due(NS, GBIT, 1500)


def test_in_an_off_phase_it_sleeps_until_the_next() -> None:
    state = StreamState(Stream(1500, GBIT, 0.01, 0.03), 0)
    state.step(0)
    assert state.step(10_000_000)[1] == pytest.approx(0.03)
    assert state.step(25_000_000) == (0, pytest.approx(0.015))

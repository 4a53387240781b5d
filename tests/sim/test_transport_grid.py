"""Sender and receiver over the virtual network: the grid of loss, tolerance, disorder, delay, probing and window."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest

from dblp.chunks import send_order
from dblp.receiver import Receiver, ReceiverState
from dblp.sender import LONG_PATH, Sender
from dblp.wire import Stop
from netem.analysis import oracle
from tests.sim.virtual_network import UP, Conditions, Observed, Protocol, VirtualNetwork

CHUNKS = 150
SMALL_WINDOW = 48
LOSS = (0.0, 0.1, 0.6, 0.8, 0.9)
TOLERANCE = (0.0, 0.008, 0.408)
NETWORKS = tuple(itertools.product((0.0, 0.2), (0.0, 0.2), (0.0, 0.0005, 0.001, 0.010)))
"""(reordered share, duplicated share, one-way delay in seconds)"""
RARE = 1e-9


def limit_of(conditions: Conditions, protocol: Protocol, chunks: int = CHUNKS) -> float:
    """Virtual seconds in which a round surely ends: twice the rare number of passes and packets, one round trip (and
    a lost hint, a stalled control frame) for each pass and each window full."""
    needed = oracle.need(chunks, protocol.tolerance)
    passes = oracle.passes(chunks, needed, conditions.loss_ratio)
    assert passes is not None
    packets = oracle.Packets(needed, conditions.loss_ratio).interval(1 - RARE)[1] * 2 + chunks
    turns = 2 * passes.interval(1 - RARE)[1] + packets / min(protocol.window, protocol.probe_every) + 4
    turn_s = conditions.rtt_s + conditions.reorder_s + 2 * conditions.control_stall_s + protocol.pass_overhead_s + 1e-3
    return turns * turn_s + packets / conditions.rate_hz


def play(
    conditions: Conditions, protocol: Protocol, *, seed: int, rounds: int = 1, chunks: int = CHUNKS
) -> list[tuple[Sender, Receiver, Observed]]:
    network = VirtualNetwork(conditions, protocol, chunks, seed=seed)
    return [network.run(round_, limit_of(conditions, protocol, chunks)) for round_ in range(rounds)]


def predicted(conditions: Conditions, protocol: Protocol, seed: int, round_: int, chunks: int) -> oracle.Prediction:
    order = send_order(protocol.order, chunks, seed=seed, round_=round_, rank=1, direction=UP)
    drop = oracle.mask_drop(seed, "up", 1, round_, conditions.loss_ratio)
    return oracle.predict(order, oracle.need(chunks, protocol.tolerance), chunks, drop)


def stop_of(sender: Sender) -> Stop:
    assert sender.stop is not None
    return sender.stop


def check_always(
    sender: Sender, receiver: Receiver, seen: Observed, conditions: Conditions, protocol: Protocol
) -> None:
    """What holds on any network."""
    assert receiver.state is ReceiverState.COMPLETE
    assert receiver.delivered == receiver.need == receiver.received.sum()
    assert receiver.missing_share <= protocol.tolerance + 1e-12
    assert not (receiver.received & ~seen.sent_mask).any()
    assert seen.most_unanswered <= protocol.window
    assert stop_of(sender).delivered == receiver.delivered
    assert len(seen.transmissions) == len(set(seen.transmissions)) == sender.sent  # no (sequence, pass) twice
    passes = np.array([pass_ for _, pass_ in seen.transmissions])
    assert sender.passes == passes.max() + 1
    if protocol.pipelined and is_long(conditions, protocol):
        check_repeats(sender, receiver, conditions, protocol)
    elif not conditions.duplicate_ratio and not conditions.reorder_ratio:
        assert receiver.duplicate == seen.wasted == seen.too_early == 0
    if not conditions.reorder_ratio and receiver.completing is not None:
        assert sender.packets_at(stop_of(sender)) == seen.transmissions.index(receiver.completing) + 1


def is_long(conditions: Conditions, protocol: Protocol) -> bool:
    """Whether a round trip holds so much that chunks under way may be repeated: two overruns of two batches each."""
    return conditions.rtt_s * conditions.rate_hz >= LONG_PATH * 2 * protocol.batch


def check_repeats(sender: Sender, receiver: Receiver, conditions: Conditions, protocol: Protocol) -> None:
    """What is repeated early fills otherwise idle time near the end: two round trips (or windows) and a quarter."""
    needed = oracle.Packets(receiver.need, conditions.loss_ratio).interval(1 - RARE)[1]
    assert sender.sent <= 1.25 * needed + 2 * min(conditions.rtt_s * conditions.rate_hz, protocol.window)


def check_overshoot(sender: Sender, conditions: Conditions, protocol: Protocol) -> None:
    """After the completing chunk: at most what a round trip and two batches hold."""
    overshoot = sender.sent - sender.packets_at(stop_of(sender))
    assert 0 <= overshoot <= conditions.rtt_s * conditions.rate_hz + 2 * protocol.batch + 1


@pytest.mark.parametrize("pipelined", [False, True], ids=["stop-and-wait", "pipelined"])
@pytest.mark.parametrize("tolerance", TOLERANCE)
@pytest.mark.parametrize("loss", LOSS)
def test_every_round_completes(loss: float, tolerance: float, pipelined: bool) -> None:
    for number, ((reorder, duplicate, delay), window) in enumerate(
        itertools.product(NETWORKS, (SMALL_WINDOW, 1 << 20))
    ):
        conditions = Conditions(loss, reorder, duplicate_ratio=duplicate, delay_s=delay)
        protocol = Protocol(pipelined, window, tolerance=tolerance)
        ((sender, receiver, seen),) = play(conditions, protocol, seed=number)
        check_always(sender, receiver, seen, conditions, protocol)
        if reorder:
            continue
        check_overshoot(sender, conditions, protocol)
        if not pipelined:
            check_prediction(sender, receiver, predicted(conditions, protocol, number, 0, CHUNKS))


def check_prediction(sender: Sender, receiver: Receiver, expected: oracle.Prediction) -> None:
    assert sender.passes == receiver.passes == expected.passes
    assert sender.packets_at(stop_of(sender)) == expected.packets_at_need
    assert receiver.completing == expected.completing
    assert np.array_equal(receiver.received, expected.delivered)


@pytest.mark.parametrize("pipelined", [False, True], ids=["stop-and-wait", "pipelined"])
@pytest.mark.parametrize("hints", [False, True], ids=["tcp only", "hints"])
def test_lost_hints_and_late_control_frames_never_hang(pipelined: bool, hints: bool) -> None:
    """Control frames that take a retransmission time-out longer, and hints that are lost half of the time or always."""
    for hint_loss, stall, delay, reorder in itertools.product((0.5, 1.0), (0.0, 0.2), (0.0, 0.01), (0.0, 0.2)):
        conditions = Conditions(
            0.6, reorder, duplicate_ratio=reorder, delay_s=delay, control_stall_s=stall, hint_loss_ratio=hint_loss
        )
        protocol = Protocol(pipelined, SMALL_WINDOW, hints=hints, tolerance=0.008)
        for sender, receiver, seen in play(conditions, protocol, seed=3, rounds=2, chunks=100):
            check_always(sender, receiver, seen, conditions, protocol)


def test_hints_save_the_time_of_stalled_control_frames() -> None:
    times = []
    for hints in (True, False):
        network = VirtualNetwork(Conditions(0.6, control_stall_s=0.2), Protocol(hints=hints), CHUNKS, seed=1)
        network.run(0, 60.0)
        times.append(network.now)
    assert times[0] < 0.1 * times[1]


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.010, 0.100, 0.3])
@pytest.mark.parametrize("pipelined", [False, True], ids=["stop-and-wait", "pipelined"])
def test_probes_are_repeated_only_when_overdue(delay: float, pipelined: bool) -> None:
    """On a network that keeps everything but data, at most the first probes are repeated: the round trip is unknown."""
    for sender, _, seen in play(
        Conditions(0.6, delay_s=delay), Protocol(pipelined, tolerance=0.008), seed=2, chunks=250
    ):
        assert seen.hinted_probes <= 2 * delay / 0.05 + 1
        assert sender.rtt_s is not None
        assert sender.rtt_s >= 2 * delay


def test_chunks_that_must_arrive_do_arrive() -> None:
    protocol = Protocol(True, tolerance=0.408, required=(0, 17, 149))
    for seed in range(20):
        ((_, receiver, seen),) = play(Conditions(0.8, duplicate_ratio=0.1), protocol, seed=seed)
        assert receiver.received[[0, 17, 149]].all()
        assert receiver.delivered >= receiver.need
        assert not (receiver.received & ~seen.sent_mask).any()


def test_pause_between_passes_costs_its_time_and_no_packets() -> None:
    conditions = Conditions(0.8)
    (fast, *_), (slow, *_) = (
        play(conditions, Protocol(tolerance=0.008, pass_overhead_s=pause), seed=4)[0] for pause in (0.0, 0.11)
    )
    network = VirtualNetwork(conditions, Protocol(tolerance=0.008, pass_overhead_s=0.11), CHUNKS, seed=4)
    sender, _, _ = network.run(0, 60.0)
    assert (slow.sent, slow.passes) == (fast.sent, fast.passes)
    assert network.now >= 0.11 * (sender.passes - 1)


def test_late_chunks_of_a_round_do_not_count_in_the_next() -> None:
    conditions = Conditions(0.1, 0.3, reorder_s=0.02, delay_s=0.001)
    rounds = play(conditions, Protocol(True, tolerance=0.408), seed=6, rounds=4)
    assert sum(seen.late_other_round for _, _, seen in rounds[1:]) > 0
    for sender, receiver, seen in rounds:
        check_always(sender, receiver, seen, conditions, Protocol(True, tolerance=0.408))


def test_snapshot_goes_on_alike() -> None:
    network = VirtualNetwork(Conditions(0.6, 0.2, duplicate_ratio=0.2, delay_s=0.001), Protocol(True), CHUNKS, seed=8)
    network.begin(0)
    for _ in range(20):
        network.step()
    twin = copy.deepcopy(network)
    for each in (network, twin):
        while not each.sender.finished:
            each.step()
    assert network.digest() == twin.digest()
    again = VirtualNetwork(network.conditions, network.protocol, CHUNKS, seed=8)
    again.run(0, 60.0)
    assert again.digest() == network.digest()
    other = VirtualNetwork(network.conditions, network.protocol, CHUNKS, seed=9)
    other.run(0, 60.0)
    assert other.digest() != network.digest()


def test_everything_lost_ends_only_by_the_deadline() -> None:
    network = VirtualNetwork(Conditions(1.0, delay_s=0.001), Protocol(tolerance=0.408), CHUNKS, seed=1)
    with pytest.raises(AssertionError, match=r"round 0 did not end within 1 s"):
        network.run(0, 1.0)
    network.receiver.give_up()
    stop = network.receiver.stop()
    network.sender.on_stop(stop)
    assert (stop.outcome, stop.delivered) == (1, 0)
    assert network.sender.packets_at(stop) == network.sender.sent

"""Duplicates and damage on a real path: what happens to which packet is as exact as which are lost."""

from __future__ import annotations

import os
import subprocess
from collections import Counter as Tally
from collections.abc import Iterator

import numpy as np
import pytest

from netem.kernel import offload
from netem.links import chain, mask
from netem.links.base import LinkError, LossRule, Shape
from netem.links.bpf import BpfPort
from netem.links.chain import GilbertElliott
from netem.links.fake import FakePort
from tests.kernel.bpf_path import KEY, UDP_FLOW, WORKERS, Path, Traffic, build_path

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: run with sudo")

N = 400


@pytest.fixture(scope="module")
def path() -> Iterator[Path]:
    with build_path() as made:
        yield made


@pytest.fixture(autouse=True)
def one_cpu() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture
def traffic(path: Path) -> Iterator[Traffic]:
    made = Traffic(path)
    yield made
    made.close()


@pytest.fixture
def port(path: Path) -> Iterator[BpfPort]:
    made = path.port()
    made.install(Shape(), UDP_FLOW, KEY, WORKERS)
    yield made
    made.close()


def expected(state: int, round_: int, lost: np.ndarray, ratio: float) -> dict[int, int]:
    """Sequence -> how often it arrives."""
    twice = mask.duplicates(state, [round_, np.arange(N), 1 << 16], mask.threshold(ratio))
    return {int(n): 1 + int(twice[n]) for n in np.flatnonzero(~lost)}


@pytest.mark.parametrize("seed", range(20))
def test_exactly_the_predicted_packets_arrive_twice(port: BpfPort, traffic: Traffic, seed: int) -> None:
    state = mask.port_state(seed, "up", 1)
    port.set_loss([LossRule(WORKERS[0], state, 0.3, duplicate_ratio=0.2)])
    traffic.send(WORKERS[0], seed, range(N), gso=seed % 2 == 1)
    lost = mask.drops(state, [seed, np.arange(N), 1 << 16], mask.threshold(0.3))
    wanted = expected(state, seed, lost, 0.2)
    arrived = [n for _, _, n in traffic.arrived()]
    assert Tally(arrived) == wanted
    assert arrived == sorted(arrived)  # a copy comes right before its original
    (counter,) = [c for c in port.counters() if c.kind == "data"]
    assert (counter.seen, counter.dropped) == (N, lost.sum())
    assert counter.duplicated == sum(wanted.values()) - len(wanted) > 20


def test_under_a_chain_and_in_its_rounds_alone(port: BpfPort, traffic: Traffic) -> None:
    fives = GilbertElliott.of_bursts(0.3, 5)
    port.set_loss([LossRule(WORKERS[0], 9, 0.3, first=2, last=2, chain=fives, duplicate_ratio=1.0)])
    for round_ in (1, 2, 3):
        traffic.send(WORKERS[0], round_, range(N))
    traffic.send(WORKERS[1], 2, range(N))
    lost = chain.lost(chain.key_base(9, (2, 1 << 16)), N, chain.limits(fives))
    arrived = Tally(traffic.arrived())
    assert {n: times for (source, r, n), times in arrived.items() if (source, r) == (WORKERS[0], 2)} == expected(
        9, 2, lost, 1.0
    )
    assert {arrived[WORKERS[0], r, n] for r in (1, 3) for n in range(N)} == {1}
    assert {arrived[WORKERS[1], 2, n] for n in range(N)} == {1}


def test_in_front_of_a_rate(path: Path, traffic: Traffic) -> None:
    """Copies wait in the queue like any packet."""
    port = path.port()
    port.install(Shape(rate_bps=200_000_000), UDP_FLOW, KEY, WORKERS)
    port.set_loss([LossRule(WORKERS[0], 1, 0.0, duplicate_ratio=1.0)])
    traffic.send(WORKERS[0], 1, range(N))
    assert set(Tally(traffic.arrived()).values()) == {2}
    assert port.health().queue_dropped == 0
    port.close()


def test_behind_a_rate(path: Path, traffic: Traffic) -> None:
    port = path.port()
    offload.write(path.receiver, "eth0", {offload.GRO: False})
    try:
        port.install(Shape(loss_at="after_rate"), UDP_FLOW, KEY, WORKERS)
        port.set_loss([LossRule(WORKERS[0], 1, 0.5, duplicate_ratio=0.5)])
        traffic.send(WORKERS[0], 1, range(N))
        lost = mask.drops(1, [1, np.arange(N), 1 << 16], mask.threshold(0.5))
        assert Tally(n for _, _, n in traffic.arrived()) == expected(1, 1, lost, 0.5)
    finally:
        port.close()
        offload.write(path.receiver, "eth0", {offload.GRO: True})


@pytest.mark.parametrize("seed", range(20))
def test_exactly_the_predicted_packets_are_damaged(port: BpfPort, traffic: Traffic, path: Path, seed: int) -> None:
    """The receiver's kernel throws them away, and counts them as such."""
    state = mask.port_state(seed, "up", 1)
    port.set_loss([LossRule(WORKERS[0], state, 0.2, duplicate_ratio=0.1, corrupt_ratio=0.3)])
    before = _header_errors(path)
    traffic.send(WORKERS[0], seed, range(N), gso=seed % 2 == 1)
    keys = [seed, np.arange(N), 1 << 16]
    lost = mask.drops(state, keys, mask.threshold(0.2))
    damaged = mask.corrupts(state, keys, mask.threshold(0.3)) & ~lost
    wanted = expected(state, seed, lost, 0.1)
    for n in np.flatnonzero(damaged).tolist():
        wanted[n] -= 1  # its copy is intact
    assert Tally(n for _, _, n in traffic.arrived()) == {n: times for n, times in wanted.items() if times}
    (counter,) = [c for c in port.counters() if c.kind == "data"]
    assert (counter.dropped, counter.corrupted) == (lost.sum(), damaged.sum())
    assert _header_errors(path) - before == damaged.sum() > 60


def _header_errors(path: Path) -> int:
    """InCsumErrors of the receiver (IpExt in /proc/net/netstat)."""
    done = subprocess.run(
        ["ip", "netns", "exec", path.receiver, "cat", "/proc/net/netstat"], capture_output=True, text=True, check=True
    )
    names, values = (line.split() for line in done.stdout.splitlines() if line.startswith("IpExt"))
    return int(values[names.index("InCsumErrors")])


def test_only_packets_with_a_key(path: Path) -> None:
    port = path.port()
    port.install(Shape(), UDP_FLOW, None, WORKERS)
    with pytest.raises(LinkError, match="only data packets with a key can be duplicated or corrupted"):
        port.set_loss([LossRule(WORKERS[0], 1, 0.0, duplicate_ratio=0.5)])
    port.close()


def test_the_port_in_memory_counts_the_same() -> None:
    fake = FakePort("p")
    fake.install(Shape(), UDP_FLOW, KEY, WORKERS)
    fake.set_loss([LossRule(WORKERS[0], 5, 0.3, duplicate_ratio=0.2)])
    for n in range(N):
        fake.offer(WORKERS[0], bytes(4) + (1).to_bytes(4, "big") + n.to_bytes(4, "big") + b"\0\1" + bytes(4))
    lost = mask.drops(5, [1, np.arange(N), 1 << 16], mask.threshold(0.3))
    assert fake.counters()[0].duplicated == sum(expected(5, 1, lost, 0.2).values()) - (~lost).sum()

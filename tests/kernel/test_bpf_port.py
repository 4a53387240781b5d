"""The bpf backend on a real path: sender - switch (bridge) - receiver, loss at the port that faces the receiver."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from netem.kernel import netns, offload, veth
from netem.kernel.sockets import open_socket
from netem.links import mask
from netem.links.base import Flow, LinkError, LossRule, Shape, UnsupportedFeature
from netem.links.bpf import BpfPort
from netem.links.bucket import bucket_bytes
from tests.kernel.bpf_path import (
    BATCH,
    FRAME_BYTES,
    KEY,
    MARKER_PORT,
    SERVER,
    TCP_PORT,
    UDP_FLOW,
    WORKERS,
    Path,
    Traffic,
    build_path,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: run with sudo")


@pytest.fixture(scope="module")
def path() -> Iterator[Path]:
    with build_path() as made:
        yield made


@pytest.fixture(autouse=True)
def one_cpu() -> Iterator[None]:
    """One CPU's queue keeps packets in order, so a marker sent last arrives last."""
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


def _delivered(
    source: str, state: int, ratio: float, round_: int, n: int, pass_: int = 1
) -> list[tuple[str, int, int]]:
    dropped = mask.drops(state, [round_, np.arange(n), pass_ << 16], mask.threshold(ratio))
    return [(source, round_, int(k)) for k in np.flatnonzero(~dropped)]


@pytest.mark.parametrize("gso", [False, True], ids=["datagrams", "gso"])
@pytest.mark.parametrize(
    ("seed", "ratio", "rank"), [(7, 0.9, 1), (7, 0.9, 2), (8, 0.6, 1), (9, 0.01, 3), (7, 0.0, 1), (7, 1.0, 1)]
)
def test_delivers_what_the_mask_predicts(
    port: BpfPort, traffic: Traffic, seed: int, ratio: float, rank: int, gso: bool
) -> None:
    n, source, state = 880, WORKERS[0], mask.port_state(seed, "up", rank)
    port.set_loss([LossRule(source, state, ratio)])
    traffic.send(source, 40, range(n), gso=gso)
    expected = _delivered(source, state, ratio, 40, n)
    assert traffic.arrived() == expected
    (counter,) = [c for c in port.counters() if c.kind == "data"]
    assert (counter.source, counter.index, counter.seen) == (source, 40, n)
    assert counter.dropped == n - len(expected)
    assert counter.bytes_seen == n * FRAME_BYTES
    assert set(vars(port.health()).values()) == {0}


def test_passes_and_senders_are_independent(port: BpfPort, traffic: Traffic) -> None:
    states = {source: mask.port_state(7, "up", rank) for rank, source in enumerate(WORKERS, 1)}
    port.set_loss([LossRule(source, state, 0.5) for source, state in states.items()])
    expected = []
    for source, state in states.items():
        for pass_ in (1, 2):
            traffic.send(source, 3, range(100), pass_=pass_)
            expected += _delivered(source, state, 0.5, 3, 100, pass_)
    assert traffic.arrived() == expected


def test_changes_take_effect_between_two_packets(port: BpfPort, traffic: Traffic) -> None:
    """100 changes in place, one datagram each: never early, never late, counters go on."""
    expected = []
    for k in range(100):
        port.set_loss([LossRule(WORKERS[0], 1, 1.0)] if k % 2 else ())
        traffic.send(WORKERS[0], 0, range(k, k + 1))
        if k % 2 == 0:
            expected.append((WORKERS[0], 0, k))
    assert traffic.arrived() == expected
    assert [(c.seen, c.dropped) for c in port.counters() if c.kind == "data"] == [(100, 50)]


def test_window_covers_its_rounds_alone(port: BpfPort, traffic: Traffic) -> None:
    port.set_loss([LossRule(WORKERS[0], 1, 1.0, first=40, last=40)])
    for round_ in (39, 40, 41, 40, 39):
        traffic.send(WORKERS[0], round_, range(10))
    assert traffic.arrived() == [(WORKERS[0], r, n) for r in (39, 41, 39) for n in range(10)]
    data = {c.index: (c.seen, c.dropped) for c in port.counters() if c.kind == "data"}
    assert data == {39: (20, 0), 40: (20, 20), 41: (10, 0)}


def test_match_all_hits_the_control_plane_too(port: BpfPort, traffic: Traffic, path: Path) -> None:
    with open_socket(path.sender, "udp", 1 << 20, 1 << 20) as control:
        control.bind((WORKERS[0], 0))
        for match, survivors in (("data", 1), ("all", 0)):
            port.set_label(survivors)
            port.set_loss([LossRule(WORKERS[0], 1, 1.0, match=match)])
            control.sendto(b"control", (SERVER, MARKER_PORT))
            traffic.send(WORKERS[0], 5, range(1))
            if survivors:
                assert traffic._marker.recv(100) == b"control"
            assert traffic.arrived() == []
    others = {c.index: (c.seen, c.dropped) for c in port.counters() if c.kind == "other" and c.source == WORKERS[0]}
    assert others[1][1] == 0
    assert others[0] == (1, 1)


def test_tcp_loss_is_random_within_its_interval(path: Path) -> None:
    """A TCP transfer under 5 % loss finishes; its data packets are lost binomially, those of others are not."""
    port, sent = path.port(), 8 << 20
    port.install(Shape(), Flow("tcp", dst_ports=(TCP_PORT, TCP_PORT)), None, WORKERS)
    port.set_label(12)
    port.set_loss([LossRule(WORKERS[0], 0, 0.05)])
    try:
        assert _transfer(path, sent) == sent
        (counter,) = [c for c in port.counters() if c.kind == "data"]
        assert counter.index == 12
        assert counter.seen > sent / 1448
        spread = (counter.seen * 0.05 * 0.95) ** 0.5
        assert abs(counter.dropped - counter.seen * 0.05) < 5 * spread
        assert port.health().gso_seen == 0
    finally:
        port.close()


def _transfer(path: Path, size: int) -> int:
    with (
        open_socket(path.receiver, "tcp", 1 << 20, 1 << 20) as listener,
        open_socket(path.sender, "tcp", 1 << 20, 1 << 20) as client,
    ):
        listener.bind((SERVER, TCP_PORT))
        listener.listen(1)
        client.bind((WORKERS[0], 0))
        client.settimeout(60)
        client.connect((SERVER, TCP_PORT))
        thread = threading.Thread(target=lambda: (client.sendall(bytes(size)), client.shutdown(socket.SHUT_WR)))
        thread.start()
        server, _ = listener.accept()
        server.settimeout(60)
        received = 0
        while data := server.recv(1 << 16):
            received += len(data)
        server.close()
        thread.join(60)
    return received


def test_super_packets_share_a_decision_and_are_flagged(port: BpfPort, traffic: Traffic, path: Path) -> None:
    offload.write(path.sender, "eth0", {offload.UDP_SEGMENTATION: True})
    try:
        port.set_loss([LossRule(WORKERS[0], 1, 1.0)])
        traffic.send(WORKERS[0], 2, range(2 * BATCH), gso=True)
        assert traffic.arrived() == []
    finally:
        offload.write(path.sender, "eth0", {offload.UDP_SEGMENTATION: False})
    assert [(c.seen, c.dropped) for c in port.counters() if c.kind == "data"] == [(2 * BATCH, 2 * BATCH)]
    assert port.health().gso_seen == 2


def test_installing_again_replaces_program_and_counters(port: BpfPort, traffic: Traffic) -> None:
    port.set_loss([LossRule(WORKERS[0], 1, 1.0)])
    traffic.send(WORKERS[0], 1, range(5))
    port.install(Shape(), UDP_FLOW, KEY, WORKERS)
    traffic.send(WORKERS[0], 2, range(5))
    assert traffic.arrived() == [(WORKERS[0], 2, n) for n in range(5)]
    assert [c.index for c in port.counters() if c.kind == "data"] == [2]
    port.close()
    traffic.send(WORKERS[0], 3, range(5))
    assert len(traffic.arrived()) == 5
    port.close()


def test_loss_before_the_rate_spares_its_queue(path: Path, traffic: Traffic) -> None:
    """200 frames into a queue for 50 at 1 Mbit/s: it overflows, unless the link loses them before."""
    port = path.port()
    shape = Shape(rate_bps=1_000_000, queue_bytes=50 * FRAME_BYTES)
    try:
        port.install(shape, UDP_FLOW, KEY, WORKERS)
        began = time.monotonic()
        traffic.send(WORKERS[0], 1, range(200))
        port.set_loss([LossRule(WORKERS[0], 1, 1.0)])
        traffic.send(WORKERS[0], 2, range(200))
        queue_dropped = port.health().queue_dropped
        # What the link carried meanwhile, and what its bucket let pass at once, made room in the queue.
        carried_bytes = (time.monotonic() - began) * 1_000_000 / 8 + bucket_bytes(1_000_000, 1500, 50 * FRAME_BYTES)
        assert 150 - math.ceil(carried_bytes / FRAME_BYTES) <= queue_dropped <= 150
        data = {c.index: (c.seen, c.dropped) for c in port.counters() if c.kind == "data"}
        assert data == {1: (200, 0), 2: (200, 200)}
        port.install(Shape(), UDP_FLOW, KEY, WORKERS)  # the rate goes, and what waits with it
        assert port.health().queue_dropped == 0
        assert all(round_ == 1 for _, round_, _ in traffic.arrived())
        port.install(shape, UDP_FLOW, KEY, WORKERS)
    finally:
        port.close()
    with closing(netns.open_netlink(path.switch)) as netlink:
        kinds = {q.get_attr("TCA_KIND") for q in netlink.get_qdiscs(index=veth.index_of(netlink, "pr"))}
    assert "tbf" not in kinds


def test_a_rate_changes_in_place_and_nothing_that_waits_is_lost(path: Path, traffic: Traffic) -> None:
    """40 frames wait behind 100 kbit/s; at 1 Gbit/s they all arrive. Counters and loss stay as they are."""
    port = path.port()
    try:
        port.install(Shape(), UDP_FLOW, KEY, WORKERS)
        with pytest.raises(LinkError, match="installed with one"):
            port.set_shape(Shape(rate_bps=10**6))
        slow = Shape(rate_bps=100_000, queue_bytes=100 * FRAME_BYTES)
        port.install(slow, UDP_FLOW, KEY, WORKERS)
        port.set_loss([LossRule(WORKERS[1], 1, 1.0)])
        for number in range(40):
            traffic.send(WORKERS[0], 1, [number])
        port.set_shape(Shape(rate_bps=10**9, queue_bytes=100 * FRAME_BYTES))
        assert len(traffic.arrived()) == 40
        assert port.health().queue_dropped == 0
        traffic.send(WORKERS[1], 2, range(5))
        data = {c.index: (c.seen, c.dropped) for c in port.counters() if c.kind == "data"}
        assert data == {1: (40, 0), 2: (5, 5)}
        with pytest.raises(UnsupportedFeature, match="sch_netem"):
            port.set_shape(Shape(rate_bps=10**9, delay_us=5))
    finally:
        port.close()


def test_loss_after_the_rate_takes_room_in_its_queue(path: Path, traffic: Traffic) -> None:
    port = path.port()
    shape = Shape(rate_bps=10_000_000, queue_bytes=50 * FRAME_BYTES, loss_at="after_rate")
    offload.write(path.receiver, "eth0", {offload.GRO: False})
    try:
        port.install(shape, UDP_FLOW, KEY, WORKERS)
        port.set_loss([LossRule(WORKERS[0], 1, 1.0)])
        traffic.send(WORKERS[0], 2, range(200))
        assert traffic.arrived() == []
        queue_dropped = port.health().queue_dropped
        assert queue_dropped >= 100
        (counter,) = [c for c in port.counters() if c.kind == "data"]
        assert counter.seen == counter.dropped
        assert 200 - queue_dropped <= counter.seen <= 200 - queue_dropped + 2  # a marker may have been dropped
    finally:
        port.close()
        offload.write(path.receiver, "eth0", {offload.GRO: True})


def test_refuses_what_it_cannot_do(path: Path) -> None:
    port = path.port()
    with pytest.raises(UnsupportedFeature, match="sch_netem") as caught:
        port.install(Shape(delay_us=1000), UDP_FLOW, KEY, WORKERS)
    assert "netem" in caught.value.backends_that_have_it
    offload.write(path.receiver, "eth0", {offload.GRO: True})
    with pytest.raises(UnsupportedFeature, match="GRO"):
        port.install(Shape(loss_at="after_rate"), UDP_FLOW, KEY, WORKERS)
    with pytest.raises(UnsupportedFeature, match="not known"):
        BpfPort("p", path.switch, "pr").install(Shape(loss_at="after_rate"), UDP_FLOW, KEY, WORKERS)

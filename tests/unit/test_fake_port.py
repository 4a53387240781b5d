"""The port in memory decides and counts as the eBPF program does."""

from __future__ import annotations

import pytest

from netem.links import mask
from netem.links.base import Counter, Flow, Key, LinkError, LossRule, Port, Shape
from netem.links.fake import FakePort

FLOW, KEY = Flow("udp", (29600, 29699)), Key(((4, 14),), (4, 8))
HOST = "10.77.0.2"


def chunk(round_: int, sequence: int, pass_: int = 1) -> bytes:
    head = bytes(4) + round_.to_bytes(4, "big") + sequence.to_bytes(4, "big") + pass_.to_bytes(2, "big")
    return head + bytes(2)


@pytest.fixture
def port() -> FakePort:
    made: FakePort = FakePort("p")
    made.install(Shape(), FLOW, KEY, [HOST, "10.77.0.3"])
    return made


def test_it_is_a_port(port: FakePort) -> None:
    checked: Port = port
    assert checked.backend == "fake"


def test_decides_by_the_mask(port: FakePort) -> None:
    state = mask.port_state(7, "up", 1)
    port.set_loss([LossRule(HOST, state, 0.5)])
    fates = [port.offer(HOST, chunk(40, n)) for n in range(200)]
    expected = mask.drops(state, [40, list(range(200)), 1 << 16], mask.threshold(0.5))
    assert fates == (~expected).tolist()
    assert port.counters() == [Counter(HOST, 40, 200, int(expected.sum()), 200 * 16)]
    assert port.offer("10.77.0.3", chunk(40, 0))


def test_window_and_clearing(port: FakePort) -> None:
    port.set_loss([LossRule(HOST, 1, 1.0, first=40, last=41)])
    assert [port.offer(HOST, chunk(n, 0)) for n in (39, 40, 41, 42)] == [True, False, False, True]
    port.set_loss(())
    assert port.offer(HOST, chunk(40, 0))
    assert [len(rules) for rules in port.history] == [1, 0]


def test_other_packets_are_lost_under_match_all_alone(port: FakePort) -> None:
    port.set_label(9)
    port.set_loss([LossRule(HOST, 1, 1.0)])
    assert port.offer(HOST, b"control", "other")
    assert port.offer(HOST, b"short")
    port.set_loss([LossRule(HOST, 1, 1.0, match="all", first=5, last=5)])
    assert not port.offer(HOST, b"control", "other")
    assert not port.offer(HOST, chunk(40, 0))
    assert port.health().short == 1
    assert Counter(HOST, 9, 3, 1, 19, "other") in port.counters()


def test_without_a_key_loss_is_random_and_seeded() -> None:
    def fates() -> list[bool]:
        port = FakePort("p", seed=3)
        port.install(Shape(), Flow("tcp", (29501, 29501)), None, [HOST])
        port.set_loss([LossRule(HOST, 0, 0.5)])
        return [port.offer(HOST, b"") for _ in range(400)]

    assert fates() == fates()
    assert 140 < sum(fates()) < 260


def test_what_cannot_be_is_refused(port: FakePort) -> None:
    with pytest.raises(LinkError, match="no such sender"):
        port.set_loss([LossRule("10.77.0.99", 1, 0.5)])
    with pytest.raises(LinkError, match="two rules"):
        port.set_loss([LossRule(HOST, 1, 0.5), LossRule(HOST, 2, 0.5)])
    port.close()
    with pytest.raises(LinkError, match="nothing is installed"):
        port.offer(HOST, b"")


def test_a_shape_changes_and_loss_and_counters_stay(port: FakePort) -> None:
    port.install(Shape(rate_bps=10**9, loss_ratio=0.25), FLOW, KEY, [HOST])
    port.set_loss([LossRule(HOST, 1, 1.0)])
    assert not port.offer(HOST, chunk(3, 1))
    port.set_shape(Shape(rate_bps=10**6, queue_bytes=5000))
    assert port.shape == Shape(rate_bps=10**6, queue_bytes=5000, loss_ratio=0.25)
    assert not port.offer(HOST, chunk(3, 2))
    assert [counter.dropped for counter in port.counters()] == [2]

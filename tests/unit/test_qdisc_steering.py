"""Which packets go to which band: windows as prefixes, byte matches of a rule, bands of rules."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.kernel.u32 import Filter, Match, prefixes
from netem.links.base import Flow, Key, LinkError, LossRule, UnsupportedFeature
from netem.links.ledger import Part
from netem.links.steering import Steering, steer, watch

PARENT = 0x100000
FLOW = Flow("udp", dst_ports=(29600, 29699))
KEY = Key(((4, 14),), index=(4, 8))
SOURCES = ["10.77.0.2", "10.77.0.3"]


def rule(source: str = SOURCES[0], loss_ratio: float = 0.9, **more: object) -> LossRule:
    return LossRule(source, 1, loss_ratio, **more)  # type: ignore[arg-type]


def packet(
    source: str = SOURCES[0], proto: int = 17, src: int = 30000, dst: int = 29600, index: int = 0, offset: int = 0
) -> bytes:
    header = b"\x45\x00\x00\x00\x00\x00" + offset.to_bytes(2, "big") + bytes([64, proto, 0, 0])
    header += ipaddress.IPv4Address(source).packed + bytes([10, 77, 0, 1])
    ports = src.to_bytes(2, "big") + dst.to_bytes(2, "big") + bytes(4)
    return header + ports + b"\x00\x00\x00\x01" + index.to_bytes(4, "big") + bytes(20)


def steered(steering: Steering, data: bytes) -> int:
    """The band of a packet: the first filter that fits decides."""
    for item in steering.filters:
        if all(data[at] & mask == value for at, (value, mask) in item.bytewise().items()):
            return item.target - PARENT - 1
    return 0


def one(*rules: LossRule, flow: Flow | None = FLOW, key: Key | None = KEY) -> Steering:
    return steer(rules, flow, key, SOURCES, 4, PARENT, 1)


@given(st.integers(0, 65535), st.integers(0, 65535), st.integers(0, 65535))
def test_prefixes_cover_the_window_exactly(a: int, b: int, probe: int) -> None:
    first, last = min(a, b), max(a, b)
    pairs = prefixes(first, last, 16)
    for number in {probe, first, last, max(first - 1, 0), min(last + 1, 65535)}:
        hits = sum(number & mask == value for value, mask in pairs)
        assert hits == (first <= number <= last)
    assert len(pairs) <= 30


def test_prefixes_of_special_windows() -> None:
    assert prefixes(0, 2**32 - 1, 32) == [(0, 0)]
    assert prefixes(5, 5, 32) == [(5, 2**32 - 1)]
    assert prefixes(29600, 29699, 16) == [(29600, 0xFFE0), (29632, 0xFFC0), (29696, 0xFFFC)]
    with pytest.raises(ValueError):
        prefixes(3, 2, 16)


@pytest.mark.parametrize(
    ("data", "hit"),
    [
        (packet(), True),
        (packet(dst=29699), True),
        (packet(dst=29599), False),
        (packet(dst=29700), False),
        (packet(source=SOURCES[1]), False),
        (packet(proto=6), False),
        (packet(offset=0x4000), True),  # don't fragment
        (packet(offset=0x0010), False),  # a later fragment
        (b"\x46" + packet()[1:], False),  # IP options: the ports lie elsewhere
    ],
)
def test_data_of_one_sender(data: bytes, hit: bool) -> None:
    assert steered(one(rule()), data) == hit
    assert (steered(watch(FLOW, [SOURCES[0]], PARENT, 3), data), len(watch(FLOW, SOURCES, PARENT, 3).filters)) == (0, 6)


def test_a_window_of_rounds() -> None:
    steering = one(rule(first=40, last=42))
    assert [steered(steering, packet(index=i)) for i in range(39, 44)] == [0, 1, 1, 1, 0]
    assert steering.parts == {1: (Part(SOURCES[0]),)}


def test_a_window_of_one_round_is_counted_under_it() -> None:
    assert one(rule(first=40, last=40)).parts == {1: (Part(SOURCES[0], 40),)}


def test_a_window_needs_an_index() -> None:
    for key in (None, Key(((4, 14),))):
        assert one(rule(first=40, last=40), key=key).filters == one(rule()).filters


def test_tcp_by_source_port() -> None:
    steering = one(rule(first=40, last=40), flow=Flow("tcp", src_ports=(29501, 29501)))
    assert steered(steering, packet(proto=6, src=29501)) == 1
    assert steered(steering, packet(proto=6, src=29500)) == 0
    assert steering.parts == {1: (Part(SOURCES[0]),)}


def test_match_all_is_everything_of_the_sender_with_its_data_apart() -> None:
    steering = one(rule(match="all", first=40, last=40))
    assert steered(steering, packet(index=40)) == 1
    assert steered(steering, packet(index=39)) == 2
    assert steered(steering, packet(proto=1)) == 2
    assert steered(steering, packet(source=SOURCES[1])) == 0
    assert steering.parts == {1: (Part(SOURCES[0], 40),), 2: (Part(SOURCES[0], None, "other"),)}
    assert steering.ratios == {1: 0.9, 2: 0.9}


def test_match_all_needs_no_flow() -> None:
    assert steered(one(rule(match="all"), flow=None), packet()) == 1


def test_every_sender_has_its_own_band() -> None:
    rules = [rule(SOURCES[1], 0.5), rule(SOURCES[0], 0.9)]
    steering = steer(rules, FLOW, KEY, SOURCES, 2, PARENT, 1)
    assert steering.ratios == {1: 0.5, 2: 0.9}
    assert steering.parts == {1: (Part(SOURCES[1]),), 2: (Part(SOURCES[0]),)}
    assert steering.labels[0] == (1, Part(SOURCES[1]))
    assert {f.target for f in steering.filters} == {PARENT | 2, PARENT | 3}
    assert len(steering.filters) == 2 * 3


def test_many_senders_share_bands_by_ratio() -> None:
    sources = [f"10.77.0.{i}" for i in range(2, 22)]
    rules = [rule(s, 0.9 if i % 2 else 0.5) for i, s in enumerate(sources)]
    steering = steer(rules, FLOW, KEY, sources, 15, PARENT, 1)
    assert steering.ratios == {1: 0.5, 2: 0.9}
    assert steering.parts[1] == tuple(Part(s) for s in sources[::2])
    too_many = [rule(s, (i + 1) / 100) for i, s in enumerate(sources)]
    with pytest.raises(UnsupportedFeature, match="loss_engine: bpf"):
        steer(too_many, FLOW, KEY, sources, 15, PARENT, 1)


def test_windows_that_need_too_many_filters_are_refused() -> None:
    sources = [f"10.77.0.{i}" for i in range(2, 17)]
    flow = Flow("udp", dst_ports=(1, 65534))
    rules = [rule(s, first=1, last=2**32 - 2) for s in sources]
    with pytest.raises(UnsupportedFeature, match="filters"):
        steer(rules, flow, KEY, sources, 15, PARENT, 1)


@pytest.mark.parametrize(
    ("rules", "flow", "message"),
    [
        ([rule("10.9.9.9")], FLOW, "not a sender at this port"),
        ([rule()], None, "without a flow"),
        ([rule(), rule(loss_ratio=0.1)], FLOW, "two loss rules for one sender"),
    ],
)
def test_rules_that_cannot_be_followed(rules: list[LossRule], flow: Flow | None, message: str) -> None:
    with pytest.raises(LinkError, match=message):
        steer(rules, flow, KEY, SOURCES, 2, PARENT, 1)


def test_no_rules() -> None:
    steering = steer([], None, None, SOURCES, 2, PARENT, 1)
    assert (steering.filters, dict(steering.ratios)) == ((), {})


def test_two_matches_on_one_byte_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="two matches"):
        Filter(0, 1, 0, (Match(0, b"\x45", b"\xff"), Match(0, b"\x40", b"\xf0"))).bytewise()

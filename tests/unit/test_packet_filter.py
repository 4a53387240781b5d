"""The capture's filter: programs are run by a small interpreter on frames, no socket."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.kernel.packet_filter import PacketFilter, compile_filter, direction_check, ranges_of

OUTGOING, INCOMING = 4, 0


def execute(program: bytes, frame: bytes, packet_type: int = INCOMING) -> int:
    """Classic BPF as the kernel runs it, for the instructions used here; a load beyond the frame ends with 0."""
    code = list(struct.iter_unpack("=HBBI", program))
    accumulator = index = at = 0
    while True:
        opcode, true, false, k = code[at]
        at += 1
        if opcode == 0x06:
            return k
        if opcode in (0x30, 0x28, 0x48, 0x40):
            if k == 0xFFFFF004:
                accumulator = packet_type
                continue
            size = {0x30: 1, 0x28: 2, 0x48: 2, 0x40: 4}[opcode]
            start = k + (index if opcode in (0x48, 0x40) else 0)
            if start + size > len(frame):
                return 0
            accumulator = int.from_bytes(frame[start : start + size], "big")
        elif opcode == 0xB1:
            index = 4 * (frame[k] & 0xF)
        elif opcode == 0x05:
            at += k
        else:
            test = {0x15: accumulator == k, 0x25: accumulator > k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}
            at += true if test[opcode] else false


def frame(
    proto: int,
    source: int,
    target: int,
    payload: bytes = b"",
    *,
    options: int = 0,
    fragment: int = 0,
    ether: int = 0x800,
) -> bytes:
    ip = bytes([0x45 + options]) + bytes(5) + fragment.to_bytes(2, "big") + bytes([64, proto]) + bytes(10 + 4 * options)
    head = source.to_bytes(2, "big") + target.to_bytes(2, "big")
    transport = head + (bytes(4) if proto == 17 else bytes(16)) + payload
    return bytes(12) + ether.to_bytes(2, "big") + ip + transport


def chunk(round_number: int) -> bytes:
    return bytes(4) + round_number.to_bytes(4, "big") + bytes(8)


def test_the_default_keeps_everything() -> None:
    program = compile_filter(PacketFilter(), "both", 96)
    assert execute(program, b"") == 96
    assert execute(compile_filter(PacketFilter(), "both", 0), bytes(60)) == 262144


@pytest.mark.parametrize("direction", ["ingress", "egress"])
def test_directions(direction: str) -> None:
    program = compile_filter(PacketFilter(), direction, 96)  # type: ignore[arg-type]
    assert execute(program, bytes(60), OUTGOING) == (96 if direction == "egress" else 0)
    assert execute(program, bytes(60), INCOMING) == (96 if direction == "ingress" else 0)
    assert direction_check("both") == b""


PORTS = PacketFilter(udp_ports=((100, 110), (200, 200)), tcp_ports=((80, 80),))


@pytest.mark.parametrize(
    ("packet", "kept"),
    [
        (frame(17, 5, 100), True),
        (frame(17, 110, 5), True),
        (frame(17, 5, 200, options=5), True),
        (frame(17, 5, 111), False),
        (frame(17, 99, 201), False),
        (frame(17, 80, 80), False),
        (frame(6, 80, 5), True),
        (frame(6, 5, 80), True),
        (frame(6, 100, 200), False),
        (frame(1, 100, 200), False),
        (frame(17, 5, 5, fragment=7), True),
        (frame(17, 5, 100, fragment=0x4000), True),
        (frame(17, 5, 100, ether=0x806), False),
        (b"", False),
    ],
)
def test_ports(packet: bytes, kept: bool) -> None:
    assert execute(compile_filter(PORTS, "both", 96), packet) == (96 if kept else 0)


@given(
    wanted=st.sets(st.integers(0, 60) | st.integers(2**32 - 3, 2**32 - 1), max_size=40),
    number=st.integers(0, 61) | st.integers(2**32 - 4, 2**32 - 1),
    options=st.integers(0, 10),
)
def test_values(wanted: set[int], number: int, options: int) -> None:
    chosen = PacketFilter(udp_ports=((100, 100),), tcp_ports=((80, 80),), values=ranges_of(sorted(wanted)))
    program = compile_filter(chosen, "both", 96)
    assert execute(program, frame(17, 5, 100, chunk(number), options=options)) == (96 if number in wanted else 0)
    assert execute(program, frame(17, 5, 101, chunk(number), options=options)) == 0
    assert execute(program, frame(6, 5, 80, chunk(number), options=options)) == 96
    assert execute(program, frame(17, 5, 100, b"short", options=options)) == 0


@given(st.sets(st.integers(0, 50)))
def test_ranges_of(values: set[int]) -> None:
    ranges = ranges_of(sorted(values))
    assert {n for low, high in ranges for n in range(low, high + 1)} == values
    assert all(b[0] > a[1] + 1 for a, b in pairwise(ranges))


def test_limits() -> None:
    single = tuple((2 * n, 2 * n) for n in range(1350))
    assert compile_filter(PacketFilter(udp_ports=((1, 2),), values=single), "both", 96)
    with pytest.raises(ValueError, match="4096"):
        compile_filter(PacketFilter(udp_ports=((1, 2),), values=(*single, *single)), "both", 96)
    with pytest.raises(ValueError, match="UDP ports"):
        compile_filter(PacketFilter(values=((1, 2),)), "both", 96)
    for wrong in ({"udp_ports": ((5, 4),)}, {"tcp_ports": ((0, 65536),)}, {"values": ((-1, 4),)}):
        with pytest.raises(ValueError, match="range"):
            PacketFilter(**wrong)  # type: ignore[arg-type]

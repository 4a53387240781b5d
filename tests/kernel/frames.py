"""Frames for the loss program, one at a time, and what it does with them (BPF_PROG_TEST_RUN)."""

from __future__ import annotations

import ipaddress
import os

from netem.links import program_layout as layout
from netem.links.base import Flow, Key
from netem.links.loss_filter import LossFilter

FLOW, KEY = Flow("udp", dst_ports=(29600, 29699)), Key(((4, 14),), (4, 8))
HOST, OTHER_HOST, STRANGER = "10.77.0.2", "10.77.0.3", "10.77.0.9"
UDP, TCP, ICMP = 17, 6, 1
PASSED, DROPPED = layout.NEXT_FILTER, layout.SHOT


def frame(
    payload: bytes, *, source: str = HOST, dport: int = 29601, sport: int = 29701, proto: int = UDP,
    options: bytes = b"", fragment: int = 0, ethertype: int = 0x0800, udp_bytes: int | None = None,
) -> bytes:  # fmt: skip
    """An Ethernet frame; `udp_bytes` overrides the length that the UDP header tells."""
    transport = b"".join(n.to_bytes(2, "big") for n in (sport, dport))
    if proto == UDP:
        transport += (udp_bytes or 8 + len(payload)).to_bytes(2, "big") + bytes(2)
    elif proto == TCP:
        transport += bytes(16)
    total = 20 + len(options) + len(transport) + len(payload)
    ip = bytes([0x45 + len(options) // 4, 0]) + total.to_bytes(2, "big") + bytes(2)
    ip += fragment.to_bytes(2, "big") + bytes([64, proto]) + bytes(2)
    ip += ipaddress.IPv4Address(source).packed + ipaddress.IPv4Address("10.77.0.1").packed + options
    return bytes(12) + ethertype.to_bytes(2, "big") + ip + transport + payload


def chunk(round_: int, sequence: int = 0, pass_: int = 1, body: bytes = bytes(16)) -> bytes:
    head = os.urandom(4)  # the session, which no decision may depend on
    return head + round_.to_bytes(4, "big") + sequence.to_bytes(4, "big") + pass_.to_bytes(2, "big") + bytes(2) + body


def run(loss: LossFilter, *frames: bytes) -> list[bool]:
    """Which frames get through."""
    results = [loss.program.test_run(each)[0] for each in frames]
    assert set(results) <= {PASSED, DROPPED}
    return [result == PASSED for result in results]

"""Packets that a namespace's kernel has refused: damaged ones, or meant for somebody else (snmp, rtnetlink)."""

from __future__ import annotations

import struct
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from netem.kernel import netns
from netem.kernel import rtnetlink as rt
from netem.kernel.errors import attempting

_SNMP = Path("/proc/thread-self/net/snmp")
_IFLA_STATS64 = 23
_RX_DROPPED, _OTHER_HOST = 6, 24  # struct rtnl_link_stats64, in numbers of 64 bits; the second since Linux 5.19


class Refused(NamedTuple):
    """Since the namespace was made. A socket counts both kinds as its drops (SO_RXQ_OVFL): the kernel tells them apart.

    damaged: of all protocols over IPv4. overflowed: no room in the buffer of a UDP socket.
    """

    damaged: int
    overflowed: int


def refused(space: str, ifname: str) -> Refused:
    """Raises KernelError."""
    with attempting(f"read the protocol counters of {space}"):
        counters = parse_snmp(netns.call_in(space, _SNMP.read_text))
    ip = counters["Ip"]["InHdrErrors"] + counters["Ip"]["InAddrErrors"]
    overflowed = counters["Udp"]["RcvbufErrors"]
    udp = counters["Udp"]["InErrors"] - overflowed
    return Refused(ip + udp + counters["Tcp"]["InErrs"] + _by_device(space, ifname), overflowed)


def parse_snmp(text: str) -> dict[str, dict[str, int]]:
    """/proc/net/snmp: for each protocol a line of names and one of values."""
    lines = [line.split() for line in text.splitlines() if line]
    return {
        names[0].rstrip(":"): dict(zip(names[1:], map(int, values[1:]), strict=True))
        for names, values in zip(lines[::2], lines[1::2], strict=True)
    }


def _by_device(space: str, ifname: str) -> int:
    """For another station, or of an unknown protocol: a bit of the frame's own header was flipped."""
    with closing(netns.open_rtnetlink(space)) as netlink:
        body = rt.link_body(0, {rt.IFLA_IFNAME: ifname})
        ((_, found),) = netlink.ask([rt.Request(f"read the statistics of {ifname}", rt.GETLINK, 0, body)])
    raw = rt.link_of(found).attributes[_IFLA_STATS64]
    values = struct.unpack(f"={len(raw) // 8}Q", raw[: len(raw) // 8 * 8])
    return values[_RX_DROPPED] + (values[_OTHER_HOST] if len(values) > _OTHER_HOST else 0)

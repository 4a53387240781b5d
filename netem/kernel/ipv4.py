"""Requests about a host's IPv4: address, static neighbours, the route with its congestion control (rtnetlink(7))."""

from __future__ import annotations

import socket
import struct
from ipaddress import IPv4Address, IPv4Network

from netem.kernel import rtnetlink as rt

NUD_PERMANENT = 0x80  # linux/neighbour.h
NDA_DST, NDA_LLADDR = 1, 2
IFA_ADDRESS, IFA_LOCAL = 1, 2  # linux/if_addr.h
SCOPE_LINK, PROTOCOL_KERNEL, TABLE_MAIN, TYPE_UNICAST = 253, 2, 254, 1  # linux/rtnetlink.h
RTA_DST, RTA_OIF, RTA_PREFSRC, RTA_METRICS = 1, 4, 7, 8
RTAX_MTU, RTAX_CC_ALGO = 2, 16
RTM_F_FIB_MATCH = 0x2000  # the route itself, not what it gives for one destination

_ADDRESS = struct.Struct("=BBBBI")  # struct ifaddrmsg: family, prefix length, flags, scope, index
_NEIGHBOUR = struct.Struct("=BxxxiHBB")  # struct ndmsg: family, index, state, flags, type
_ROUTE = struct.Struct("=BBBBBBBBI")  # struct rtmsg: family, two lengths, tos, table, protocol, scope, type, flags


def address(what: str, index: int, own: IPv4Address, prefix_length: int) -> rt.Request:
    """Give an interface an address."""
    body = _ADDRESS.pack(socket.AF_INET, prefix_length, 0, 0, index) + rt.encode({IFA_LOCAL: own, IFA_ADDRESS: own})
    return rt.Request(what, rt.NEWADDR, rt.CREATE | rt.EXCLUSIVE, body)


def neighbour(what: str, index: int, other: IPv4Address, mac: str) -> rt.Request:
    """A permanent neighbour entry, so that no ARP request can be lost."""
    head = _NEIGHBOUR.pack(socket.AF_INET, index, NUD_PERMANENT, 0, 0)
    body = head + rt.encode({NDA_DST: other, NDA_LLADDR: rt.mac_bytes(mac)})
    return rt.Request(what, rt.NEWNEIGH, rt.CREATE | rt.REPLACE, body)


def route(
    what: str, index: int, network: IPv4Network, own: IPv4Address, congestion_control: str, mtu: int | None = None
) -> rt.Request:
    """Replace the kernel's own route to an interface's network: the same, with a congestion control (congctl).

    mtu: of the path, where it is smaller than that of the interface.
    """
    kinds = (TABLE_MAIN, PROTOCOL_KERNEL, SCOPE_LINK, TYPE_UNICAST)
    head = _ROUTE.pack(socket.AF_INET, network.prefixlen, 0, 0, *kinds, 0)
    values: dict[int, rt.Value] = {
        RTA_DST: network.network_address,
        RTA_OIF: index,
        RTA_PREFSRC: own,
        RTA_METRICS: {RTAX_CC_ALGO: congestion_control, **({} if mtu is None else {RTAX_MTU: mtu})},
    }
    return rt.Request(what, rt.NEWROUTE, rt.CREATE | rt.REPLACE, head + rt.encode(values))


def find_route(what: str, network: IPv4Network) -> rt.Request:
    """Read the route that a network's last address has; see `congestion_control_of`."""
    head = _ROUTE.pack(socket.AF_INET, 32, 0, 0, 0, 0, 0, 0, RTM_F_FIB_MATCH)
    body = head + rt.encode({RTA_DST: network.broadcast_address - 1})
    return rt.Request(what, rt.GETROUTE, 0, body)


def congestion_control_of(answer: bytes) -> str | None:
    """The algorithm that a route names (RTM_NEWROUTE); None where it leaves it to the sysctl."""
    metrics = rt.attributes(rt.attributes(answer[_ROUTE.size :]).get(RTA_METRICS, b""))
    return rt.text(metrics[RTAX_CC_ALGO]) if RTAX_CC_ALGO in metrics else None

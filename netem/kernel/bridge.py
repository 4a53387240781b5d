"""A bridge (bridge(8)) as a switch that only forwards what it was told: it learns nothing and floods nothing.

No spanning tree, no multicast snooping, no IPv6. A packet to an address without a static entry is dropped, so links may
form loops without a broadcast storm.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable

from netem.kernel import rtnetlink as rt
from netem.kernel.errors import KernelError

FORWARD_DELAY, STP_STATE, MCAST_SNOOPING = 1, 5, 23  # IFLA_BR_*, linux/if_link.h
BRPORT_STATE = 1  # IFLA_BRPORT_STATE
# IFLA_BRPORT_LEARNING, _UNICAST_FLOOD, _MCAST_FLOOD, _BCAST_FLOOD
PORT_OFF = {8: b"\0", 9: b"\0", 27: b"\0", 30: b"\0"}
BR_STATE_FORWARDING = 3  # linux/if_bridge.h
AF_BRIDGE = 7  # linux/socket.h
NTF_MASTER = 4  # linux/neighbour.h
NUD_REACHABLE, NUD_NOARP = 0x02, 0x40
NDA_LLADDR = 2
NEIGHBOUR = struct.Struct("=BxxxiHBB")  # struct ndmsg: family, index, state, flags, type


def create(netlink: rt.Rtnetlink, ifname: str, mac: str, index: int) -> None:
    """Create a bridge with this index, up."""
    what = f"create bridge {ifname}"
    settings: dict[int, rt.Value] = {FORWARD_DELAY: 0, STP_STATE: 0, MCAST_SNOOPING: b"\0"}
    info: dict[int, rt.Value] = {rt.IFLA_INFO_KIND: "bridge", rt.IFLA_INFO_DATA: settings}
    values: dict[int, rt.Value] = {rt.IFLA_IFNAME: ifname, rt.IFLA_ADDRESS: rt.mac_bytes(mac), rt.IFLA_LINKINFO: info}
    answers = netlink.ask(
        [
            rt.Request(what, rt.NEWLINK, rt.CREATE | rt.EXCLUSIVE, rt.link_body(index, values, up=True)),
            rt.get_link(what, index),
        ]
    )
    link = rt.link_of(answers[-1][1])
    found = link.info(rt.IFLA_INFO_DATA)
    wrong = [n for n in (STP_STATE, MCAST_SNOOPING) if n in found and rt.number(found[n]) != 0]
    if STP_STATE not in found or wrong or not link.up or link.mac != mac:
        raise KernelError(what, detail="it is not as set: up, without spanning tree and multicast snooping")


def add_port(netlink: rt.Rtnetlink, bridge: int, port: int, group: int) -> None:
    """Enslave an interface that exists, and set it up; `group` lets all ports be deleted at once."""
    body = rt.link_body(port, {rt.IFLA_MASTER: bridge, rt.IFLA_GROUP: group}, up=True)
    netlink.ask([rt.Request(f"add port {port} to bridge {bridge}", rt.NEWLINK, 0, body)])


def add_static(netlink: rt.Rtnetlink, entries: Iterable[tuple[int, str]]) -> None:
    """Static forwarding entries (port, MAC): known from the start, so nothing is ever flooded."""
    state = NUD_NOARP | NUD_REACHABLE
    netlink.ask(
        [
            rt.Request(
                f"add forwarding entry {mac} to port {port}",
                rt.NEWNEIGH,
                rt.CREATE | rt.REPLACE,
                NEIGHBOUR.pack(AF_BRIDGE, port, state, NTF_MASTER, 0) + rt.encode({NDA_LLADDR: rt.mac_bytes(mac)}),
            )
            for port, mac in entries
        ]
    )


def no_flooding(netlink: rt.Rtnetlink, ports: Iterable[int]) -> None:
    """Ports that forward static entries alone. Read back by `await_forwarding`."""
    info: dict[int, rt.Value] = {rt.IFLA_INFO_SLAVE_DATA: PORT_OFF}
    body = {rt.IFLA_LINKINFO: info}
    netlink.ask(
        [
            rt.Request(f"switch off learning and flooding at port {port}", rt.NEWLINK, 0, rt.link_body(port, body))
            for port in ports
        ]
    )


def await_forwarding(netlink: rt.Rtnetlink, bridge: int, timeout_s: float = 5.0) -> list[rt.Link]:
    """Wait until every port of a bridge forwards; before that it drops. Returns all interfaces of the namespace.

    KernelError when one does not in time. The kernel tells a bridge about a port's carrier later than it sets it: at
    once for most veth pairs, but up to a second later when both ends have the same index (link_watch.c,
    linkwatch_urgent_event).
    """
    deadline = time.monotonic() + timeout_s
    while True:
        links = netlink.links(f"read the ports of bridge {bridge}")
        waiting = [link.name for link in links if link.master == bridge and not _forwards(link)]
        if not waiting:
            _check_ports(links, bridge)
            return links
        if time.monotonic() >= deadline:
            raise KernelError(f"bring up the ports of bridge {bridge}", detail=f"no carrier at {', '.join(waiting)}")
        time.sleep(0.002)


def _forwards(port: rt.Link) -> bool:
    state = port.info(rt.IFLA_INFO_SLAVE_DATA).get(BRPORT_STATE)
    return state is not None and rt.number(state) == BR_STATE_FORWARDING


def _check_ports(links: Iterable[rt.Link], bridge: int) -> None:
    for link in links:
        if link.master == bridge:
            held = link.info(rt.IFLA_INFO_SLAVE_DATA)
            if any(held.get(option, b"\0") != off for option, off in PORT_OFF.items()):
                raise KernelError(f"switch off learning and flooding at port {link.name}", detail="it is still on")

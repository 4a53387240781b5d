"""A bridge (bridge(8)) as a plain learning switch: no spanning tree, no multicast snooping, no IPv6."""

from __future__ import annotations

import time
from typing import Any

from pyroute2 import IPRoute

from netem.kernel.errors import KernelError, attempting
from netem.kernel.veth import index_of

NTF_MASTER = 4  # linux/neighbour.h
BR_STATE_FORWARDING = 3  # linux/if_bridge.h
NUD_REACHABLE, NUD_NOARP = 0x02, 0x40


def create(netlink: IPRoute, ifname: str, mac: str) -> int:
    """Create a bridge, up, and return its index."""
    with attempting(f"create bridge {ifname}"):
        netlink.link(
            "add",
            ifname=ifname,
            kind="bridge",
            address=mac,
            br_stp_state=0,
            br_mcast_snooping=0,
            br_forward_delay=0,
        )
        index = index_of(netlink, ifname)
        netlink.link("set", index=index, state="up")
        info = netlink.link("get", index=index)[0].get_nested("linkinfo", "data")
    if info is None or info.get("br_stp_state") != 0:
        raise KernelError(f"create bridge {ifname}", detail="spanning tree is on")
    return index


def add_port(netlink: IPRoute, bridge: int, port: int, group: int) -> None:
    """Enslave an interface and set it up; `group` lets all ports be deleted at once."""
    with attempting(f"add port {port} to bridge {bridge}"):
        netlink.link("set", index=port, master=bridge, group=group, state="up")


def add_static(netlink: IPRoute, port: int, mac: str) -> None:
    """A static forwarding entry: the address is known from the start, so nothing is ever flooded."""
    with attempting(f"add forwarding entry {mac} to port {port}"):
        netlink.fdb("replace", ifindex=port, lladdr=mac, flags=NTF_MASTER, state=NUD_NOARP | NUD_REACHABLE)


def await_forwarding(netlink: IPRoute, bridge: int, timeout_s: float = 5.0) -> None:
    """Wait until every port of a bridge forwards; before that it drops. KernelError when one does not in time.

    The kernel tells a bridge about a port's carrier later than it sets it: at once for most veth pairs, but up to a
    second later when both ends happen to have the same index (link_watch.c, linkwatch_urgent_event).
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with attempting(f"read the ports of bridge {bridge}"):
            ports = [link for link in netlink.get_links() if link.get("master") == bridge]
        waiting = [port.get("ifname") for port in ports if _port_state(port) != BR_STATE_FORWARDING]
        if not waiting:
            return
        if time.monotonic() >= deadline:
            raise KernelError(f"bring up the ports of bridge {bridge}", detail=f"no carrier at {', '.join(waiting)}")
        time.sleep(0.002)


def _port_state(port: Any) -> int | None:
    details = port.get_nested("linkinfo", "slave_data")
    return None if details is None else details.get_attr("IFLA_BRPORT_STATE")

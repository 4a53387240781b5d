"""A bridge (bridge(8)) as a plain learning switch: no spanning tree, no multicast snooping, no IPv6."""

from __future__ import annotations

from pyroute2 import IPRoute

from netem.kernel.errors import KernelError, attempting
from netem.kernel.veth import index_of

NTF_MASTER = 4  # linux/neighbour.h
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

"""veth pairs, created with both ends already in their namespaces: no end ever appears anywhere else (veth(4))."""

from __future__ import annotations

import os
from dataclasses import dataclass

from pyroute2 import IPRoute

from netem.kernel.errors import KernelError, attempting
from netem.kernel.netns import RUN_DIR


@dataclass(frozen=True)
class End:
    """One end of a pair. `mac` as "02:00:0a:4d:00:01"."""

    netns: str
    ifname: str
    mac: str


def create(netlink: IPRoute, near: End, far: End, mtu_bytes: int) -> int:
    """Create a pair; `netlink` is in near's namespace. Returns near's index. Both ends are down."""
    what = f"create veth {near.netns}/{near.ifname} - {far.netns}/{far.ifname}"
    with attempting(what):
        fd = os.open(RUN_DIR / far.netns, os.O_RDONLY | os.O_CLOEXEC)
        try:
            peer = {"ifname": far.ifname, "net_ns_fd": fd, "address": far.mac, "mtu": mtu_bytes}
            netlink.link("add", ifname=near.ifname, kind="veth", address=near.mac, mtu=mtu_bytes, peer=peer)
        finally:
            os.close(fd)
        return index_of(netlink, near.ifname, mtu_bytes)


def index_of(netlink: IPRoute, ifname: str, mtu_bytes: int | None = None) -> int:
    """The index of an interface, its MTU checked. KernelError when it is missing or has another MTU."""
    with attempting(f"find interface {ifname}"):
        found = netlink.link("get", ifname=ifname)
    if not found:
        raise KernelError(f"find interface {ifname}", detail="not there")
    if mtu_bytes is not None and found[0].get("mtu") != mtu_bytes:
        raise KernelError(f"set the MTU of {ifname} to {mtu_bytes}", detail=f"it is {found[0].get('mtu')}")
    return int(found[0]["index"])


def tx_dropped(netlink: IPRoute, ifname: str) -> int:
    """Packets that an interface could not hand to its peer, whose ring was full (IFLA_STATS64, tx_dropped)."""
    with attempting(f"read the statistics of {ifname}"):
        found = netlink.link("get", ifname=ifname)
        return int(found[0].get_attr("IFLA_STATS64")["tx_dropped"])


def delete_group(netlink: IPRoute, group: int) -> None:
    """Delete all interfaces of a group at once (IFLA_GROUP): one grace period of the kernel instead of one each."""
    with attempting(f"delete interface group {group}"):
        netlink.link("del", index=0, group=group)

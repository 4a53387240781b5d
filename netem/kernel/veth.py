"""veth pairs, created with both ends already in their namespaces: no end ever appears anywhere else (veth(4))."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from netem.kernel import rtnetlink as rt
from netem.kernel.errors import KernelError, attempting
from netem.kernel.netns import RUN_DIR

if TYPE_CHECKING:
    from pyroute2 import IPRoute

VETH_INFO_PEER = 1  # linux/veth.h


@dataclass(frozen=True)
class End:
    """One end of a pair. `mac` as "02:00:0a:4d:00:01". `index` is unique in its namespace; 0 in both: the kernel's."""

    netns: str
    ifname: str
    mac: str
    index: int = 0


@dataclass(frozen=True)
class Pair:
    near: End
    far: End
    mtu_bytes: int


def create(netlink: rt.Rtnetlink, pairs: Sequence[Pair], bridge: int = 0, group: int = 0) -> None:
    """Create pairs; `netlink` is in the namespace of all near ends. Not read back: see `check`.

    bridge: index of a bridge that all near ends become ports of, up; 0: none, and they are down. Far ends are down.
    group: number (IFLA_GROUP) by which all near ends can be deleted at once.
    """
    with ExitStack() as stack:
        requests = [_request(stack, pair, bridge, group) for pair in pairs]
        netlink.ask(requests)


def _request(stack: ExitStack, pair: Pair, bridge: int, group: int) -> rt.Request:
    near, far = pair.near, pair.far
    what = f"create veth {near.netns}/{near.ifname} - {far.netns}/{far.ifname}"
    with attempting(what):
        fd = os.open(RUN_DIR / far.netns, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    peer = rt.link_body(far.index, {**_end(far, pair.mtu_bytes), rt.IFLA_NET_NS_FD: fd})
    info: dict[int, rt.Value] = {rt.IFLA_INFO_KIND: "veth", rt.IFLA_INFO_DATA: {VETH_INFO_PEER: peer}}
    values: dict[int, rt.Value] = {**_end(near, pair.mtu_bytes), rt.IFLA_LINKINFO: info}
    if bridge:
        values |= {rt.IFLA_MASTER: bridge}
    if group:
        values |= {rt.IFLA_GROUP: group}
    body = rt.link_body(near.index, values, up=bool(bridge))
    return rt.Request(what, rt.NEWLINK, rt.CREATE | rt.EXCLUSIVE, body)


def _end(end: End, mtu_bytes: int) -> dict[int, rt.Value]:
    return {rt.IFLA_IFNAME: end.ifname, rt.IFLA_ADDRESS: rt.mac_bytes(end.mac), rt.IFLA_MTU: mtu_bytes}


def check(link: rt.Link | None, end: End, mtu_bytes: int) -> None:
    """Whether an interface that was read is the one wanted. KernelError when it is missing or differs."""
    what = f"create {end.netns}/{end.ifname}"
    if link is None:
        raise KernelError(what, detail="not there")
    if link.mtu_bytes != mtu_bytes:
        raise KernelError(f"set the MTU of {end.netns}/{end.ifname} to {mtu_bytes}", detail=f"it is {link.mtu_bytes}")
    if (link.name, link.mac) != (end.ifname, end.mac) or end.index not in (0, link.index):
        raise KernelError(what, detail=f"reads back {link.index} {link.name} {link.mac}")


def index_of(netlink: IPRoute, ifname: str) -> int:
    """The index of an interface. KernelError when it is missing."""
    with attempting(f"find interface {ifname}"):
        found = netlink.link("get", ifname=ifname)
    if not found:
        raise KernelError(f"find interface {ifname}", detail="not there")
    return int(found[0]["index"])


def tx_dropped(netlink: IPRoute, ifname: str) -> int:
    """Packets that an interface could not hand to its peer, whose ring was full (IFLA_STATS64, tx_dropped)."""
    with attempting(f"read the statistics of {ifname}"):
        found = netlink.link("get", ifname=ifname)
        return int(found[0].get_attr("IFLA_STATS64")["tx_dropped"])


def delete_group(netlink: rt.Rtnetlink, group: int) -> None:
    """Delete all interfaces of a group at once (IFLA_GROUP): one grace period of the kernel instead of one each.

    KernelError with ENODEV when there is none.
    """
    body = rt.link_body(0, {rt.IFLA_GROUP: group})
    netlink.ask([rt.Request(f"delete interface group {group}", rt.DELLINK, 0, body)])

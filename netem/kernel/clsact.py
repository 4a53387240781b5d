"""eBPF classifiers on clsact: attached by direct action, looked up after writing, removed (tc-bpf(8))."""

from __future__ import annotations

import errno
from contextlib import closing, suppress
from typing import Literal

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from netem.kernel import bpf, veth
from netem.kernel.errors import KernelError, attempting
from netem.kernel.netns import open_netlink

Hook = Literal["egress", "ingress"]

_PARENTS = {"egress": 0xFFFFFFF3, "ingress": 0xFFFFFFF2}  # TC_H_CLSACT with TC_H_MIN_EGRESS, TC_H_MIN_INGRESS
_HANDLE, _DIRECT_ACTION, _ETH_P_ALL = 1, 1, 0x0003


class Attachment:
    """One program on one hook of one interface. `priority` orders the programs of a hook, the lowest first."""

    def __init__(self, netns: str | None, ifname: str, hook: Hook, priority: int) -> None:
        self.netns, self.ifname, self.hook, self.priority = netns, ifname, hook, priority

    def __str__(self) -> str:
        return f"{self.netns or 'this namespace'}/{self.ifname} {self.hook}"

    def attach(self, program: bpf.Program) -> None:
        """Puts the program in place, instead of one that has this priority. KernelError when it is not there then."""
        name = f"{program.name}:{program.id}"  # a dump gives back the name alone, so it carries the program's number
        what = f"attach {program.name} at {self}"
        with closing(open_netlink(self.netns)) as netlink, attempting(what):
            index = veth.index_of(netlink, self.ifname)
            _add_clsact(netlink, index)
            netlink.tc(
                "replace-filter", "bpf", index, handle=_HANDLE, fd=program.fd, name=name,
                parent=_PARENTS[self.hook], prio=self.priority, protocol=_ETH_P_ALL, flags=_DIRECT_ACTION,
            )  # fmt: skip
            filters = netlink.get_filters(index=index, parent=_PARENTS[self.hook])
            if name not in {each.get_nested("TCA_OPTIONS", "TCA_BPF_NAME") for each in filters}:
                raise KernelError(what, detail="it is not in the filter list")

    def number(self, name: str) -> int | None:
        """The number of the program of this name that anybody has attached to this hook; None where there is none."""
        with closing(open_netlink(self.netns)) as netlink:
            index = veth.index_of(netlink, self.ifname)
            with attempting(f"read the filters at {self}"):
                try:
                    filters = netlink.get_filters(index=index, parent=_PARENTS[self.hook])
                except NetlinkError as error:
                    if error.code in (errno.EINVAL, errno.ENOENT):  # no clsact, so no filters
                        return None
                    raise
        for each in filters:
            found = str(each.get_nested("TCA_OPTIONS", "TCA_BPF_NAME") or "")
            if found.startswith(f"{name}:"):
                return int(found.partition(":")[2])
        return None

    def detach(self) -> None:
        """The interface or its namespace may be gone already."""
        with suppress(KernelError), closing(open_netlink(self.netns)) as netlink:
            index = veth.index_of(netlink, self.ifname)
            with attempting(f"remove a filter at {self}"):
                netlink.tc(
                    "del-filter", "bpf", index, handle=_HANDLE, parent=_PARENTS[self.hook], prio=self.priority,
                    protocol=_ETH_P_ALL,
                )  # fmt: skip


def _add_clsact(netlink: IPRoute, index: int) -> None:
    try:
        with attempting("add clsact"):
            netlink.tc("add", "clsact", index)
    except KernelError as error:
        if error.code != errno.EEXIST:
            raise

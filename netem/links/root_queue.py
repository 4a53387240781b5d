"""The counters of an interface's root queueing discipline, whoever put it there."""

from __future__ import annotations

from contextlib import closing

from netem.kernel import qdisc
from netem.kernel.netns import open_rtnetlink


def read(netns: str | None, ifname: str) -> qdisc.Stats:
    """Packets seen, dropped and waiting since it was made. KernelError."""
    with closing(open_rtnetlink(netns)) as netlink:
        found = qdisc.dump(netlink, netlink.find(ifname).index)
    roots = [each for each in found.values() if each.parent == qdisc.ROOT]
    return roots[0].stats if roots else qdisc.Stats()

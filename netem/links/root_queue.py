"""The counters of an interface's root queueing discipline, whoever put it there."""

from __future__ import annotations

from contextlib import closing

from netem.kernel import qdisc, veth
from netem.kernel.netns import open_netlink


def read(netns: str | None, ifname: str) -> qdisc.Stats:
    """Packets seen, dropped and waiting since it was made. KernelError."""
    with closing(open_netlink(netns)) as netlink:
        found = qdisc.dump(netlink, veth.index_of(netlink, ifname))
    roots = [message for message in found.values() if message["parent"] == qdisc.ROOT]
    return qdisc.stats(roots[0]) if roots else qdisc.Stats()

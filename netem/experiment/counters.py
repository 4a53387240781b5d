"""What has passed and what was dropped at each host's link since the lab was built, by reason, from any process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

from netem.kernel import netem_options, qdisc, veth
from netem.kernel.clsact import Hook
from netem.kernel.errors import attempting
from netem.kernel.netns import open_netlink, open_rtnetlink
from netem.kernel.rtnetlink import Rtnetlink
from netem.lab import Lab
from netem.lab.standing import Lost
from netem.links.ledger import split_drops
from netem.links.loss_filter import LossFilter
from netem.links.tree import stats_of

NETEM = "netem"


@dataclass(frozen=True)
class LinkCount:
    """One direction of one host's link. packets, bytes: handed over at its end.

    injected: by the loss that was asked for; queue: no room behind a rate or a delay; device: the receiver's ring.
    """

    packets: int
    bytes: int
    injected: int
    queue: int
    device: int

    @property
    def dropped(self) -> int:
        return self.injected + self.queue + self.device


@dataclass(frozen=True)
class _Interface:
    """Counters of one interface: of what it sends, but for `received`."""

    sent: tuple[int, int, int]
    """(packets, bytes, dropped by the device)"""
    received: tuple[int, int]
    queue: int
    netem: int


def count(lab: Lab, lost: Lost | None = None, hosts: Iterable[str] | None = None) -> dict[str, dict[str, LinkCount]]:
    """Host -> `up` and `down`. lost: drops of programs and queues that were replaced since. hosts: None for all."""
    with ExitStack() as stack:
        return _count(lab, lost or {}, hosts or lab.hosts, stack)


def _count(lab: Lab, lost: Lost, hosts: Iterable[str], stack: ExitStack) -> dict[str, dict[str, LinkCount]]:
    opened: dict[str, tuple[Any, Rtnetlink]] = {}
    found = {}
    for name in hosts:
        host = lab.hosts[name]
        place = lab.port_of(name)
        for space in (place.netns, host.netns):
            if space not in opened:
                links = stack.enter_context(closing(open_netlink(space)))
                opened[space] = links, stack.enter_context(closing(open_rtnetlink(space)))
        port = _interface(*opened[place.netns], place.ifname)
        own = _interface(*opened[host.netns], host.ifname)
        down = LinkCount(*port.sent[:2], _injected(lab, name, "down") + port.netem, port.queue, port.sent[2])
        up_lost = _injected(lab, name, "up")
        up = LinkCount(*port.received, up_lost + own.netem, own.queue, own.sent[2])
        down, up = (_plus(each, lost.get(f"{name}.{way}", {})) for each, way in ((down, "down"), (up, "up")))
        found[name] = {"up": _passed(up, up.injected - own.netem), "down": down}
    return found


def _plus(count: LinkCount, lost: Mapping[str, int]) -> LinkCount:
    more = {key: getattr(count, key) + value for key, value in lost.items()}
    return replace(count, **more)


def _passed(count: LinkCount, lost: int) -> LinkCount:
    """The switch counts what comes from a host before the loss there; the bytes are those of packets of mean length."""
    passed = max(0, count.packets - lost)
    return replace(count, packets=passed, bytes=round(count.bytes * passed / count.packets) if count.packets else 0)


def _injected(lab: Lab, name: str, way: str) -> int:
    """Packets that the loss programs in place have dropped on one direction of a host's link."""
    place, host = lab.port_of(name), lab.hosts[name]
    ends: list[tuple[str, str, Hook]] = [(place.netns, place.ifname, "ingress")]
    if way == "down":  # at the receiver's own interface where the loss comes after a rate
        ends = [(place.netns, place.ifname, "egress"), (host.netns, host.ifname, "ingress")]
    senders = [each.address for each in lab.hosts.values()]
    total = 0
    for end in ends:
        with closing(LossFilter(*end)) as loss:
            if loss.adopt(senders):
                total += sum(counter.dropped for counter in loss.counters()) + loss.events()["overflow_dropped"]
    return total


def _interface(netlink: Any, queues: Rtnetlink, ifname: str) -> _Interface:
    index = veth.index_of(netlink, ifname)
    with attempting(f"read the statistics of {ifname}"):
        stats = netlink.link("get", index=index)[0].get_attr("IFLA_STATS64")
    queue, netem = _queues(qdisc.dump(queues, index))
    return _Interface(
        sent=(stats["tx_packets"], stats["tx_bytes"], stats["tx_dropped"]),
        received=(stats["rx_packets"], stats["rx_bytes"]),
        queue=queue,
        netem=netem,
    )


def _queues(found: Mapping[int, qdisc.Found]) -> tuple[int, int]:
    """(drops for want of room, drops by netem's loss). netem counts both in one number, see `split_drops`.

    A rate limiter counts the drops of what is below it as well.
    """
    root = next((each for each in found.values() if each.parent == qdisc.ROOT), None)
    total = 0 if root is None else root.stats.dropped
    lost = over = 0
    for each in found.values():
        if each.kind == NETEM:
            options = netem_options.decode(each.options)
            stats = stats_of(found, each)
            split = split_drops(stats.seen, stats.dropped, options.loss_ratio, options.clustering)
            lost, over = lost + split[0], over + split[1]
    return max(over, total - lost), lost

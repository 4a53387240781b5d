"""Guest side: a port of the netem backend at the near end of a pair, with what the checks need of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import Any

from guest_network import Network

from netem.kernel import qdisc
from netem.kernel.netns import open_rtnetlink
from netem.links.base import Flow, Key, LossRule, Shape
from netem.links.bpf import BpfPort
from netem.links.mask import port_state
from netem.links.netem import NetemPort

SENDERS = ["10.77.0.2", "10.77.0.3"]
FLOW = Flow("udp", dst_ports=(29600, 29699))
KEY = Key(((4, 14),), index=(4, 8))


@contextmanager
def port_of(
    shape: Shape, senders: list[str] = SENDERS, flow: Flow = FLOW, *, bpf_loss: bool = False
) -> Iterator[tuple[NetemPort, Network]]:
    with Network(senders) as network:
        place = ("near", network.near.netns, network.near.ifname)
        port = NetemPort(*place, classifier=BpfPort(*place, queues=False) if bpf_loss else None)
        try:
            port.install(shape, flow, KEY, senders)
            yield port, network
        finally:
            port.close()


def rule(source: str, ratio: float, **more: Any) -> LossRule:
    return LossRule(source, port_state(7, "up", 1), ratio, **more)


def handles(network: Network) -> list[str]:
    return sorted(qdisc.show(handle) for handle in qdiscs(network))


def qdiscs(network: Network) -> dict[int, qdisc.Found]:
    with closing(open_rtnetlink(network.near.netns)) as netlink:
        return qdisc.dump(netlink, network.ifindex)


def account(port: NetemPort) -> dict[str, Any]:
    return {"counters": [asdict(c) for c in port.counters()], "health": asdict(port.health())}

"""Changes the links of a lab that stands by itself, in place.

A change writes the full state of the link directions that are named, and leaves the others alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from netem.experiment.counters import LinkCount, count
from netem.experiment.wiring import chain_of, senders_of, shape_of
from netem.kernel import netns, offload
from netem.lab import Lab
from netem.lab.standing import WAYS, Lost, Standing, Way, queued, with_shapes
from netem.links.base import Port
from netem.links.bpf import BpfPort
from netem.links.choose import BackendChoice
from netem.links.loss_filter import LossFilter
from netem.links.netem import NetemPort
from netem.spec import LinkShape, Topology
from netem.spec.impairments import FourStateLoss


def put(lab: Lab, standing: Standing, new: Topology, choice: BackendChoice) -> Standing:
    """Put in place what differs, and read it back. Raises LinkError, UnsupportedFeature.

    What has been changed is recorded even when a later change fails.
    """
    wanted = [
        (host, way)
        for host in new.hosts
        for way in WAYS
        if getattr(new.link_of(host), way) != getattr(standing.now.link_of(host), way)
    ]
    for host, way in wanted:
        shape = getattr(new.link_of(host), way)
        before = count(lab, hosts=[host])[host][way]
        placed = _Place(lab, choice, host, way).put(standing, shape)
        lost = _forgotten(standing.lost, f"{host}.{way}", before, count(lab, hosts=[host])[host][way])
        now = with_shapes(standing.now, {(host, way): shape}, lab.name)
        standing = Standing(standing.built, now, choice, placed, lost)
        lab.set_links(standing.to_json())
    return standing


def _forgotten(lost: Lost, end: str, before: LinkCount, after: LinkCount) -> Lost:
    """With the drops that went with a program or a queue when it was replaced."""
    own = lost.get(end, {})
    gone = {key: max(0, getattr(before, key) - getattr(after, key)) for key in ("injected", "queue")}
    return {**lost, end: {key: own.get(key, 0) + value for key, value in gone.items()}}


@dataclass(frozen=True)
class _Place:
    """One direction of one host's link."""

    lab: Lab
    choice: BackendChoice
    host: str
    way: Way

    def put(self, standing: Standing, shape: LinkShape) -> frozenset[str]:
        """Returns the link directions that are placed then."""
        old = getattr(standing.now.link_of(self.host), self.way)
        end = f"{self.host}.{self.way}"
        if self.way == "down":
            self._down(old if end in standing.placed else None, shape)
            return standing.placed | {end}
        if end in standing.placed or queued(shape):
            self._up(old if end in standing.placed else None, shape)
        self._lose(shape.loss)
        return standing.placed | {end} if queued(shape) else standing.placed - {end}

    def _down(self, old: LinkShape | None, shape: LinkShape) -> None:
        place, host = self.lab.port_of(self.host), self.lab.hosts[self.host]
        port = self._port(f"port to {self.host}", place.netns, place.ifname, (host.netns, host.ifname))
        senders = senders_of(self.lab, self.choice)
        if old is not None:
            port.adopt(shape_of(old), senders)
        port.install(shape_of(shape), None, None, senders)

    def _up(self, old: LinkShape | None, shape: LinkShape) -> None:
        """Delay and rate at the host; a sender's bundles would pass its own qdisc as one packet."""
        host = self.lab.hosts[self.host]
        port = self._port(f"uplink of {self.host}", host.netns, host.ifname, None)
        if old is not None:
            port.adopt(replace(shape_of(old), loss_ratio=0.0, chain=None), ())
        if queued(shape):
            netns.call_in(host.netns, lambda: offload.write_here(host.ifname, {offload.GSO: False}))
            port.install(replace(shape_of(shape), loss_ratio=0.0, chain=None), None, None, ())
        else:
            port.close()

    def _lose(self, asked: float) -> None:
        """Where the packets enter the switch: a sender's TCP would notice it at home."""
        place, host = self.lab.port_of(self.host), self.lab.hosts[self.host]
        loss = LossFilter(place.netns, place.ifname, "ingress")
        chain = chain_of(asked)
        ratio = 0.0 if chain or isinstance(asked, FourStateLoss) else float(asked)
        if ratio or chain or loss.adopt([host.address]):
            loss.install(None, None, [host.address], ratio, chain)

    def _port(self, label: str, space: str, ifname: str, receiver: tuple[str, str] | None) -> Port:
        mtu = self.lab.hosts[self.host].mtu
        if self.choice.name == "bpf":
            return BpfPort(label, space, ifname, mtu=mtu, receiver=receiver)
        if self.choice.loss_engine != "bpf":
            return NetemPort(label, space, ifname)
        loss = BpfPort(label, space, ifname, mtu=mtu, receiver=receiver, queues=False)
        return NetemPort(label, space, ifname, classifier=loss)

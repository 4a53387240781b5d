"""The links of a lab as its topology describes them: which port does what to all packets, all the time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from netem.lab import Lab
from netem.links.base import Flow, Key, Port, Shape
from netem.links.bpf import BpfPort, LossFilter
from netem.links.choose import BackendChoice
from netem.links.netem import NetemPort
from netem.spec import LinkShape, Topology


def shape_of(shape: LinkShape, loss_at: str = "before_rate") -> Shape:
    """A link direction of the topology in the terms of the links."""
    return Shape(
        delay_us=shape.delay_us,
        jitter_us=shape.jitter_us,
        rate_bps=None if shape.rate_bps is None else round(shape.rate_bps),
        loss_ratio=shape.loss,
        limit_packets=shape.queue_packets,
        queue_bytes=shape.queue_bytes,
        loss_at="after_rate" if loss_at == "after_rate" else "before_rate",
    )


@dataclass
class Wiring:
    """A port towards every host, and what the hosts' uplinks need. `close` takes everything away again."""

    lab: Lab
    topology: Topology
    choice: BackendChoice
    loss_at: str = "before_rate"
    ports: dict[str, Port] = field(default_factory=dict)
    uplinks: dict[str, Port] = field(default_factory=dict)
    """Delay and rate from a host to the switch, at the host."""
    uplink_losses: dict[str, LossFilter] = field(default_factory=dict)
    """Loss from a worker to the switch, where its packets enter the switch: a sender's TCP would notice it at home."""

    def __post_init__(self) -> None:
        for name in self.topology.ranks:
            place, host = self.lab.port_of(name), self.lab.hosts[name]
            self.ports[name] = self._port(f"port to {name}", place.netns, place.ifname, (host.netns, host.ifname))
            self._install_uplink(name)

    def down(self, name: str) -> Shape:
        """From the switch to a host. What the server's uplink loses is lost here, so that each worker's is counted."""
        shape = shape_of(self.topology.link_of(name).down, self.loss_at)
        if name == self.topology.server:
            return shape
        kept = (1.0 - shape.loss_ratio) * (1.0 - self.topology.link_of(self.topology.server).up.loss)
        return replace(shape, loss_ratio=1.0 - kept)

    def install_steady(self) -> None:
        """No experiment, only what the topology says: for a lab that stands by itself."""
        addresses = [host.address for host in self.lab.hosts.values()]
        for name, port in self.ports.items():
            port.install(self.down(name), None, None, addresses)
        self.install_uplink_losses(None, None)

    def install_uplink_losses(self, flow: Flow | None, key: Key | None) -> None:
        """Steady loss of the workers' uplinks, counted as `flow` and `key` say; counters start at zero."""
        for name, loss in self.uplink_losses.items():
            loss.install(flow, key, [self.lab.hosts[name].address], self.topology.link_of(name).up.loss)

    def _port(self, label: str, netns: str, ifname: str, receiver: tuple[str, str] | None = None) -> Port:
        mtu = self.topology.mtu
        if self.choice.name == "bpf":
            return BpfPort(label, netns, ifname, mtu=mtu, receiver=receiver)
        if self.choice.loss_engine != "bpf":
            return NetemPort(label, netns, ifname)
        loss = BpfPort(label, netns, ifname, mtu=mtu, receiver=receiver, queues=False)
        return NetemPort(label, netns, ifname, classifier=loss)

    def _install_uplink(self, name: str) -> None:
        """From a host to the switch."""
        host, place = self.lab.hosts[name], self.lab.port_of(name)
        shape = shape_of(self.topology.link_of(name).up)
        if shape.delay_us or shape.jitter_us or shape.rate_bps:
            port = self._port(f"uplink of {name}", host.netns, host.ifname)
            port.install(replace(shape, loss_ratio=0.0), None, None, ())
            self.uplinks[name] = port
        if shape.loss_ratio and name != self.topology.server:
            self.uplink_losses[name] = LossFilter(place.netns, place.ifname, "ingress")

    def close(self) -> None:
        for port in (*self.ports.values(), *self.uplinks.values()):
            port.close()
        for loss in self.uplink_losses.values():
            loss.close()

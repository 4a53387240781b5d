"""The links of a lab as its topology describes them: which port does what to all packets, all the time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from netem.lab import Lab
from netem.links.base import Port, Shape
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
    _uplinks: list[Port | LossFilter] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in self.topology.ranks:
            place, host = self.lab.port_of(name), self.lab.hosts[name]
            self.ports[name] = self._port(f"port to {name}", place.netns, place.ifname, (host.netns, host.ifname))
            self._install_uplink(name)

    def down(self, name: str) -> Shape:
        """From the switch to a host."""
        return shape_of(self.topology.link_of(name).down, self.loss_at)

    def install_steady(self) -> None:
        """No experiment, only what the topology says: for a lab that stands by itself."""
        addresses = [host.address for host in self.lab.hosts.values()]
        for name, port in self.ports.items():
            port.install(self.down(name), None, None, addresses)

    def _port(self, label: str, netns: str, ifname: str, receiver: tuple[str, str] | None = None) -> Port:
        mtu = self.topology.mtu
        if self.choice.name == "bpf":
            return BpfPort(label, netns, ifname, mtu=mtu, receiver=receiver)
        if self.choice.loss_engine != "bpf":
            return NetemPort(label, netns, ifname)
        loss = BpfPort(label, netns, ifname, mtu=mtu, receiver=receiver, queues=False)
        return NetemPort(label, netns, ifname, classifier=loss)

    def _install_uplink(self, name: str) -> None:
        """From a host to the switch: delay and rate at the host, loss where the packet enters the switch."""
        host, place = self.lab.hosts[name], self.lab.port_of(name)
        shape = shape_of(self.topology.link_of(name).up)
        if shape.delay_us or shape.jitter_us or shape.rate_bps:
            port = self._port(f"uplink of {name}", host.netns, host.ifname)
            port.install(replace(shape, loss_ratio=0.0), None, None, ())
            self._uplinks.append(port)
        if shape.loss_ratio:
            loss = LossFilter(place.netns, place.ifname, "ingress")
            loss.install(None, None, [host.address], shape.loss_ratio)
            self._uplinks.append(loss)

    def close(self) -> None:
        for port in (*self.ports.values(), *self._uplinks):
            port.close()

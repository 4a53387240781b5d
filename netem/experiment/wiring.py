"""The links of a lab as its topology describes them: which port does what to all packets, all the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from netem.experiment.extras import extras_of
from netem.experiment.passages import Passage, passages
from netem.kernel.clsact import Hook
from netem.lab import Lab
from netem.links import mask
from netem.links.base import Extras, Flow, Key, Port, Shape
from netem.links.bpf import BpfPort
from netem.links.chain import GilbertElliott
from netem.links.choose import BackendChoice
from netem.links.loss_filter import LossFilter
from netem.links.netem import NetemPort
from netem.links.seeding import port_seed
from netem.spec import LinkShape, Shift, Topology
from netem.spec.effects import LinkEnd, shape_at
from netem.spec.impairments import FourStateLoss
from netem.spec.loss import BurstyLoss

STANDING_RATE_BPS = 32 * 10**9
"""Of a link direction without a rate that is to get one for a while: a limiter cannot come and go, what waits in it
would be lost with it. More than a veth pair carries, and what 32 bits hold in bytes per second."""
STANDING_PACKETS = 20_000


def shape_of(shape: LinkShape, loss_at: str = "before_rate") -> Shape:
    """A link direction of the topology in the terms of the links."""
    return Shape(
        delay_us=shape.delay_us,
        jitter_us=shape.jitter_us,
        rate_bps=None if shape.rate_bps is None else round(shape.rate_bps),
        loss_ratio=0.0 if isinstance(shape.loss, BurstyLoss | FourStateLoss) else shape.loss,
        chain=chain_of(shape.loss),
        limit_packets=shape.queue_packets,
        queue_bytes=shape.queue_bytes,
        loss_at="after_rate" if loss_at == "after_rate" else "before_rate",
        extras=extras_of(shape),
    )


def chain_of(loss: float) -> GilbertElliott | None:
    """The chain of a loss in bursts, in the terms of the links."""
    return GilbertElliott(*loss.parameters) if isinstance(loss, BurstyLoss) else None


def senders_of(lab: Lab, choice: BackendChoice) -> list[str]:
    """At ports that make no bursts. There netem tells no senders apart, and so has no need of a band for each."""
    return [] if choice.loss_engine == "netem" else [host.address for host in lab.hosts.values()]


Place = tuple[str, str]
"""(here, there): a direction of a link."""


@dataclass
class Wiring:
    """A port towards every host, and what the links in front of those need. `close` takes everything away again."""

    lab: Lab
    topology: Topology
    choice: BackendChoice
    loss_at: str = "before_rate"
    shifted: frozenset[LinkEnd] = frozenset()
    """Link directions whose rate, delay or queue will change."""
    seed: int = 0
    """Of the chains of steady losses in bursts."""
    netem_seed: int | None = None
    """Of netem's random numbers; None: the kernel's own."""
    ports: dict[str, Port] = field(default_factory=dict)
    """Towards the hosts that have a rank: bursts are made here."""
    side_ports: dict[str, Port] = field(default_factory=dict)
    """Towards the others."""
    uplinks: dict[str, Port] = field(default_factory=dict)
    """Delay and rate from a host to the switch, at the host."""
    trunks: dict[Place, Port] = field(default_factory=dict)
    """The same from a switch to another, at the port that leads there."""
    losses: dict[Place, LossFilter] = field(default_factory=dict)
    """Loss of all links but the last. From a host: where packets enter the switch, as a sender's TCP would notice it at
    home. Between switches: at the port that leads there. Counted by sender; gradients on the way down by receiver."""

    def __post_init__(self) -> None:
        self.passages = passages(self.topology)
        self.addresses = [host.address for host in self.lab.hosts.values()]
        for name in self.topology.hosts:
            place, host = self.lab.port_of(name), self.lab.hosts[name]
            port = self._port(f"port to {name}", place.netns, place.ifname, (host.netns, host.ifname))
            (self.ports if name in self.topology.ranks else self.side_ports)[name] = port
        for passage in self.passages.all:
            self._install_passage(passage)
        for name, port in self.side_ports.items():
            port.install(self.down(name), None, None, senders_of(self.lab, self.choice))

    def down(self, name: str) -> Shape:
        """From the switch to a host."""
        shape = self._standing(name, "down", shape_of(self.topology.link_of(name).down, self.loss_at))
        state = self._chain_state("down", list(self.topology.hosts).index(name))
        return replace(shape, chain_state=state) if shape.chain is not None else shape

    def _chain_state(self, way: str, number: int) -> int:
        """Of a steady loss in bursts: another than those of the bursts at the same port."""
        return mask.mix(mask.port_state(self.seed, way, number))

    def up(self, name: str) -> Shape:
        """From a host to the switch, without the loss, which is made behind it."""
        return replace(self._standing(name, "up", shape_of(self.topology.link_of(name).up)), loss_ratio=0.0, chain=None)

    def trunk(self, here: str, there: str) -> Shape:
        """From a switch to another, without the loss, which is made behind it."""
        shape = shape_of(shape_at(self.topology, (here, f"to {there}")))
        return replace(self._standing(here, f"to {there}", shape), loss_ratio=0.0, chain=None)

    def _standing(self, name: str, way: str, shape: Shape) -> Shape:
        if (name, way) not in self.shifted or shape.rate_bps is not None:
            return shape
        queue_bytes = shape.queue_bytes or STANDING_PACKETS * (self.topology.mtu + 14)
        return replace(shape, rate_bps=STANDING_RATE_BPS, queue_bytes=queue_bytes)

    def port_and_shape(self, name: str, way: str, shift: Shift | None) -> tuple[Port, Shape]:
        """What stands at one direction of a link while this shift is in force; None: the steady state."""
        port, shape = self._steady(name, way)
        if shift is None:
            return port, shape
        if shift.rate_bps is not None:
            steady = shape_at(self.topology, (name, way))
            shape = replace(shape, rate_bps=shift.rate_bps, queue_bytes=steady.queue_bytes)
        if shift.delay_s is not None:
            shape = replace(shape, delay_us=round(shift.delay_s * 1e6))
        if shift.queue is not None:
            shape = replace(shape, queue_bytes=shift.queue.size_bytes, limit_packets=shift.queue.packets)
        return port, shape

    def _steady(self, name: str, way: str) -> tuple[Port, Shape]:
        if way == "up":
            return self.uplinks[name], self.up(name)
        if way == "down":
            return (self.ports if name in self.ports else self.side_ports)[name], self.down(name)
        there = way.removeprefix("to ")
        return self.trunks[name, there], self.trunk(name, there)

    def install_steady(self) -> None:
        """No experiment, only what the topology says: for a lab that stands by itself."""
        for name, port in self.ports.items():
            port.install(self.down(name), None, None, senders_of(self.lab, self.choice))
        self.install_losses({}, None)

    def install_losses(self, flows: Mapping[str, Flow], key: Key | None) -> None:
        """Steady loss in front of the last link, counted as `flows` (by direction) and `key` say, from zero."""
        for number, passage in enumerate(self.passages.all, len(self.topology.hosts)):
            loss = self.losses.get((passage.here, passage.there))
            if loss is not None:
                flow, ratio = flows.get(passage.direction or ""), passage.shape.loss
                loss.by = "destination" if flow and passage.direction == "down" else "source"
                chain = chain_of(ratio)
                state = self._chain_state(passage.direction or "up", number)
                loss.install(flow, key if flow else None, self.addresses, 0.0 if chain else float(ratio), chain, state)

    def _port(self, label: str, netns: str, ifname: str, receiver: tuple[str, str] | None = None) -> Port:
        mtu = self.topology.mtu
        if self.choice.name == "bpf":
            return BpfPort(label, netns, ifname, mtu=mtu, receiver=receiver)
        if self.choice.loss_engine != "bpf":
            return self._netem(label, netns, ifname)
        loss = BpfPort(label, netns, ifname, mtu=mtu, receiver=receiver, queues=False)
        return self._netem(label, netns, ifname, loss)

    def _netem(self, label: str, netns: str, ifname: str, classifier: Port | None = None) -> NetemPort:
        port = NetemPort(label, netns, ifname, classifier=classifier)
        port.seed = None if self.netem_seed is None else port_seed(self.netem_seed, label)
        return port

    def _install_passage(self, passage: Passage) -> None:
        """From a host to its switch, or from a switch to another."""
        shape, here, there = shape_of(passage.shape), passage.here, passage.there
        shifted = (here, "up" if passage.from_host else f"to {there}") in self.shifted
        if passage.from_host:
            host, place = self.lab.hosts[here], self.lab.port_of(here)
            end = (host.netns, host.ifname)
        else:
            place = self.lab.port_between(here, there)
            end = (place.netns, place.ifname)
        queued = shape.limit_packets or shape.queue_bytes
        asked = shape.delay_us or shape.jitter_us or shape.rate_bps or shape.extras != Extras()
        if asked or shifted or (queued and not passage.from_host):
            # Four states are netem's whatever the engine of the bursts.
            own = shape.extras.loss is not None
            port = self._netem(passage.name, *end) if own else self._port(passage.name, *end)
            steady = self.up(here) if passage.from_host else self.trunk(here, there)
            port.install(steady, None, None, ())
            if passage.from_host:
                self.uplinks[here] = port
            else:
                self.trunks[here, there] = port
        if shape.loss_ratio or shape.chain:
            hook: Hook = "ingress" if passage.from_host else "egress"
            self.losses[here, there] = LossFilter(place.netns, place.ifname, hook)

    def seed_ports(self, seed: int) -> None:
        """Of netem's random numbers, from each port's next `install` on."""
        self.netem_seed = seed
        for ports in (self.ports, self.side_ports, self.uplinks, self.trunks):
            for port in ports.values():
                if isinstance(port, NetemPort):
                    port.seed = port_seed(seed, port.name)

    @property
    def seeded(self) -> bool | None:
        """Whether the kernel took the seeds of netem's random numbers; None: no port of netem was given one."""
        every = [*self.ports.values(), *self.side_ports.values(), *self.uplinks.values(), *self.trunks.values()]
        known = [port.seeded for port in every if isinstance(port, NetemPort) and port.seeded is not None]
        return all(known) if known else None

    def close(self) -> None:
        for ports in (self.ports, self.side_ports, self.uplinks, self.trunks):
            for port in ports.values():
                port.close()
        for loss in self.losses.values():
            loss.close()

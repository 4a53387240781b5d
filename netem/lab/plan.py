"""From a topology to the exact kernel objects of a lab: names, addresses, forwarding entries. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from netem.kernel.netns import NAME_LIMIT
from netem.kernel.veth import End
from netem.routing import PlanError, Routes, ordered_hosts, routes_of

__all__ = ["Cable", "Forwarding", "Host", "Plan", "PlanError", "Switch", "TopologyLike", "make_plan", "routes_of"]

DEFAULT_NETWORK = "10.77.0.0/16"
MAX_MTU_BYTES = 65535
HOST_IFNAME = "eth0"
BRIDGE_IFNAME = "br0"
# Indexes are planned too: no look-up, and both ends of a cable differ (a carrier is then noticed at once).
HOST_INDEX, BRIDGE_INDEX, FIRST_PORT_INDEX = 2, 2, 3
ID_PATTERN = re.compile(r"dn[0-9a-f]{4}")


class LinkLike(Protocol):
    """Two ends, each the name of a host or a switch."""

    @property
    def between(self) -> tuple[str, str]: ...

    @property
    def mtu(self) -> int: ...


class HostLike(Protocol):
    @property
    def role(self) -> str: ...


class TopologyLike(Protocol):
    """What a lab needs to know of netem.spec's Topology: any graph of hosts and switches in one piece."""

    @property
    def name(self) -> str: ...

    @property
    def hosts(self) -> Mapping[str, HostLike]: ...

    @property
    def switches(self) -> Sequence[str]: ...

    @property
    def links(self) -> Sequence[LinkLike]: ...


@dataclass(frozen=True)
class Host:
    """A host as the kernel knows it. Rank 0 is the server; workers count from 1 in the topology's order.

    path_mtu: what fits through every link between switches too.
    """

    name: str
    role: str
    rank: int | None
    netns: str
    ifname: str
    address: str
    prefix_length: int
    mac: str
    mtu: int
    path_mtu: int


@dataclass(frozen=True)
class Switch:
    name: str
    netns: str
    mac: str


@dataclass(frozen=True)
class Cable:
    """A veth pair. `near` is a switch's port; `far` is a host's interface, or another switch's port."""

    near: End
    far: End
    mtu_bytes: int
    host: str | None  # the host at the far end
    between: tuple[str, str]  # the names of both ends, near and far


@dataclass(frozen=True)
class Forwarding:
    """A static forwarding entry: on this port of this switch lies that address."""

    netns: str
    ifname: str
    mac: str
    index: int


@dataclass(frozen=True)
class Plan:
    lab_id: str
    name: str
    network: str
    hosts: tuple[Host, ...]
    switches: tuple[Switch, ...]
    cables: tuple[Cable, ...]
    forwarding: tuple[Forwarding, ...]

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (*(s.netns for s in self.switches), *(h.netns for h in self.hosts))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Plan:
        """The plan that `to_json` wrote. TypeError or KeyError when it is another shape."""
        return cls(
            lab_id=raw["lab_id"],
            name=raw["name"],
            network=raw["network"],
            hosts=tuple(Host(**host) for host in raw["hosts"]),
            switches=tuple(Switch(**switch) for switch in raw["switches"]),
            cables=tuple(_cable_of(cable) for cable in raw["cables"]),
            forwarding=tuple(Forwarding(**entry) for entry in raw["forwarding"]),
        )


def _cable_of(raw: Mapping[str, Any]) -> Cable:
    first, second = raw["between"]
    return Cable(End(**raw["near"]), End(**raw["far"]), raw["mtu_bytes"], raw["host"], (first, second))


def make_plan(topology: TopologyLike, lab_id: str, network: str = DEFAULT_NETWORK) -> Plan:
    """Plan a lab. PlanError when the topology is not one graph, or the network is too small."""
    if not ID_PATTERN.fullmatch(lab_id):
        raise PlanError(f"lab id {lab_id!r}: expected dn and four hexadecimal digits")
    net = ipaddress.IPv4Network(network)
    ordered = ordered_hosts(topology.hosts)
    if len(ordered) + len(topology.switches) > net.num_addresses - 2:
        raise PlanError(f"{len(ordered)} hosts do not fit into {network}")
    ways = routes_of(topology)
    spaces = _namespaces(lab_id, [*ordered, *topology.switches])
    mtus, narrowest = _mtus(topology)
    hosts = tuple(
        Host(
            name=name,
            role=topology.hosts[name].role,
            rank=number if topology.hosts[name].role in ("server", "worker") else None,
            netns=spaces[name],
            ifname=HOST_IFNAME,
            address=str(net[number + 1]),
            prefix_length=net.prefixlen,
            mac=_mac(0, number + 1),
            mtu=mtus[name],
            path_mtu=min(mtus[name], narrowest),
        )
        for number, name in enumerate(ordered)
    )
    switches = tuple(Switch(name, spaces[name], _mac(1, number)) for number, name in enumerate(topology.switches))
    cables, ends = _cables(topology, {h.name: h for h in hosts}, {s.name: s for s in switches})
    forwarding = tuple(_forwarding(hosts, ways, ends))
    return Plan(lab_id, topology.name, str(net), hosts, switches, cables, forwarding)


def _mac(kind: int, number: int) -> str:
    """A locally administered address: hosts are kind 0, bridges 1, switch ports 2."""
    return f"02:00:00:{kind:02x}:{number >> 8:02x}:{number & 255:02x}"


def _namespaces(lab_id: str, names: Sequence[str]) -> dict[str, str]:
    """Namespace names: the logical name where it fits, a number else. All start with the lab's id."""
    room = NAME_LIMIT - len(lab_id) - 1
    fits = {name for name in names if len(name) <= room and re.fullmatch(r"[A-Za-z0-9_.-]+", name)}
    spaces = {}
    taken = set(fits)
    for number, name in enumerate(names):
        short = name if name in fits else f"n{number}"
        while name not in fits and short in taken:
            short += "x"
        taken.add(short)
        spaces[name] = f"{lab_id}-{short}"
    return spaces


def _mtus(topology: TopologyLike) -> tuple[dict[str, int], int]:
    """The MTU of each host's link, and the smallest of the links between switches."""
    mtus, trunks = {}, []
    for link in topology.links:
        hosts = [end for end in link.between if end in topology.hosts]
        mtus.update(dict.fromkeys(hosts, link.mtu))
        trunks += [] if hosts else [link.mtu]
    return mtus, min(trunks, default=MAX_MTU_BYTES)


def _cables(
    topology: TopologyLike, hosts: Mapping[str, Host], switches: Mapping[str, Switch]
) -> tuple[tuple[Cable, ...], dict[tuple[str, str], End]]:
    """The cables, and for each (switch, neighbour) the switch's port that leads there."""
    cables = []
    ends: dict[tuple[str, str], End] = {}
    numbers = {name: number for number, name in enumerate(hosts)}
    for number, link in enumerate(topology.links):
        near, far = link.between if link.between[0] in switches else link.between[::-1]
        port = f"p{numbers[far]}" if far in hosts else f"x{number}a"
        index = FIRST_PORT_INDEX + 2 * number
        near_end = End(switches[near].netns, port, _mac(2, 2 * number), index)
        if far in hosts:
            far_end = End(hosts[far].netns, HOST_IFNAME, hosts[far].mac, HOST_INDEX)
        else:
            far_end = End(switches[far].netns, f"x{number}b", _mac(2, 2 * number + 1), index + 1)
            ends[far, near] = far_end
        ends[near, far] = near_end
        cables.append(Cable(near_end, far_end, link.mtu, far if far in hosts else None, (near, far)))
    return tuple(cables), ends


def _forwarding(hosts: Sequence[Host], ways: Routes, ends: Mapping[tuple[str, str], End]) -> Iterable[Forwarding]:
    """At every switch an entry for every host: the port that its next hop is behind."""
    for host in hosts:
        for switch, following in ways.next_hop[host.name].items():
            port = ends[switch, following]
            yield Forwarding(port.netns, port.ifname, host.mac, port.index)

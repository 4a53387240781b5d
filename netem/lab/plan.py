"""From a topology to the exact kernel objects of a lab: names, addresses, forwarding entries. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from netem.kernel.netns import NAME_LIMIT
from netem.kernel.veth import End

DEFAULT_NETWORK = "10.77.0.0/16"
DEFAULT_MTU_BYTES = 1500
HOST_IFNAME = "eth0"
BRIDGE_IFNAME = "br0"
# Indexes are planned too: no look-up, and both ends of a cable differ (a carrier is then noticed at once).
HOST_INDEX, BRIDGE_INDEX, FIRST_PORT_INDEX = 2, 2, 3
# With more hosts than this only pairs with a server get a static neighbour entry (the number of pairs is quadratic).
ALL_PAIRS_LIMIT = 16
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
    """What a lab needs to know of netem.spec's Topology; several switches in a tree would do as well."""

    @property
    def name(self) -> str: ...

    @property
    def hosts(self) -> Mapping[str, HostLike]: ...

    @property
    def switches(self) -> Sequence[str]: ...

    @property
    def links(self) -> Sequence[LinkLike]: ...


class PlanError(ValueError):
    """The topology is not one tree of switches with every host on exactly one of them."""


@dataclass(frozen=True)
class Host:
    """A host as the kernel knows it. Rank 0 is the server; workers count from 1 in the topology's order."""

    name: str
    role: str
    rank: int
    netns: str
    ifname: str
    address: str
    prefix_length: int
    mac: str
    mtu: int


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
            cables=tuple(Cable(End(**c["near"]), End(**c["far"]), c["mtu_bytes"], c["host"]) for c in raw["cables"]),
            forwarding=tuple(Forwarding(**entry) for entry in raw["forwarding"]),
        )

    def neighbours(self, host: Host) -> tuple[Host, ...]:
        """The hosts that get a static neighbour entry at `host`, so that no ARP request can be lost."""
        everyone = len(self.hosts) <= ALL_PAIRS_LIMIT
        servers = {"server"}
        return tuple(
            other
            for other in self.hosts
            if other is not host and (everyone or host.role in servers or other.role in servers)
        )


def make_plan(topology: TopologyLike, lab_id: str, network: str = DEFAULT_NETWORK) -> Plan:
    """Plan a lab. PlanError when the topology is not a tree, or the network is too small."""
    if not ID_PATTERN.fullmatch(lab_id):
        raise PlanError(f"lab id {lab_id!r}: expected dn and four hexadecimal digits")
    net = ipaddress.IPv4Network(network)
    ranked = _ranked(topology.hosts)
    if len(ranked) + len(topology.switches) > net.num_addresses - 2:
        raise PlanError(f"{len(ranked)} hosts do not fit into {network}")
    spaces = _namespaces(lab_id, [*ranked, *topology.switches])
    mtus = _host_mtus(topology, ranked)
    hosts = tuple(
        Host(
            name=name,
            role=topology.hosts[name].role,
            rank=rank,
            netns=spaces[name],
            ifname=HOST_IFNAME,
            address=str(net[rank + 1]),
            prefix_length=net.prefixlen,
            mac=_mac(0, rank + 1),
            mtu=mtus[name],
        )
        for rank, name in enumerate(ranked)
    )
    switches = tuple(Switch(name, spaces[name], _mac(1, number)) for number, name in enumerate(topology.switches))
    cables, ends = _cables(topology, {h.name: h for h in hosts}, {s.name: s for s in switches})
    forwarding = tuple(_forwarding(hosts, switches, ends))
    return Plan(lab_id, topology.name, str(net), hosts, switches, cables, forwarding)


def _ranked(hosts: Mapping[str, HostLike]) -> list[str]:
    """Host names by rank: the server first, then the others in the file's order."""
    servers = [name for name, host in hosts.items() if host.role == "server"]
    return [*servers, *(name for name in hosts if name not in servers)]


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


def _host_mtus(topology: TopologyLike, hosts: Iterable[str]) -> dict[str, int]:
    mtus: dict[str, int] = {}
    for link in topology.links:
        for end in link.between:
            if end in topology.hosts:
                if end in mtus:
                    raise PlanError(f"host {end} has more than one link")
                mtus[end] = link.mtu
    missing = sorted(set(hosts) - set(mtus))
    if missing:
        raise PlanError(f"no link to {', '.join(missing)}")
    return mtus


def _cables(
    topology: TopologyLike, hosts: Mapping[str, Host], switches: Mapping[str, Switch]
) -> tuple[tuple[Cable, ...], dict[tuple[str, str], End]]:
    """The cables, and for each (switch, neighbour) the switch's port that leads there."""
    cables = []
    ends: dict[tuple[str, str], End] = {}
    for number, link in enumerate(topology.links):
        near, far = link.between if link.between[0] in switches else link.between[::-1]
        if near not in switches or far not in {**hosts, **switches} or near == far:
            raise PlanError(f"link {' - '.join(link.between)}: expected a switch and a host, or two switches")
        port = f"p{hosts[far].rank}" if far in hosts else f"x{number}a"
        index = FIRST_PORT_INDEX + 2 * number
        near_end = End(switches[near].netns, port, _mac(2, 2 * number), index)
        if far in hosts:
            far_end = End(hosts[far].netns, HOST_IFNAME, hosts[far].mac, HOST_INDEX)
        else:
            far_end = End(switches[far].netns, f"x{number}b", _mac(2, 2 * number + 1), index + 1)
            ends[far, near] = far_end
        ends[near, far] = near_end
        cables.append(Cable(near_end, far_end, link.mtu, far if far in hosts else None))
    if len(ends) != len(cables) + sum(cable.host is None for cable in cables):
        raise PlanError("two links between the same pair")
    return tuple(cables), ends


def _forwarding(
    hosts: Sequence[Host], switches: Sequence[Switch], ends: Mapping[tuple[str, str], End]
) -> Iterable[Forwarding]:
    """Walk the tree from each host: every switch reached gets an entry that points back."""
    adjacent: dict[str, list[str]] = {switch.name: [] for switch in switches}
    for switch, neighbour in ends:
        adjacent[switch].append(neighbour)
    if len(ends) - len(hosts) != 2 * (len(switches) - 1):
        raise PlanError("the switches and the links between them must form one tree")
    for host in hosts:
        reached = {host.name}
        frontier = [(host.name, switch) for switch in adjacent if host.name in adjacent[switch]]
        while frontier:
            back, switch = frontier.pop()
            port = ends[switch, back]
            yield Forwarding(port.netns, port.ifname, host.mac, port.index)
            reached.add(switch)
            frontier += [(switch, n) for n in adjacent[switch] if n in adjacent and n not in reached]
        if len(reached) != len(switches) + 1:
            raise PlanError(f"{host.name} does not reach every switch")

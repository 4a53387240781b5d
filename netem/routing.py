"""Which way packets go: for each destination a tree of shortest paths, chosen the same way every time. Pure.

Shortest means fewest links. Where a switch has several next hops that are equally near to the destination, the choice
depends on the destination alone, so that no packet overtakes another of its flow and nothing can loop: every step is
nearer. Destinations are dealt out in turn, over the switches of one choice and then over those of the next, so that in
a leaf-spine or a fat tree the hosts of one leaf are reached through different spines.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

METHOD = "static forwarding entries on shortest paths (fewest links), spread by destination"


class RoleLike(Protocol):
    @property
    def role(self) -> str: ...


class EdgeLike(Protocol):
    @property
    def between(self) -> tuple[str, str]: ...


class GraphLike(Protocol):
    """The part of a topology that ways depend on."""

    @property
    def hosts(self) -> Mapping[str, RoleLike]: ...

    @property
    def switches(self) -> Sequence[str]: ...

    @property
    def links(self) -> Sequence[EdgeLike]: ...


class PlanError(ValueError):
    """The topology is not a graph of switches with every host on exactly one of them, in one piece."""


@dataclass(frozen=True)
class Routes:
    """`switch_of`: host -> its switch. `next_hop`: destination -> switch -> next switch, or the destination itself."""

    switch_of: Mapping[str, str]
    next_hop: Mapping[str, Mapping[str, str]]

    def path(self, source: str, destination: str) -> tuple[str, ...]:
        """All nodes from one host to another, both included."""
        nodes = [source]
        if source != destination:
            nodes.append(self.switch_of[source])
        while nodes[-1] != destination:
            nodes.append(self.next_hop[destination][nodes[-1]])
        return tuple(nodes)

    def hops(self, source: str, destination: str) -> tuple[tuple[str, str], ...]:
        """The links of a path in the direction in which it takes them, without those of the two hosts."""
        nodes = self.path(source, destination)[1:-1]
        return tuple(itertools.pairwise(nodes))


def routes(hosts: Sequence[str], switches: Sequence[str], links: Iterable[tuple[str, str]]) -> Routes:
    """`hosts` in the order of their numbers, of which the choice between equal paths depends. Raises PlanError."""
    switch_of, adjacent = _joined(hosts, switches, links)
    trees: dict[str, tuple[Mapping[str, int], Mapping[str, list[str]]]] = {}
    next_hop: dict[str, dict[str, str]] = {}
    for number, host in enumerate(hosts):
        root = switch_of[host]
        if root not in trees:
            trees[root] = _towards(root, adjacent)
        distance, nearer = trees[root]
        if len(distance) != len(adjacent):
            lost = next(name for name in switches if name not in distance)
            raise PlanError(f"there is no way from switch {lost} to host {host}")
        next_hop[host] = {root: host, **_chosen(number, distance, nearer)}
    return Routes(switch_of, next_hop)


def routes_of(topology: GraphLike) -> Routes:
    """Every way in a lab of this topology. PlanError when it is not one graph."""
    return routes(ordered_hosts(topology.hosts), topology.switches, [link.between for link in topology.links])


def ordered_hosts(hosts: Mapping[str, RoleLike]) -> list[str]:
    """Host names by number: the server, the workers, then those without a rank, each in the file's order."""
    place = {"server": 0, "worker": 1}
    return sorted(hosts, key=lambda name: place.get(hosts[name].role, 2))


def _joined(
    hosts: Sequence[str], switches: Sequence[str], links: Iterable[tuple[str, str]]
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The switch of each host, and the switches beside each switch in the order of `switches`."""
    order = {name: n for n, name in enumerate(switches)}
    known = set(hosts)
    switch_of: dict[str, str] = {}
    adjacent: dict[str, list[str]] = {name: [] for name in switches}
    for first, second in links:
        if first in order and second in order and first != second:
            if second in adjacent[first]:
                raise PlanError(f"two links between the same pair, {first} and {second}")
            adjacent[first].append(second)
            adjacent[second].append(first)
            continue
        host, switch = (first, second) if first in known else (second, first)
        if host not in known or switch not in order:
            raise PlanError(f"link {first} - {second}: expected a switch and a host, or two switches")
        if host in switch_of:
            raise PlanError(f"host {host} has more than one link")
        switch_of[host] = switch
    missing = sorted(known - set(switch_of))
    if missing:
        raise PlanError(f"no link to {', '.join(missing)}")
    return switch_of, {name: sorted(found, key=order.__getitem__) for name, found in adjacent.items()}


def _towards(root: str, adjacent: Mapping[str, Sequence[str]]) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Links between each switch and the root, nearest first, and its neighbours that are one link nearer."""
    distance = {root: 0}
    queue = [root]
    for switch in queue:
        for neighbour in adjacent[switch]:
            if neighbour not in distance:
                distance[neighbour] = distance[switch] + 1
                queue.append(neighbour)
    nearer = {name: [n for n in adjacent[name] if distance[n] == far - 1] for name, far in distance.items()}
    return distance, nearer


def _chosen(number: int, distance: Mapping[str, int], nearer: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The next hop of each switch but the root. `ways` counts the choices that the rest of a way has had."""
    ways: dict[str, int] = {}
    found: dict[str, str] = {}
    for switch, far in distance.items():
        if not far:
            ways[switch] = 1
            continue
        options = nearer[switch]
        behind = max(ways[option] for option in options)
        found[switch] = options[number // behind % len(options)]
        ways[switch] = behind * len(options)
    return found

"""Where a drawing of a topology puts switches, hosts and links. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from netem.spec import Link, Topology

MAX_ROWS = 8
"""More hosts at one switch than this are shown in groups of equal ones."""


@dataclass(frozen=True)
class Row:
    """One host, or several with the same role and equal links."""

    hosts: tuple[str, ...]
    role: str
    ranks: tuple[int, int] | None
    """The first and the last."""
    link: Link

    @property
    def name(self) -> str:
        return several(self.hosts, 1)

    @property
    def words(self) -> str:
        if self.ranks is None:
            return "no rank" if len(self.hosts) == 1 else f"{len(self.hosts)} hosts without a rank"
        first, last = self.ranks
        return f"rank {first}" if first == last else f"ranks {first} to {last}"


def levels(topology: Topology) -> list[list[str]]:
    """Switches by how far they are from the nearest host: first those that have hosts. In the topology's order."""
    near = {link.switch for link in topology.host_links}
    distance = dict.fromkeys(near, 0)
    frontier = list(near)
    for switch in frontier:
        for link in topology.trunks:
            if switch in link.between:
                other = link.between[0] if link.between[1] == switch else link.between[1]
                if other not in distance:
                    distance[other] = distance[switch] + 1
                    frontier.append(other)
    return [
        [switch for switch in topology.switches if distance.get(switch) == level]
        for level in range(max(distance.values(), default=0) + 1)
    ]


def upper_ends(topology: Topology) -> Mapping[str, list[str]]:
    """Of each switch, those it is linked to that are farther from the hosts; of two on one level the second."""
    level_of = {name: level for level, names in enumerate(levels(topology)) for name in names}
    found: dict[str, list[str]] = {name: [] for name in topology.switches}
    for link in topology.trunks:
        first, second = link.between
        low, high = (second, first) if level_of[first] > level_of[second] else (first, second)
        found[low].append(high)
    return found


def rows(topology: Topology, properties: Callable[[Link], str]) -> Mapping[str, tuple[Row, ...]]:
    """Of each switch that has hosts, what is drawn below it. `properties` says which links are equal."""
    ranks = topology.ranks
    beside: dict[str, list[str]] = {}
    for link in topology.host_links:
        beside.setdefault(link.switch, []).append(link.host)
    found = {}
    for switch, hosts in beside.items():
        groups: list[list[str]] = []
        for host in hosts:
            if len(hosts) > MAX_ROWS and groups and _equal(topology, groups[-1][-1], host, properties):
                groups[-1].append(host)
            else:
                groups.append([host])
        found[switch] = tuple(
            Row(
                tuple(group),
                topology.hosts[group[0]].role,
                (ranks[group[0]], ranks[group[-1]]) if group[0] in ranks else None,
                topology.link_of(group[0]),
            )
            for group in groups
        )
    return found


def _equal(topology: Topology, one: str, other: str, properties: Callable[[Link], str]) -> bool:
    """Drawn as one: the same role, ranks that follow each other, and equal links."""
    ranks = topology.ranks
    follows = one not in ranks or ranks.get(other) == ranks[one] + 1
    same = topology.hosts[one].role == topology.hosts[other].role
    return follows and same and properties(topology.link_of(one)) == properties(topology.link_of(other))


def kinds(links: Sequence[Link], properties: Callable[[Link], str]) -> dict[str, list[Link]]:
    """Links with the same properties together."""
    found: dict[str, list[Link]] = {}
    for link in links:
        found.setdefault(properties(link), []).append(link)
    return found


def several(names: Sequence[str], shown: int = 4) -> str:
    """`a, b` or, where there are many, `a … z`; numbered runs as one."""
    if len(names) <= shown:
        return ", ".join(names)
    parts: list[list[str]] = [[names[0]]]
    for before, name in pairwise(names):
        if _number(name) is not None and _number(name) == _following(before):
            parts[-1].append(name)
        else:
            parts.append([name])
    texts = [part[0] if len(part) == 1 else f"{part[0]} … {part[-1]}" for part in parts]
    return ", ".join(texts) if len(texts) <= shown else f"{names[0]} … {names[-1]}"


def _number(name: str) -> tuple[str, int] | None:
    stem = name.rstrip("0123456789")
    return (stem, int(name[len(stem) :])) if stem != name else None


def _following(name: str) -> tuple[str, int] | None:
    parts = _number(name)
    return None if parts is None else (parts[0], parts[1] + 1)

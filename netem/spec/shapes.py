"""Short forms of a topology, expanded on the tree: star, dumbbell, leaf-spine, two sites, fat tree.

A group of hosts is a number (of workers) or `{server: 1, workers: n, hosts: m}`. Unless a group names the server, the
first worker of all is it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

from netem.spec.fields import did_you_mean
from netem.spec.source import Node, make
from netem.spec.topology import MAX_HOSTS, MAX_LINKS, MAX_SWITCHES, MAX_WORKERS, SHAPES

Pair = tuple[str, str]
GROUP_KEYS = ("server", "workers", "hosts")
MAX_K = 6


@dataclass
class _Graph:
    """A topology in the making."""

    switches: list[str] = field(default_factory=list)
    roles: list[tuple[str, str]] = field(default_factory=list)
    """(role, switch) of every host, in order."""
    trunks: list[Pair] = field(default_factory=list)

    def add(self, group: dict[str, int], switch: str) -> None:
        for role, key in (("server", "server"), ("worker", "workers"), ("host", "hosts")):
            self.roles += [(role, switch)] * group.get(key, 0)

    def named(self) -> list[tuple[str, str, str]]:
        """(host, role, switch): `server`, and `worker1`, `host1` and so on."""
        roles = self.roles
        if not any(role == "server" for role, _ in roles):
            first = next((n for n, (role, _) in enumerate(roles) if role == "worker"), None)
            roles = [("server" if n == first else role, switch) for n, (role, switch) in enumerate(roles)]
        counts: dict[str, int] = {}
        found = []
        for role, switch in roles:
            counts[role] = counts.get(role, 0) + 1
            found.append(("server" if role == "server" else f"{role}{counts[role]}", role, switch))
        return found


def expand(node: Node) -> tuple[Node, list[Pair] | None]:
    """The tree with hosts and switches in place of its short form, and that form's links; None without such a form."""
    forms = [name for name in SHAPES if node.child(name) is not None]
    if not forms:
        return node, None
    form, shape = forms[0], node.items[forms[0]]
    for key in (*forms[1:], "hosts", "switches"):
        if (other := node.child(key)) is not None:
            raise other.error(f"`{key}` and `{form}` exclude each other")
    build = _FORMS[form]
    keys, example = _KEYS[form]
    if not shape.is_mapping:
        raise shape.error(f"expected a mapping such as {example}")
    for key in shape.items:
        if key not in keys:
            raise shape.error(f"unknown key {key!r}{did_you_mean(key, keys)} (allowed: {', '.join(keys)})", key)
    graph = _Graph()
    build(shape, graph)
    hosts = graph.named()
    _check(shape, graph, hosts)
    mark = shape.mark
    made: dict[str, Node | None] = dict.fromkeys(SHAPES)
    made["name"] = node.child("name") or make(_name(form, graph), mark)
    made["hosts"] = make({name: {"role": role} for name, role, _ in hosts}, mark)
    made["switches"] = make(graph.switches, mark)
    return node.with_items(**made), [*((name, switch) for name, _, switch in hosts), *graph.trunks]


def _check(shape: Node, graph: _Graph, hosts: Sequence[tuple[str, str, str]]) -> None:
    servers = sum(role == "server" for _, role, _ in hosts)
    workers = sum(role == "worker" for _, role, _ in hosts)
    if servers > 1:
        raise shape.error(f"{servers} servers; a topology has one")
    if workers > MAX_WORKERS:
        raise shape.error(f"{workers} workers; allowed: up to {MAX_WORKERS}. Others may be `hosts`, without a rank")
    if not 1 <= len(hosts) <= MAX_HOSTS:
        raise shape.error(f"{len(hosts)} hosts; allowed: 1 to {MAX_HOSTS}")
    if len(graph.switches) > MAX_SWITCHES:
        raise shape.error(f"{len(graph.switches)} switches; allowed: up to {MAX_SWITCHES}")
    if len(hosts) + len(graph.trunks) > MAX_LINKS:
        raise shape.error(f"{len(hosts) + len(graph.trunks)} links; allowed: up to {MAX_LINKS}")


def _name(form: str, graph: _Graph) -> str:
    workers = sum(role == "worker" for role, _ in graph.roles)
    return f"star{workers}" if form == "star" else form.replace("_", "-")


def _star(shape: Node, graph: _Graph) -> None:
    workers = number(_required(shape, "workers"), 1, MAX_WORKERS, "workers")
    extra = shape.child("hosts")
    graph.switches.append("sw")
    hosts = number(extra, 0, MAX_HOSTS, "hosts") if extra else 0
    graph.add({"server": 1, "workers": workers, "hosts": hosts}, "sw")


def _pair(first: str, second: str) -> Callable[[Node, _Graph], None]:
    """Two switches, one link between them."""

    def build(shape: Node, graph: _Graph) -> None:
        for switch in (first, second):
            graph.switches.append(switch)
            graph.add(_group(_required(shape, switch)), switch)
        graph.trunks.append((first, second))

    return build


def _leaf_spine(shape: Node, graph: _Graph) -> None:
    """Every leaf is linked to every spine."""
    leaves = number(_required(shape, "leaves"), 1, MAX_SWITCHES, "leaves")
    spines = number(_required(shape, "spines"), 1, MAX_SWITCHES, "spines")
    group = _group(_required(shape, "hosts_per_leaf"))
    lower, upper = _numbered("leaf", leaves), _numbered("spine", spines)
    graph.switches += [*lower, *upper]
    _fill(shape, graph, lower, group)
    graph.trunks += product(lower, upper)


def _fat_tree(shape: Node, graph: _Graph) -> None:
    """k pods of k/2 edge and k/2 aggregation switches, (k/2)^2 core switches (Al-Fares et al., SIGCOMM 2008)."""
    wanted = _required(shape, "k")
    k = number(wanted, 2, MAX_K, "ports a switch")
    if k % 2:
        raise wanted.error(f"{k} is odd; a fat tree has an even number of ports a switch")
    half = k // 2
    group = _group(given) if (given := shape.child("hosts_per_edge")) else {"workers": half}
    edge, agg, core = (_numbered(name, n) for name, n in (("edge", k * half), ("agg", k * half), ("core", half**2)))
    graph.switches += [*edge, *agg, *core]
    _fill(shape, graph, edge, group)
    for pod in range(k):
        inside = range(pod * half, (pod + 1) * half)
        graph.trunks += [(edge[low], agg[high]) for low, high in product(inside, inside)]
    graph.trunks += [(agg[n], core[n % half * half + up]) for n in range(k * half) for up in range(half)]


def _fill(shape: Node, graph: _Graph, switches: Sequence[str], group: dict[str, int]) -> None:
    """The same group at each of these switches; a server of its own only at the first."""
    for switch in switches:
        graph.add(group, switch)
    if group.get("server", 0) and len(switches) > 1:
        raise shape.error("`server` would stand at every switch; leave it out, the first worker is the server")


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}{n}" for n in range(1, count + 1)]


def _required(shape: Node, key: str) -> Node:
    found = shape.child(key)
    if found is None:
        raise shape.error("is required", key)
    return found


def _group(node: Node) -> dict[str, int]:
    if not node.is_mapping:
        return {"workers": number(node, 0, MAX_HOSTS, "hosts")}
    for key in node.items:
        if key not in GROUP_KEYS:
            allowed = ", ".join(GROUP_KEYS)
            raise node.error(f"unknown key {key!r}{did_you_mean(key, GROUP_KEYS)} (allowed: {allowed})", key)
    limits = {"server": 1, "workers": MAX_WORKERS, "hosts": MAX_HOSTS}
    return {key: number(value, 0, limits[key], key) for key, value in node.items.items()}


def number(node: Node, low: int, high: int, what: str) -> int:
    """A whole number in these limits. Raises SpecError."""
    count = node.value
    if isinstance(count, bool) or not isinstance(count, int):
        raise node.error(f"expected a number of {what} from {low} to {high}")
    if not low <= count <= high:
        raise node.error(f"{count} {what} are out of range; allowed: {low} to {high}")
    return count


_KEYS: dict[str, tuple[tuple[str, ...], str]] = {
    "star": (("workers", "hosts"), "{workers: 3}"),
    "dumbbell": (("left", "right"), "{left: 4, right: 1}"),
    "leaf_spine": (("leaves", "spines", "hosts_per_leaf"), "{leaves: 4, spines: 2, hosts_per_leaf: 4}"),
    "two_site": (("site1", "site2"), "{site1: 4, site2: 4}"),
    "fat_tree": (("k", "hosts_per_edge"), "{k: 4}"),
}
_FORMS: dict[str, Callable[[Node, _Graph], None]] = {
    "star": _star,
    "dumbbell": _pair("left", "right"),
    "leaf_spine": _leaf_spine,
    "two_site": _pair("site1", "site2"),
    "fat_tree": _fat_tree,
}

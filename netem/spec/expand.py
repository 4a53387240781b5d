"""Shorthands of files, expanded on the tree: bases, `{star: {workers: n}}`, wildcards in links, both-way properties.

What is of the wrong type is left alone here: the models refuse it with a better sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

from netem.spec.fields import did_you_mean
from netem.spec.merge import merge
from netem.spec.source import Node, make
from netem.spec.topology import MAX_WORKERS, SHAPE_KEYS

Find = Callable[[Node], Node]
"""Tree of the file that a node names (a bare name or a path). Raises SpecError at that node."""

MAX_BASES = 16


def with_bases(node: Node, find: Find) -> Node:
    """A mapping with `extends: base` merged on top of that base, and so on."""
    chain = [node]
    while (base := chain[-1].child("extends")) is not None:
        if not isinstance(base.value, str):
            raise base.error("expected the name or path of a file to extend")
        found = find(base)
        if len(chain) == MAX_BASES or any(found.mark.file == seen.mark.file for seen in chain):
            files = " -> ".join(seen.mark.file for seen in (*chain, found))
            raise base.error(f"files extend each other without an end: {files}")
        chain.append(found)
    merged = chain.pop().with_items(extends=None)
    while chain:
        merged = merge(merged, chain.pop().with_items(extends=None))
    return merged


def topology(node: Node, find: Find) -> Node:
    """The full form of a topology given by name, by `extends`, as a star, or in full."""
    if isinstance(node.value, str):
        node = find(node)
    if not node.is_mapping:
        return node
    node = with_bases(node, find)
    node = _star(_sized(node))
    return _links(node)


def _sized(node: Node) -> Node:
    """`workers: n` beside `extends`: the base with another number of workers, named worker1..n."""
    workers = node.child("workers")
    if workers is None:
        return node
    if (shape := node.child("star")) is not None:
        return node.with_items(workers=None, star=shape.with_items(workers=workers))
    hosts = node.child("hosts")
    if hosts is None or not hosts.is_mapping:
        raise workers.error("works with `extends` only, or as `star: {workers: n}`")
    kept = {name: host for name, host in hosts.items.items() if _role(host) != "worker"}
    added = {f"worker{rank}": make({"role": "worker"}, workers.mark) for rank in range(1, _count(workers) + 1)}
    for name in added.keys() & kept.keys():
        raise workers.error(f"the base already has a host {name!r} that is not a worker")
    return node.with_items(workers=None, hosts=replace(hosts, value=kept | added))


def _role(host: Node) -> object:
    role = host.child("role")
    return role.value if role else None


def _count(workers: Node) -> int:
    count = workers.value
    if isinstance(count, bool) or not isinstance(count, int):
        raise workers.error(f"expected a number of workers from 1 to {MAX_WORKERS}")
    if not 1 <= count <= MAX_WORKERS:
        raise workers.error(f"{count} workers are out of range; allowed: 1 to {MAX_WORKERS}")
    return count


def _star(node: Node) -> Node:
    """`star: {workers: n}`: hosts server and worker1..n, switch sw; links too unless they are given."""
    shape = node.child("star")
    if shape is None:
        return node
    for key in ("hosts", "switches"):
        if (other := node.child(key)) is not None:
            raise other.error(f"`{key}` and `star` exclude each other")
    if not shape.is_mapping:
        raise shape.error("expected a mapping such as {workers: 3}")
    for key in shape.items:
        if key != "workers":
            raise shape.error(f"unknown key {key!r}{did_you_mean(key, ['workers'])} (allowed: workers)", key)
    workers = shape.child("workers")
    if workers is None:
        raise shape.error("is required", "workers")
    count, mark = _count(workers), shape.mark
    hosts = {"server": {"role": "server"}} | {f"worker{r}": {"role": "worker"} for r in range(1, count + 1)}
    return node.with_items(
        star=None,
        name=node.child("name") or make(f"star{count}", mark),
        hosts=make(hosts, mark),
        switches=make(["sw"], mark),
        links=node.child("links") or make([{"between": ["*", "sw"]}], mark),
    )


def _links(node: Node) -> Node:
    """One link per host: wildcards expanded, an exact name before a wildcard, both-way properties in up and down."""
    hosts, switches, links = node.child("hosts"), node.child("switches"), node.child("links")
    if hosts is None or switches is None or links is None or not hosts.is_mapping:
        return node
    names = list(hosts.items)
    switch_names = [str(entry.value) for entry in switches.elements]
    chosen: dict[str, tuple[bool, Node]] = {}
    loose: list[Node] = []
    for link in links.elements:
        ends = _ends(link, switch_names)
        if ends is None:
            loose.append(link)
            continue
        pattern, switch = ends
        exact = pattern.value in names
        for host in matching(pattern, names, "host"):
            _choose(chosen, host, exact, _directed(link, host, switch))
    ordered = [chosen[name][1] for name in names if name in chosen]
    return node.with_items(links=replace(links, value=(*ordered, *loose))) if links.elements else node


def _ends(link: Node, switches: list[str]) -> tuple[Node, str] | None:
    """(host end, switch name), or None where `between` is not a list of texts."""
    between = link.child("between")
    if between is None or not isinstance(between.value, tuple):
        return None
    if len(between.elements) != 2:
        raise between.error(f"expected two names, a host and a switch, got {len(between.elements)}")
    first, second = between.elements
    if not isinstance(first.value, str) or not isinstance(second.value, str):
        return None
    if first.value in switches and second.value in switches:
        raise between.error("a link between switches is not supported: a topology is a star around one switch")
    if second.value in switches:
        return first, second.value
    if first.value in switches:
        return second, first.value
    listed = ", ".join(switches) or "none"
    neither = f"neither {first.value!r} nor {second.value!r} is a switch (switches: {listed})"
    raise between.error(f"a link joins a host and a switch; {neither}")


def matching(pattern: Node, hosts: Iterable[str], what: Literal["host", "worker"]) -> list[str]:
    """Hosts that a name or a wildcard means. Raises SpecError if there is none."""
    text, hosts = str(pattern.value), list(hosts)
    if text in hosts:
        return [text]
    found = [name for name in hosts if fnmatchcase(name, text)]
    if not found:
        problem = f"matches no {what}" if any(sign in text for sign in "*?[") else f"is not a {what}"
        raise pattern.error(f"{text!r} {problem}{did_you_mean(text, hosts)} ({what}s: {', '.join(hosts)})")
    return found


def _choose(chosen: dict[str, tuple[bool, Node]], host: str, exact: bool, link: Node) -> None:
    if host in chosen and chosen[host][0] == exact:
        where = chosen[host][1].mark
        raise link.error(f"host {host!r} is linked twice, already in {where.file} line {where.line}")
    if host not in chosen or exact:
        chosen[host] = (exact, link)


def _directed(link: Node, host: str, switch: str) -> Node:
    """The link of one host, with the properties that stand for both directions moved into `up` and `down`."""
    both = {key: node for key in SHAPE_KEYS if (node := link.child(key)) is not None}
    changes: dict[str, Node | None] = dict.fromkeys(both)
    changes["between"] = make((host, switch), link.items["between"].mark)
    for direction in ("up", "down"):
        own = link.child(direction) or Node({}, link.mark)
        changes[direction] = replace(own, value={**both, **own.items}) if own.is_mapping else own
    return link.with_items(**changes)


def scenario(node: Node, find_topology: Find, default_name: str) -> Node:
    """A scenario's tree (bases already merged) in its full form."""
    changes: dict[str, Node | None] = {}
    if node.child("name") is None:
        changes["name"] = make(default_name, node.mark)
    if (place := node.child("topology")) is not None:
        changes["topology"] = _named(topology(place, find_topology))
    if (transports := node.child("transports")) is not None and transports.is_mapping:
        kinds = {name: _transport(name, transport) for name, transport in transports.items.items()}
        changes["transports"] = replace(transports, value=kinds)
    if (bursts := node.child("bursts")) is not None and bursts.elements:
        changes["bursts"] = replace(bursts, value=tuple(_burst(burst) for burst in bursts.elements))
    if (workload := node.child("workload")) is not None:
        changes["workload"] = _workload(workload)
    return node.with_items(**changes)


def _named(place: Node) -> Node:
    return place.with_items(name=make("inline", place.mark)) if place.is_mapping and not place.child("name") else place


def _transport(name: str, node: Node) -> Node:
    """Without `kind`: tcp by its name, mlt by its name or `fixed`, else dblp; dblp's detector has a default."""
    if not node.is_mapping:
        return node
    if node.child("kind") is None:
        kind = "tcp" if name == "tcp" else "mlt" if name == "mlt" or node.child("fixed") is not None else "dblp"
        node = node.with_items(kind=make(kind, node.mark))
    if node.items["kind"].value == "dblp" and node.child("detector") is None:
        node = node.with_items(detector=make("every-n-rounds", node.mark))
    return node


def _burst(node: Node) -> Node:
    """`workers: worker1` is `workers: [worker1]`."""
    workers = node.child("workers")
    if workers is None or not isinstance(workers.value, str) or workers.value == "all":
        return node
    return node.with_items(workers=replace(workers, value=(workers,)))


def _workload(node: Node) -> Node:
    kind, iterations = node.child("kind"), node.child("iterations")
    if kind is None or kind.value != "replay" or iterations is None or node.child("iterations_per_epoch") is not None:
        return node
    return node.with_items(iterations_per_epoch=iterations)

"""Shorthands of files, expanded on the tree: bases, numbers of workers, roles; `shapes` and `links` do the rest.

What is of the wrong type is left alone here: the models refuse it with a better sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from netem.spec import links, shapes
from netem.spec.fields import did_you_mean
from netem.spec.merge import merge
from netem.spec.source import Node, make
from netem.spec.topology import MAX_WORKERS, SHAPES
from netem.spec.traces import TraceError, read_trace

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
    """The full form of a topology given by name, by `extends`, in a short form, or in full."""
    if isinstance(node.value, str):
        node = find(node)
    if not node.is_mapping:
        return node
    node = with_bases(node, find)
    node, base = shapes.expand(_sized(node))
    return links.expand(_with_roles(node), base)


def _sized(node: Node) -> Node:
    """`workers: n` beside `extends`: the base with another number of workers, named worker1..n."""
    workers = node.child("workers")
    if workers is None:
        return node
    if (shape := node.child("star")) is not None:
        return node.with_items(workers=None, star=shape.with_items(workers=workers))
    for form in SHAPES:
        if node.child(form) is not None:
            raise workers.error(f"does not say where they stand in `{form}`; give `{form}` itself")
    hosts = node.child("hosts")
    if hosts is None or not hosts.is_mapping:
        raise workers.error("works with `extends` only, or as `star: {workers: n}`")
    count = shapes.number(workers, 1, MAX_WORKERS, "workers")
    kept = {name: host for name, host in hosts.items.items() if _role(host) != "worker"}
    added = {f"worker{rank}": make({"role": "worker"}, workers.mark) for rank in range(1, count + 1)}
    for name in added.keys() & kept.keys():
        raise workers.error(f"the base already has a host {name!r} that is not a worker")
    return node.with_items(workers=None, hosts=replace(hosts, value=kept | added))


def _role(host: Node) -> object:
    role = host.child("role")
    return role.value if role else None


def _with_roles(node: Node) -> Node:
    """A host without a role is a worker, but for one that is called `server` where no other is the server."""
    hosts = node.child("hosts")
    if hosts is None or not hosts.is_mapping:
        return node
    servers = any(_role(host) == "server" for host in hosts.items.values())
    full = {}
    for name, host in hosts.items.items():
        if host.value is None:
            host = replace(host, value={})
        if host.is_mapping and host.child("role") is None:
            role = "server" if name == "server" and not servers else "worker"
            host = host.with_items(role=make(role, host.mark))
        full[name] = host
    return node.with_items(hosts=replace(hosts, value=full))


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
    if (events := node.child("events")) is not None and events.elements:
        changes["events"] = replace(events, value=tuple(_event(event) for event in events.elements))
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


def _event(node: Node) -> Node:
    """`on: worker1.up` is `on: [worker1.up]`; a trace is its rows; files lie beside the scenario that names them."""
    changes: dict[str, Node | None] = {}
    on, trace, replay = node.child("on"), node.child("trace"), node.child("replay")
    if on is not None and isinstance(on.value, str):
        changes["on"] = replace(on, value=(on,))
    if trace is not None and isinstance(trace.value, str):
        try:
            changes["trace"] = make(read_trace(_beside(trace)), trace.mark)
        except TraceError as error:
            raise trace.error(str(error)) from error
    if replay is not None:
        path = replay.child("path") if replay.is_mapping else replay
        if path is not None and isinstance(path.value, str):
            place = make(str(_beside(path).absolute()), path.mark)
            changes["replay"] = replay.with_items(path=place) if replay.is_mapping else place
    return node.with_items(**changes) if node.is_mapping else node


def _beside(name: Node) -> Path:
    """`--set` means the working directory."""
    here = Path() if name.mark.file.startswith("--set ") else Path(name.mark.file).parent
    return here / str(name.value)


def _workload(node: Node) -> Node:
    kind, iterations = node.child("kind"), node.child("iterations")
    if kind is None or kind.value != "replay" or iterations is None or node.child("iterations_per_epoch") is not None:
        return node
    return node.with_items(iterations_per_epoch=iterations)

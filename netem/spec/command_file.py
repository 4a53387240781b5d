"""`kind: command` in a file: wildcards and short forms expanded on the tree, and what types alone cannot say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from netem.spec.command import TEXTS, Command, Place, PlaceholderError, fill, placeholders
from netem.spec.expand import matching
from netem.spec.source import Node, Source, make
from netem.spec.topology import Topology

FOLDER = "{folder}"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_VALUE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DBLP_EVENTS")


def expand(root: Node) -> Node:
    """A scenario's tree with the workload of a command in full: a program for each host, texts for numbers."""
    work = root.child("workload")
    kind = work.child("kind") if work is not None else None
    if work is None or kind is None or kind.value != "command":
        return root
    topology = root.child("topology")
    hosts = topology.child("hosts") if topology is not None else None
    names = _rank_order(hosts) if hosts is not None else []
    changes: dict[str, Node | None] = {}
    if (run := work.child("run")) is not None and run.is_mapping and names:
        changes["run"] = _programs(run, names)
    if (env := work.child("env")) is not None:
        changes["env"] = _texts(env)
    if (variants := work.child("variants")) is not None and variants.is_mapping:
        changes["variants"] = replace(variants, value={name: _texts(each) for name, each in variants.items.items()})
    running = list(changes["run"].items) if changes.get("run") else []  # type: ignore[union-attr]
    if running:
        changes["until"] = _until(work, running, hosts)
    if (flow := work.child("flow")) is not None and flow.is_mapping and names:
        changes["flow"] = _flow(flow, names)
    return root.with_items(workload=work.with_items(**changes))


def _rank_order(hosts: Node) -> list[str]:
    """As `Topology.ranks`: servers first."""
    return sorted(hosts.items, key=lambda name: _role(hosts, name) != "server")


def _role(hosts: Node | None, name: str) -> object:
    role = hosts.items[name].child("role") if hosts is not None else None
    return role.value if role is not None else None


def _programs(run: Node, names: list[str]) -> Node:
    """One entry for each host that runs something; an exact name before a wildcard."""
    chosen: dict[str, tuple[bool, Node]] = {}
    for pattern, program in run.items.items():
        exact = pattern in names
        for host in matching(replace(program, value=pattern), names, "host"):
            if host in chosen and chosen[host][0] == exact:
                where = chosen[host][1].mark
                raise run.error(f"host {host!r} gets two programs, one already in line {where.line}", pattern)
            if host not in chosen or exact:
                chosen[host] = (exact, _program(program))
    return replace(run, value={name: chosen[name][1] for name in names if name in chosen})


def _program(node: Node) -> Node:
    """`[iperf3, -s]` stands for `{argv: [iperf3, -s]}`."""
    if isinstance(node.value, str):
        raise node.error(f"a program is a list of arguments, such as [{', '.join(node.value.split())}]")
    if node.value == ():
        raise node.error("is empty; a program is a list of arguments, such as [iperf3, -s]")
    if isinstance(node.value, tuple):
        node = Node({"argv": node}, node.mark)
    if not node.is_mapping:
        return node
    changes: dict[str, Node | None] = {}
    if (argv := node.child("argv")) is not None and argv.elements:
        changes["argv"] = replace(argv, value=tuple(_text(each) for each in argv.elements))
    if (env := node.child("env")) is not None:
        changes["env"] = _texts(env)
    return node.with_items(**changes)


def _texts(node: Node) -> Node:
    return replace(node, value={key: _text(each) for key, each in node.items.items()}) if node.is_mapping else node


def _text(node: Node) -> Node:
    """Numbers as they are written, and `{folder}`: that of the file in which it stands, or the current for `--set`."""
    if isinstance(node.value, bool | int | float):
        return replace(node, value=node.text or str(node.value))
    if not isinstance(node.value, str) or FOLDER not in node.value:
        return node
    folder = Path() if node.mark.file.startswith("--set") else Path(node.mark.file).parent
    text = node.value.replace(FOLDER, str(folder.resolve()))
    if node.value.startswith(f"{FOLDER}/") and not Path(text).exists():
        raise node.error(f"{text}: no such file")
    return replace(node, value=text)


def _until(work: Node, running: list[str], hosts: Node | None) -> Node:
    """`all`, `workers`, or names and wildcards of hosts that run a program -> a list of names."""
    until = work.child("until")
    if until is None:
        return make(running, work.mark)
    if until.value == "all":
        return make(running, until.mark)
    if until.value == "workers":
        found = [name for name in running if _role(hosts, name) == "worker"]
        if not found:
            raise until.error("no worker runs a program")
        return make(found, until.mark)
    patterns = until.elements or ((until,) if isinstance(until.value, str) else ())
    if not patterns:
        raise until.error("expected all, workers, or names of hosts that run a program")
    named = [name for pattern in patterns for name in matching(pattern, running, "host")]
    return make([name for name in running if name in named], until.mark)


def _flow(flow: Node, names: list[str]) -> Node:
    at = flow.child("at")
    if at is None:
        return flow.with_items(at=make(names[:1], flow.mark))
    patterns = at.elements or ((at,) if isinstance(at.value, str) else ())
    found = [name for pattern in patterns for name in matching(pattern, names, "host")]
    return flow.with_items(at=make([name for name in names if name in found], at.mark))


def first_host(topology: Topology) -> str:
    """The server, or the first host where nobody has a rank."""
    return next(iter((*topology.ranks, *topology.hosts)))


def check_command(work: Command, topology: Topology, source: Source) -> None:
    """Raises SpecError at what cannot run."""
    if not work.run:
        raise source.error(("workload", "run"), "names no program, such as server: [iperf3, -s]")
    for host, program in work.run.items():
        at = ("workload", "run", host)
        if program.ready is not None and (program.ready.tcp is None) == (program.ready.udp is None):
            raise source.error((*at, "ready"), "names one port, such as {tcp: 5201} or {udp: 5201}")
        _check_variables(program.env, (*at, "env"), source)
    _check_variables(work.env, ("workload", "env"), source)
    _check_variants(work, source)
    _check_flow(work, source)
    for name in work.names:
        for host in work.run:
            _check_placeholders(work, host, name, topology, source)


def _check_variables(env: dict[str, str], at: tuple[str | int, ...], source: Source) -> None:
    for name in env:
        if not _VARIABLE.fullmatch(name):
            raise source.error((*at, name), f"{name!r} is not a name of an environment variable")
        if name in RESERVED:
            raise source.error((*at, name), "is set by the testbed")


def _check_variants(work: Command, source: Source) -> None:
    first = next(iter(work.variants.values()), {})
    for name, values in work.variants.items():
        at = ("workload", "variants", name)
        if not _NAME.fullmatch(name):
            message = f"{name!r} is not a valid name: a letter, then letters, digits, - and _, at most 32"
            raise source.error(at, message)
        for key in values:
            if key in TEXTS or not _VALUE.fullmatch(key):
                taken = "is a placeholder already" if key in TEXTS else "is not a name of a placeholder"
                raise source.error((*at, key), taken)
        if values.keys() != first.keys():
            listed = ", ".join(first) or "none"
            raise source.error(at, f"all variants have the same keys; the first has {listed}")


def _check_flow(work: Command, source: Source) -> None:
    flow = work.flow
    if flow is None:
        return
    if flow.key and flow.proto != "udp":
        raise source.error(
            ("workload", "flow", "key"), "is for udp alone: a TCP segment does not say which transmission it is"
        )
    for index, (start, stop) in enumerate(flow.key):
        if not 0 <= start < stop <= 1024:
            message = f"[{start}, {stop}] is no byte range; the first byte and the one after the last, such as [0, 8]"
            raise source.error(("workload", "flow", "key", index), message)


def _check_placeholders(work: Command, host: str, variant: str, topology: Topology, source: Source) -> None:
    addresses = dict.fromkeys(topology.hosts, "")  # what stands in for them does not matter
    values = placeholders(work, Place(host, addresses, first_host(topology), "", variant=variant))
    program, at = work.run[host], ("workload", "run", host)
    texts: list[tuple[tuple[str | int, ...], str]] = [
        *(((*at, "argv", index), text) for index, text in enumerate(program.argv)),
        *(((*at, "env", key), text) for key, text in program.env.items()),
        *((("workload", "env", key), text) for key, text in work.env.items()),
    ]
    for path, text in texts:
        try:
            fill(text, values)
        except PlaceholderError as error:
            raise source.error(path, str(error)) from error

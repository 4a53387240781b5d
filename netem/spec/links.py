"""The links of a topology's file, expanded on the tree: wildcards at either end, defaults, both-way properties.

What is of the wrong type is left alone here: the models refuse it with a better sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

from netem.kernel import distributions
from netem.spec.fields import did_you_mean
from netem.spec.source import Mark, Node, make
from netem.spec.topology import SHAPE_KEYS

Pair = tuple[str, str]


@dataclass(frozen=True)
class _Entry:
    """One entry of `links`: the names that each of its two ends stands for, and which ends are exact names."""

    node: Node
    ends: tuple[list[str], list[str]]
    exact: tuple[bool, bool]

    def pairs(self) -> Iterator[Pair]:
        return ((a, b) for a, b in product(*self.ends) if a != b)

    def words(self) -> str:
        return " and ".join(repr(end.value) for end in self.node.items["between"].elements)


@dataclass(frozen=True)
class _Nodes:
    hosts: Sequence[str]
    switches: Sequence[str]


def expand(node: Node, base: Sequence[Pair] | None) -> Node:
    """`links` in full: one for each host in the hosts' order, then those between switches.

    base: the links of a short form. `links` then says what some of them do; without a base it says which there are.
    """
    hosts, switches, links = node.child("hosts"), node.child("switches"), node.child("links")
    defaults = _defaults(node)
    node = node.with_items(defaults=None)
    if links is None and base is not None:
        links = make((), node.mark)
    if hosts is None or switches is None or links is None or not hosts.is_mapping or not isinstance(links.value, tuple):
        return node
    names = _Nodes(list(hosts.items), [str(entry.value) for entry in switches.elements])
    entries, loose = _entries(links, names)
    chosen = _made(entries, names) if base is None else _applied(entries, base, names, links.mark)
    ordered = sorted(chosen, key=lambda c: names.hosts.index(c[0][0]) if c[0][0] in names.hosts else len(names.hosts))
    full = [_directed(entry, pair, defaults) for pair, entry in ordered]
    return node.with_items(links=replace(links, value=(*full, *loose)))


def _defaults(node: Node) -> Node:
    given = node.child("defaults")
    if given is None:
        return Node({}, node.mark)
    if not given.is_mapping:
        raise given.error(
            "expected a mapping such as {rate: 10 Gbit}: properties of all links that do not say their own"
        )
    if given.child("between") is not None:
        raise given.error("`defaults` are for all links; those between certain nodes stand in `links`", "between")
    return given


def _entries(links: Node, names: _Nodes) -> tuple[list[_Entry], list[Node]]:
    entries, loose = [], []
    for link in links.elements:
        entry = _entry(link, names)
        if entry is None:
            loose.append(link)
        else:
            entries.append(entry)
    return entries, loose


def _entry(link: Node, names: _Nodes) -> _Entry | None:
    """None where `between` is not a list of two texts."""
    between = link.child("between")
    if between is None or not isinstance(between.value, tuple):
        return None
    if len(between.elements) != 2:
        raise between.error(f"expected two names, a host and a switch or two switches, got {len(between.elements)}")
    first, second = between.elements
    if not isinstance(first.value, str) or not isinstance(second.value, str):
        return None
    ends = (_meant(first, names), _meant(second, names))
    exact = tuple(str(end.value) in (*names.hosts, *names.switches) for end in (first, second))
    if all(exact) and first.value == second.value:
        raise between.error(f"{first.value!r} is linked to itself")
    entry = _Entry(link, ends, (exact[0], exact[1]))
    for a, b in entry.pairs():
        if not {a, b} & set(names.switches):
            listed = ", ".join(names.switches) or "none"
            why = f"neither {a!r} nor {b!r} is a switch (switches: {listed})"
            raise between.error(f"a link joins a host and a switch, or two switches; {why}")
    return entry


def _meant(end: Node, names: _Nodes) -> list[str]:
    """A name; or the hosts that a wildcard means, and the switches where it means no host."""
    text = str(end.value)
    if text in names.hosts or text in names.switches:
        return [text]
    wild = any(sign in text for sign in "*?[")
    for group in (names.hosts, names.switches) if wild else ():
        if found := [name for name in group if fnmatchcase(name, text)]:
            return found
    problem = "matches no host and no switch" if wild else "is not a host, nor a switch"
    known = f"(hosts: {', '.join(names.hosts)}; switches: {', '.join(names.switches) or 'none'})"
    raise end.error(f"{text!r} {problem}{did_you_mean(text, [*names.hosts, *names.switches])} {known}")


def _made(entries: Sequence[_Entry], names: _Nodes) -> list[tuple[Pair, Node]]:
    """The links that entries make: one of each host, one of each two switches. An exact name beats a wildcard."""
    chosen: dict[frozenset[str], tuple[int, Pair, Node]] = {}
    for entry in entries:
        own: dict[frozenset[str], Pair] = {}
        for pair in entry.pairs():
            a, b = pair if pair[1] not in names.hosts else pair[::-1]
            host = a in names.hosts
            key = frozenset((a,)) if host else frozenset((a, b))
            if host and key in own:
                raise entry.node.error(f"host {a!r} would have two links, to {own[key][1]} and {b}; a host has one")
            if key not in own:
                own[key] = (a, b)
        for key, pair in own.items():
            # Of a host's link only the host counts: `[worker1, leaf2]` beats `["*", leaf1]`.
            sure = _sure(entry, pair[0]) if len(key) == 1 else sum(entry.exact)
            _choose(chosen, key, sure, pair, entry.node)
    return [(pair, node) for _, pair, node in chosen.values()]


def _sure(entry: _Entry, host: str) -> int:
    return int(any(exact and end == [host] for exact, end in zip(entry.exact, entry.ends, strict=True)))


def _choose(
    chosen: dict[frozenset[str], tuple[int, Pair, Node]], key: frozenset[str], sure: int, pair: Pair, node: Node
) -> None:
    known = chosen.get(key)
    if known is None or known[0] < sure:
        chosen[key] = (sure, pair, node)
    elif known[0] == sure:
        where = known[2].mark
        what = f"host {pair[0]!r} is" if len(key) == 1 else f"switches {pair[0]!r} and {pair[1]!r} are"
        raise node.error(f"{what} linked twice, already in {where.file} line {where.line}")


def _applied(entries: Sequence[_Entry], base: Sequence[Pair], names: _Nodes, mark: Mark) -> list[tuple[Pair, Node]]:
    """The links of a short form, each with the entry that says most exactly that it is meant."""
    chosen: dict[frozenset[str], tuple[int, Pair, Node]] = {}
    known = {frozenset(pair): pair for pair in base}
    for entry in entries:
        hit = {frozenset(pair): pair for pair in reversed(list(entry.pairs())) if frozenset(pair) in known}
        if not hit:
            raise entry.node.error(f"the short form has no link between {entry.words()}", "between")
        for key, pair in hit.items():
            oriented = known[key] if known[key][0] in names.hosts else pair
            _choose_applied(chosen, key, sum(entry.exact), oriented, entry.node)
    plain = Node({}, mark)
    return [chosen[key][1:] if (key := frozenset(pair)) in chosen else (pair, plain) for pair in base]


def _choose_applied(
    chosen: dict[frozenset[str], tuple[int, Pair, Node]], key: frozenset[str], sure: int, pair: Pair, node: Node
) -> None:
    known = chosen.get(key)
    if known is not None and known[0] == sure:
        where = f"{known[2].mark.file} line {known[2].mark.line}"
        raise node.error(f"the link between {pair[0]!r} and {pair[1]!r} is described twice, already in {where}")
    if known is None or known[0] < sure:
        chosen[key] = (sure, pair, node)


def _directed(link: Node, pair: Pair, defaults: Node) -> Node:
    """One link, with the properties that stand for both directions moved into `up` and `down`."""
    between = link.child("between")
    changes: dict[str, Node | None] = dict.fromkeys(SHAPE_KEYS)
    changes["between"] = make(pair, between.mark if between else link.mark)
    changes["reorder"] = next(filter(None, map(_policy, (link, defaults))), None)
    for key, value in defaults.items.items():
        if key not in (*SHAPE_KEYS, "up", "down"):
            changes[key] = link.child(key) or value
    for direction in ("up", "down"):
        changes[direction] = _direction(direction, link, defaults)
    return link.with_items(**changes)


def _direction(direction: str, link: Node, defaults: Node) -> Node:
    """Of the same key, what the link says of this direction wins, then of both; then what the defaults say."""
    merged: dict[str, Node] = {}
    place = link
    for level in (defaults, link):
        merged |= {key: node for key in SHAPE_KEYS if (node := level.child(key)) is not None}
        if _policy(level) is not None:
            del merged["reorder"]
        own = level.child(direction)
        if own is not None:
            if not own.is_mapping:
                return own
            place = own
            merged |= own.items
    return _shape(Node(merged, place.mark))


def _policy(level: Node) -> Node | None:
    """`reorder: allow` is about what jitter may do; `reorder: 5%` is a property of a direction."""
    reorder = level.child("reorder")
    return reorder if reorder is not None and reorder.value in ("refuse", "allow") else None


def _shape(shape: Node) -> Node:
    """One direction: `reorder: 5%` is `reorder: {ratio: 5%}`, and the path of a table becomes its values."""
    if (reorder := shape.child("reorder")) is not None and isinstance(reorder.value, str | int | float):
        shape = shape.with_items(reorder=Node({"ratio": reorder}, reorder.mark))
    shape = _with_table(shape)
    slot = shape.child("slot")
    return shape.with_items(slot=_with_table(slot)) if slot is not None and slot.is_mapping else shape


def _with_table(node: Node) -> Node:
    """The path is relative to the file that names it."""
    named = node.child("distribution")
    if named is None or not isinstance(named.value, str) or named.value in ("uniform", *distributions.NAMES):
        return node
    path = Path(named.mark.file).parent / named.value
    try:
        table = distributions.parse(path.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        names = ", ".join(("uniform", *distributions.NAMES))
        reason = error.strerror if isinstance(error, OSError) else error
        guess = did_you_mean(named.value, distributions.NAMES)
        raise named.error(f"{path}: {reason}; expected {names}, or the file of a table{guess}") from error
    return node.with_items(distribution=make(list(table), named.mark))

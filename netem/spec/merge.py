"""Bases and overrides, applied to trees before validation.

A base is merged like a JSON merge patch (RFC 7396): mappings key by key, everything else replaced, null removes a key.
"""

from __future__ import annotations

from dataclasses import replace

from netem.spec.source import Key, Mark, Node, Path_, SpecError, dotted, parse_value

_REPLACED_WHOLE = frozenset({"topology", "detector"})
"""Keys whose mappings are one choice: merging `{paper: ...}` into `{schedule: ...}` would give two."""

_SHORTHANDS = {"topology": "extends", "profile": "base"}
"""Keys whose text value stands for a mapping, so that `--set topology.workers=8` works on `topology: star3`."""

_LISTS = frozenset({"bursts", "expect", "switches", "links"})
MAX_ECHO = 100
"""Characters of an assignment that an error repeats."""


def merge(base: Node, over: Node) -> Node:
    """`over` on top of `base`; both are mappings."""
    if _other_kind(base, over):
        return over
    changes: dict[str, Node | None] = {}
    for key, node in over.items.items():
        below = base.child(key)
        if node.value is None and below is not None:
            changes[key] = None
        elif below is not None and below.is_mapping and node.is_mapping and key not in _REPLACED_WHOLE:
            changes[key] = merge(below, node)
        else:
            changes[key] = node
    return replace(base, mark=over.mark).with_items(**changes)


def _other_kind(base: Node, over: Node) -> bool:
    """A workload of another kind shares no keys with the one it replaces."""
    old, new = base.child("kind"), over.child("kind")
    return old is not None and new is not None and old.value != new.value


def override(root: Node, assignment: str) -> Node:
    """The tree with `key=value` applied: a dotted path, and a value in YAML; null removes the key. Raises SpecError."""
    name, equals, text = assignment.partition("=")
    path = tuple(int(part) if part.isdigit() else part for part in name.strip().split("."))
    shown = assignment if len(assignment) <= MAX_ECHO else f"{assignment[: MAX_ECHO - 3]}..."
    mark = Mark(f"--set {shown}", None, path)
    if not equals or any(part == "" for part in path):
        raise SpecError(mark.file, None, "", "expected key=value such as seed=3 or bursts.0.loss=80%")
    value = parse_value(text, mark, lines=False)
    return _assign(root, path, value, ())


def _assign(node: Node, path: Path_, value: Node, done: Path_) -> Node:
    key, rest = path[0], path[1:]
    node = _widen(node, value, done)
    if isinstance(key, int) and done and done[-1] in _LISTS and not node.elements and not node.items:
        raise _error(value, done, f"there is no {dotted((*done, key))}: the file has no {done[-1]}")
    if node.elements or node.value == ():
        return _assign_element(node, key, rest, value, done)
    if not node.is_mapping and node.value is not None:
        raise _error(value, done, f"{dotted(done)} is {node.value!r} and has no key {key!r}")
    key = str(key)
    if not rest:
        # A null for a key that is not here stays: it may remove the key of a base, and is an error otherwise.
        removes = value.value is None and node.child(key) is not None
        return node.with_items(**{key: None if removes else value})
    below = node.child(key) or Node({}, value.mark)
    return node.with_items(**{key: _assign(below, rest, value, (*done, key))})


def _assign_element(node: Node, key: Key, rest: Path_, value: Node, done: Path_) -> Node:
    entries = list(node.elements)
    if not isinstance(key, int) or key >= len(entries):
        last = f"0 to {len(entries) - 1}" if entries else "none, it is empty"
        raise _error(value, done, f"{dotted(done)} is a list; its entries are {last}")
    entries[key] = _assign(entries[key], rest, value, (*done, key)) if rest else value
    return replace(node, value=tuple(entries))


def _widen(node: Node, value: Node, done: Path_) -> Node:
    if len(done) == 1 and done[0] in _SHORTHANDS and isinstance(node.value, str):
        return replace(node, value={_SHORTHANDS[str(done[0])]: replace(node)})
    if node.value is None:
        return Node({}, value.mark)
    return node


def _error(value: Node, done: Path_, message: str) -> SpecError:
    return SpecError(value.mark.file, None, dotted(value.mark.path), message)

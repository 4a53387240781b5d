"""YAML with line numbers: a tree of values that remember where each was written.

The tree is what bases (`extends`), overrides (`--set`) and shorthands are merged in, so that an error found much later
still names the file, the line and the key that the user wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Union

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

Key = Union[str, int]  # noqa: UP007 - a runtime alias
Path_ = tuple[Key, ...]
Scalar = Union[str, int, float, bool, None]  # noqa: UP007

MAX_NODES = 50_000
"""More than any honest file has: a few nested aliases can describe billions of values."""
MAX_DEPTH = 50

_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "null", "bool", "int", "float", "str", "timestamp")}
_TEXT_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "timestamp")}


class SpecError(Exception):
    """A scenario or topology that is not valid (exit status 2).

    `line` is 1-based, or None where the whole file or a `--set` is meant; `key` is a dotted path, or empty.
    """

    exit_status = 2

    def __init__(self, file: str, line: int | None, key: str, message: str) -> None:
        self.file, self.line, self.key, self.message = file, line, key, message
        place = f"{file}:{line}" if line is not None else file
        super().__init__(": ".join(part for part in (place, key, message) if part))

    def as_json(self) -> dict[str, Any]:
        return {"file": self.file, "line": self.line, "key": self.key, "message": self.message}


@dataclass(frozen=True)
class Mark:
    """Where a value was written: file (or `--set KEY`), 1-based line, and the key path in that file."""

    file: str
    line: int | None = None
    path: Path_ = ()


@dataclass(frozen=True)
class Node:
    """A value and where it was written. Never changed: merging makes new nodes."""

    value: Mapping[str, Node] | tuple[Node, ...] | Scalar
    mark: Mark
    text: str = ""
    """What a scalar of a file looks like there: 0.10 is no longer told from 0.1 by its value."""

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.value, Mapping)

    @property
    def items(self) -> Mapping[str, Node]:
        """The entries of a mapping; empty for anything else."""
        return self.value if isinstance(self.value, Mapping) else {}

    @property
    def elements(self) -> tuple[Node, ...]:
        """The entries of a list; empty for anything else."""
        return self.value if isinstance(self.value, tuple) else ()

    def child(self, key: Key) -> Node | None:
        if isinstance(key, str):
            return self.items.get(key)
        return self.elements[key] if 0 <= key < len(self.elements) else None

    def plain(self) -> Any:
        """Dicts, tuples and scalars."""
        if isinstance(self.value, Mapping):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, tuple):
            return tuple(node.plain() for node in self.value)
        return self.value

    def with_items(self, **changes: Node | None) -> Node:
        """This mapping with some entries set, or (None) removed."""
        items = {key: node for key, node in self.items.items() if changes.get(key, node) is not None}
        items |= {key: node for key, node in changes.items() if node is not None}
        return replace(self, value=items)

    def error(self, message: str, *keys: Key) -> SpecError:
        """An error at the place of this node, or of what is below it at `keys` as far as that exists."""
        node, rest = self, list(keys)
        while rest and (below := node.child(rest[0])) is not None:
            node = below
            rest.pop(0)
        return SpecError(node.mark.file, node.mark.line, dotted((*node.mark.path, *rest)), message)


@dataclass(frozen=True)
class Source:
    """The tree that a spec was made from, after bases, overrides and shorthands."""

    file: str
    root: Node

    def error(self, path: Path_, message: str) -> SpecError:
        return self.root.error(message, *path)

    def line(self, path: Path_) -> int | None:
        return self.error(path, "").line


def dotted(path: Path_) -> str:
    """`bursts.0.loss`, as `--set` takes it."""
    return ".".join(str(key) for key in path)


def make(value: Any, mark: Mark) -> Node:
    """A tree from plain values, all written at one place."""
    if isinstance(value, Node):
        return value
    if isinstance(value, Mapping):
        return Node({key: make(item, mark) for key, item in value.items()}, mark)
    if isinstance(value, list | tuple):
        return Node(tuple(make(item, mark) for item in value), mark)
    return Node(value, mark)


def read_file(path: Path) -> Node:
    """The tree of a YAML file. Raises SpecError, also for a file that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(str(path), None, "", f"is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise SpecError(str(path), None, "", f"cannot be read: {error.strerror}") from error
    return parse(text, str(path))


def parse(text: str, file: str) -> Node:
    """The tree of one YAML document that must be a mapping. Raises SpecError."""
    root = parse_value(text, Mark(file))
    if root.value is None:
        raise SpecError(file, None, "", "the file is empty; a mapping such as `name: burst90` is expected")
    if not root.is_mapping:
        what = "a list" if isinstance(root.value, tuple) else f"just {root.value!r}"
        raise SpecError(file, root.mark.line, "", f"the file is {what}; a mapping such as `name: burst90` is expected")
    return root


def parse_value(text: str, mark: Mark, *, lines: bool = True) -> Node:
    """The tree of any YAML value, None for an empty text. Without `lines` every node gets `mark`'s line."""
    yaml = YAML(typ="safe", pure=True)
    try:
        composed = yaml.compose(text)
        if composed is None:
            return Node(None, mark)
        return _Reader(yaml, mark, lines).read(composed, mark.path, ())
    except MarkedYAMLError as error:
        place = error.problem_mark or error.context_mark
        line = place.line + 1 if place is not None and lines else mark.line
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise SpecError(mark.file, line, dotted(mark.path), f"not valid YAML: {problem}") from error
    except (YAMLError, ValueError) as error:
        problem = str(error).splitlines()[0] if str(error) else "unreadable"
        raise SpecError(mark.file, mark.line, dotted(mark.path), f"not valid YAML: {problem}") from error
    except RecursionError as error:
        raise SpecError(mark.file, mark.line, dotted(mark.path), "is nested too deeply") from error


class _Reader:
    """Turns ruamel's node graph into a tree; refuses what the graph can do and a spec must not."""

    def __init__(self, yaml: YAML, mark: Mark, lines: bool) -> None:
        self._yaml, self._mark, self._lines = yaml, mark, lines
        self._count = 0

    def read(self, node: Any, path: Path_, parents: tuple[int, ...], line: int | None = None) -> Node:
        mark = Mark(self._mark.file, self._line(node) if line is None else line, path)
        self._count += 1
        if self._count > MAX_NODES:
            raise SpecError(mark.file, mark.line, dotted(path), f"more than {MAX_NODES} values")
        if id(node) in parents:
            raise SpecError(mark.file, mark.line, dotted(path), "an alias that contains itself")
        if len(parents) == MAX_DEPTH:
            raise SpecError(mark.file, mark.line, dotted(path[:8]), "is nested too deeply")
        parents = (*parents, id(node))
        if str(node.tag) not in _TAGS:
            raise SpecError(mark.file, mark.line, dotted(path), f"the YAML tag {node.tag} is not supported")
        if isinstance(node, MappingNode):
            return Node(dict(self._entries(node, path, parents)), mark)
        if isinstance(node, SequenceNode):
            return Node(tuple(self.read(n, (*path, i), parents) for i, n in enumerate(node.value)), mark)
        return Node(self._scalar(node), mark, str(node.value))

    def _entries(self, node: MappingNode, path: Path_, parents: tuple[int, ...]) -> Iterator[tuple[str, Node]]:
        seen: dict[str, int | None] = {}
        for key_node, value_node in node.value:
            line = self._line(key_node)
            if not isinstance(key_node, ScalarNode):
                raise SpecError(self._mark.file, line, dotted(path), "a key must be plain text")
            key = str(key_node.value)
            if key in seen:
                message = f"duplicate key {key!r}, already given in line {seen[key]}"
                raise SpecError(self._mark.file, line, dotted((*path, key)), message)
            if key == "<<":
                raise SpecError(self._mark.file, line, dotted(path), "merge keys (<<) are not supported; use `extends`")
            seen[key] = line
            yield key, self.read(value_node, (*path, key), parents, line)

    def _scalar(self, node: Any) -> Scalar:
        if str(node.tag) in _TEXT_TAGS:
            return str(node.value)
        value: Scalar = self._yaml.constructor.construct_object(node, deep=True)
        return value

    def _line(self, node: Any) -> int | None:
        return node.start_mark.line + 1 if self._lines else self._mark.line

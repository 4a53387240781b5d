"""From a file name to a validated spec, and back to a file in which everything is explicit."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML

from netem.spec import command_file, expand
from netem.spec.checks import any_hosts, burst_workers, capture_hosts, check_scenario, check_topology
from netem.spec.event_checks import check_events, event_links
from netem.spec.fields import FROM_FILE, WITH_UNITS, did_you_mean, explain
from netem.spec.merge import override
from netem.spec.scenario import Scenario
from netem.spec.source import Node, Path_, Source, SpecError, parse, read_file
from netem.spec.topology import SHAPES, Topology
from netem.spec.traffic_checks import resolve_traffic

Kind = Literal["scenario", "topology"]
_FOLDERS: dict[Kind, str] = {"scenario": "scenarios", "topology": "topologies"}
_SUFFIXES = (".yaml", ".yml")

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Loaded:
    """A valid scenario, and where each part of it was written (for errors that are found later)."""

    spec: Scenario
    source: Source


def load_scenario(name: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """A scenario by path or bare name, with `key=value` overrides. Raises SpecError."""
    path = _locate("scenario", str(name), None)
    return _scenario(read_file(path), path.stem, overrides)


def load_scenario_text(text: str, overrides: Sequence[str] = (), *, file: str = "<text>") -> Loaded:
    """The same from YAML text. `file` is the name used in errors."""
    return _scenario(parse(text, file), "scenario", overrides)


def load_topology(name: str | Path, overrides: Sequence[str] = ()) -> Topology:
    """A topology by path or bare name, with `key=value` overrides. Raises SpecError."""
    path = _locate("topology", str(name), None)
    root = read_file(path)
    if not any(root.child(key) is not None for key in ("name", "extends", *SHAPES)):
        root = root.with_items(name=Node(path.stem, root.mark))
    return _topology(root, overrides)


def load_topology_text(text: str, overrides: Sequence[str] = (), *, file: str = "<text>") -> Topology:
    """The same from YAML text. `file` is the name used in errors."""
    return _topology(parse(text, file), overrides)


def available(kind: Kind) -> tuple[str, ...]:
    """Bare names that would be found from the working directory, sorted."""
    return tuple(sorted({path.stem for folder in _folders(kind) for path in _files(folder)}))


def resolved_yaml(spec: Scenario | Topology) -> str:
    """The spec as a file in which everything is explicit; loading it gives an equal spec."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # annotated too narrowly
    yaml.width = 4096
    buffer = io.StringIO()
    yaml.dump(_lists(spec.model_dump(by_alias=True, context=WITH_UNITS)), buffer)
    return buffer.getvalue()


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _scenario(root: Node, default_name: str, overrides: Sequence[str]) -> Loaded:
    file = root.mark.file
    root = expand.with_bases(root, _finder("scenario"))
    for assignment in overrides:
        root = override(root, assignment)
    full = expand.scenario(root, _finder("topology"), default_name)
    source = Source(file, command_file.expand(full))
    spec = _validated(Scenario, source)
    check_topology(spec.topology, source, ("topology",))
    bursts = tuple(
        burst.model_copy(update={"workers": burst_workers(spec, index, source)})
        for index, burst in enumerate(spec.bursts)
    )
    capture = spec.capture.model_copy(update={"at": capture_hosts(spec, source)})
    events = tuple(
        event.model_copy(update={"on": event_links(event, index, spec, source)})
        for index, event in enumerate(spec.events)
    )
    spec = spec.model_copy(update={"bursts": bursts, "events": events, "capture": capture})
    spec = resolve_traffic(spec, source, lambda names, at: any_hosts(spec, source, names, at))
    check_scenario(spec, source)
    check_events(spec, source)
    return Loaded(spec, source)


def _topology(root: Node, overrides: Sequence[str]) -> Topology:
    file = root.mark.file
    for assignment in overrides:
        root = override(root, assignment)
    source = Source(file, expand.topology(root, _finder("topology")))
    topology = _validated(Topology, source)
    check_topology(topology, source)
    return topology


def _validated(model: type[M], source: Source) -> M:
    try:
        return model.model_validate(source.root.plain(), context=FROM_FILE)
    except ValidationError as error:
        problems = [explain(entry) for entry in error.errors(include_url=False)]
        errors = [source.error((*_real(source.root, at), *below), text) for at, below, text in problems]
        raise min(errors, key=lambda e: (e.file != source.file, e.line or 0)) from error


def _real(root: Node, location: Path_) -> Path_:
    """Pydantic's location without the names of union members that it puts in between."""
    path: list[Any] = []
    node = root
    for key in location:
        below = node.child(key)
        if below is not None:
            node = below
            path.append(key)
    return tuple(path)


def _finder(kind: Kind) -> Callable[[Node], Node]:
    def find(node: Node) -> Node:
        return read_file(_locate(kind, str(node.value), node))

    return find


def _locate(kind: Kind, name: str, asked_at: Node | None) -> Path:
    """The file that a name means: a path (relative to the file that names it), ./scenarios, then what is shipped."""
    here = Path(asked_at.mark.file).parent if asked_at is not None else Path()
    as_path = here / name
    if as_path.is_file():
        return as_path
    if not _is_path(name):
        for folder in _folders(kind):
            for path in _files(folder):
                if path.stem == name:
                    return path
    raise _missing(kind, name, asked_at, as_path)


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith(_SUFFIXES)


def _folders(kind: Kind) -> Iterator[Path]:
    """Where bare names are looked up, first match first."""
    package = Path(__file__).resolve().parent.parent
    yield Path(_FOLDERS[kind])
    yield package / "_data" / _FOLDERS[kind]  # an installed wheel
    if (package.parent / "pyproject.toml").is_file():
        yield package.parent / _FOLDERS[kind]  # a source checkout


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file())


def _missing(kind: Kind, name: str, asked_at: Node | None, as_path: Path) -> SpecError:
    known = available(kind)
    if as_path.is_dir() and _is_path(name):
        message = f"is a folder, not a {kind}"
    elif _is_path(name):
        message = f"no such file{did_you_mean(Path(name).stem, known)}"
    else:
        message = f"no {kind} {name!r}{did_you_mean(name, known)} (known: {', '.join(known) or 'none'})"
    if asked_at is not None:
        return asked_at.error(f"{as_path}: {message}" if _is_path(name) else message)
    return SpecError(name, None, "", message)

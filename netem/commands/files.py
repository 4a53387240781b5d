"""validate, show, schema: commands about files. They need no privileges and build nothing."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from netem.commands import options
from netem.commands.failure import CommandError, print_json, report, translate
from netem.statuses import OK, USAGE

if TYPE_CHECKING:
    from netem.spec import Loaded, Topology

_TOPOLOGY_KEYS = {"hosts", "switches", "links", "defaults", "workers"}
_SCENARIO_KEYS = {"workload", "transports", "topology", "bursts", "events", "seed", "expect"}


class Kind(enum.StrEnum):
    """What a file describes."""

    scenario = "scenario"
    topology = "topology"


def validate(
    names: options.SpecNames,
    set_: options.Overrides = None,
    seed: options.Seed = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Check scenarios and topologies. Says file, line and key of the first error in each."""
    from netem.spec import SpecError

    results: list[dict[str, Any]] = []
    for name in names:
        try:
            results.append(_valid(name, set_, seed))
        except SpecError as error:
            results.append({"name": name, "ok": False, "error": error.as_json()})
            report(translate(error), as_json=False)
        if not json and results[-1]["ok"]:
            typer.echo(f"{results[-1]['file']}: valid {results[-1]['kind']}: {results[-1]['summary']}")
    ok = all(result["ok"] for result in results)
    if json:
        print_json({"ok": ok, "exit_status": OK if ok else USAGE, "files": results})
    return OK if ok else USAGE


def _valid(name: str, set_: list[str] | None, seed: int | None) -> dict[str, Any]:
    from netem.spec import Command, Topology, iterations_total

    loaded = load(name, set_, seed)
    if isinstance(loaded, Topology):
        plain = sum(host.role == "host" for host in loaded.hosts.values())
        words = f"1 server, {_count(len(loaded.workers), 'worker')}" if loaded.ranks else ""
        words += f"{', ' if words and plain else ''}{_count(plain, 'host')} without a rank" if plain else ""
        return {"name": name, "ok": True, "kind": "topology", "file": name, "summary": words}
    spec = loaded.spec
    bursts = _count(len(spec.bursts), "burst") + (f", {_count(len(spec.events), 'event')}" if spec.events else "")
    if isinstance(spec.workload, Command):
        programs = _count(len(spec.workload.run), "program")
        words = f"{programs}, {bursts}, variants {', '.join(spec.workload.names)}"
    else:
        words = (
            f"{_count(iterations_total(spec), 'iteration')}, {bursts}, "
            f"{_count(len(spec.topology.workers), 'worker')}, transports {', '.join(spec.transports)}"
        )
    return {"name": name, "ok": True, "kind": "scenario", "file": loaded.source.file, "summary": words}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def show(
    name: options.SpecName,
    svg: Annotated[
        Path | None,
        typer.Option("--svg", metavar="FILE", help="Draw the topology into this file instead.", show_default=False),
    ] = None,
    set_: options.Overrides = None,
    seed: options.Seed = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Show a scenario or topology with everything explicit: a summary in a comment, then a file that loads again."""
    from netem.commands.describe import scenario_lines, topology_lines
    from netem.spec import Topology, resolved_yaml

    loaded = load(name, set_, seed)
    spec = loaded if isinstance(loaded, Topology) else loaded.spec
    if svg is not None:
        return _draw(spec if isinstance(spec, Topology) else spec.topology, svg, json)
    if json:
        kind = "topology" if isinstance(spec, Topology) else "scenario"
        print_json({"ok": True, "kind": kind, kind: spec.model_dump(mode="json", by_alias=True)})
        return OK
    if isinstance(spec, Topology):
        head, lines = f"topology {spec.name}", topology_lines(spec)
    else:
        head, lines = f"scenario {spec.name}, seed {spec.seed}", scenario_lines(spec)
    comment = "".join(f"# {line}".rstrip() + "\n" for line in [head, "", *lines])
    sys.stdout.write(f"{comment}\n{resolved_yaml(spec)}")
    return OK


def _draw(topology: Topology, path: Path, json: bool) -> int:
    from netem.commands.svg import picture

    try:
        path.write_text(picture(topology), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}", USAGE) from error
    if json:
        print_json({"ok": True, "kind": "picture", "file": str(path)})
    else:
        typer.echo(f"{path}: topology {topology.name}")
    return OK


def schema(
    kind: Annotated[Kind, typer.Argument(help="Which kind of file.")] = Kind.scenario,
    debug: options.Debug = False,
) -> int:
    """Print the JSON Schema of scenario or topology files, for editors."""
    from netem.spec import schema as schema_of

    print_json(schema_of(kind.value))
    return OK


def load(name: str, set_: list[str] | None, seed: int | None = None) -> Loaded | Topology:
    """A scenario or topology, whichever the name means, checked as far as `run` would. Raises SpecError."""
    from netem.spec import SpecError, load_scenario, load_topology

    if kind_of(name) is Kind.topology:
        if seed is not None:
            raise SpecError(name, None, "--seed", "a topology has no seed")
        return load_topology(name, options.overrides(set_))
    loaded = load_scenario(name, options.overrides(set_, seed))
    from netem.experiment import check

    check(loaded)
    return loaded


def kind_of(name: str) -> Kind:
    """By its keys for a path, by where it is found for a bare name. Raises SpecError when there is no such file."""
    from netem.spec import SpecError, available
    from netem.spec.source import read_file
    from netem.spec.topology import SHAPES

    path = Path(name)
    if path.is_file():
        root = read_file(path)
        keys = set(root.items)
        topology_keys = _TOPOLOGY_KEYS | set(SHAPES)
        base = root.child("extends")
        if keys & _SCENARIO_KEYS or (base is None and not keys & topology_keys):
            return Kind.scenario
        if keys & topology_keys or base is None:
            return Kind.topology
        beside = path.parent / str(base.value)
        return kind_of(str(beside) if beside.is_file() else str(base.value))
    scenarios, topologies = available("scenario"), available("topology")
    if name in topologies and name not in scenarios:
        return Kind.topology
    if name not in scenarios and "/" not in name and path.suffix not in (".yaml", ".yml"):
        known = f"scenarios: {', '.join(scenarios)}; topologies: {', '.join(topologies)}"
        raise SpecError(name, None, "", f"no scenario or topology {name!r} ({known})")
    return Kind.scenario

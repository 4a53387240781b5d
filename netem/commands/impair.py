"""impair: change what a link does to packets, by hand, on a lab that is up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from netem.commands import labs, options
from netem.commands.failure import CommandError, print_json
from netem.statuses import OK, USAGE

if TYPE_CHECKING:
    from pathlib import Path

    from netem.lab import Lab
    from netem.lab.standing import Standing
    from netem.links.choose import BackendChoice
    from netem.spec import Topology

_USAGE = "dblp-netem impair [LAB] HOST [--up|--down] --loss 30%"
NONE = "none"


def _property(name: str, example: str) -> Any:
    help_ = f"As in a topology file, such as {example}; `{NONE}` takes it away."
    return typer.Option(f"--{name}", metavar=name.upper(), help=help_, show_default=False)


def impair(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LAB] HOST", help="A host, wildcards allowed; the lab where there are several.", show_default=False
        ),
    ] = None,
    up: Annotated[bool, typer.Option("--up", metavar="", help="Only from the host to the switch.")] = False,
    down: Annotated[bool, typer.Option("--down", metavar="", help="Only from the switch to the host.")] = False,
    loss: Annotated[str | None, _property("loss", "30%")] = None,
    delay: Annotated[str | None, _property("delay", "5ms")] = None,
    jitter: Annotated[str | None, _property("jitter", "1ms")] = None,
    rate: Annotated[str | None, _property("rate", "100Mbit")] = None,
    queue: Annotated[str | None, _property("queue", "64KiB")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key of a link. Repeatable.", show_default=False),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", metavar="", help="Back to what the topology says.")] = False,
    show: Annotated[bool, typer.Option("--show", metavar="", help="Only say what is in force.")] = False,
    json: options.Json = False,
    debug: options.Debug = False,
    state_dir: options.StateDir = options.STATE_DIR,
) -> int:
    """Change loss, delay, rate or queue of a host's link in a lab that is up. What is not named stays as it is."""
    given = {"loss": loss, "delay": delay, "jitter": jitter, "rate": rate, "queue": queue}
    changes = {key: value for key, value in given.items() if value is not None}
    if (bool(changes or set_)) + clear + show != 1:
        raise CommandError(f"give properties, or --clear, or --show: {_USAGE}", USAGE)
    wanted, pattern = _target(list(names or ()), labs.look(state_dir)[0], all_=clear or show)
    ways = [way for way, only in (("up", up), ("down", down)) if only] or ["up", "down"]
    if show:
        return _show(_recorded(state_dir, wanted), pattern, ways, json)
    from netem import preflight
    from netem.kernel.user import User
    from netem.lab import Lab

    preflight.require(User.current())
    if wanted.state != "up":
        raise CommandError(f"lab {wanted.name} ({wanted.id}) is not one of `up`: a run has its impairments in its file")
    with Lab.attach(wanted.id, state_dir=state_dir) as lab, lab.locked():
        standing = _standing(lab.links, wanted)
        ends = [(host, way) for host in _hosts(standing.now, pattern) for way in ways]
        new = _cleared(standing, ends) if clear else _changed(standing, ends, _all_changes(changes, set_))
        standing = _put(lab, standing, new, state_dir)
    return _show(standing, pattern, ways, json)


def _target(names: list[str], up: list[labs.Standing], all_: bool) -> tuple[labs.Standing, str]:
    """The lab, and which hosts (a pattern): `LAB HOST`, or `HOST` of the only lab; `all_`: also `LAB`, or nothing."""
    hint = "such as `dblp-netem impair ID HOST`"
    if len(names) > 2 or (not names and not all_):
        raise CommandError(f"name a host: {_USAGE}", USAGE)
    if len(names) == 2:
        return labs.choose(up, names[0], hint), names[1]
    if not names:
        return labs.choose(up, None, hint), "*"
    if all_ and any(names[0] in (lab.id, lab.name) for lab in up):
        return labs.choose(up, names[0], hint), "*"
    return labs.choose(up, None, hint), names[0]


def _recorded(state_dir: Path, lab: labs.Standing) -> Standing:
    from netem.state import read

    return _standing(read(state_dir, lab.id).links, lab)


def _standing(links: Mapping[str, Any], lab: labs.Standing) -> Standing:
    from netem.lab.standing import Standing

    try:
        return Standing.from_json(links)
    except (KeyError, TypeError, ValueError) as error:
        if not links:
            message = f"lab {lab.name} ({lab.id}) is not one of `up`, or was built by an older version"
        else:
            message = f"the state of lab {lab.name} ({lab.id}) does not say what its links do: {error}"
        raise CommandError(message) from error


def _hosts(topology: Topology, pattern: str) -> list[str]:
    from netem.spec.expand import matching
    from netem.spec.source import Mark, Node

    return list(matching(Node(pattern, Mark("impair")), list(topology.hosts), "host"))


def _all_changes(changes: Mapping[str, str], set_: list[str] | None) -> dict[str, Any]:
    """`none` is YAML's null here; `--set` takes any YAML."""
    from netem.spec.source import Mark, parse_value

    found: dict[str, Any] = {key: None if value == NONE else value for key, value in changes.items()}
    for assignment in set_ or ():
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise CommandError(f"--set {assignment[:80]}: expected KEY=VALUE such as loss=30%", USAGE)
        found[key.strip()] = parse_value(text, Mark(f"--set {assignment[:80]}"), lines=False).plain()
    return found


def _cleared(standing: Standing, ends: list[tuple[str, str]]) -> Topology:
    from netem.lab.standing import with_shapes

    shapes = {(host, way): getattr(standing.built.link_of(host), way) for host, way in ends}
    return with_shapes(standing.now, shapes, "impair")  # type: ignore[arg-type]


def _changed(standing: Standing, ends: list[tuple[str, str]], changes: Mapping[str, Any]) -> Topology:
    from netem.lab.standing import changed, with_shapes

    shapes = {
        (host, way): changed(getattr(standing.now.link_of(host), way), changes, f"impair {host}.{way}")
        for host, way in ends
    }
    return with_shapes(standing.now, shapes, "impair")  # type: ignore[arg-type]


def _put(lab: Lab, standing: Standing, new: Topology, state_dir: Path) -> Standing:
    from netem.experiment.by_hand import put

    return put(lab, standing, new, _choice(standing.choice, new, state_dir))


def _choice(choice: BackendChoice | None, new: Topology, state_dir: Path) -> BackendChoice:
    """The lab's backend stays; one that lacks what is asked for now is refused before anything is changed."""
    from netem import preflight
    from netem.links.choose import choose

    if choice is None:
        return choose("auto", "auto", new.needs_netem, preflight.probe(state_dir))
    if new.needs_netem and choice.name == "bpf":
        choose("bpf", "auto", new.needs_netem, preflight.probe(state_dir))
    return choice


def _show(standing: Standing, pattern: str, ways: list[str], json: bool) -> int:
    from netem.lab.standing import words

    hosts = _hosts(standing.now, pattern)
    ends = [(host, way) for host in hosts for way in ways]
    if json:
        print_json({"ok": True, "links": {f"{host}.{way}": _pair(standing, host, way) for host, way in ends}})
        return OK
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    width = max(len(f"{host}.{way}") for host, way in ends)
    for host, way in ends:
        now, built = (getattr(topology.link_of(host), way) for topology in (standing.now, standing.built))
        was = "" if now == built else f"   [dim](topology: {words(built)})[/]"
        console.print(f"{f'{host}.{way}'.ljust(width)}  {words(now)}{was}")
    return OK


def _pair(standing: Standing, host: str, way: str) -> dict[str, Any]:
    from netem.spec.fields import WITH_UNITS

    return {
        key: getattr(topology.link_of(host), way).model_dump(mode="json", by_alias=True, context=WITH_UNITS)
        for key, topology in (("now", standing.now), ("topology", standing.built))
    }

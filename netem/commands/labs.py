"""up, down, clean: labs that outlive a command."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from netem.commands import options
from netem.commands.failure import CommandError, Failure, print_json, report
from netem.state import Record, StateError, lab_ids, not_a_record, path_of, read
from netem.statuses import FAILED, OK, USAGE

if TYPE_CHECKING:
    from netem.lab import CleanReport, Lab, Removed
    from netem.lab.reach import Reach
    from netem.spec import Topology


@dataclass(frozen=True)
class Standing:
    """A recorded lab as anyone may see it. `state`: up (waits for `down`), running (a command's), dead (`clean`)."""

    id: str
    name: str
    state: str
    owner_pid: int | None
    created_utc: str
    age_s: float
    hosts: tuple[dict[str, Any], ...]


def standing(record: Record, now: datetime, path: Path) -> Standing:
    """`now` is in UTC. Raises StateError for a record (in the file `path`) without the hosts' names."""
    state = "dead" if record.abandoned else "up" if record.owner is None else "running"
    keys = ("name", "role", "address", "netns")
    try:
        hosts = tuple({key: host[key] for key in keys} for host in record.plan["hosts"])
        age_s = (now - datetime.fromisoformat(record.created_utc)).total_seconds()
    except (KeyError, TypeError, ValueError) as error:
        raise not_a_record(path, f"damaged at {error}") from error
    pid = record.owner.pid if record.owner else None
    return Standing(record.id, record.name, state, pid, record.created_utc, max(0.0, age_s), hosts)


def look(state_dir: Path) -> tuple[list[Standing], list[str]]:
    """All recorded labs, oldest first, and what could not be read. Needs no privileges."""
    labs, problems = [], []
    for lab_id in lab_ids(state_dir):
        try:
            labs.append(standing(read(state_dir, lab_id), datetime.now(UTC), path_of(state_dir, lab_id)))
        except StateError as error:
            problems.append(str(error))
    return sorted(labs, key=lambda lab: lab.created_utc), problems


def choose(labs: list[Standing], wanted: str | None, what: str) -> Standing:
    """The lab of this name or id; without one, the only lab there is. CommandError (status 2) otherwise."""
    found = [lab for lab in labs if wanted in (None, lab.id, lab.name)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"{lab.name} ({lab.id})" for lab in found or labs)
    if not labs:
        raise CommandError("no lab is up; `dblp-netem up star3` builds one", USAGE)
    if not found:
        raise CommandError(f"no lab {wanted}; there are {listed}", USAGE)
    raise CommandError(f"there are several labs; say which by id, {what}: {listed}", USAGE)


def age(seconds: float) -> str:
    """12 s, 3 min, 5 h, 2 days."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def up(
    topology: options.TopologyName,
    name: Annotated[
        str | None, typer.Option("--name", help="The lab's name, in place of the topology's.", show_default=False)
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", metavar="", help="Send from every host to every other; without a way between two, nothing stays."
        ),
    ] = False,
    set_: options.Overrides = None,
    json: options.Json = False,
    debug: options.Debug = False,
    state_dir: options.StateDir = options.STATE_DIR,
) -> int:
    """Build a topology and leave it standing, to run commands in it with `exec`; `down` ends it."""
    from netem.spec import load_topology

    spec = load_topology(topology, options.overrides(set_))
    _check_name(name)
    from netem import preflight
    from netem.lab import Lab, PlanError, Settings
    from netem.links.choose import choose as choose_backend

    preflight.require()
    wanted = name or spec.name
    for lab in look(state_dir)[0]:
        if wanted in (lab.name, lab.id):
            ending = "clean" if lab.state == "dead" else f"down {lab.id}"
            hint = f"end it with `dblp-netem {ending}`, or give another --name"
            raise CommandError(f"there is a lab {wanted} ({lab.id}) already; {hint}")
    started = time.monotonic()
    choice = choose_backend("auto", "auto", spec.needs_netem, preflight.probe(state_dir)) if _shaped(spec) else None
    try:
        built = Lab.build(spec, name=wanted, state_dir=state_dir, settings=Settings(gso=not spec.shapes_uplinks))
    except PlanError as error:
        raise CommandError(f"{topology}: {error}", USAGE) from error
    try:
        if choice is not None:
            from netem.experiment.wiring import Wiring

            Wiring(built, spec, choice).install_steady()  # stays when this process ends
        took_s = time.monotonic() - started
        reach = _checked(built, spec) if check else None
        _print_built(built, choice.reason if choice else "plain: no rate, delay or loss", took_s, reach, json)
        from netem.lab import standing as links

        built.set_links(links.built(spec, choice).to_json())
        built.detach()
    except BaseException:
        built.close()
        raise
    return OK


def _checked(lab: Lab, spec: Topology) -> Reach:
    """Every host reaches every other, or CommandError."""
    from netem.lab.reach import TIMEOUT_S, all_to_all

    delays_s = [max(shape.delay_s + shape.jitter_s for shape in (link.up, link.down)) for link in spec.links]
    reach = all_to_all(lab, TIMEOUT_S + sum(delays_s))
    if not reach.ok:
        shown = ", ".join(f"{source} to {target}" for source, target in reach.missing[:8])
        more = f" and {len(reach.missing) - 8} more" if len(reach.missing) > 8 else ""
        raise CommandError(
            f"{len(reach.missing)} of {reach.pairs} ways carry nothing: {shown}{more}; the lab is removed"
        )
    return reach


def _check_name(name: str | None) -> None:
    """The same rule as for the name in a file."""
    from netem.spec.fields import NAME_PATTERN

    if name is not None and not re.fullmatch(NAME_PATTERN.strip("^$"), name):
        rule = "letters, digits, dot, underscore and hyphen, the first a letter or digit, at most 64"
        raise CommandError(f"--name: {name[:80]!r} is not a valid name: {rule}", USAGE)


def _print_built(lab: Lab, links: str, took_s: float, reach: Reach | None, json: bool) -> None:
    if json:
        content = {"ok": True, "id": lab.id, "name": lab.name}
        content |= {"hosts": [asdict(host) for host in lab.hosts.values()], "links": links, "built_s": took_s}
        print_json({**content, **({"reach": asdict(reach)} if reach else {})})
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(
        f"Lab [bold]{lab.name}[/] ({lab.id}) is up, built in {took_s:.2f} s. Links: {links}.\n", soft_wrap=True
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("host", "role", "rank", "address", "MTU", "namespace"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("rank", "MTU") else "left")
    for host in lab.hosts.values():
        table.add_row(
            host.name, host.role, "-" if host.rank is None else str(host.rank), host.address, str(host.mtu), host.netns
        )
    console.print(table)
    if reach is not None:
        ways = f"every host reaches every other: {reach.pairs} ways between {reach.hosts} hosts"
        console.print(f"\nChecked:    {ways} in {reach.took_s * 1e3:.0f} ms", soft_wrap=True)
    some = next((host.name for host in lab.hosts.values() if host.role == "worker"), next(iter(lab.hosts)))
    console.print(f"\nRun in it:  sudo dblp-netem exec --lab {lab.id} {some} -- COMMAND", soft_wrap=True)
    console.print(f"End it:     sudo dblp-netem down {lab.id}", soft_wrap=True)


def _shaped(spec: Topology) -> bool:
    from netem.spec import LinkShape

    return any(shape != LinkShape() for link in spec.links for shape in (link.up, link.down))


def down(
    lab: Annotated[
        str | None,
        typer.Argument(metavar="LAB", help="Name or id; not needed when there is one lab.", show_default=False),
    ] = None,
    json: options.Json = False,
    debug: options.Debug = False,
    state_dir: options.StateDir = options.STATE_DIR,
) -> int:
    """End a lab that `up` built, and the processes in it."""
    from netem import preflight
    from netem.kernel.user import User
    from netem.lab import Lab

    preflight.require(User.current())
    labs, problems = look(state_dir)
    if problems and not labs:
        raise CommandError(problems[0])
    wanted = choose(labs, lab, "such as `dblp-netem down ID`")
    if wanted.state == "running":
        raise CommandError(f"lab {wanted.name} ({wanted.id}) is in use by process {wanted.owner_pid}; end that process")
    removed = Lab.attach(wanted.id, state_dir=state_dir).close()
    _print_removed([removed], (), (), json)
    return FAILED if removed.left else OK


def clean(
    json: options.Json = False, debug: options.Debug = False, state_dir: options.StateDir = options.STATE_DIR
) -> int:
    """Remove what killed commands left behind, and nothing else: labs in use and those of `up` stay."""
    from netem import lab, preflight
    from netem.kernel.user import User

    preflight.require(User.current())
    done: CleanReport = lab.clean(state_dir)
    _print_removed(list(done.removed), done.kept, done.problems, json)
    return OK if done.ok else FAILED


def _print_removed(removed: list[Removed], kept: tuple[str, ...], problems: tuple[str, ...], json: bool) -> None:
    ok = not problems and not any(lab.left for lab in removed)
    if json:
        done = [asdict(lab) for lab in removed]
        print_json({"ok": ok, "removed": done, "kept": list(kept), "problems": list(problems)})
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for lab in removed:
        ended = f", {len(lab.killed)} processes ended" if lab.killed else ""
        console.print(f"removed {lab.name} ({lab.lab_id}): {len(lab.namespaces)} namespaces{ended}")
        for left in lab.left:
            console.print(f"  [red]left:[/] {left}")
    if not removed and not problems:
        console.print("nothing to remove")
    for text in kept:
        console.print(f"kept    {text}", markup=False)
    for text in problems:
        report(Failure(FAILED, text), as_json=False)

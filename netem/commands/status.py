"""status: the labs of this machine, what their links do, and what has passed and was dropped there."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from netem.commands import options
from netem.commands.failure import CommandError, Failure, print_json, report
from netem.commands.labs import Standing, age, choose, look
from netem.state import StateError, read
from netem.statuses import FAILED, OK, USAGE

if TYPE_CHECKING:
    from rich.console import RenderableType

    from netem.experiment.counters import LinkCount

    Counts = Mapping[str, Mapping[str, LinkCount]]

INTERVAL_S = 1.0
_PER_LINE = 3
_STATES = {
    "up": ("green", "up, ended by `dblp-netem down {id}`"),
    "running": ("cyan", "in use by process {owner_pid}"),
    "dead": ("red", "left behind by process {owner_pid}, removed by `dblp-netem clean`"),
}


@dataclass(frozen=True)
class Reading:
    """Counters at one time. `problem` says why there are none."""

    t: float
    counts: Counts
    problem: str = ""


def status(
    lab: Annotated[
        str | None,
        typer.Argument(metavar="LAB", help="Name or id: only this one, with its counters.", show_default=False),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", metavar="", help="Show it live, until Ctrl-C.")] = False,
    json: options.Json = False,
    debug: options.Debug = False,
    state_dir: options.StateDir = options.STATE_DIR,
) -> int:
    """List the labs of this machine; of one alone also what its links do, have passed and dropped (that needs root)."""
    labs, problems = look(state_dir)
    if lab is not None or watch:
        labs = [choose(labs, lab, "such as `dblp-netem status ID`")]
    if watch:
        if json:
            raise CommandError("--watch is for people; call `status --json` again and again instead", USAGE)
        return _watch(labs[0], state_dir)
    counted = {one.id: _read(one, state_dir) for one in labs if len(labs) == 1}
    if json:
        entries = [_entry(one, counted.get(one.id), state_dir) for one in labs]
        print_json({"ok": not problems, "labs": entries, "problems": problems})
        return FAILED if problems else OK
    from rich.console import Console

    console = Console(highlight=False)
    for one in labs:
        _print(console, one, counted.get(one.id), state_dir)
    if not labs and not problems:
        console.print("no labs")
    for problem in problems:
        report(Failure(FAILED, problem), as_json=False)
    return FAILED if problems else OK


def _entry(lab: Standing, reading: Reading | None, state_dir: Path) -> dict[str, Any]:
    counts = reading.counts if reading is not None else {}
    counters = {host: {way: asdict(each) for way, each in ways.items()} for host, ways in counts.items()}
    return {**asdict(lab), "links": _in_force(lab, state_dir), "counters": counters or None}


def _in_force(lab: Standing, state_dir: Path) -> dict[str, str]:
    """Link direction -> what it does, where that is anything; empty for labs of `run`, whose scenario says it."""
    links = read(state_dir, lab.id).links
    if not links:
        return {}
    from netem.lab.standing import WAYS, words
    from netem.lab.standing import Standing as Links

    try:
        now = Links.from_json(links).now
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"the state of lab {lab.name} ({lab.id}) does not say what its links do: {error}") from error
    plain = words(type(now.links[0].up)())
    found = {f"{host}.{way}": words(getattr(now.link_of(host), way)) for host in now.hosts for way in WAYS}
    return {end: text for end, text in found.items() if text != plain}


def _read(lab: Standing, state_dir: Path) -> Reading:
    """The counters now. Needs root, and a lab that is whole."""
    if os.geteuid() != 0:
        return Reading(0.0, {}, "counters need root: sudo dblp-netem status")
    if lab.state == "dead":
        return Reading(0.0, {})
    from netem.experiment.counters import count
    from netem.kernel.errors import LabError
    from netem.lab import Lab
    from netem.links.base import LinkError

    try:
        with Lab.attach(lab.id, state_dir=state_dir) as attached:
            counts = count(attached, attached.links.get("lost", {}))
    except (LabError, LinkError, StateError) as error:
        return Reading(0.0, {}, f"no counters: {error}")
    return Reading(time.monotonic(), counts)


def _print(console: Any, lab: Standing, reading: Reading | None, state_dir: Path) -> None:
    console.print(_title(lab), soft_wrap=True)
    if reading is not None and reading.counts:
        console.print(_table(lab, reading, None))
    else:
        for line in _host_lines(lab.hosts):
            console.print(f"  {line}", soft_wrap=True, markup=False)
    for end, text in _in_force(lab, state_dir).items():
        console.print(f"  {end}: {text}", markup=False)
    if reading is not None and reading.problem:
        console.print(f"  {reading.problem}", style="dim", markup=False, soft_wrap=True)


def _title(lab: Standing) -> str:
    colour, words = _STATES[lab.state]
    said = words.format(id=lab.id, owner_pid=lab.owner_pid)
    return f"[bold]{lab.name}[/] ({lab.id}), {age(lab.age_s)} old: [{colour}]{said}[/]"


def _table(lab: Standing, reading: Reading, before: Reading | None) -> RenderableType:
    """`before`: an earlier reading, for the rate between the two."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    rates = [] if before is None else ["Mbit/s"]
    for title in ("  host", "address", "link", "packets", "bytes", *rates, "injected", "queue", "device"):
        table.add_column(title, no_wrap=True, justify="left" if title in ("  host", "address", "link") else "right")
    for host in lab.hosts:
        for way, count in reading.counts.get(host["name"], {}).items():
            names = (f"  {host['name']}", host["address"]) if way == "up" else ("", "")
            rate = [] if before is None else [_rate(reading, before, host["name"], way)]
            drops = [f"{value:,}" for value in (count.injected, count.queue, count.device)]
            table.add_row(*names, way, f"{count.packets:,}", _size(count.bytes), *rate, *drops)
    return table


def _rate(reading: Reading, before: Reading, host: str, way: str) -> str:
    try:
        grown = reading.counts[host][way].bytes - before.counts[host][way].bytes
    except KeyError:
        return "-"
    return f"{8e-6 * grown / max(1e-3, reading.t - before.t):,.1f}"


def _size(value: int) -> str:
    size, unit = float(value), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{value} B" if unit == "B" else f"{size:.3g} {unit}"


def _host_lines(hosts: tuple[dict[str, Any], ...]) -> list[str]:
    cells = [f"{host['name']} {host['address']}" for host in hosts]
    width = max(map(len, cells), default=0)
    rows = [cells[at : at + _PER_LINE] for at in range(0, len(cells), _PER_LINE)]
    return ["   ".join(cell.ljust(width) for cell in row).rstrip() for row in rows]


def _watch(lab: Standing, state_dir: Path) -> int:
    """Until Ctrl-C, or the lab is gone."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    with _until_interrupted(), Live(console=console, auto_refresh=False) as live:
        first = reading = _read(lab, state_dir)
        if reading.problem:
            raise CommandError(reading.problem)
        while not reading.problem:
            links = [Text(f"  {end}: {text}") for end, text in _in_force(lab, state_dir).items()]
            live.update(Group(Text.from_markup(_title(lab)), _table(lab, reading, first), *links), refresh=True)
            time.sleep(INTERVAL_S)
            first, reading = reading, _read(lab, state_dir)
            labs = [one for one in look(state_dir)[0] if one.id == lab.id]
            if not labs:
                break
            lab = labs[0]
    return OK


@contextmanager
def _until_interrupted() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        pass  # that is how it ends

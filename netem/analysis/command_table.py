"""The table at the end of a command workload: variants side by side, bursts, programs, verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from netem.analysis.table import MISSING, delay_cell, notes, seconds

Summary = dict[str, Any]
Cell = Callable[[dict[str, Any]], str]
MAX_BURSTS_SHOWN = 12


def render_commands(summary: Summary, console: Console) -> None:
    """Prints the table and the verdicts of a summary (the content of summary.json)."""
    title = (
        f"{summary['scenario']}   seed {summary['seed']}   links: {summary['backend']}, loss: {summary['loss_engine']}"
    )
    parts: list[Text | Table] = [Text(title, style="bold"), _numbers(summary)]
    if (bursts := _bursts(summary)) is not None:
        parts.append(bursts)
    console.print(Group(*parts, *_programs(summary), *notes(summary)))


def _numbers(summary: Summary) -> Table:
    names = list(summary["commands"])
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    grid.add_column("", no_wrap=True)
    for name in names:
        grid.add_column(name, justify="right", no_wrap=True)
    for label, cell in _LINES:
        cells = [cell(summary["commands"][name]) for name in names]
        if any(text != MISSING for text in cells):
            grid.add_row(label, *cells)
    return grid


def _latency(group: str, key: str) -> Cell:
    return lambda command: MISSING if command[group] is None else seconds(command[group][key])


def _count(key: str) -> Cell:
    return lambda command: f"{command['link'][key]:,}"


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2%}"


_LINES: tuple[tuple[str, Cell], ...] = (
    ("time, longest", lambda command: seconds(command["wall_s"]["max"])),
    ("rounds reported", lambda command: str(command["rounds"]["count"]) if command["rounds"]["count"] else MISSING),
    ("latency, mean", _latency("latency_s", "mean")),
    ("latency, max", _latency("latency_s", "max")),
    ("burst latency, mean", _latency("burst_latency_s", "mean")),
    ("burst latency, max", _latency("burst_latency_s", "max")),
    ("packets", _count("seen")),
    ("lost by the links", _count("dropped")),
    ("lost in queues", _count("queue_dropped")),
    ("lost in devices", _count("device_dropped")),
    ("delay, median / asked", delay_cell),
)


def _bursts(summary: Summary) -> Table | None:
    rows = [(name, one) for name, command in summary["commands"].items() for one in command["bursts"]]
    if not rows:
        return None
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("burst", "variant", "asked for", "achieved", "packets", "in place"):
        grid.add_column(title, justify="left" if title in ("burst", "variant") else "right", no_wrap=True)
    for name, one in rows[:MAX_BURSTS_SHOWN]:
        when = f"at {one['planned_s']:g} s" if one["planned_s"] is not None else f"iteration {one['iteration']}"
        asked = ", ".join(f"{ratio:.4g} %" for ratio in (100 * each for each in one["requested"]))
        late = MISSING if one["planned_s"] is None else f"{1e3 * (one['t_s'] - one['planned_s']):+.1f} ms"
        grid.add_row(when, name, asked or MISSING, _percent(one["loss"]), f"{one['seen']:,}", late)
    if len(rows) > MAX_BURSTS_SHOWN:
        grid.add_row(f"and {len(rows) - MAX_BURSTS_SHOWN} more")
    return grid


def _programs(summary: Summary) -> Iterator[Text]:
    """One line for each end that is not `status 0, by itself`; nobody wants to read the others."""
    programs = [(name, one) for name, command in summary["commands"].items() for one in command["programs"]]
    odd = [(name, one) for name, one in programs if one["ended_by"] != "testbed" and one["status"] != 0]
    ended = sum(1 for _, one in programs if one["ended_by"] == "testbed")
    rest = f", {ended} ended by the testbed when the job was over" if ended else ""
    yield Text(f"programs: {len(programs)} run{rest}")
    for name, one in odd:
        yield Text(f"  {name}: {one['host']} ended with status {one['status']} ({one['log']})")
    for name, command in summary["commands"].items():
        for one in command["bursts"]:
            if not one["seen"]:
                when = f"at {one['planned_s']:g} s" if one["planned_s"] is not None else f"iteration {one['iteration']}"
                yield Text(f"  {name}: no packet passed during the burst {when}", style="yellow")

"""compare: whether two runs had the same losses, and the transports of one run."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from netem.commands import options
from netem.commands.failure import CommandError, print_json
from netem.statuses import FAILED, OK

if TYPE_CHECKING:
    from netem.analysis.fates import Agreement
    from netem.analysis.folder import Run

RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN_A", help="Folder of a run.", exists=True, file_okay=False, show_default=False)
]
OtherFolder = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN_B",
        help="Folder of another run; without it the transports of RUN_A are compared with each other.",
        exists=True,
        file_okay=False,
        show_default=False,
    ),
]
MACHINE_KEYS = ("link", "latencies", "deadlines")
"""Keys of a scenario that say how a machine carries it out; what happens to packets does not depend on them."""
_NO_FATES = (
    "no fates to compare: that needs captures from before and after the loss. Run with --set capture.both=true, and "
    "with capture.at and capture.rounds in the scenario."
)


@dataclass(frozen=True)
class Line:
    """One comparison. `equal` None: nothing to compare; `decides`: it counts for the exit status."""

    what: str
    equal: bool | None
    detail: str
    decides: bool = True
    examples: tuple[str, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)


def compare(
    run_a: RunFolder,
    run_b: OtherFolder = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Compare two runs: packet by packet where both repeat their losses, else within intervals. Status 1: different."""
    from netem.analysis.folder import read_run

    one = read_run(run_a)
    other = read_run(run_b) if run_b is not None else None
    lines = [_scenario(one, other)] if other else []
    lines += [_agreement(*found) for found in _fates(one, other)]
    if other:
        lines += _deliveries(one, other)
        lines += _results(one, other)
    if not any("compared" in line.data for line in lines):
        raise CommandError(f"nothing to compare in {' and '.join(str(run.path) for run in (one, other) if run)}")
    equal = all(line.equal is not False for line in lines if line.decides)
    if json:
        entries = [
            {"what": line.what, "equal": line.equal, "decides": line.decides, "examples": line.examples, **line.data}
            for line in lines
        ]
        print_json({"ok": equal, "equal": equal, "comparisons": entries})
    else:
        _print(lines, equal)
    return OK if equal else FAILED


def _scenario(one: Run, other: Run) -> Line:
    hashes = (one.scenario_hash[:12], other.scenario_hash[:12])
    differing = [name for name in type(one.spec).model_fields if getattr(one.spec, name) != getattr(other.spec, name)]
    equal = hashes[0] == hashes[1] or set(differing) <= set(MACHINE_KEYS)
    detail = f"{hashes[0]} and {hashes[1]}"
    if equal:
        but = f" but for {', '.join(f'`{name}`' for name in differing)}" if differing else ""
        detail = f"the same{but}, seed {one.spec.seed}; links {one.backend or '?'} and {other.backend or '?'}"
    else:
        detail += f": {', '.join(f'`{name}`' for name in differing)}"
    return Line("scenario", equal, detail, data={"sha256": [one.scenario_hash, other.scenario_hash]})


def _fates(one: Run, other: Run | None) -> list[tuple[str, Agreement, int, bool]]:
    """(what, agreement, packets missed by the captures, whether the seed says the losses): run against run, then
    transport against transport.
    """
    from netem.analysis.fates import compare as agreement

    found = []
    if other is not None:
        for key in (key for key in one.fates if key in other.fates):
            a, b = one.fates[key], other.fates[key]
            repeatable = one.repeatable_loss and other.repeatable_loss
            found.append((f"fates, {_label(*key)}", agreement(a, b), a.missed + b.missed, repeatable))
    for name, run in (("A", one), ("B", other)):
        if run is None:
            continue
        where = f" in {name}" if other is not None else ""
        for (first, second), repeat in _pairs(run):
            a, b = run.fates[first, repeat], run.fates[second, repeat]
            what = f"fates, {_label(first, repeat)} and {second}{where}"
            found.append((what, agreement(a, b), a.missed + b.missed, run.repeatable_loss))
    return found


def _pairs(run: Run) -> list[tuple[tuple[str, str], int]]:
    """Transports of one repeat (each repeat has losses of its own)."""
    repeats = sorted({repeat for _, repeat in run.fates})
    names = list(run.spec.transports)
    return [
        (pair, repeat)
        for repeat in repeats
        for pair in combinations([name for name in names if (name, repeat) in run.fates], 2)
    ]


def _label(transport: str, repeat: int) -> str:
    return transport if repeat == 0 else f"{transport} (repeat {repeat})"


def _agreement(what: str, found: Agreement, missed: int, repeatable: bool) -> Line:
    if not found.compared:
        return Line(what, None, "no transmission occurs in both")
    detail = f"{found.compared:,} transmissions in both, {found.dropped:,} dropped, {found.different:,} differ"
    if missed:
        detail += f"; the captures missed {missed:,} packets, which look like drops"
    if found.different and not repeatable:
        detail += "; not a fault, since sch_netem draws its losses at random"
    examples = tuple(
        f"round {e.flow.round}, worker {e.flow.rank} {e.flow.direction}, chunk {e.sequence}, pass {e.pass_}: "
        f"{_fate(e.arrived[0])} and {_fate(e.arrived[1])}"
        for e in found.examples
    )
    data = {
        "compared": found.compared,
        "different": found.different,
        "dropped": found.dropped,
        "only": list(found.only),
        "missed": missed,
    }
    return Line(what, found.different == 0, detail, repeatable, examples, data)


def _fate(arrived: bool) -> str:
    return "arrived" if arrived else "dropped"


def _deliveries(one: Run, other: Run) -> list[Line]:
    from netem.analysis.folder import different_deliveries

    shared, different = different_deliveries(one, other)
    if not shared:
        return [Line("delivered sets", None, "no round occurs in both")]
    decides = all(run.repeatable_sets and run.repeatable_loss for run in (one, other))
    detail = f"{shared:,} rounds in both, {len(different):,} differ"
    if different and not decides:
        detail += "; not a fault: only stop-and-wait (profile: paper) and losses by bpf make them independent of chance"
    examples = tuple(
        f"{_label(d.transport, d.repeat)}, round {d.round}, worker {d.worker} {d.direction}" for d in different[:5]
    )
    return [
        Line(
            "delivered sets",
            not different,
            detail,
            decides,
            examples,
            {"compared": shared, "different": len(different)},
        )
    ]


def _results(one: Run, other: Run) -> list[Line]:
    """Achieved loss, packets and passes of the rounds under loss, within what chance allows."""
    from netem.analysis.agreement import compare as agreement

    lines = []
    for found in agreement(one.rounds, other.rounds, passes=one.stop_and_wait and other.stop_and_wait):
        scale, unit, digits = (100.0, " %", 3) if found.what == "loss" else (1.0, "", 2)
        a, b, gap, allowed = (scale * x for x in (*found.means, abs(found.difference), found.allowed))
        detail = (
            f"{a:,.{digits}f}{unit} and {b:,.{digits}f}{unit}, mean of {found.rounds} rounds; they differ by "
            f"{gap:,.{digits}f}{unit}, by chance up to {allowed:,.{digits}f}{unit}"
        )
        data = {"compared": found.rounds, "means": list(found.means), "allowed": found.allowed}
        lines.append(Line(f"{found.what}, {found.transport} at {found.loss:.4g}", found.agrees, detail, data=data))
    return lines


def _print(lines: list[Line], equal: bool) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        bad = "bold red" if line.decides else "yellow"
        mark, style = {True: ("=", "green"), False: ("≠", bad), None: ("-", "dim")}[line.equal]
        console.print(Text.assemble((mark, style), " ", (line.what, "bold")))
        console.print(Padding(Text(line.detail), (0, 0, 0, 2)))
        for example in line.examples:
            console.print(Padding(Text(example, style="dim"), (0, 0, 0, 4)))
    if not any(line.what.startswith("fates") and line.data for line in lines):
        console.print(Padding(Text(_NO_FATES, style="cyan"), (0, 0, 0, 2)))
    same = all(line.equal is not False for line in lines)
    words = "equal" if same else "they agree: what differs is left to chance"
    console.print(f"[bold green]{words}[/]" if equal else "[bold red]different[/]")

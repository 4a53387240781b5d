"""doctor --fidelity: the table of settings, each measured on this machine's links."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from netem.commands.failure import CommandError, print_json
from netem.statuses import OK, UNFAITHFUL, USAGE

if TYPE_CHECKING:
    from rich.console import Console

    from netem.links.choose import Requested
    from netem.probing.measure import Row
    from netem.probing.settings import Backend

BACKENDS = ("auto", "netem", "bpf")


def fidelity(requested: str, state_dir: Path, json: bool) -> int:
    """The table, row by row as it comes. Exit status 5 where a row is not as asked."""
    if requested not in BACKENDS:
        raise CommandError(f"--backend {requested}: expected one of {', '.join(BACKENDS)}", USAGE)
    from rich.console import Console

    from netem import preflight
    from netem.experiment.calibrate import sleeping
    from netem.links.choose import choose
    from netem.probing import lines
    from netem.probing.measure import measure

    preflight.require()
    choice = choose(cast("Requested", requested), "auto", False, preflight.probe(state_dir))
    console = Console(highlight=False, soft_wrap=True, quiet=json)
    console.print(lines.head(), style="dim")
    late_p50_s, late_p99_s = (float(each) for each in np.quantile(sleeping(), (0.5, 0.99)))
    table = measure(cast("Backend", choice.name), state_dir, on_row=lambda row: _print(console, row))
    if json:
        machine = {"late_p50_s": late_p50_s, "late_p99_s": late_p99_s}
        print_json({**table.to_json(), "machine": machine, "choice": asdict(choice)})
    console.print()
    for text in lines.summary(table, late_p50_s, late_p99_s):
        console.print(text, markup=False)
    return UNFAITHFUL if table.failed or table.disturbed else OK


def _print(console: Console, row: Row) -> None:
    from rich.text import Text

    from netem.probing import lines

    style = {"held": "green", "failed": "bold red", "disturbed": "yellow", "elsewhere": "dim"}[row.verdict]
    for text, words in lines.lines(row):
        beside = words.startswith("beside")
        console.print(
            Text.assemble(
                (text, "dim" if row.verdict == "elsewhere" else ""), " ", (words, "bold red" if beside else style)
            )
        )

"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from netem.state import DEFAULT_DIR

MAX_SEED = 2**63 - 1


def _seed(text: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) < 25 and int(digits) <= MAX_SEED):
        raise typer.BadParameter(f"{text[:40]!r} is not a seed: a whole number from 0 to 2^63-1")
    return int(digits)


ScenarioName = Annotated[
    str, typer.Argument(metavar="SCENARIO", help="A scenario: path or bare name, such as burst90.", show_default=False)
]
TopologyName = Annotated[
    str, typer.Argument(metavar="TOPOLOGY", help="A topology: path or bare name, such as star3.", show_default=False)
]
SpecName = Annotated[
    str,
    typer.Argument(
        metavar="SCENARIO|TOPOLOGY",
        help="A scenario or a topology: path or bare name, such as burst90 or star3.",
        show_default=False,
    ),
]
SpecNames = Annotated[
    list[str],
    typer.Argument(
        metavar="SCENARIO|TOPOLOGY...", help="Scenarios or topologies: paths or bare names.", show_default=False
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one key of the file, by its dotted path. Repeatable.",
        show_default=False,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", parser=_seed, metavar="N", help="Override the scenario's seed.", show_default=False),
]
Json = Annotated[
    bool, typer.Option("--json", metavar="", help="Machine-readable output on standard output, errors too.")
]
Debug = Annotated[bool, typer.Option("--debug", metavar="", help="Show the traceback of an error.")]
"""Read by `netem.cli` from the arguments, so that it works before they are parsed; commands ignore it."""
StateDir = Annotated[
    Path,
    typer.Option(
        "--state-dir", metavar="DIR", help="Where labs are recorded.", hidden=True, envvar="DBLP_NETEM_STATE_DIR"
    ),
]
STATE_DIR = DEFAULT_DIR


def overrides(given: list[str] | None, seed: int | None = None) -> list[str]:
    """What --set and --seed say, in the order in which they apply."""
    return [*(given or ()), *((f"seed={seed}",) if seed is not None else ())]

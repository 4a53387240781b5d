"""vm: any other command on a throw-away kernel that has sch_netem."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from netem.commands import options
from netem.commands.failure import CommandError
from netem.statuses import USAGE

if TYPE_CHECKING:
    from netem.vm import Engine

_USAGE = "dblp-netem vm [--kernel FILE] -- run SCENARIO"
COMMANDS = ("run", "doctor", "validate", "show", "compare")
"""What makes sense in a machine that is gone afterwards."""
DEFAULT_OUT = "runs"
DEFAULT_LIMIT_S = 3600.0
SLOW_SETTINGS = ("latencies=reported", "deadlines.connect=600s")
"""Latencies there are the machine's, and to import torch takes minutes."""


def _limit(given: str | float) -> float:
    from netem.spec.units import UnitError, parse_time_s

    if isinstance(given, float):  # the default
        return given
    try:
        return parse_time_s(given)
    except UnitError as error:
        raise typer.BadParameter(str(error)) from error


def vm(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND...", help="A command of this program, such as `run burst90-replay`."),
    ],
    kernel: Annotated[
        Path | None,
        typer.Option(
            "--kernel",
            metavar="FILE",
            help="Kernel: an image as in /boot, or user-mode Linux; default: what is installed.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="Memory of the machine, as QEMU takes it.")
    ] = "4G",
    cpus: Annotated[
        int, typer.Option("--cpus", min=1, max=256, metavar="N", help="Processors; user-mode Linux has one.")
    ] = 2,
    limit: Annotated[
        float,
        typer.Option(
            "--limit", parser=_limit, metavar="TIME", help="End the machine after this time.", show_default="1 h"
        ),
    ] = DEFAULT_LIMIT_S,
    emulate: Annotated[bool, typer.Option("--emulate", metavar="", help="Use QEMU, without KVM.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", metavar="", help="Show what the machine's kernel says.")
    ] = False,
    debug: options.Debug = False,
) -> int:
    """Run a command on a throw-away kernel with netem, over your own files: needs neither netem here nor root.

    Boots a kernel from /boot with KVM, or user-mode Linux, or a kernel from /boot on an emulated processor: the
    first that works here. Only the run folder comes back. Returns the command's status.
    """
    from netem import vm as machines

    argv, out = _inner(command)
    engines = machines.candidates(kernel, emulate=emulate)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    kept = out.resolve() if out is not None else None
    machine = machines.Machine(cpus=cpus, memory=memory, kept=kept, verbose=verbose)

    def boot(engine: Engine) -> int:
        program = [sys.executable, "-B", "-m", "netem.cli", *(argv if engine.full_speed else _patient(argv))]
        typer.echo(f"booting {engine.kernel.name} with {engine.name}", err=True)
        if engine.advice:
            typer.echo(engine.advice, err=True)
        return machines.run(engine, machine, program, cwd=Path.cwd(), limit_s=limit)

    *first, last = engines
    for engine in first:
        try:
            return boot(engine)
        except machines.NotBooted as error:
            typer.echo(str(error), err=True)
    return boot(last)


def _patient(argv: list[str]) -> list[str]:
    """What a slow machine needs in every scenario; what the user sets comes after it and wins."""
    if argv[0] != "run":
        return argv
    return ["run", *(part for setting in SLOW_SETTINGS for part in ("--set", setting)), *argv[1:]]


def _inner(command: list[str]) -> tuple[list[str], Path | None]:
    """The command's arguments, and the folder in which `run` makes its own; None for other commands."""
    if not command or command[0].startswith("-") or command[0] not in COMMANDS:
        given = f"{command[0]!r} is not one of them" if command else "give a command"
        raise CommandError(f"{given}: {_USAGE}; the machine runs {', '.join(COMMANDS)}", USAGE)
    if command[0] != "run":
        return command, None
    for number, argument in enumerate(command):
        if argument.startswith("--out="):
            return command, Path(argument.removeprefix("--out="))
        if argument == "--out" and number + 1 < len(command):
            return command, Path(command[number + 1])
    return command, Path(DEFAULT_OUT)

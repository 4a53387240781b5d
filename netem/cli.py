"""The command line: puts the commands together and turns every error into one line and an exit status."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any

import typer

from netem import __version__
from netem.commands import compare, doctor, execute, files, impair, labs, run, status, vm
from netem.commands.failure import CommandError, report, translate
from netem.commands.interrupt import interruptible
from netem.statuses import FAILED, INTERRUPTED, OK, USAGE

PROGRAM = "dblp-netem"
_HELP = (
    "What a microburst does to distributed training, and what a bounded-loss transport does about it.\n\n"
    "Start with [bold]dblp-netem doctor[/bold], then [bold]sudo dblp-netem run burst90[/bold].\n\n"
    "Exit status: 0 ok, 1 failed, 2 usage or invalid file, 3 an expectation failed, 4 something is missing "
    "(permission, kernel feature, program), 5 the emulation was not faithful, 130 interrupted."
)
_EXPERIMENT, _LAB, _MACHINE = "Experiments", "Labs that stay up", "This machine"


def build_app() -> typer.Typer:
    """All commands, in the order in which the help shows them."""
    app = typer.Typer(
        name=PROGRAM,
        help=_HELP,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    for panel, commands in (
        (_EXPERIMENT, (run.run, files.validate, files.show, compare.compare, files.schema)),
        (_LAB, (labs.up, execute.exec_, impair.impair, status.status, labs.down)),
        (_MACHINE, (doctor.doctor, vm.vm, labs.clean)),
    ):
        for command in commands:
            settings = {"allow_interspersed_args": command not in (execute.exec_, vm.vm)}
            name = command.__name__.rstrip("_")
            app.command(name, rich_help_panel=panel, context_settings=settings)(_own_interrupt(command))
    return app


def _own_interrupt(command: Callable[..., int]) -> Callable[..., int]:
    """Typer would end silently on Ctrl-C, or with the status 1, depending on its version."""

    @wraps(command)
    def call(**arguments: Any) -> int:
        try:
            return command(**arguments)
        except KeyboardInterrupt:
            raise CommandError("interrupted", INTERRUPTED) from None

    return call


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit(OK)


def _global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", is_eager=True, callback=_print_version, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """What may stand before the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. `argv` without the program's name; returns the exit status, never raises."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # no crash over a box-drawing character
    try:
        with interruptible():
            status = build_app()(args=arguments or ["--help"], prog_name=PROGRAM, standalone_mode=False)
            sys.stdout.flush()
    except BrokenPipeError:  # `dblp-netem show burst90 | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in own and not hasattr(error, "format_message"):
            traceback.print_exc()
        return report(translate(error), as_json="--json" in own)
    if not arguments:
        return USAGE
    return status if isinstance(status, int) else OK


if __name__ == "__main__":
    sys.exit(main())

"""exec: a program inside a host of a lab, on the caller's terminal."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from netem.commands import labs, options
from netem.commands.failure import CommandError, Failure, report
from netem.statuses import USAGE

if TYPE_CHECKING:
    from netem.kernel.process import Child

NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""As shells, env(1) and sudo say it."""
_USAGE = "dblp-netem exec [--lab LAB] HOST -- COMMAND..."


def exec_(
    host: Annotated[str, typer.Argument(metavar="HOST", help="A host of the lab.", show_default=False)],
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND...", help="The program and its arguments.", show_default=False),
    ],
    lab: Annotated[
        str | None,
        typer.Option("--lab", metavar="LAB", help="Name or id; not needed when there is one lab.", show_default=False),
    ] = None,
    debug: options.Debug = False,
    state_dir: options.StateDir = options.STATE_DIR,
) -> int:
    """Run a program inside a host, as the user who called sudo. Returns its exit status (128 + n for signal n)."""
    from netem import preflight
    from netem.kernel.errors import KernelError
    from netem.lab import Lab

    lab, argv = _late_lab(command, lab)
    if not argv:
        raise CommandError(f"give a command: {_USAGE}", USAGE)
    preflight.require()
    wanted = labs.choose(labs.look(state_dir)[0], lab, "such as --lab ID")
    names = [entry["name"] for entry in wanted.hosts]
    if host not in names:
        raise CommandError(f"no host {host} in lab {wanted.name}; there are {', '.join(names)}", USAGE)
    with Lab.attach(wanted.id, state_dir=state_dir) as attached, _forwarding() as forward_to:
        try:
            child = attached.spawn(host, argv, env=_environment(wanted, host), log=None, cwd=_folder())
        except KernelError as error:
            why = os.strerror(error.code) if error.code else str(error)
            report(Failure(NOT_FOUND, f"{argv[0]} cannot be run in {host}: {why}"), as_json=False)
            return NOT_FOUND if error.code == errno.ENOENT else NOT_EXECUTABLE
        forward_to(child)
        status = _await(child)
    return 128 - status if status < 0 else status


def _late_lab(command: list[str], lab: str | None) -> tuple[str | None, list[str]]:
    """The lab and the program, where `--lab LAB` stands behind the host; other options must stand before it."""
    if not command[0].startswith("-"):
        return lab, command
    own, program = command, list[str]()
    if "--" in command:
        at = command.index("--")
        own, program = command[:at], command[at + 1 :]
    if len(own) == 1 and own[0].startswith("--lab="):
        lab = own[0].removeprefix("--lab=")
    elif len(own) == 2 and own[0] == "--lab":
        lab = own[1]
    elif own:
        raise CommandError(f"{own[0]}: options stand before the host: {_USAGE}", USAGE)
    return lab, program


def _environment(lab: labs.Standing, host: str) -> dict[str, str]:
    """The caller's, without what sudo added to it."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SUDO_")}
    return kept | {"DBLP_NETEM_LAB": lab.id, "DBLP_NETEM_HOST": host}


def _folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # removed meanwhile
        return Path("/")


@contextmanager
def _forwarding() -> Generator[Callable[[Child], None], None, None]:
    """Signals are the program's business; those that come before it has started wait for it.

    Those of the terminal reach it directly: it is in our process group.
    """
    children: list[Child] = []
    waiting: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if not children:
            waiting.append(number)
        elif number == signal.SIGTERM or not _in_foreground():
            children[0].signal(number)

    def forward_to(child: Child) -> None:
        children.append(child)
        for number in waiting:
            child.signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, forward)
    try:
        yield forward_to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def _await(child: Child) -> int:
    while True:
        try:
            return child.wait(60.0)
        except TimeoutError:
            continue

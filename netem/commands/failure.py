"""From an exception to an exit status and one line for a person, or JSON for a program."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

from netem.statuses import FAILED, INTERRUPTED, USAGE


class CommandError(Exception):
    """A command cannot do what was asked; the message is for the user."""

    def __init__(self, message: str, exit_status: int = FAILED) -> None:
        self.exit_status = exit_status
        super().__init__(message)


@dataclass(frozen=True)
class Failure:
    """`hint` is what the user may want to do next; `detail` goes into the JSON form."""

    status: int
    message: str
    hint: str = ""
    detail: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"ok": False, "exit_status": self.status, "error": {"message": self.message, **self.detail}}


def translate(error: BaseException) -> Failure:
    """What to tell the user about an error. By its attributes and module, so that nothing has to be imported."""
    if hasattr(error, "format_message"):  # usage errors: of typer, or in older versions of click
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "dblp-netem"
        return Failure(USAGE, error.format_message(), f"See: {path} --help")
    if isinstance(error, KeyboardInterrupt):
        return Failure(INTERRUPTED, "interrupted")
    own = type(error).__module__.startswith(("netem.", "dblp."))
    if own:
        detail = error.as_json() if hasattr(error, "as_json") else {}
        message = str(error) or type(error).__name__
        return Failure(int(getattr(error, "exit_status", FAILED)), message, detail={"text": message, **detail})
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return Failure(FAILED, f"{where}{error.strerror}")
    message = f"internal error: {type(error).__name__}: {error}"
    return Failure(FAILED, message, "With --debug it shows where. Please report it.")


def report(failure: Failure, *, as_json: bool) -> int:
    """Print a failure, to standard output too as JSON when asked for; returns the exit status."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if failure.status == INTERRUPTED:
        console.print(failure.message)
    else:
        console.print(Text.assemble(("error: ", "bold red"), failure.message))
        if failure.hint:
            console.print(Text(failure.hint, style="dim"))
    if as_json:
        print_json(failure.as_json())
    return failure.status


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")

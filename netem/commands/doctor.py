"""doctor: what works on this machine, and what to do about the rest."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from netem.commands import options
from netem.commands.failure import CommandError, print_json
from netem.statuses import OK, PREFLIGHT, USAGE

if TYPE_CHECKING:
    from rich.console import Console

    from netem.preflight import Check


def doctor(
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", metavar="", help="Measure instead which differences this machine can resolve."),
    ] = False,
    fidelity: Annotated[
        bool,
        typer.Option(
            "--fidelity", metavar="", help="Measure instead whether links do what is asked, setting by setting."
        ),
    ] = False,
    backend: Annotated[
        str,
        typer.Option(
            "--backend", metavar="NAME", help="With --fidelity: netem or bpf, instead of what `run` would take."
        ),
    ] = "auto",
    json: options.Json = False,
    debug: options.Debug = False,
    state_dir: options.StateDir = options.STATE_DIR,
) -> int:
    """Try everything that a run may need, for real, and say what to do where it does not work."""
    if calibrate and fidelity:
        raise CommandError("--calibrate or --fidelity: one at a time", USAGE)
    if backend != "auto" and not fidelity:
        raise CommandError(f"--backend {backend}: only with --fidelity", USAGE)
    if calibrate:
        return _calibrate(state_dir, json)
    if fidelity:
        from netem.commands.fidelity import fidelity as measure

        return measure(backend, state_dir, json)
    from netem import preflight, rootless
    from netem.kernel.errors import Unavailable

    if os.geteuid() != 0:
        with contextlib.suppress(Unavailable):  # the check of that name says why
            rootless.enter()
    checks = preflight.doctor(state_dir)
    lacking = missing(checks)
    if json:
        entries = {name: asdict(check) for name, check in checks.items()}
        print_json({"ok": not lacking, "missing": lacking, "checks": entries})
        return PREFLIGHT if lacking else OK
    from rich.console import Console

    _print(Console(highlight=False), checks, lacking)
    return PREFLIGHT if lacking else OK


def _calibrate(state_dir: Path, json: bool) -> int:
    from netem import preflight
    from netem.experiment import calibrate
    from netem.kernel.user import User

    preflight.require()
    user = User.caller()
    found = calibrate.calibrate(state_dir, user)
    path = calibrate.path_of(user)
    calibrate.save(found, path, user)
    if json:
        print_json({"ok": True, "file": str(path), "calibration": asdict(found)})
        return OK
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    late, share = (found.late_p50_s * 1e6, found.late_p99_s * 1e6), found.waiting_share
    for label, value in (
        ("round of 64 packets, idle", f"{found.idle_p50_s * 1e3:.2f} ms, 95 % below {found.idle_p95_s * 1e3:.2f} ms"),
        ("goodput, no loss", f"{found.goodput_bps / 1e9:.2f} Gbit/s"),
        ("a sleep of 1 ms ends late by", f"{late[0]:.0f} us, 99 % below {late[1]:.0f} us"),
        ("waiting for a core", "not known" if share is None else f"{share:.1%} of the time"),
    ):
        console.print(f"{label.ljust(30)}{value}")
    single, mean = f"[bold]{found.single_s * 1e3:.3g} ms[/]", f"[bold]{found.mean_s * 1e3:.2g} ms[/]"
    console.print(f"\nTwo single rounds differ by up to {single} by themselves (95 % of pairs),")
    console.print(f"means of 30 rounds by {mean}: smaller effects cannot be told here.")
    console.print(f"Kept in {path}; every run refers to it.", markup=False)
    return OK


def missing(checks: Mapping[str, Check]) -> list[str]:
    """What no run can do without: each needed feature, and one of the backends that can make loss."""
    lacking = [name for name, check in checks.items() if check.needed and not check.ok]
    tried = lacking == [] or "privileges" not in lacking
    if tried and not any(checks[name].ok for name in ("bpf", "netem") if name in checks):
        lacking.append("bpf or netem")
    return lacking


def _print(console: Console, checks: Mapping[str, Check], lacking: list[str]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    untried = []
    width = max(map(len, checks))
    for name, check in checks.items():
        if check.detail.startswith("not tried"):
            untried.append(name)
            continue
        mark = ("✓", "green") if check.ok else ("✗", "bold red" if name in lacking else "yellow")
        line = Text.assemble(mark, f" {name.ljust(width)}  ")
        if len(line) + len(check.detail) <= console.width:
            console.print(line.append(check.detail))
        else:
            console.print(line)
            console.print(Padding(check.detail, (0, 0, 0, 4)), markup=False)
        if check.remedy and not check.ok:
            console.print(Padding(Text(check.remedy, style="cyan"), (0, 0, 0, 4)))
    if untried:
        console.print(f"–  [dim]not tried: {', '.join(untried)}[/]")
    failed = [name for name, check in checks.items() if not check.ok and name not in lacking and name not in untried]
    if lacking:
        console.print(f"\n[bold red]Not ready[/]: a run needs {', '.join(lacking)}.")
    elif failed:
        console.print(f"\n[bold green]Ready.[/] Some scenarios need what is missing here: {', '.join(failed)}.")
    else:
        console.print("\n[bold green]Ready.[/] Everything works.")

"""run: the main job."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from netem.commands import options
from netem.commands.failure import print_json
from netem.statuses import OK


def _out(given: str | Path) -> Path:
    """A folder that is there or can be made, as far as can be told without making it."""
    if not str(given).strip():
        raise typer.BadParameter("it is empty; name the folder in which the run's folder is made, such as runs")
    path = Path(given)
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    try:
        if not there.is_dir():
            raise NotADirectoryError(20, "not a folder", str(there))
        if os.geteuid() == 0:  # others cannot run anything, and may look at a plan
            tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise typer.BadParameter(f"no folder can be made in {there}: {error.strerror}") from error
    return path


def run(
    scenario: options.ScenarioName,
    set_: options.Overrides = None,
    seed: options.Seed = None,
    out: Annotated[
        Path, typer.Option("--out", parser=_out, metavar="DIR", help="Where the run's folder is made.")
    ] = Path("runs"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Say what would be done, and do nothing.")
    ] = False,
    allow_unfaithful: Annotated[
        bool,
        typer.Option("--allow-unfaithful", metavar="", help="Exit status 0 although the emulation was not faithful."),
    ] = False,
    json: options.Json = False,
    debug: options.Debug = False,
    state_dir: options.StateDir = options.STATE_DIR,
) -> int:
    """Run a scenario: build the lab, train in it while losses hit the chosen iterations, save and show the results.

    Without root it runs in a user namespace where the system allows that, on links of netem alone.
    """
    from netem.spec import load_scenario

    loaded = load_scenario(scenario, options.overrides(set_, seed))
    if os.geteuid() != 0 and not dry_run:
        from netem import rootless

        rootless.enter()  # before numpy, which makes threads
    from netem import experiment

    experiment.check(loaded)
    settings = experiment.RunOptions(
        out=out, argv=tuple(sys.argv), state_dir=state_dir, allow_unfaithful=allow_unfaithful, json_output=json
    )
    if dry_run:
        plan = experiment.dry_run(loaded, settings)
        if json:
            print_json({"ok": True, "plan": plan.splitlines()})
        else:
            typer.echo(plan)
        return OK
    from rich.console import Console

    from netem import preflight

    preflight.require()
    return experiment.run_scenario(loaded, settings, Console(stderr=json))

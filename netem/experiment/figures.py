"""Figures of a run, drawn after the measurements by a process of the user: it writes in the user's own folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any

import netem
from netem.analysis.command import CommandRun
from netem.analysis.run import TransportRun
from netem.experiment.folder import RunFolder
from netem.kernel import process
from netem.kernel.errors import LabError

LIMIT_S = 300.0
MISSING = "no figures: matplotlib is not installed (pip install 'dblp-netem[figures]')"
LOG = "logs/figures.log"


def draw_queues(folder: RunFolder, runs: Sequence[TransportRun | CommandRun]) -> str | None:
    """figures/<transport>-r<repeat>-queue-<host>.svg for each recorded port; why not, in a sentence for the user."""
    figures = [_about(folder, run, number) for run in runs for number in range(len(run.queues))]
    if not figures:
        return None
    if util.find_spec("matplotlib") is None:
        return MISSING
    argv = [sys.executable, "-m", "netem.analysis.queue_figure", json.dumps(figures)]
    env = {"PYTHONPATH": str(Path(netem.__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}
    with folder.open_new(LOG) as log:
        try:
            child = process.start(argv, netns=None, env=env, user=folder.user, log=log)
            try:
                status = child.wait(LIMIT_S)
            finally:
                child.terminate()
        except (LabError, TimeoutError) as error:
            return f"no figures: {error}"
    return None if status == 0 else f"no figures: see {folder.path / LOG}"


def _about(folder: RunFolder, run: TransportRun | CommandRun, number: int) -> dict[str, Any]:
    queue = run.queues[number]
    name = f"{run.name}-r{run.repeat}-queue-{queue.host}"
    received = [burst for burst in run.microbursts if burst.to == queue.host and burst.began_s is not None]
    return {
        "csv": str(folder.path / f"stats/{name}.csv"),
        "svg": str(folder.path / f"figures/{name}.svg"),
        "title": f"{folder.spec.name}, {run.name}: the queue of the port to {queue.host}",
        "limit_bytes": queue.limit_bytes,
        "bursts_s": [[burst.began_s, burst.ended_s] for burst in received],
    }

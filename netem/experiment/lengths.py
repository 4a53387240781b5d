"""Losses in a row where a chain was asked for, from the captures of a run. They are read only for that."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from netem.analysis.burst_lengths import burst_lengths
from netem.analysis.fates import Fates, captured
from netem.analysis.folder import CAPTURES
from netem.analysis.merge import LossPlan
from netem.analysis.pcapng import CaptureError
from netem.analysis.run import TransportRun
from netem.spec import Scenario
from netem.spec.loss import BurstyLoss


def with_burst_lengths(
    spec: Scenario, plan: LossPlan, runs: Sequence[TransportRun], folder: Path
) -> tuple[TransportRun, ...]:
    """The same runs, with what their captures say. One that cannot be read says nothing."""
    if not any(isinstance(row.loss_requested, BurstyLoss) for run in runs for row in run.rows):
        return tuple(runs)
    found: dict[tuple[str, int], Fates] = {}
    with contextlib.suppress(CaptureError):
        for name, repeat, fates in captured(folder / CAPTURES, list(spec.transports), spec.topology.ranks):
            found[name, repeat] = fates
    return tuple(
        replace(
            run,
            burst_lengths=burst_lengths(run.rows, found.get((run.name, run.repeat)), plan, keyed=run.kind != "tcp"),
        )
        for run in runs
    )

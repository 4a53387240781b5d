"""The product's own rounds for benchmarks: a scenario's lab and links stand, its jobs run when they are called.

So other programs can run in the same lab between two jobs. What a job measures is what `dblp-netem run` would write to
rounds.csv: real server and worker processes, the worker's own clock.
"""

from __future__ import annotations

import io
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.labs import Star
from netem.analysis.records import RoundRow
from netem.experiment.asked import loss_plan
from netem.experiment.conductor import Conductor, Memory
from netem.experiment.fabric import Fabric
from netem.experiment.folder import RunFolder
from netem.experiment.hub import Event
from netem.experiment.prepare import check, gradient_bytes, make_job
from netem.experiment.record import Recorder
from netem.kernel.user import User
from netem.lab import Lab
from netem.links.choose import choose
from netem.preflight import probe, require_memory
from netem.spec import Loaded, iterations_per_epoch, load_scenario_text

Watch = Callable[[Conductor, Event], None]
"""Called at every event of the workload; the conductor knows the processes (`children`, by rank)."""


@dataclass
class Outcome:
    """One job: its rows, and the packets that a receiver's device had no room for, by direction."""

    rows: tuple[RoundRow, ...]
    device_drops: dict[str, int]

    def up(self, *iterations: int) -> list[RoundRow]:
        """Rows of workers to server; of these iterations, or of all but the first, which warms up."""
        chosen = [row for row in self.rows if row.direction == "up"]
        return [row for row in chosen if (row.iteration in iterations if iterations else row.iteration > 0)]


@dataclass
class Testbed:
    """A scenario whose lab stands. Use `standing`."""

    loaded: Loaded
    lab: Lab
    fabric: Fabric
    folder: RunFolder
    choice: Any
    star: Star
    _jobs: int = 0
    _began: float = field(default_factory=time.monotonic)

    def run(self, transport: str, watch: Watch | None = None) -> Outcome:
        """One job of this transport; each call has a seed, and so losses, of its own. Raises RunFailed."""
        spec, self._jobs = self.loaded.spec, self._jobs + 1
        job = make_job(self.loaded, transport, self._jobs, secrets.token_hex(16), spec.seed)
        recorder = Recorder(job, io.StringIO(), self._began, iterations_per_epoch(spec))
        conductor = Conductor(self.lab, self.fabric, spec, job, self.folder, recorder, Memory())
        if watch is not None:
            recorder.watch = lambda event: watch(conductor, event)
        conductor.run()
        exact = self.choice.loss_engine == "bpf"
        counts = self.fabric.counts(job, [burst.iteration for burst in spec.bursts])
        plan = loss_plan(spec, job.config.seed)
        run = recorder.result(counts, plan, by_round=exact, repeatable=exact)
        bad = [row for row in run.rows if row.outcome != "ok"]
        if bad:
            raise RuntimeError(f"{transport}: {len(bad)} rounds did not end ok, the first: {bad[0]}")
        return Outcome(run.rows, self.fabric.device_drops())


@contextmanager
def standing(scenario: str, folder: Path) -> Iterator[Testbed]:
    """The lab and links of a scenario, given as YAML text. What its jobs leave behind goes below `folder`.

    Raises Unavailable where there is not enough memory for such gradients, or no root.
    """
    loaded = load_scenario_text(scenario)
    check(loaded)
    spec = loaded.spec
    require_memory(gradient_bytes(loaded), len(spec.topology.workers))
    choice = choose(spec.link.backend, spec.link.loss_engine, spec.topology.needs_delay, probe())
    (folder / "programs").mkdir(exist_ok=True)
    with (
        RunFolder(folder / "jobs", spec, spec.seed, User.caller()) as run_folder,
        Lab.build(spec.topology, name=f"bench-{os.getpid()}") as lab,
        Fabric(lab, spec, choice) as fabric,
    ):
        yield Testbed(loaded, lab, fabric, run_folder, choice, Star(lab, folder / "programs"))


def replay(workers: int, chunks: int, iterations: int, transports: str, bursts: str = "[]", name: str = "bench") -> str:
    """A scenario of gradients without a model, on clean links but for the bursts; recommended profile.

    transports, bursts: YAML in flow style.
    """
    return f"""
name: {name}
seed: 7
topology: {{star: {{workers: {workers}}}}}
workload: {{kind: replay, chunks: {chunks}, iterations: {iterations}}}
profile: recommended
transports: {transports}
bursts: {bursts}
"""

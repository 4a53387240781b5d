"""(h) What a rank costs while it waits: no busy loop.

Replay workload, 3 workers, 4 MB. In the middle of the job worker 3 is halted (SIGSTOP) for some seconds, so that the
others wait: worker 1 for the mean of the round, the server for the gradient of worker 3. Processor time of each over
the time of waiting, as a share of one core; the first moment, in which they still send, is left out.
"""

from __future__ import annotations

import os
import signal
import time

from benchmarks.harness import Context, Line
from benchmarks.processes import cpu_s
from benchmarks.testbed import replay, standing
from netem.experiment.conductor import Conductor
from netem.experiment.hub import Event

TITLE = "(h) processor time of a rank that waits"
CHUNKS, ITERATIONS, AT = 2747, 6, 2
SETTLE_S, WAIT_S, QUICK_WAIT_S = 0.5, 4.0, 1.5
HALTED, WATCHED = 3, {"server": 0, "worker": 1}
LIMIT_PERCENT = 2.0


class Halt:
    """Halts one worker once, and measures the others meanwhile; a `Watch`."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self.shares: dict[str, float] = {}

    def __call__(self, conductor: Conductor, event: Event) -> None:
        if event.get("iteration") != AT or self.shares:
            return
        pids = {rank: child.pid for rank, child in conductor.children.items()}
        os.kill(pids[HALTED], signal.SIGSTOP)
        try:
            time.sleep(SETTLE_S)
            before = {who: cpu_s(pids[rank]) for who, rank in WATCHED.items()}
            time.sleep(self.wait_s)
            after = {who: cpu_s(pids[rank]) for who, rank in WATCHED.items()}
        finally:
            os.kill(pids[HALTED], signal.SIGCONT)
        self.shares = {who: ((after[who] or 0.0) - (before[who] or 0.0)) / self.wait_s for who in WATCHED}


def measure(context: Context) -> list[Line]:
    halt = Halt(QUICK_WAIT_S if context.quick else WAIT_S)
    with standing(replay(3, CHUNKS, ITERATIONS, "{dblp: {fixed: 0.8%}}"), context.scratch()) as bed:
        bed.run("dblp", halt)
    context.record("shares", halt.shares)
    return [Line(f"{who} that waits", 100 * halt.shares[who], LIMIT_PERCENT, unit="% of a core") for who in WATCHED]

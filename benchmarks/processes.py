"""What the processes of a job use: peak of resident memory, processor time. And what an interpreter uses without a job.

python -m benchmarks.processes        # prints the peak of a process that has loaded what a rank loads, in bytes
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.labs import Star
from netem.experiment.conductor import Conductor
from netem.experiment.hub import Event

IDLE = """
import pathlib, numpy.random, dblp.train
print(pathlib.Path("/proc/self/status").read_text())
"""
"""A process that loads what a rank without a model loads, does nothing, and prints its status."""


def idle_bytes(star: Star) -> int:
    """Peak resident memory of an interpreter with the libraries of a rank; median of three."""
    argv = [sys.executable, "-c", IDLE]
    return int(median(_peak(star.start("server", argv).output(30.0)) for _ in range(3)))


def peak_bytes(pid: int) -> int:
    """Peak resident memory of a process as the kernel has kept it (proc(5), VmHWM); 0 when it has gone."""
    try:
        return _peak(Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0


def _peak(status: str) -> int:
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def cpu_s(pid: int) -> float | None:
    """Processor time of a process with all its threads, ended ones too (clock_getcpuclockid(3)); None when it has gone.

    The kernel's work for packets counts where it interrupts the process, as it mostly does on a busy machine.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return None


class PeakMemory:
    """Peak resident memory by rank, read at every event of a job; a `Watch`."""

    def __init__(self) -> None:
        self.by_rank: dict[int, int] = {}

    def __call__(self, conductor: Conductor, event: Event) -> None:
        for rank, child in conductor.children.items():
            self.by_rank[rank] = max(self.by_rank.get(rank, 0), peak_bytes(child.pid))

    @property
    def server_bytes(self) -> int:
        return self.by_rank[0]

    @property
    def worker_bytes(self) -> int:
        """Of the largest worker."""
        return max(peak for rank, peak in self.by_rank.items() if rank)


class Work:
    """Time and processor time between the first reports of two iterations; a `Watch`."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}

    def __call__(self, conductor: Conductor, event: Event) -> None:
        iteration = event.get("iteration")
        if iteration is None or iteration in self._seen:
            return
        used = [cpu_s(child.pid) for child in conductor.children.values()]
        self._seen[iteration] = (time.monotonic(), sum(each or 0.0 for each in used))

    def per_iteration(self) -> tuple[float, float]:
        """(wall seconds, processor seconds of all processes) of an iteration; the first and the last are left out."""
        first, last = 1, max(self._seen) - 1
        (began, used), (ended, used_then) = self._seen[first], self._seen[last]
        return (ended - began) / (last - first), (used_then - used) / (last - first)

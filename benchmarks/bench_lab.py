"""(f) Set-up and tear-down of labs of 4, 16 and 64 hosts behind one switch, beside Mininet's.

The lab is built and torn down in this process (one of the hosts is the server); Mininet says itself how long its own
took ("completed in", without the start of its interpreter), with a Linux bridge as switch. They take turns. `mn -c` is
never called: it would kill what it did not start.

The time of the commands `up` and `down`, from start to end of the process, is shown beside them: most of it is the
start of the interpreter and its libraries.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.harness import ROOT, Context, Line, Spread, alternate, installed, ratio
from benchmarks.labs import environment
from netem.lab import Lab
from netem.spec import star

TITLE = "(f) lab up and down"
HOSTS, QUICK_HOSTS = (4, 16, 64), (4, 16)
LIMIT, LIMIT_S = 0.5, 120.0
NEEDS = ("mn", "mnexec", "brctl")
COMPLETED = re.compile(r"completed in ([0-9.]+) seconds")


def measure(context: Context) -> list[Line]:
    lines = []
    samples: dict[str, dict[str, list[float]]] = {}
    missing = [program for program in NEEDS if installed(program) is None]
    for hosts in QUICK_HOSTS if context.quick else HOSTS:
        contestants: dict[str, Callable[[], float]] = {"lab": partial(lab_s, hosts, context.scratch())}
        if not missing:
            contestants["mininet"] = partial(mininet_s, hosts)
        for run in contestants.values():
            run()  # the first of each is not counted
        found = alternate(contestants, context.repeats(7))
        samples[f"{hosts} hosts"] = found
        lines.append(_line(hosts, found, missing))
    context.record("up_and_down_s", samples)
    commands = Spread.of(command_s(context.scratch()) for _ in range(context.repeats(5)))
    return [*lines, Line("commands up and down, star3", commands.median, unit="s", detail=commands.shown(1, "s"))]


def _line(hosts: int, found: dict[str, list[float]], missing: list[str]) -> Line:
    name = f"{hosts} hosts, over Mininet"
    if missing:
        return Line.absent(name, f"not installed: {', '.join(missing)} (Debian: mininet, bridge-utils)", LIMIT)
    detail = ", ".join(f"{who} {Spread.of(each).shown(1, 's')}" for who, each in found.items())
    return Line(name, ratio(found["lab"], found["mininet"]), LIMIT, detail=detail)


def lab_s(hosts: int, folder: Path) -> float:
    """Seconds from nothing to a lab of so many hosts, and back to nothing."""
    topology = star(hosts - 1)
    began = time.perf_counter()
    lab = Lab.build(topology, state_dir=folder / "state")
    removed = lab.close()
    took_s = time.perf_counter() - began
    if removed.left:
        raise RuntimeError(f"the lab left {', '.join(removed.left)}")
    return took_s


def mininet_s(hosts: int) -> float:
    """Seconds that Mininet says it took for the same."""
    argv = ["mn", "--switch", "lxbr", "--controller", "none", "--topo", f"single,{hosts}", "--test", "none"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL)
    found = COMPLETED.search(done.stdout + done.stderr)
    if done.returncode != 0 or found is None:
        raise RuntimeError(f"{' '.join(argv)}: status {done.returncode}: {(done.stdout + done.stderr)[-400:]}")
    return float(found.group(1))


def command_s(folder: Path) -> float:
    """Seconds of `up star3` and `down`, as whoever types them waits for them."""
    began = time.perf_counter()
    name = f"bench-{os.getpid()}"
    for words in (("up", "star3", "--name", name), ("down", name)):
        argv = [sys.executable, "-m", "netem.cli", *words, "--state-dir", str(folder / "state")]
        subprocess.run(argv, cwd=ROOT, env=environment({}), capture_output=True, timeout=LIMIT_S, check=True)
    return time.perf_counter() - began

"""The noise floor of this machine: idle rounds with the real transport in a lab, goodput, timers, scheduling."""

from __future__ import annotations

import csv
import json
import os
import platform
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from netem.analysis import resolution
from netem.kernel.user import User
from netem.spec import load_scenario_text

FILE = "dblp-netem/calibration.json"
VERSION = 1
STALE_DAYS = 30
SLEEPS, SLEEP_S = 400, 0.001
SPIN_S = 1.0
_IDLE = """\
name: calibration-idle
topology: {star: {workers: 1}}
latencies: reported
workload: {kind: replay, chunks: 64, iterations: 200, compute: 2 ms}
transports: {mlt: {fixed: 0%}}
"""
_BULK = """\
name: calibration-bulk
topology: {star: {workers: 1}}
latencies: reported
workload: {kind: replay, chunks: 5000, iterations: 12}
transports: {mlt: {fixed: 0%}}
"""
WARM_UP = 10
"""Rounds that are left out: the first ones find cold caches."""


class CalibrationFailed(Exception):
    """A round of the measurement did not end well; the message says which."""

    exit_status = 1


@dataclass(frozen=True)
class Calibration:
    """idle_*: latency of a round of 64 packets. single_s, mean_s: see `resolution`; the latter of means of 30 rounds.

    late_*: how much later than asked a sleep of 1 ms ends. waiting_share: part of a second in which a process that
    wants to run waits for a core.
    """

    measured_utc: str
    kernel: str
    cores: int
    idle_p50_s: float
    idle_p95_s: float
    single_s: float
    mean_s: float
    goodput_bps: float
    late_p50_s: float
    late_p99_s: float
    late_max_s: float
    waiting_share: float | None
    version: int = VERSION


def calibrate(state_dir: Path, user: User) -> Calibration:
    """Takes some 20 s. Raises CalibrationFailed, and what a run raises before it begins."""
    late = sleeping()
    waiting = _waiting_share()
    with tempfile.TemporaryDirectory(prefix="dblp-netem-") as name:
        os.chmod(name, 0o755)
        idle = [float(row["latency_s"]) for row in _rounds(_IDLE, Path(name), state_dir)][WARM_UP:]
        bulk = [float(row["goodput_bps"]) for row in _rounds(_BULK, Path(name), state_dir)][2:]
    return Calibration(
        measured_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        kernel=platform.release(),
        cores=len(os.sched_getaffinity(0)),
        idle_p50_s=float(np.median(idle)),
        idle_p95_s=float(np.quantile(idle, 0.95)),
        single_s=resolution.single(idle),
        mean_s=resolution.mean(idle),
        goodput_bps=float(np.median(bulk)),
        late_p50_s=float(np.median(late)),
        late_p99_s=float(np.quantile(late, 0.99)),
        late_max_s=max(late),
        waiting_share=waiting,
    )


def _rounds(text: str, out: Path, state_dir: Path) -> list[dict[str, str]]:
    """The rounds of a run, worker to server."""
    from netem.experiment.run import RunOptions, run_scenario

    loaded = load_scenario_text(text)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        status = run_scenario(loaded, RunOptions(out=out, state_dir=state_dir), Console(file=nowhere))
    (folder,) = out.glob(f"{loaded.spec.name}-*")
    if status != 0:
        problem = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["problem"]
        raise CalibrationFailed(f"{loaded.spec.name}: {problem or f'exit status {status}'}")
    with (folder / "rounds.csv").open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["direction"] == "up"]


def sleeping() -> list[float]:
    """How much later than asked short sleeps end."""
    late = []
    for _ in range(SLEEPS):
        began = time.perf_counter()
        time.sleep(SLEEP_S)
        late.append(time.perf_counter() - began - SLEEP_S)
    return late


def _waiting_share() -> float | None:
    """Run-queue wait of a thread that computes for a second (proc(5), schedstat: ns on a core, ns waiting).

    None where the kernel does not count it.
    """
    try:
        before = _schedstat()
        end = time.perf_counter() + SPIN_S
        while time.perf_counter() < end:
            pass
        running, waiting = (now - then for now, then in zip(_schedstat(), before, strict=True))
    except (OSError, ValueError):
        return None
    return waiting / max(1, running + waiting)


def _schedstat() -> tuple[int, int]:
    first, second, *_ = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
    return int(first), int(second)


def path_of(user: User, environ: Mapping[str, str] | None = None) -> Path:
    """In the user's XDG_STATE_HOME (sudo does not hand it on: then its default)."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_STATE_HOME")
    return Path(base) / FILE if base else Path(user.home) / ".local/state" / FILE


def save(found: Calibration, path: Path, user: User) -> None:
    """Written by the user, not by root: the folder is theirs. Raises OSError."""
    with _as(user):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
        temporary.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)


def load(path: Path, user: User) -> Calibration | None:
    """None where there is none that can be read."""
    try:
        with _as(user):
            raw = json.loads(path.read_text(encoding="utf-8"))
        found = Calibration(**raw)
        datetime.fromisoformat(found.measured_utc)
    except (OSError, ValueError, TypeError):
        return None
    return found if found.version == VERSION else None


@contextmanager
def _as(user: User) -> Generator[None, None, None]:
    """Files as this user."""
    if user.is_current:
        yield
        return
    group, owner = os.getegid(), os.geteuid()
    os.setegid(user.gid)
    os.seteuid(user.uid)
    try:
        yield
    finally:
        os.seteuid(owner)
        os.setegid(group)


def reference(found: Calibration | None, now: datetime) -> dict[str, Any] | None:
    """For manifest.json: the values, their age, and whether this is still the machine that they are of."""
    if found is None:
        return None
    return {
        **asdict(found),
        "age_s": round((now - datetime.fromisoformat(found.measured_utc)).total_seconds()),
        "same_kernel": found.kernel == platform.release(),
        "same_cores": found.cores == len(os.sched_getaffinity(0)),
    }


def line(referred: Mapping[str, Any] | None) -> str:
    """One line for a run: what can be told apart here, or why that is not known."""
    if referred is None:
        return "calibration: none; `dblp-netem doctor --calibrate` measures which differences this machine can resolve"
    doubts = [
        text
        for text, doubtful in (
            ("another kernel", not referred["same_kernel"]),
            ("another number of cores", not referred["same_cores"]),
            (f"{referred['age_s'] // 86400} days old", referred["age_s"] > STALE_DAYS * 86400),
        )
        if doubtful
    ]
    stale = f" (of {', '.join(doubts)}: measure again)" if doubts else ""
    single, mean = 1e3 * referred["single_s"], 1e3 * referred["mean_s"]
    said = f"single rounds differ by up to {single:.3g} ms by themselves, means of 30 by {mean:.2g} ms"
    return f"calibration: {said}{stale}"

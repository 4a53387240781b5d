"""Starts `dblp-netem run` on a small replay, as a user would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120

SCENARIO = """\
name: small
seed: 11
topology: {{star: {{workers: {workers}}}}}
workload: {{kind: replay, chunks: {chunks}, iterations: 8}}
profile: {profile}
latencies: reported
link: {{backend: bpf}}
transports: {transports}
bursts:
{bursts}
{extra}
"""
DBLP = "{low: 0.8%, high: 40.8%, detector: {schedule: {critical: 0..1}}}"
BOTH = "{dblp: " + DBLP + ", mlt: {fixed: 0.8%}}"
TWO_BURSTS = "  - {iteration: 3, loss: 90%}\n  - {iteration: 5, loss: 60%, direction: both}"


def scenario(
    folder: Path,
    *,
    workers: int = 3,
    chunks: int = 400,
    profile: str = "recommended",
    transports: str = BOTH,
    bursts: str = TWO_BURSTS,
    extra: str = "",
) -> Path:
    path = folder / "small.yaml"
    text = SCENARIO.format(
        workers=workers, chunks=chunks, profile=profile, transports=transports, bursts=bursts, extra=extra
    )
    path.write_text(text)
    return path


def command(path: Path, out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "netem.cli", "run", str(path), "--out", str(out), *options]


def start(path: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(path, out, *options), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def run(path: Path, out: Path, *options: str, status: int = 0) -> Path:
    """Runs to the end and returns the run folder."""
    before = set(out.glob("*")) if out.exists() else set()
    done = subprocess.run(
        command(path, out, *options), cwd=ROOT, text=True, capture_output=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == status, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    (folder,) = set(out.glob("*")) - before
    return folder


def clean() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "netem.cli", "clean", "--json"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == kind]


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content

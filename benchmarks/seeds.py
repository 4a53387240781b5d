"""Runs a shipped scenario with many seeds and says how often all its expectations held.

    sudo .venv/bin/python benchmarks/seeds.py burst90 --seeds 20

Prints one line a seed: exit status, wall time, peak memory of everything together, burst latency ratio, accuracies.
Writes the same as JSON under benchmarks/results/. Exit status 0 when every run ended with 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RUN_LIMIT_S = 600


def one(scenario: str, seed: int, out: Path) -> dict[str, Any]:
    """A run of one seed, in numbers."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "netem.cli", "run", scenario, "--seed", str(seed), "--out", str(out), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    wall_s = time.monotonic() - began
    report = json.loads(done.stdout)
    row: dict[str, Any] = {"seed": seed, "status": done.returncode, "wall_s": round(wall_s, 1)}
    summary = report.get("summary")
    if summary is None:
        return {**row, "problem": report.get("error", {}).get("message")}
    manifest = json.loads((Path(report["folder"]) / "manifest.json").read_text())
    failed = [c["name"] for c in summary["fidelity"]["checks"] if not c["ok"]]
    return {
        **row,
        "peak_mib": manifest["peak_memory_bytes"] >> 20,
        "ratios": {name: ratios.get("burst_max") for name, ratios in summary["ratios"].items()},
        "accuracy": {name: each["accuracy"] for name, each in summary["transports"].items()},
        "expectations_failed": [e["text"] for e in summary["expectations"] if e["held"] is not True],
        "checks_failed": failed,
    }


def shown(row: dict[str, Any]) -> str:
    if "problem" in row:
        return f"seed {row['seed']:>4}  status {row['status']}  {row['wall_s']:6.1f} s  {row['problem']}"
    ratios = ", ".join(f"{name} {value:.2f}x" for name, value in row["ratios"].items() if value)
    accuracy = ", ".join(f"{name} {value:.2%}" for name, value in row["accuracy"].items() if value)
    bad = "; ".join([*row["expectations_failed"], *row["checks_failed"]])
    return (
        f"seed {row['seed']:>4}  status {row['status']}  {row['wall_s']:6.1f} s  {row['peak_mib']} MiB"
        f"  burst {ratios}  {accuracy}  {bad}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario")
    parser.add_argument("--seeds", type=int, default=20, help="how many, counted from --first")
    parser.add_argument("--first", type=int, default=1)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="dblp-netem-seeds-") as out:
        for seed in range(options.first, options.first + options.seeds):
            rows.append(one(options.scenario, seed, Path(out)))
            sys.stdout.write(shown(rows[-1]) + "\n")
            sys.stdout.flush()
    good = sum(row["status"] == 0 for row in rows)
    walls = sorted(row["wall_s"] for row in rows)
    sys.stdout.write(f"{good} of {len(rows)} runs ended with status 0; median {walls[len(walls) // 2]} s a run\n")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"seeds-{options.scenario}.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Runs over several switches: as faithful as on a star, and what is lost between switches is in the accounts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kernel.run_helpers import LIMIT_S, run, start, summary

SCENARIO = """\
name: graph
seed: 5
topology: {topology}
latencies: reported
workload: {{kind: replay, chunks: {chunks}, iterations: 6}}
link: {{backend: bpf}}
transports: {{dblp: {{low: 0.8%, high: 40.8%, detector: {{schedule: {{critical: 0..1}}}}}}}}
bursts:
  - {{iteration: 3, loss: 80%, direction: both}}
"""
CHAIN = """
  name: chain
  hosts: {server: {role: server}, near: {}, far: {}, sink: {role: host}}
  switches: [a, b, c]
  links:
    - {between: [server, a], up: {loss: 1%}}
    - {between: [near, b], up: {loss: 2%}}
    - {between: [far, c]}
    - {between: [sink, c]}
    - {between: [a, b], loss: 3%, rate: 60 Mbit, queue: 20 packets}
    - {between: [b, c], down: {loss: 4%}, up: {loss: 1%}}"""


def scenario(folder: Path, topology: str, chunks: int) -> Path:
    path = folder / "graph.yaml"
    path.write_text(SCENARIO.format(topology=topology, chunks=chunks))
    return path


@pytest.mark.parametrize(("topology", "chunks"), [("leaf-spine", 60), ("dumbbell", 200), ("two-site", 200)])
def test_a_burst_over_several_switches_is_faithful(topology: str, chunks: int, tmp_path: Path) -> None:
    folder = run(scenario(tmp_path, topology, chunks), tmp_path / "runs")
    found = summary(folder)
    assert found["fidelity"]["faithful"]
    totals = [check for check in found["fidelity"]["checks"] if check["name"] == "totals"]
    assert [check["detail"] for check in totals] == [totals[0]["detail"]]
    assert "sums close (by round)" in totals[0]["detail"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert "shortest paths" in manifest["routing"]["method"]
    switch = {"leaf-spine": "spine1", "dumbbell": "right", "two-site": "site1"}[topology]
    last = list(manifest["routing"]["up"])[-1]
    assert switch in manifest["routing"]["up"][last]


def test_losses_and_queues_between_switches_are_told_apart(tmp_path: Path) -> None:
    """Steady loss on four links of a way, and a trunk that overflows: every drop is counted where it belongs."""
    folder = run(scenario(tmp_path, CHAIN, 300), tmp_path / "runs")
    found = summary(folder)
    checks = found["fidelity"]["checks"]
    base = {check["detail"].split(",")[0]: check["requested"] for check in checks if check["name"] == "base loss"}
    assert base == pytest.approx(
        {
            "worker 1 up": 1 - 0.98 * 0.97,
            "worker 2 up": 1 - 0.96 * 0.97,
            "worker 1 down": 1 - 0.99 * 0.97,
            "worker 2 down": 1 - 0.99 * 0.97 * 0.99,
        }
    )
    stats = json.loads((folder / "stats/dblp-r0.json").read_text())
    assert stats["trunk_drops"]["up"] > 20
    assert stats["ports"]["b to a"]["queue_dropped"] == stats["trunk_drops"]["up"]
    assert stats["queue_drops"] == stats["uplink_drops"] == {"up": 0, "down": 0}
    (totals,) = [check for check in checks if check["name"] == "totals"]
    assert "packets dropped by queues and devices" in totals["detail"]


def test_two_runs_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """The same scenario twice at the same time: same addresses, same names, both faithful."""
    path = scenario(tmp_path, "{dumbbell: {left: 1, right: 2}}", 100)
    both = [start(path, tmp_path / f"runs{n}") for n in range(2)]
    for process in both:
        out, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, out
    folders = [next((tmp_path / f"runs{n}").iterdir()) for n in range(2)]
    assert all(summary(folder)["fidelity"]["faithful"] for folder in folders)

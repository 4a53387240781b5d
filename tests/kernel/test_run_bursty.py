"""Runs with loss in bursts of packets, other losses for other workers, duplicates, and bursts loaded before the run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from netem.analysis import fates, oracle
from netem.spec.loss import BurstyLoss
from tests.kernel.run_helpers import BOTH, LIMIT_S, ROOT, events, run, scenario, summary

STOP_AND_WAIT = "{base: recommended, probing: stop-and-wait}"
FIVES = "{gilbert_elliott: {loss: 30%, burst: 5}}"
LOSSES = f"""\
  - {{iteration: 2, loss: {FIVES}}}
  - {{iteration: 3, loss: 90%, workers: worker1}}
  - {{iteration: 3, loss: {FIVES}, workers: worker2, direction: both}}
  - {{iteration: 3, loss: 20%, workers: worker3}}
  - {{iteration: 5, loss: {{gilbert_elliott: {{p: 10%, r: 20%, h: 10%, k: 99%}}}}, direction: down}}
  - {{iteration: 6, loss: 40%}}"""
CAPTURE = "capture: {at: [server, 'worker*'], both: true, rounds: all, snap: 64 B}"
RANKS = {"server": 0, "worker1": 1, "worker2": 2, "worker3": 3}
CHAIN = BurstyLoss.of_bursts(0.3, 5)
ASKED = {
    ("up", 1, 2): CHAIN, ("up", 2, 2): CHAIN, ("up", 3, 2): CHAIN,
    ("up", 1, 3): 0.9, ("up", 2, 3): CHAIN, ("up", 3, 3): 0.2, ("down", 2, 3): CHAIN,
    **{("down", worker, 5): BurstyLoss(0.1, 0.2, 0.1, 0.99) for worker in (1, 2, 3)},
    **{("up", worker, 6): 0.4 for worker in (1, 2, 3)},
}  # fmt: skip


def checks(folder: Path) -> dict[str, list[bool]]:
    found: dict[str, list[bool]] = defaultdict(list)
    for check in summary(folder)["fidelity"]["checks"]:
        found[check["name"]].append(check["ok"])
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same scenario with gates and without."""
    folder = tmp_path_factory.mktemp("bursty")
    path = scenario(folder, profile=STOP_AND_WAIT, bursts=LOSSES, extra=CAPTURE)
    return {arm: run(path, folder / "runs", "--set", f"link.arm={arm}") for arm in ("gate", "preloaded")}


@pytest.mark.parametrize("arm", ["gate", "preloaded"])
def test_every_fate_is_the_predicted_one(runs: dict[str, Path], arm: str) -> None:
    """All transmissions of all rounds and workers, in both directions, under both transports."""
    transmissions = 0
    for _, _, found in fates.captured(runs[arm] / "captures", ["dblp", "mlt"], RANKS):
        assert found.missed == 0
        for (direction, rank, round_), fate in found.flows.items():
            drop = oracle.mask_drop(11, direction, rank, round_, ASKED.get((direction, rank, round_), 0.0))
            for pass_ in sorted({int(key) & 0xFFFF for key in fate.keys}):
                mine = (fate.keys & 0xFFFF) == pass_
                sequences = (fate.keys[mine] >> 16).astype(int)
                assert (drop(sequences, pass_) == ~fate.arrived[mine]).all(), (direction, rank, round_, pass_)
            transmissions += len(fate.keys)
    assert transmissions > 2 * 8 * 2 * 3 * 400


@pytest.mark.parametrize("arm", ["gate", "preloaded"])
def test_the_run_is_faithful_and_passes_follow_the_mask(runs: dict[str, Path], arm: str) -> None:
    found = checks(runs[arm])
    assert found["mask"] == [True, True]
    assert all(all(oks) for oks in found.values())


@pytest.mark.parametrize("arm", ["gate", "preloaded"])
def test_losses_in_a_row_are_measured(runs: dict[str, Path], arm: str) -> None:
    """Of three workers up and one down with bursts of 5, and of three down with the other chain."""
    assert checks(runs[arm])["burst length"] == [True] * 14
    for transport in ("dblp", "mlt"):
        found = summary(runs[arm])["transports"][transport]["burst_lengths"]
        fives = [each for each in found if each["requested_mean"] == pytest.approx(5)]
        assert [(each["worker"], each["direction"]) for each in fives] == [(1, "up"), (2, "up"), (3, "up"), (2, "down")]
        assert len(found) == 7
        assert all(each["doubt"] is None and sum(each["histogram"]) == each["bursts"] > 5 for each in found)


def test_preloaded_bursts_need_no_gate(runs: dict[str, Path]) -> None:
    assert events(runs["gate"], "gate")
    assert events(runs["preloaded"], "gate") == events(runs["preloaded"], "impairment") == []
    once = events(runs["preloaded"], "preloaded")
    assert [event["transport"] for event in once] == ["dblp", "mlt"]
    # 3 workers up in rounds 2, 3 and 6; worker 2 down in 3, all down in 5
    assert [event["rules"] for event in once] == [13, 13]


def test_with_and_without_gates_every_fate_is_the_same(runs: dict[str, Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "netem.cli", "compare", str(runs["gate"]), str(runs["preloaded"])],
        cwd=ROOT, text=True, capture_output=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if "in both" in line]
    assert len(lines) == 5
    assert all(" 0 differ" in line for line in lines), done.stdout


def test_auto_falls_back_to_gates(tmp_path: Path) -> None:
    bursts = "  - {iteration: 3, loss: 90%, for: 2 ms}"
    folder = run(scenario(tmp_path, bursts=bursts, chunks=50, extra="").rename(tmp_path / "s.yaml"), tmp_path / "runs",
                 "--set", "link.arm=auto")  # fmt: skip
    assert events(folder, "gate")
    assert not events(folder, "preloaded")


def test_duplicates_and_damage_are_in_the_accounts(tmp_path: Path) -> None:
    bursts = (
        "  - {iteration: 3, loss: 20%, duplicate: 30%, direction: both}\n"
        "  - {iteration: 5, loss: 10%, corrupt: 20%, duplicate: 10%}"
    )
    folder = run(scenario(tmp_path, bursts=bursts, profile=STOP_AND_WAIT), tmp_path / "runs")
    assert all(all(oks) for oks in checks(folder).values())
    for transport in ("dblp", "mlt"):
        rows = [e for e in events(folder, "received") if e["round"] == 3 and e["transport"] == transport]
        assert rows
        assert sum(row["duplicate"] for row in rows) > 100
        flows = json.loads((folder / f"stats/{transport}-r0.json").read_text())["flows"]
        assert {flow["round"] for flow in flows if flow["corrupted"]} == {5}
        assert {flow["round"] for flow in flows if flow["duplicated"]} == {3, 5}


def test_a_link_that_loses_in_bursts_all_the_time(tmp_path: Path) -> None:
    path = scenario(tmp_path, bursts="  - {iteration: 3, loss: 60%}", transports=BOTH, profile=STOP_AND_WAIT)
    links = f"[{{between: [server, sw], down: {{loss: {FIVES}}}}}, {{between: ['worker*', sw], down: {{loss: 2%}}}}]"
    path.write_text(path.read_text().replace("{star: {workers: 3}}", f"{{star: {{workers: 3}}, links: {links}}}"))
    folder = run(path, tmp_path / "runs")
    found = checks(folder)
    assert all(all(oks) for oks in found.values())
    assert len(found["base loss"]) == 12

"""Events on this kernel: applied, read back, cleared, at the time that was planned; a recorded mask to the packet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from netem.analysis.records import RoundRow, read_csv
from netem.kernel.priority import prompt
from netem.links.base import Flow, Key
from netem.links.recorded import program
from netem.spec import load_scenario
from netem.spec.timeline import bounded_spans
from tests.kernel.run_helpers import LIMIT_S, command, events, run, summary

pytestmark = pytest.mark.timeout(400)  # whole runs, on machines that may be busy

REPLAY = """\
name: small
seed: 11
topology: {{star: {{workers: 3}}}}
latencies: reported
workload: {{kind: replay, chunks: {chunks}, iterations: {iterations}, compute: {compute}}}
profile: {profile}
link: {{backend: bpf}}
transports: {transports}
{rest}
"""
MLT = "{mlt: {fixed: 0.8%}}"
DBLP = "{dblp: {low: 0.8%, high: 40.8%, detector: {schedule: {critical: 3..5}}}}"
CAPTURE = 'capture: {at: ["*"], snap: 96 B, rounds: all, both: true}\n'


def scenario(
    folder: Path,
    rest: str,
    *,
    chunks: int = 300,
    iterations: int = 40,
    compute: str = "20 ms",
    profile: str = "recommended",
    transports: str = MLT,
) -> Path:
    path = folder / "small.yaml"
    text = REPLAY.format(
        chunks=chunks, iterations=iterations, compute=compute, profile=profile, transports=transports, rest=rest
    )
    path.write_text(text)
    return path


def changes(folder: Path) -> list[dict[str, Any]]:
    return [event for event in events(folder, "impairment") if event["planned_s"] is not None]


def checks(folder: Path) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in summary(folder)["fidelity"]["checks"]}


def test_events_by_time_are_applied_read_back_and_cleared(tmp_path: Path) -> None:
    """At 300 ms for 100 ms, every 150 ms from 500 ms on, and a ramp: in this order, late but never early."""
    path = scenario(
        tmp_path,
        "events:\n"
        "  - {at: 300 ms, for: 100 ms, loss: 50%}\n"
        "  - {every: 150 ms, for: 20 ms, from: 500 ms, until: 700 ms, loss: 90%, on: worker1.up}\n"
        "  - {at: 720 ms, ramp: {from: 10%, to: 40%, over: 80 ms, steps: 4}, on: worker2.down}\n",
    )
    folder = run(path, tmp_path / "runs")
    found = [(e["action"], e["planned_s"], [round(b["loss"], 6) for b in e["bursts"]]) for e in changes(folder)]
    assert found == [
        ("apply", 0.3, [0.5]), ("clear", 0.4, []),
        ("apply", 0.5, [0.9]), ("clear", 0.52, []), ("apply", 0.65, [0.9]), ("clear", 0.67, []),
        ("apply", 0.72, [0.1]), ("apply", 0.74, [0.2]), ("apply", 0.76, [0.3]), ("apply", 0.78, [0.4]),
        ("clear", 0.8, []),
    ]  # fmt: skip
    for event in changes(folder):
        assert 0.0 <= event["lateness_s"] < 0.25, event
        assert event["actual_s"] == pytest.approx(event["planned_s"] + event["lateness_s"], abs=1e-5)
    facts = summary(folder)["transports"]["mlt"]["facts"]["by_time"]
    assert (facts["changes"], facts["missed"]) == (11, 0)
    rows = read_csv(folder / "rounds.csv", RoundRow)
    touched = {(row.worker, row.direction) for row in rows if row.burst}
    assert touched == {(1, "up"), (2, "up"), (3, "up"), (2, "down")}
    assert all(row.dropped_link == 0 for row in rows if not row.burst)
    assert sum(row.dropped_link or 0 for row in rows if row.burst) > 50
    assert all(check["ok"] for check in checks(folder).values())


def test_a_round_that_lies_within_an_event_is_checked_against_its_loss(tmp_path: Path) -> None:
    rest = "events: [{at: 10 ms, for: 30 s, loss: 60%}]\n"
    folder = run(scenario(tmp_path, rest, chunks=2000, iterations=6, compute="0 ms"), tmp_path / "runs")
    rows = [row for row in read_csv(folder / "rounds.csv", RoundRow) if row.direction == "up"]
    assert [row.loss_requested for row in rows if row.round == 0] == [None] * 3
    assert {row.loss_requested for row in rows if row.round > 1} == {0.6}
    found = [c for c in summary(folder)["fidelity"]["checks"] if c["name"] == "burst loss"]
    assert len(found) >= 12
    assert all(check["ok"] for check in found)


def test_phases_of_the_workload(tmp_path: Path) -> None:
    rest = "events: [{while: critical, loss: 70%}]\n"
    folder = run(scenario(tmp_path, rest, iterations=9, compute="0 ms", transports=DBLP), tmp_path / "runs")
    rows = [row for row in read_csv(folder / "rounds.csv", RoundRow) if row.direction == "up"]
    assert {row.round for row in rows if row.burst} == {3, 4, 5}
    assert {row.round for row in rows if row.phase == "critical"} == {3, 4, 5}
    assert all((row.dropped_link or 0) > 0 for row in rows if row.burst)
    assert [e["planned_round"] for e in events(folder, "impairment")] == [3, 6]
    assert checks(folder)["burst loss"]["ok"]


def test_rates_change_in_place_and_what_the_queue_drops_is_accounted_for(tmp_path: Path) -> None:
    """40 Mbit/s in iterations 3 and 4, 20 on one uplink: the rounds take as long as the packets do."""
    rest = (
        "events:\n  - {iteration: 3..4, rate: 40 Mbit, queue: 1000 packets, on: server.down}\n"
        "  - {iteration: 6, rate: 20 Mbit, on: worker2.up}\n"
    )
    folder = run(scenario(tmp_path, rest, iterations=9, compute="0 ms"), tmp_path / "runs")
    rows = [row for row in read_csv(folder / "rounds.csv", RoundRow) if row.direction == "up"]
    slowest = {r: max(row.latency_s or 0.0 for row in rows if row.round == r) for r in (3, 4)}
    bits = 3 * 0.99 * 300 * 1514 * 8
    assert all(latency > 0.9 * bits / 40e6 for latency in slowest.values()), slowest
    (one,) = [row for row in rows if row.round == 6 and row.worker == 2]
    assert (one.latency_s or 0.0) > 0.9 * bits / 3 / 20e6 - 0.02  # the bucket lets 1 ms, and a first frame, through
    assert {(row.round, row.worker) for row in rows if row.burst} == {(r, w) for r in (3, 4) for w in (1, 2, 3)} | {
        (6, 2)
    }
    assert {row.loss_requested for row in rows} == {0.0}
    assert all(check["ok"] for check in checks(folder).values())


def test_a_recorded_mask_loses_what_was_lost(tmp_path: Path) -> None:
    """From a run's captures under stop-and-wait: every transmission has the same fate, the sets are the same."""
    rest = CAPTURE + "bursts:\n  - {iteration: 2, loss: 80%}\n  - {iteration: 4, loss: 60%, direction: both}\n"
    options: dict[str, Any] = {"iterations": 6, "compute": "0 ms", "profile": "paper"}
    options["transports"] = "{dblp: {low: 0.8%, high: 40.8%, detector: never}, mlt: {fixed: 0.8%}}"
    first = run(scenario(tmp_path, rest, **options), tmp_path / "runs")
    again = run(scenario(tmp_path, f"{CAPTURE}events: [{{replay: {first}}}]\n", **options), tmp_path / "runs")
    compared = subprocess.run(
        [sys.executable, "-m", "netem.cli", "compare", str(first), str(again), "--json"],
        text=True, capture_output=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    found = {each["what"]: each for each in json.loads(compared.stdout)["comparisons"]}
    for what in ("fates, dblp", "fates, mlt"):
        assert found[what]["different"] == 0
        assert found[what]["dropped"] > 500
    assert found["delivered sets"]["different"] == 0
    rows = read_csv(again / "rounds.csv", RoundRow)
    assert {row.round for row in rows if row.dropped_link} == {2, 4}
    assert all(row.burst for row in rows if row.dropped_link)
    assert checks(again)["recorded mask"]["detail"].startswith("9 rounds equal")
    assert all(check["ok"] for check in checks(again).values())
    assert [event["flows"] for event in events(again, "mask")] == [9, 9]
    assert not events(first, "mask")


def test_every_round_of_a_window_is_counted_where_packets_do_not_say_theirs(tmp_path: Path) -> None:
    rest = "events: [{iteration: 3..4, loss: 3%}]\n"
    options: dict[str, Any] = {"chunks": 2000, "iterations": 7, "compute": "0 ms", "transports": "{tcp: {}}"}
    folder = run(scenario(tmp_path, rest, **options), tmp_path / "runs")
    rows = [row for row in read_csv(folder / "rounds.csv", RoundRow) if row.direction == "up"]
    assert {row.round for row in rows if row.dropped_link} == {3, 4}
    found = [c for c in summary(folder)["fidelity"]["checks"] if c["name"] == "burst loss"]
    assert len(found) == 6
    assert all(check["ok"] for check in found)


def test_delay_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    path = scenario(tmp_path, "events: [{at: 1 s, for: 1 s, delay: 5 ms, on: worker1}]\n")
    done = subprocess.run(
        command(path, tmp_path / "runs"), text=True, capture_output=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 4, done.stdout + done.stderr
    assert "delay is not available" in done.stdout + done.stderr
    assert not (tmp_path / "runs").exists()


def test_what_a_job_does_not_reach_is_told(tmp_path: Path) -> None:
    path = scenario(tmp_path, "events: [{at: 90 s, loss: 5%}]\n", iterations=3, compute="0 ms")
    folder = run(path, tmp_path / "runs")
    (missed,) = events(folder, "missed")
    assert (missed["at"], missed["planned_s"]) == ("events.0", 90.0)
    assert [span.start_s for span in bounded_spans(load_scenario(path).spec)] == [90.0]


def test_the_program_of_a_recorded_mask_fits_its_key() -> None:
    key = Key(ranges=((4, 14),), index=(4, 8))
    assert len(program(Flow("udp", dst_ports=(5, 9)), key)) < 200
    with pytest.raises(ValueError, match="UDP"):
        program(Flow("tcp", dst_ports=(5, 9)), key)
    with pytest.raises(ValueError, match="at most 12 bytes"):
        program(Flow("udp"), Key(ranges=((0, 16),)))


def test_a_prompt_thread_is_ordinary_again_afterwards() -> None:
    before = os.sched_getscheduler(0)
    with prompt() as got:
        child = subprocess.run(
            [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"],
            text=True, capture_output=True, timeout=60, check=True,
        )  # fmt: skip
        assert int(child.stdout) == os.SCHED_OTHER, "children do not inherit it"
        if got:
            assert os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_RR
    assert os.sched_getscheduler(0) == before


def test_events_between_switches(tmp_path: Path) -> None:
    """Two sites: loss on the link between them hits the three far workers, a rate there slows them down."""
    rest = (
        "events:\n  - {iteration: 2, loss: 60%, on: site2 to site1}\n"
        "  - {iteration: 4, rate: 20 Mbit, queue: 4 MiB, on: site2 to site1}\n"
    )
    path = scenario(tmp_path, rest, iterations=7)
    path.write_text(path.read_text().replace("{star: {workers: 3}}", "two-site"))
    folder = run(path, tmp_path / "runs")
    rows = [row for row in read_csv(folder / "rounds.csv", RoundRow) if row.direction == "up"]
    assert {(row.round, row.worker) for row in rows if row.dropped_link} == {(2, worker) for worker in (2, 3, 4)}
    shifts = [[(s["link"], s["rate_bps"]) for s in e["shifts"]] for e in events(folder, "impairment")]
    assert shifts == [[], [], [("site2 to site1", 20_000_000)], []]
    wire_s = 3 * 298 * 1514 * 8 / 20e6
    slow = [row.latency_s or 0.0 for row in rows if row.round == 4 and row.worker != 1]
    assert max(slow) > 0.9 * wire_s, "three gradients share 20 Mbit/s"

"""`dblp-netem run` end to end on this kernel: repeatability, exactness, outcomes, and what it leaves behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from scapy.all import rdpcap

from netem.analysis.records import RoundRow, read_csv
from netem.kernel.snapshot import HostSnapshot, host_snapshot
from netem.state import lab_ids, read
from tests.kernel.run_helpers import DBLP, LIMIT_S, ROOT, clean, command, events, run, scenario, start, summary

STATE_DIR = Path("/run/dblp-netem")
pytestmark = pytest.mark.timeout(400)  # whole runs, on machines that may be busy
CAPTURE = "capture: {at: [server], snap: 96 B, rounds: all, both: true}"
KILLS = 20
Since = Callable[[HostSnapshot, Collection[str]], list[str]]


def fates(first: Path, second: Path, status: int) -> dict[str, tuple[int, int]]:
    """What `compare` says of transmissions: (compared, different) by what was compared."""
    done = subprocess.run(
        [sys.executable, "-m", "netem.cli", "compare", str(first), str(second), "--json"],
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    entries = json.loads(done.stdout)["comparisons"]
    return {e["what"]: (e["compared"], e["different"]) for e in entries if e["what"].startswith("fates")}


def test_the_same_seed_gives_every_transmission_the_same_fate(tmp_path: Path) -> None:
    path = scenario(tmp_path, extra=CAPTURE, bursts="  - {iteration: 3, loss: 90%}\n  - {iteration: 5, loss: 60%}")
    first, second = run(path, tmp_path / "runs"), run(path, tmp_path / "runs")
    same = fates(first, second, status=0)
    assert {what.removeprefix("fates, ") for what in same} == {
        "dblp",
        "mlt",
        "dblp and mlt in A",
        "dblp and mlt in B",
    }
    assert all(compared > 1000 and different == 0 for compared, different in same.values()), same
    other = fates(first, run(path, tmp_path / "runs", "--seed", "12"), status=1)
    assert other["fates, dblp"][1] > 100
    assert other["fates, mlt"][1] > 100


def test_under_stop_and_wait_the_delivered_sets_are_equal_and_the_mask_predicts_them(tmp_path: Path) -> None:
    bursts = "\n".join(f"  - {{iteration: {i}, loss: 80%}}" for i in (2, 4, 6))
    path = scenario(tmp_path, profile="paper", bursts=bursts)
    first, second = run(path, tmp_path / "runs"), run(path, tmp_path / "runs")

    def digests(folder: Path) -> dict[tuple[object, ...], str]:
        return {
            (e["transport"], e["round"], e["worker"], e["direction"]): e["delivered_digest"]
            for e in events(folder, "received")
        }

    assert len(digests(first)) == 2 * 8 * 3 * 2
    assert digests(first) == digests(second)
    checks = {(c["name"], c["transport"]): c for c in summary(first)["fidelity"]["checks"]}
    for transport in ("dblp", "mlt"):
        assert checks["mask", transport]["ok"], checks["mask", transport]
        assert "9 burst rounds equal" in checks["mask", transport]["detail"]
        assert checks["passes", transport]["ok"]


@pytest.mark.parametrize("profile", ["recommended", "paper"])
def test_hardly_anything_is_sent_behind_the_chunk_that_completes_a_round(tmp_path: Path, profile: str) -> None:
    """At most two super-packets of 44 and what a round trip holds: on this path, which has no delay, less than one."""
    sent = list(events(run(scenario(tmp_path, chunks=3000, profile=profile), tmp_path / "runs"), "sent"))
    assert len(sent) == 2 * 8 * 3 * 2
    for each in sent:
        assert each["outcome"] == "ok"
        assert 0 <= each["packets"] - each["packets_at_need"] <= 3 * 44, each


def test_rows_and_files_of_a_run(tmp_path: Path) -> None:
    folder = run(scenario(tmp_path, extra="capture: {at: [server], snap: 96 B, rounds: bursts}"), tmp_path / "runs")
    rows = read_csv(folder / "rounds.csv", RoundRow)
    assert len(rows) == 2 * 8 * 3 * 2
    assert {row.outcome for row in rows} == {"ok"}
    assert {(row.iteration, row.direction) for row in rows if row.burst} == {(3, "up"), (5, "up"), (5, "down")}
    assert all(row.dropped_link == 0 for row in rows if not row.burst)
    assert all((row.dropped_link or 0) > 0 for row in rows if row.burst)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["exit_status"] == 0
    assert manifest["link_backend"] == "bpf"
    assert manifest["peak_memory_bytes"] > 0
    for name in ("scenario.resolved.yaml", "epochs.csv", "summary.json", "logs", "captures", "config"):
        assert (folder / name).exists(), name
    assert [c["missed_by_kernel"] for c in summary(folder)["captures"]] == [0, 0]
    impairments = events(folder, "impairment")
    assert [e["planned_round"] for e in impairments] == [3, 4, 5, 6] * 2
    assert not (folder / "events.sock").exists()


def test_a_capture_at_a_host_sees_both_directions(tmp_path: Path) -> None:
    extra = "capture: {at: [worker1], place: host, snap: 64 B, rounds: all}"
    folder = run(scenario(tmp_path, chunks=50, extra=extra), tmp_path / "runs")
    (path,) = folder.glob("captures/dblp-r0-*.pcapng")
    assert path.name == "dblp-r0-worker1-both.pcapng"
    sources = {packet["IP"].src for packet in rdpcap(str(path)) if packet.haslayer("IP")}
    assert sources == {"10.77.0.1", "10.77.0.2"}


def test_impairments_are_in_place_between_the_rounds(tmp_path: Path) -> None:
    folder = run(scenario(tmp_path), tmp_path / "runs")
    for transport in ("dblp", "mlt"):
        placed = {e["planned_round"]: e["t"] for e in events(folder, "impairment") if e["transport"] == transport}
        asked: dict[int, list[float]] = defaultdict(list)
        for event in events(folder, "gate"):
            if event["transport"] == transport:
                asked[event["round"]].append(event["t"])
        done = {
            e["round"]: e["t"]
            for e in events(folder, "received")
            if e["transport"] == transport and e["direction"] == "up"
        }
        for round_, at in placed.items():
            assert len(asked[round_]) == 3
            assert done[round_ - 1] <= at <= done[round_]


def test_a_stream_that_cannot_finish_is_censored_at_the_deadline(tmp_path: Path) -> None:
    path = scenario(
        tmp_path,
        transports="{tcp: {}}",
        bursts="  - {iteration: 3, loss: 95%}",
        extra="deadlines: {round: 1500 ms}",
        chunks=2000,
    )
    folder = run(path, tmp_path / "runs")
    rows = [row for row in read_csv(folder / "rounds.csv", RoundRow) if row.direction == "up"]
    outcomes = {row.iteration: row.outcome for row in rows}
    assert outcomes.pop(3) == "censored"
    assert set(outcomes.values()) == {"ok"}, "it goes on after the burst"
    (replicas,) = events(folder, "replicas")
    assert replicas["identical"]


def test_loss_of_all_traffic_in_both_directions_is_survived(tmp_path: Path) -> None:
    bursts = "  - {iteration: 3, loss: 50%, match: all, direction: both}"
    folder = run(scenario(tmp_path, bursts=bursts, transports="{dblp: " + DBLP + "}"), tmp_path / "runs")
    rows = read_csv(folder / "rounds.csv", RoundRow)
    assert {row.outcome for row in rows} == {"ok"}


def test_a_burst_for_some_workers_spares_the_others(tmp_path: Path) -> None:
    folder = run(scenario(tmp_path, bursts="  - {iteration: 3, loss: 80%, workers: [worker2]}"), tmp_path / "runs")
    hit = [row for row in read_csv(folder / "rounds.csv", RoundRow) if row.dropped_link]
    assert {(row.iteration, row.worker, row.direction) for row in hit} == {(3, 2, "up")}


def test_a_failed_expectation_gives_status_3_and_says_which(tmp_path: Path) -> None:
    path = scenario(tmp_path, extra="expect: ['dblp.rounds.count == 9', 'mlt.rounds.ok == 1']")
    folder = run(path, tmp_path / "runs", status=3)
    assert [e["held"] for e in summary(folder)["expectations"]] == [False, True]


def test_a_worker_that_dies_ends_the_run_with_its_name(tmp_path: Path, unchanged_host: None) -> None:
    path = scenario(tmp_path, chunks=2000, transports="{dblp: " + DBLP + "}", extra="deadlines: {round: 5 s}")
    text = path.read_text().replace("iterations: 8", "iterations: 100000, compute: 5 ms")
    path.write_text(text)
    process = start(path, tmp_path / "runs")
    try:
        victim = _pid_of_rank(tmp_path / "runs", 2)
        os.kill(victim, signal.SIGKILL)
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 1, output
    assert "worker 2" in output or "worker2" in output, output
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "manifest.json").read_text())["exit_status"] == 1
    lost = [row for row in read_csv(folder / "rounds.csv", RoundRow) if row.outcome == "lost_worker"]
    assert {row.worker for row in lost} == {2}, "the others have lost nothing"
    assert [row.direction for row in lost].count("up") == 1


def labs_of(pid: int) -> set[str]:
    """Labs whose state file names this process as the owner."""
    records = [read(STATE_DIR, lab_id) for lab_id in lab_ids(STATE_DIR)]
    return {record.id for record in records if record.owner is not None and record.owner.pid == pid}


def _pid_of_rank(out: Path, rank: int) -> int:
    """From the hello event; waits for it with a limit."""
    changed = threading.Event()
    for _ in range(LIMIT_S * 10):
        for path in out.glob("*/events.jsonl"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n") and '"event":"sent"' in line:
                    hello = next(e for e in events(path.parent, "hello") if e["rank"] == rank)
                    return int(hello["pid"])
        changed.wait(0.1)
    raise AssertionError("the run did not begin")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, number: int, since: Since) -> None:
    before = host_snapshot()
    path = scenario(tmp_path)
    path.write_text(path.read_text().replace("iterations: 8", "iterations: 100000"))
    process = start(path, tmp_path / "runs")
    try:
        _pid_of_rank(tmp_path / "runs", 1)
        labs = labs_of(process.pid)
        process.send_signal(number)
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert len(labs) == 1
    assert since(before, labs) == []
    assert not labs & set(lab_ids(STATE_DIR))
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "manifest.json").read_text())["problem"] == "interrupted"


def test_sigkill_at_any_moment_is_one_clean_away_from_the_host_before(tmp_path: Path, since: Since) -> None:
    before = host_snapshot()
    path = scenario(tmp_path)
    path.write_text(path.read_text().replace("iterations: 8", "iterations: 100000"))
    moments, built = random.Random(20), 0
    for turn in range(KILLS):
        process = start(path, tmp_path / f"runs{turn}")
        try:
            process.wait(timeout=moments.uniform(0.3, 4.0))
            raise AssertionError(f"ended by itself: {process.communicate()[0]}")
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate(timeout=LIMIT_S)
        labs = labs_of(process.pid)
        built += len(labs)
        clean()
        assert since(before, labs) == [], f"kill {turn}"
        assert not labs & set(lab_ids(STATE_DIR))
    assert built > KILLS // 4, "most were killed before they had a lab: nothing is shown"


def test_the_workload_runs_as_the_caller_of_sudo(tmp_path: Path, system_python: Path) -> None:
    """The lab needs root, the workload does not: it runs as the user whose name sudo gives, who owns all results."""
    out = system_python.parents[2] / "results"
    out.mkdir(mode=0o755)
    os.chown(out, 65534, 65534)
    path = scenario(out, chunks=100)
    environment = {**os.environ, "SUDO_UID": "65534", "SUDO_GID": "65534"}
    done = subprocess.run(
        [str(system_python), "-m", "netem.cli", "run", str(path), "--out", str(out / "runs")],
        env=environment,
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (out / "runs").iterdir()
    strangers = [str(p) for p in folder.rglob("*") if p.lstat().st_uid != 65534]
    assert strangers == []
    assert folder.stat().st_uid == 65534
    assert json.loads((folder / "manifest.json").read_text())["workload_user"] == "nobody"


def test_json_on_standard_output_whatever_the_end(tmp_path: Path) -> None:
    good = scenario(tmp_path, chunks=50)
    done = subprocess.run(
        [*command(good, tmp_path / "runs"), "--json"], cwd=ROOT, capture_output=True, timeout=LIMIT_S, check=False
    )
    content = json.loads(done.stdout)
    assert (content["ok"], content["exit_status"]) == (True, 0)
    assert content["summary"]["scenario"] == "small"
    assert Path(content["folder"]).is_dir()
    good.write_text(good.read_text().replace("iterations: 8", "iterations: 100000"))
    process = subprocess.Popen(
        [*command(good, tmp_path / "more"), "--json"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        _pid_of_rank(tmp_path / "more", 1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    content = json.loads(output)
    assert (content["ok"], content["exit_status"], content["error"]) == (False, 130, {"message": "interrupted"})

"""`run` with a command workload, as a user would: any programs in hosts, bursts by time and by iteration."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from netem.state import lab_ids
from tests.kernel.run_helpers import ROOT, events, run, start, summary

LIMIT_S = 60

pytestmark = pytest.mark.usefixtures("unchanged_host")

HEAD = "topology: {star: {workers: 2}}\nlink: {backend: bpf}\nworkload:\n  kind: command\n"
SENDER = """\
import socket, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end = time.monotonic() + 1.5
while time.monotonic() < end:
    sock.sendto(bytes(200), (sys.argv[1], 5000))
    time.sleep(0.0005)
"""
SINK = (
    "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 5000))\nwhile s.recv(2048): pass"
)


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch, state_dir: Path) -> None:
    monkeypatch.setenv("DBLP_NETEM_STATE_DIR", str(state_dir))


def scenario(folder: Path, workload: str, rest: str = "") -> Path:
    path = folder / "job.yaml"
    path.write_text(HEAD + "".join(f"  {line}\n" for line in workload.splitlines()) + rest)
    return path


def programs(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "manifest.json").read_text())["programs"]
    return found


def problem(folder: Path) -> str:
    return str(json.loads((folder / "manifest.json").read_text())["problem"])


def log(folder: Path, host: str) -> str:
    return (folder / "logs" / f"command-r0-{host}.log").read_text()


def datagrams(folder: Path, events_: str, flow: str = "flow: {proto: udp, ports: 5000}") -> Path:
    """Two workers send 2,000 datagrams a second each for 1.5 s."""
    (folder / "sender.py").write_text(SENDER)
    (folder / "sink.py").write_text(SINK)
    workload = (
        'run:\n  server: {argv: ["{python}", "{folder}/sink.py"], ready: {udp: 5000}}\n'
        '  "worker*": ["{python}", "{folder}/sender.py", "{server}"]\n'
        f"until: workers\nlimit: 40 s\n{flow}\n"
    )
    return scenario(folder, workload, events_)


def test_a_burst_by_time_hits_whom_it_names_and_nobody_else(tmp_path: Path) -> None:
    path = datagrams(tmp_path, "events: [{at: 300 ms, for: 500 ms, loss: 40%, on: worker1.up}]\n")
    folder = run(path, tmp_path / "runs")
    found = summary(folder)["commands"]["command"]
    (burst,) = found["bursts"]
    applied, cleared = events(folder, "impairment")
    at_most = 2000 * (cleared["t_s"] - applied["t_s"])  # the sender sleeps between two datagrams, and never catches up
    assert 0.1 * at_most < burst["seen"] <= 1.1 * at_most
    assert burst["loss"] == pytest.approx(0.4, abs=0.12)
    cells = json.loads((folder / "stats/command-r0.json").read_text())["cells"]
    dropped = {sender: sum(c["dropped"] for c in cells if c["sender"] == sender) for sender in ("worker1", "worker2")}
    assert dropped["worker1"] > 0
    assert dropped["worker2"] == 0
    assert burst["planned_s"] == 0.3
    assert burst["t_s"] == pytest.approx(0.3, abs=0.2)
    assert cleared["t_s"] - applied["t_s"] == pytest.approx(0.5, abs=0.2)
    ended = {one["host"]: (one["status"], one["ended_by"]) for one in programs(folder)}
    assert ended["worker1"] == ended["worker2"] == (0, "itself")
    assert ended["server"][1] == "testbed"


def test_a_burst_without_a_flow_hits_everything_between_the_hosts(tmp_path: Path) -> None:
    path = datagrams(tmp_path, "events: [{at: 200 ms, for: 800 ms, loss: 100%}]\n", flow="env: {}")
    found = summary(run(path, tmp_path / "runs"))["commands"]["command"]
    assert found["bursts"][0]["seen"] > 100
    assert found["bursts"][0]["loss"] == 1.0


def test_a_burst_that_does_not_come_makes_the_run_unfaithful(tmp_path: Path) -> None:
    path = datagrams(tmp_path, "events: [{at: 30 s, for: 1 s, loss: 40%}]\n")
    folder = run(path, tmp_path / "runs", status=5)
    (check,) = (one for one in summary(folder)["fidelity"]["checks"] if not one["ok"])
    assert "the event at 30 s did not come: the job ended after " in check["detail"]


def test_the_environment_is_that_of_torchrun_and_nothing_is_read(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(
        "import os, sys\nnames = 'RANK WORLD_SIZE MASTER_ADDR MASTER_PORT PEER'.split()\n"
        "print(*(os.environ[name] for name in names), sys.stdin.read() + sys.argv[1])\n"
    )
    workload = 'run: {"*": ["{python}", "{folder}/show.py", "{host}"]}\nenv: {PEER: "{address:worker2}"}\n'
    folder = run(scenario(tmp_path, workload), tmp_path / "runs")
    assert log(folder, "worker1").split("\n")[0] == "1 3 10.77.0.1 29500 10.77.0.3 worker1"
    assert log(folder, "server").startswith("0 3 10.77.0.1")


def test_a_missing_program_is_one_error_before_anything_is_built(tmp_path: Path) -> None:
    path = scenario(tmp_path, "run:\n  server: [true]\n  worker1: [no-such-program, -x]\n")
    done = start(path, tmp_path / "runs")
    output, _ = done.communicate(timeout=LIMIT_S)
    assert done.returncode == 4
    assert "job.yaml:7: workload.run.worker1: no program no-such-program in PATH" in output
    assert not (tmp_path / "runs").exists()


def test_a_program_that_fails_ends_the_job_with_its_words(tmp_path: Path) -> None:
    workload = 'run:\n  server: [sleep, 600]\n  worker1: [sh, -c, "echo about to fail; exit 3"]\nuntil: worker1\n'
    began = time.monotonic()
    folder = run(scenario(tmp_path, workload), tmp_path / "runs", status=1)
    assert time.monotonic() - began < LIMIT_S
    assert "worker1 ended with status 3: about to fail" in problem(folder)
    ended = {one["host"]: (one["status"], one["ended_by"]) for one in programs(folder)}
    assert ended == {"server": (-signal.SIGTERM, "testbed"), "worker1": (3, "itself")}


def test_another_exit_status_may_be_expected(tmp_path: Path) -> None:
    workload = 'run:\n  worker1: {argv: [sh, -c, "exit 3"], status: 3}\n  worker2: {argv: [false], status: any}\n'
    found = summary(run(scenario(tmp_path, workload), tmp_path / "runs"))["commands"]["command"]
    assert [one["status"] for one in found["programs"]] == [3, 1]
    run(scenario(tmp_path, workload, ""), tmp_path / "more", "--set", "workload.run.worker1.status=4", status=1)


def test_a_program_that_hangs_is_ended_at_the_limit_with_all_it_started(tmp_path: Path) -> None:
    mark = f"4{os.getpid()}"
    workload = f'run: {{worker1: [sh, -c, "trap : TERM; sleep {mark} & while :; do sleep 0.1; done"]}}\nlimit: 1 s\n'
    folder = run(scenario(tmp_path, workload), tmp_path / "runs", status=1)
    assert "worker1 still running after the limit of 1 s (workload.limit)" in problem(folder)
    assert not running(["sleep", mark])


LEAVE = """\
import os, subprocess, sys
who, variant, mark = sys.argv[1:]
def sleeps(pid):
    try:
        return open(f"/proc/{pid}/cmdline", "rb").read() == f"sleep\\0{mark}\\0".encode()
    except OSError:
        return False
if variant == "1":
    subprocess.Popen(["sleep", mark])
else:
    sys.exit(any(sleeps(pid) for pid in os.listdir("/proc")))
"""


def test_what_a_program_leaves_behind_is_gone_before_the_next_job(tmp_path: Path) -> None:
    mark = f"5{os.getpid()}"
    (tmp_path / "leave.py").write_text(LEAVE)
    program = f'["{{python}}", "{{folder}}/leave.py", "{{host}}", "{{x}}", {mark}]'
    workload = f"variants: {{first: {{x: 1}}, second: {{x: 2}}}}\nrun: {{worker1: {program}}}\n"
    run(scenario(tmp_path, workload), tmp_path / "runs")
    assert not running(["sleep", mark])


def test_ctrl_c_ends_everything(tmp_path: Path, state_dir: Path) -> None:
    mark = f"6{os.getpid()}"
    with start(scenario(tmp_path, f'run: {{"*": [sleep, {mark}]}}\n'), tmp_path / "runs") as job:
        deadline = time.monotonic() + LIMIT_S
        while len(running(["sleep", mark])) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        job.send_signal(signal.SIGINT)
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 130
    assert "interrupted" in output
    assert not running(["sleep", mark])
    assert lab_ids(state_dir) == []


def test_a_program_that_breaks_the_protocol_of_reports_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "import json, os, socket\ns = socket.socket(socket.AF_UNIX)\ns.connect(os.environ['DBLP_EVENTS'])\n"
        "event = {'event': 'round', 'rank': 0, 'round': 1, 'latency_s': -1}\n"
        "s.sendall(json.dumps(event).encode() + b'\\n')\ns.recv(1)\n"
    )
    path = scenario(tmp_path, 'run: {worker1: ["{python}", "{folder}/bad.py"]}\n')
    folder = run(path, tmp_path / "runs", status=1)
    assert "what is not an event" in problem(folder)


def running(argv: list[str]) -> list[int]:
    """Processes with exactly these arguments."""
    wanted = b"\0".join(arg.encode() for arg in argv) + b"\0"
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and Path(f"/proc/{entry}/cmdline").read_bytes() == wanted:
                found.append(int(entry))
        except OSError:
            continue
    return found


def test_the_shipped_example_loses_the_same_packets_in_every_run(tmp_path: Path) -> None:
    path = ROOT / "scenarios/command.yaml"
    folders = [run(path, tmp_path / name, "--set", "link.backend=bpf") for name in ("one", "two")]
    lost = []
    for folder in folders:
        cells = json.loads((folder / "stats/all-r0.json").read_text())["cells"]
        (cell,) = (c for c in cells if c["burst"] == 0.9)  # of worker1 alone: its socket overflows in no run
        lost.append((cell["seen"], cell["dropped"]))
        rows = (folder / "reports.csv").read_text().splitlines()
        assert len(rows) == 1 + 2 * 20 * 3
        assert sum(row.endswith(",1") for row in rows) == 2 * 4
    assert lost[0] == lost[1]
    assert lost[0][0] > 400


def test_the_shipped_torch_example(tmp_path: Path) -> None:
    sets: tuple[str, ...] = ("workload.iterations=4", "bursts.0.iteration=2", "expect=[command.rounds.count == 4]")
    program = f'["{{python}}", "{ROOT}/scenarios/programs/gloo.py", --rounds, 4, --values, 100000]'
    sets += (f"workload.run={{'*': {program}}}", "topology.workers=2")
    options = [part for each in sets for part in ("--set", each)]
    path = ROOT / "scenarios/gloo.yaml"
    found = summary(run(path, tmp_path / "runs", *options))["commands"]["command"]
    assert found["rounds"]["count"] == 4
    assert found["bursts"][0]["seen"] > 50


def test_the_shipped_iperf3_example_runs_or_says_what_to_install(tmp_path: Path) -> None:
    path = ROOT / "scenarios/iperf3.yaml"
    if shutil.which("iperf3") is None:
        done = start(path, tmp_path)
        assert "no program iperf3 in PATH" in done.communicate(timeout=LIMIT_S)[0]
        assert done.returncode == 4
        return
    found = summary(run(path, tmp_path / "runs"))["commands"]
    assert list(found) == ["cubic", "reno"]
    assert all(one["bursts"][0]["seen"] > 20 for one in found.values())


def test_programs_run_as_the_user_who_called_sudo(tmp_path: Path, system_python: Path) -> None:
    tmp_path.chmod(0o755)
    path = scenario(tmp_path, 'run: {worker1: [sh, -c, "id -u; id -g"]}\n')
    environment = {"PATH": os.environ["PATH"], "SUDO_UID": "65534", "SUDO_GID": "65534"}
    environment["DBLP_NETEM_STATE_DIR"] = os.environ["DBLP_NETEM_STATE_DIR"]
    out = system_python.parents[2] / "runs"
    done = subprocess.run(
        [system_python, "-m", "netem.cli", "run", path, "--out", out],
        env=environment, cwd="/", capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = out.iterdir()
    assert log(folder, "worker1").split() == ["65534", "65534"]
    assert (folder / "summary.json").stat().st_uid == 65534


def test_an_event_may_change_the_rate(tmp_path: Path) -> None:
    slow = "events: [{at: 200 ms, for: 600 ms, rate: 200 kbit, queue: 2 kB, on: server.down}]\n"
    found = summary(run(datagrams(tmp_path, slow), tmp_path / "runs"))["commands"]["command"]
    assert found["link"]["dropped"] == 0
    assert found["link"]["queue_dropped"] > 100  # 4,000 datagrams of 242 bytes a second, 7.7 Mbit/s
    assert found["bursts"] == []

"""Whole runs with microbursts and background traffic: who lost what is told apart, and all of it is written down."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.kernel.run_helpers import LIMIT_S, ROOT, command, events, run, summary

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: run with sudo")

NOBODY = 65534
TOPOLOGY = """\
topology:
  name: shallow
  hosts:
    server: {role: server}
    worker1: {role: worker}
    worker2: {role: worker}
    other1: {role: host}
    other2: {role: host}
  switches: [sw]
  links:
    - {between: [server, sw], down: {rate: 100 Mbit, queue: 64 KiB}}
    - {between: ["worker*", sw]}
    - {between: ["other*", sw]}
link: {backend: bpf}
profile: {base: recommended, pace: 30 Mbit}
"""
INCAST = (
    TOPOLOGY
    + """\
name: incast-small
latencies: reported
workload: {kind: replay, chunks: 200, iterations: 5, compute: 5 ms}
transports: {mlt: {fixed: 5%}, tcp: {}}
microbursts:
  - {iteration: 2, offset: 10 ms, from: "other*", packets: 100}
  - {at: 30 ms, from: [other1], rate: 10 Mbit, duration: 5 ms, packet: 200 B}
background:
  - {from: other2, rate: 5 Mbit, on: 5 ms, off: 5 ms}
expect: [mlt.queue.drops > 100, mlt.queue.drops_in_burst > 99%, mlt.queue.peak > 95%, tcp.queue.drops > 100]
"""
)


@pytest.fixture(scope="module")
def incast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("incast")
    path = folder / "incast-small.yaml"
    path.write_text(INCAST)
    return run(path, folder / "runs", "--allow-unfaithful")  # a late microburst, on a machine that is too busy


def queue_of(folder: Path, transport: str) -> dict[str, object]:
    (queue,) = summary(folder)["transports"][transport]["queues"]
    return queue


def test_drops_are_those_of_the_queue_and_told_apart(incast: Path) -> None:
    for transport in ("mlt", "tcp"):
        queue = queue_of(incast, transport)
        flows = {flow["kind"]: flow for flow in queue["flows"]}  # type: ignore[attr-defined]
        assert flows["microburst"]["packets_in"] == 200 + 30
        assert flows["microburst"]["dropped"] > 100
        assert flows["background"]["packets_in"] > 0
        assert queue["dropped"] == queue["counted_drops"] == sum(flow["dropped"] for flow in flows.values())
        assert queue["busy_rate_bps"] > 1e6  # type: ignore[operator]
        assert 60_000 < queue["peak_bytes"] <= 65_536 + 2 * 1514  # type: ignore[operator]
        stats = json.loads((incast / f"stats/{transport}-r0.json").read_text())
        assert stats["queue_drops"]["up"] == flows["data"]["dropped"], "of the workload alone"


def test_totals_close_and_the_queue_is_checked(incast: Path) -> None:
    checks = summary(incast)["fidelity"]["checks"]
    failed = [check for check in checks if not check["ok"] and check["name"] != "microbursts"]
    assert not failed
    assert [check["transport"] for check in checks if check["name"] == "queues"] == ["mlt", "tcp"]


def test_what_was_sent_and_when_is_written_down(incast: Path) -> None:
    found = events(incast, "microburst")
    assert [(event["transport"], event["number"], event["packets"]) for event in found] == [
        ("mlt", 1, [30]), ("mlt", 0, [100, 100]), ("tcp", 1, [30]), ("tcp", 0, [100, 100]),
    ]  # fmt: skip
    for event in found:
        assert event["planned_t"] <= event["began_t"] < event["ended_t"] < event["t"]
    for transport in ("mlt", "tcp"):
        (gate,) = [
            e for e in events(incast, "gate") if e["transport"] == transport and (e["round"], e["rank"]) == (2, 1)
        ]
        (burst,) = [e for e in found if e["transport"] == transport and e["number"] == 0]
        assert burst["planned_t"] >= gate["t"], "released with the gate of its round"
    assert len(events(incast, "background")) == 2


def test_every_packet_is_in_the_csv_and_the_drops_in_the_burst(incast: Path) -> None:
    with (incast / "stats/mlt-r0-queue-server.csv").open() as file:
        rows = list(csv.DictReader(file))
    queue = queue_of(incast, "mlt")
    assert len(rows) == queue["recorded"]
    dropped = [row for row in rows if row["dropped"] == "1"]
    assert {row["sojourn_s"] for row in dropped} == {""}
    (burst,) = [e for e in events(incast, "microburst") if e["transport"] == "mlt" and e["number"] == 0]
    near = [row for row in dropped if burst["began_t"] <= float(row["time_s"]) <= burst["ended_t"] + 0.0053]
    assert len(near) == len(dropped) > 100
    assert all(int(row["depth_bytes"]) + int(row["bytes"]) > 65_536 - 1514 for row in near), "there was no room"


def test_a_figure_of_each_queue(incast: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'dblp-netem[figures]'")
    for transport in ("mlt", "tcp"):
        text = (incast / f"figures/{transport}-r0-queue-server.svg").read_text()
        assert ET.fromstring(text).tag.endswith("svg")


SEND = """\
import socket, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(600):
    sock.sendto(bytes(1000), ("10.77.0.1", 7000))
    time.sleep(0.001)
"""
RECEIVE = """\
import socket, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(("10.77.0.1", 7000))
time.sleep(60)
"""


def test_any_program_under_a_microburst(tmp_path: Path) -> None:
    """One sends a datagram every millisecond, the other takes them."""
    (tmp_path / "send.py").write_text(SEND)
    (tmp_path / "receive.py").write_text(RECEIVE)
    path = tmp_path / "program.yaml"
    path.write_text(
        TOPOLOGY.replace("profile: {base: recommended, pace: 30 Mbit}\n", "")
        + f"""\
workload:
  kind: command
  run:
    server: {{argv: [python3, {tmp_path}/receive.py], ready: {{udp: 7000}}}}
    worker1: [python3, {tmp_path}/send.py]
  until: worker1
  limit: 60 s
  flow: {{proto: udp, ports: 7000}}
microbursts:
  - {{at: 200 ms, from: "other*", packets: 100}}
expect: [command.queue.drops > 100, command.queue.drops_in_burst > 99%]
"""
    )
    folder = run(path, tmp_path / "runs", "--allow-unfaithful")
    (queue,) = summary(folder)["commands"]["command"]["queues"]
    flows = {flow["kind"]: flow for flow in queue["flows"]}
    assert (flows["data"]["packets_in"], flows["microburst"]["packets_in"]) == (600, 200)
    assert queue["dropped"] == queue["counted_drops"]
    assert [event["packets"] for event in events(folder, "microburst")] == [[100, 100]]


def test_iperf3_in_the_background(tmp_path: Path) -> None:
    if shutil.which("iperf3") is None:
        pytest.skip("needs iperf3 (Debian, Ubuntu: apt-get install iperf3)")
    path = tmp_path / "iperf.yaml"
    path.write_text(
        TOPOLOGY
        + """\
latencies: reported
workload: {kind: replay, chunks: 100, iterations: 4, compute: 20 ms}
transports: {mlt: {fixed: 5%}}
background:
  - {kind: iperf3-tcp, from: other1, rate: 5 Mbit}
  - {kind: iperf3-udp, from: other2, rate: 5 Mbit, packet: 500 B}
queues: {at: [server], during: run}
"""
    )
    folder = run(path, tmp_path / "runs", "--allow-unfaithful")
    flows = {flow["kind"]: flow for flow in queue_of(folder, "mlt")["flows"]}  # type: ignore[attr-defined]
    assert flows["background"]["packets_in"] > 20
    assert "sender" in (folder / "logs/mlt-r0-iperf3-0-client.log").read_text()


def test_without_iperf3_the_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 4, before anything is built."""
    path = tmp_path / "iperf.yaml"
    path.write_text(
        TOPOLOGY
        + "latencies: reported\nworkload: {kind: replay, chunks: 10, iterations: 2}\ntransports: {tcp: {}}\n"
        + "background: [{kind: iperf3-tcp, from: other1}]\n"
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    done = subprocess.run(
        command(path, tmp_path / "runs"), cwd=ROOT, text=True, capture_output=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 4
    assert "apt-get install iperf3" in " ".join((done.stdout + done.stderr).split())
    assert not (tmp_path / "runs").exists()


def test_sources_run_as_the_caller_of_sudo_and_a_run_without_matplotlib_says_so(
    tmp_path: Path, system_python: Path
) -> None:
    """The interpreter of this test has no matplotlib, and its user may not open what belongs to root."""
    out = system_python.parents[2] / "traffic"
    out.mkdir(mode=0o755)
    os.chown(out, NOBODY, NOBODY)
    path = out / "small.yaml"
    path.write_text(
        TOPOLOGY
        + "latencies: reported\nworkload: {kind: replay, chunks: 50, iterations: 3, compute: 5 ms}\n"
        + "transports: {tcp: {}}\n"
        + "microbursts: [{iteration: 1, from: other1, packets: 100}]\n"
    )
    done = subprocess.run(
        [str(system_python), "-m", "netem.cli", "run", str(path), "--out", str(out / "runs"), "--allow-unfaithful"],
        env={**os.environ, "SUDO_UID": str(NOBODY), "SUDO_GID": str(NOBODY)},
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no figures: matplotlib is not installed" in " ".join((done.stdout + done.stderr).split())
    (folder,) = (out / "runs").iterdir()
    assert [event["packets"] for event in events(folder, "microburst")] == [[100]]
    assert {path.lstat().st_uid for path in folder.rglob("*")} == {NOBODY}
    assert (folder / "stats/tcp-r0-queue-server.csv").read_text().count("microburst") == 100

"""`python -m dblp.train` on loopback: one server and three workers as processes, told by the environment alone."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dblp.train import main

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 90
TRAIN = {"kind": "train", "epochs": 2, "batch_size": 160}
REPLAY = {"kind": "replay", "chunks": 300, "iterations": 4, "epoch_iterations": 2}
DBLP = {
    "name": "dblp",
    "kind": "bounded",
    "low": 0.008,
    "high": 0.408,
    "detector": {"kind": "schedule", "critical": [[0, 2]]},
}
MLT = {"name": "mlt", "kind": "bounded", "fixed": 0.008}
RELIABLE = {"name": "reliable", "kind": "bounded", "fixed": 0.0}
TCP = {"name": "tcp", "kind": "tcp"}


def free_port() -> int:
    """A base port whose TCP ports are free now (the UDP ports are far from the ephemeral range's middle)."""
    for base in range(21000 + os.getpid() % 1000, 31000, 500):
        with socket.socket() as control, socket.socket() as data:
            try:
                control.bind(("127.0.0.1", base))
                data.bind(("127.0.0.1", base + 1))
            except OSError:
                continue
            return base
    raise RuntimeError("no free port")


def write_config(folder: Path, transport: Mapping[str, Any], workload: Mapping[str, Any], **more: Any) -> Path:
    path = folder / "config.json"
    raw = {"version": 1, "token": "00ff", "seed": 7, "transport": transport, "workload": workload, **more}
    path.write_text(json.dumps(raw))
    return path


def environment(rank: int, config: Path, port: int, world_size: int = 4) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DBLP_CONFIG": str(config),
    }


def start(rank: int, config: Path, port: int, world_size: int = 4) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dblp.train"],
        cwd=ROOT,
        env={**os.environ, **environment(rank, config, port, world_size)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_world(config: Path, world_size: int = 4) -> dict[int, str]:
    """Run all ranks to their end; returns each rank's standard output. Fails where one did not end well."""
    port = free_port()
    ranks = {rank: start(rank, config, port, world_size) for rank in range(world_size)}
    try:
        results = {rank: process.communicate(timeout=LIMIT_S) for rank, process in ranks.items()}
    finally:
        for process in ranks.values():
            process.kill()
    errors = {rank: err for rank, (_, err) in results.items() if ranks[rank].returncode or err}
    assert not errors
    return {rank: out for rank, (out, _) in results.items()}


def replicas(outputs: Mapping[int, str]) -> list[str]:
    """The replicas' digests after each epoch, which all workers must agree on."""
    found = [re.findall(r"replica (\w+)", out) for rank, out in outputs.items() if rank > 0]
    assert all(digests == found[0] for digests in found)
    return found[0]


@pytest.mark.parametrize("transport", [DBLP, MLT, TCP], ids=lambda transport: str(transport["name"]))
def test_training_keeps_replicas_identical_and_learns(tmp_path: Path, transport: dict[str, Any]) -> None:
    outputs = run_world(write_config(tmp_path, transport, TRAIN))
    digests = replicas(outputs)
    assert len(set(digests)) == TRAIN["epochs"]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", outputs[1])]
    assert losses[1] < losses[0]
    assert outputs[0].splitlines()[-1] == "rank 0: done"


def test_without_tolerance_datagrams_and_tcp_give_the_same_means_every_time(tmp_path: Path) -> None:
    runs = [replicas(run_world(write_config(tmp_path, t, REPLAY))) for t in (RELIABLE, TCP, RELIABLE)]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("transport", [DBLP, TCP], ids=lambda transport: str(transport["name"]))
def test_replay(tmp_path: Path, transport: dict[str, Any]) -> None:
    assert len(set(replicas(run_world(write_config(tmp_path, transport, REPLAY))))) == 2


def test_one_worker_is_a_world(tmp_path: Path) -> None:
    assert len(replicas(run_world(write_config(tmp_path, MLT, REPLAY), world_size=2))) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": None}, ["RANK", "not set"]),
        ({"RANK": "4"}, ["RANK", "0..3"]),
        ({"RANK": "one"}, ["RANK", "'one'"]),
        ({"WORLD_SIZE": None}, ["WORLD_SIZE", "not set"]),
        ({"WORLD_SIZE": "1"}, ["WORLD_SIZE"]),
        ({"MASTER_ADDR": None}, ["MASTER_ADDR", "not set"]),
        ({"MASTER_PORT": "99999"}, ["MASTER_PORT"]),
        ({"DBLP_CONFIG": None}, ["DBLP_CONFIG", "not set"]),
        ({"DBLP_CONFIG": "/nonexistent/c.json"}, ["/nonexistent/c.json", "No such file"]),
        ({"DBLP_EVENTS": "/nonexistent/e.sock"}, ["DBLP_EVENTS", "/nonexistent/e.sock"]),
    ],
)
def test_a_bad_environment_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str | None], words: list[str]
) -> None:
    merged = {**environment(1, write_config(tmp_path, MLT, REPLAY), 29500), **change}
    assert main({key: value for key, value in merged.items() if value is not None}) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("transport", "workload", "key"),
    [
        ({**DBLP, "high": 1.5}, REPLAY, "transport.high"),
        (MLT, {**REPLAY, "chunks": 0}, "workload.chunks"),
        (MLT, {**TRAIN, "model": "resnet"}, "workload.model"),
    ],
)
def test_a_bad_configuration_names_the_key_on_every_rank(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rank: int,
    transport: dict[str, Any],
    workload: dict[str, Any],
    key: str,
) -> None:
    assert main(environment(rank, write_config(tmp_path, transport, workload), 29500)) == 1
    assert key in capsys.readouterr().err


def test_a_worker_without_a_server_gives_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, MLT, REPLAY, deadlines={"connect_s": 0.3})
    assert main(environment(1, config, free_port())) == 1
    assert capsys.readouterr().err.startswith("dblp.train: rank 1: ")


def test_an_interrupt_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    process = start(0, write_config(tmp_path, MLT, REPLAY), free_port())
    try:
        assert process.stdout is not None
        assert "waiting for 3 workers" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors == ""


def test_the_server_does_not_load_torch() -> None:
    code = "import sys, dblp.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0

"""A run folder belongs to the user whose workload runs in it: what that plants there is nothing that root follows."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from netem.experiment.folder import RunFolder
from netem.experiment.hub import Hub
from netem.kernel.user import User
from netem.spec import load_scenario
from tests.kernel.conftest import SYSTEM_PYTHON
from tests.kernel.run_helpers import DBLP, LIMIT_S, scenario

NOBODY = 65534
SECRET = "untouched, and known to root alone"
CAPTURE = "capture: {at: [server], snap: 96 B, rounds: bursts}"
pytestmark = pytest.mark.timeout(400)

PREPARE = """
import json, os, pathlib, signal, sys, threading
runs, victim = pathlib.Path(sys.argv[1]), sys.argv[2]
pause = threading.Event()
def hellos():
    return [e for p in runs.glob("*/events.jsonl") for l in p.read_text().splitlines(True)
            if l.endswith("\\n") for e in [json.loads(l)] if e["event"] == "hello"]
while not (found := hellos()):
    pause.wait(0.02)
(folder,) = runs.iterdir()
def plant(name, target):
    path = folder / name
    if path.exists():
        path.rename(path.with_name("moved-" + path.name))
    path.symlink_to(target)
"""
EXCHANGE = """
for name in ("rounds.csv", "epochs.csv", "summary.json", "manifest.json", "events.jsonl"):
    plant(name, victim + "/file")
    plant(name + ".part", victim + "/file")
for name in ("captures", "logs", "stats"):
    plant(name, victim)
"""
KILL = """
for path in list((folder / "logs").iterdir()):
    plant("logs/" + path.name, victim + "/file")
os.kill(found[0]["pid"], signal.SIGKILL)
"""


@dataclass(frozen=True)
class Victim:
    """A folder of root's with one file, and what they were."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Victim:
        folder.mkdir(mode=0o755)
        folder.joinpath("file").write_text(SECRET)
        folder.joinpath("file").chmod(0o600)
        return cls(folder)

    def check(self) -> None:
        (file,) = self.folder.iterdir()
        assert file.read_text() == SECRET
        for path, mode in ((file, 0o100600), (self.folder, 0o40755)):
            assert (path.stat().st_uid, path.stat().st_mode) == (0, mode), path


@pytest.fixture
def place(system_python: Path, tmp_path: Path) -> Path:
    """A folder of the user's, who can reach it."""
    folder = system_python.parents[2] / tmp_path.name
    folder.mkdir(mode=0o755)
    os.chown(folder, NOBODY, NOBODY)
    return folder


@pytest.fixture
def victim(system_python: Path, tmp_path: Path) -> Victim:
    return Victim.make(system_python.parents[2] / f"{tmp_path.name}-victim")


def as_the_user(program: str, *arguments: Path, uid: int = NOBODY, **options: Any) -> subprocess.Popen[bytes]:
    words = [SYSTEM_PYTHON, "-c", program, *map(str, arguments)]
    return subprocess.Popen(words, user=uid, group=uid, extra_groups=[], **options)


def attacked(python: Path, place: Path, victim: Victim, attack: str, **options: str) -> tuple[int, str, Path]:
    """Exit status, output and run folder of a run during which the user does this."""
    path = scenario(place, chunks=100, **options)  # type: ignore[arg-type]
    attacker = as_the_user(PREPARE + attack, place / "runs", victim.folder)
    try:
        done = subprocess.run(
            [str(python), "-m", "netem.cli", "run", str(path), "--out", str(place / "runs")],
            env={**os.environ, "SUDO_UID": str(NOBODY), "SUDO_GID": str(NOBODY)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
        assert attacker.wait(10) == 0, done.stdout
    finally:
        attacker.kill()
    (folder,) = (place / "runs").iterdir()
    strangers = [str(path) for path in (folder, *folder.rglob("*")) if path.lstat().st_uid != NOBODY]
    assert strangers == []
    return done.returncode, done.stdout, folder


def test_names_exchanged_during_a_run_lead_root_nowhere(system_python: Path, place: Path, victim: Victim) -> None:
    status, output, folder = attacked(system_python, place, victim, EXCHANGE, extra=CAPTURE)
    victim.check()
    assert status == 0, output
    for name in ("rounds.csv", "epochs.csv", "summary.json", "manifest.json"):
        assert not (folder / name).is_symlink(), name
    assert '"transport":"mlt"' in (folder / "moved-events.jsonl").read_text()
    assert list((folder / "moved-captures").glob("mlt-*.pcapng"))
    assert list((folder / "moved-logs").glob("mlt-*.log"))


def test_a_log_that_became_a_link_is_not_read(system_python: Path, place: Path, victim: Victim) -> None:
    transports = "{dblp: " + DBLP + "}"
    status, output, folder = attacked(
        system_python, place, victim, KILL, transports=transports, extra="deadlines: {round: 5 s}"
    )
    victim.check()
    manifest = (folder / "manifest.json").read_text()
    assert (status, json.loads(manifest)["exit_status"]) == (1, 1), output
    assert SECRET not in output + manifest


def test_everything_made_in_a_run_folder_is_the_users(tmp_path: Path) -> None:
    spec = load_scenario(scenario(tmp_path)).spec
    with RunFolder(tmp_path / "new" / "runs", spec, 1, User.of(NOBODY)) as folder:
        folder.write("config/a.json", "{}", mode=0o600)
        folder.append("events.jsonl").close()
        folder.open_new("logs/a.log").close()
    made = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert len(made) > 10
    assert {(path.stat().st_uid, path.stat().st_gid) for path in made} == {(NOBODY, User.of(NOBODY).gid)}
    assert tmp_path.stat().st_uid == 0


KNOCK = """
import socket
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(20)
sock.connect("events.sock")
try:
    sock.sendall(b'{"event": "hello", "rank": 1}\\n')
    print(sock.recv(100).decode(), end="")
except (BrokenPipeError, ConnectionResetError):
    pass
"""


@pytest.mark.parametrize(("uid", "answers"), [(NOBODY, 1), (NOBODY - 1, 0)])
def test_the_hub_serves_the_user_and_no_stranger(place: Path, uid: int, answers: int) -> None:
    seen: list[dict[str, Any]] = []
    make_socket = Mock(side_effect=AssertionError)
    with RunFolder(place, load_scenario(scenario(place)).spec, 1, User.of(NOBODY)) as folder:
        hub = Hub(
            folder.descriptor,
            uid=NOBODY,
            workers=1,
            gates=(),
            open_gate=lambda round_: None,
            make_socket=make_socket,
            sink=seen.append,
        )
        guest = as_the_user(KNOCK, uid=uid, cwd=folder.path, stdout=subprocess.PIPE)
        try:
            for _ in range(200):
                hub.step(0.1)
                if guest.poll() is not None:
                    break
            output, _ = guest.communicate(timeout=10)
        finally:
            guest.kill()
            hub.close()
        assert guest.returncode == 0
        assert (len(seen), output.count(b"hello")) == (answers, answers)
        assert not (folder.path / "events.sock").exists()

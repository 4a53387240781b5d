"""Labs through the command line, in real processes: up, exec, status, down, clean."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from netem.kernel.user import User
from netem.preflight import first_closed

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60
NOBODY = 65534

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.usefixtures("unchanged_host")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "netem.cli", *arguments]


def environment(state_dir: Path, **more: str) -> dict[str, str]:
    plain = {key: value for key, value in os.environ.items() if not key.startswith("SUDO_")}
    return plain | {"DBLP_NETEM_STATE_DIR": str(state_dir), "PYTHONPATH": str(ROOT), "COLUMNS": "80"} | more


@pytest.fixture
def cli(state_dir: Path, unchanged_host: None) -> Iterator[Cli]:
    """Runs a command; labs that a failing test leaves are ended."""

    def run(*arguments: str, env: dict[str, str] | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments), cwd=ROOT, env=environment(state_dir, **(env or {})), input=stdin,
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip

    yield run
    for lab in _labs(run):
        run("down", lab["id"])
    run("clean")


def _labs(run: Cli) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run("status", "--json").stdout)["labs"]
    return found


def _up(run: Cli, *arguments: str) -> dict[str, Any]:
    done = run("up", "star3", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    built: dict[str, Any] = json.loads(done.stdout)
    return built


def test_round_trip(cli: Cli) -> None:
    built = _up(cli)
    server = next(host for host in built["hosts"] if host["role"] == "server")
    (lab,) = _labs(cli)
    assert (lab["id"], lab["name"], lab["state"]) == (built["id"], "star3", "up")
    assert {host["name"] for host in lab["hosts"]} == {"server", "worker1", "worker2", "worker3"}
    script = (
        "import socket, sys, os; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
        "s.connect((sys.argv[1], 9)); print(s.getsockname()[0], os.environ['DBLP_NETEM_HOST'])"
    )
    done = cli("exec", "worker1", "--", sys.executable, "-c", script, server["address"])
    worker = next(host for host in built["hosts"] if host["name"] == "worker1")
    assert done.stdout.split() == [worker["address"], "worker1"]
    done = cli("down")
    assert done.returncode == 0
    assert done.stdout.startswith(f"removed star3 ({built['id']}): 5 namespaces")
    assert _labs(cli) == []


def test_what_people_read_fits_80_columns(cli: Cli) -> None:
    texts = [cli("up", "star", "--set", "star.workers=12", "--name", "big").stdout, cli("status").stdout]
    assert "big" in texts[0]
    assert "10.77.0.13" in texts[1]
    texts += [cli("clean").stdout, cli("down", "big").stdout, cli("status").stdout]
    assert "kept" in texts[2]
    assert max(len(line) for text in texts for line in text.splitlines()) <= 80


def test_exec_hands_over_streams_and_status(cli: Cli) -> None:
    _up(cli)
    done = cli("exec", "server", "--", "sh", "-c", "cat; echo err >&2; exit 42", stdin="in\n")
    assert (done.returncode, done.stdout, done.stderr) == (42, "in\n", "err\n")
    done = cli("exec", "server", "sh", "-c", "kill -KILL $$")
    assert done.returncode == 128 + signal.SIGKILL
    assert cli("exec", "server", "--", "echo", "--", "-x").stdout == "-- -x\n"
    assert cli("exec", "server", "--", "no-such-program").returncode == 127
    assert cli("exec", "server", "--", "/etc/passwd").returncode == 126


def test_exec_is_the_user_who_called_sudo(cli: Cli) -> None:
    _up(cli)
    sudo = {"SUDO_UID": str(NOBODY), "SUDO_GID": str(NOBODY), "SUDO_USER": "nobody"}
    done = cli("exec", "worker1", "--", "sh", "-c", "id -u; echo $SUDO_UID", env=sudo)
    if first_closed(Path(sys.executable), User.of(NOBODY)) is not None:
        assert done.returncode == 4  # this interpreter is out of the user's reach, and that is what it says
        assert "cannot" in done.stderr
    elif done.returncode == 4:
        assert "cannot read" in done.stderr
    else:
        assert done.stdout.split() == [str(NOBODY)]


def test_exec_passes_a_signal_on(cli: Cli, state_dir: Path) -> None:
    _up(cli)
    script = "trap 'echo asked; exit 7' TERM; echo ready; while :; do read -r line; done"
    with subprocess.Popen(
        command("exec", "server", "--", "sh", "-c", script),
        cwd=ROOT, env=environment(state_dir), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as running:  # fmt: skip
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGTERM)
        running.stdin.write("\n")  # a shell runs its trap when `read` returns
        running.stdin.flush()
        assert running.stdout.readline() == "asked\n"
        assert running.wait(TIMEOUT_S) == 7


def test_ctrl_c_on_a_terminal_ends_the_program_only_once(cli: Cli, state_dir: Path) -> None:
    _up(cli)
    script = "n=0; trap 'n=$((n+1))' INT; echo ready; read -r a; read -r b; echo caught $n"
    terminal = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    with subprocess.Popen(
        [sys.executable, "-c", terminal, *command("exec", "server", "--", "sh", "-c", script)],
        cwd=ROOT, env=environment(state_dir), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as running:  # fmt: skip
        assert running.stdin is not None
        assert running.stdout is not None
        _read_until(running.stdout.fileno(), b"ready")
        running.stdin.write(b"\x03")
        running.stdin.flush()
        _read_until(running.stdout.fileno(), b"^C")
        running.stdin.write(b"\n\n")
        running.stdin.flush()
        assert b"caught 1" in _read_until(running.stdout.fileno(), b"caught ", more=1)
        assert running.wait(TIMEOUT_S) == 0


def _read_until(fd: int, wanted: bytes, more: int = 0) -> bytes:
    """What a descriptor gives up to `wanted` and `more` bytes behind it; pytest's timeout limits the wait."""
    seen = b""
    while wanted not in seen or len(seen) < seen.index(wanted) + len(wanted) + more:
        part = os.read(fd, 1)
        assert part, seen
        seen += part
    return seen


def test_down_ends_what_runs_inside(cli: Cli, state_dir: Path) -> None:
    _up(cli)
    with subprocess.Popen(
        command("exec", "server", "--", "sh", "-c", "echo ready; exec sleep 1000"),
        cwd=ROOT, env=environment(state_dir), text=True, stdout=subprocess.PIPE,
    ) as running:  # fmt: skip
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        done = cli("down", "star3")
        assert done.returncode == 0
        assert "processes ended" in done.stdout
        assert running.wait(TIMEOUT_S) == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["exec", "worker9", "--", "true"], "server, worker1, worker2, worker3"),
        (["exec", "--lab", "nonsense", "server", "--", "true"], "there are"),
        (["exec", "server", "--"], "COMMAND"),
        (["down", "nonsense"], "there are"),
    ],
)
def test_what_does_not_exist_is_status_2(cli: Cli, arguments: Sequence[str], words: str) -> None:
    _up(cli)
    done = cli(*arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_without_a_lab(cli: Cli) -> None:
    for arguments in (["exec", "server", "--", "true"], ["down"]):
        done = cli(*arguments)
        assert done.returncode == 2
        assert "up star3" in done.stderr
    done = cli("clean")
    assert (done.returncode, done.stdout) == (0, "nothing to remove\n")


def test_names_are_unique_and_several_labs_need_one(cli: Cli) -> None:
    _up(cli)
    done = cli("up", "star3")
    assert done.returncode == 1
    assert "--name" in done.stderr
    _up(cli, "--name", "second")
    done = cli("exec", "server", "--", "true")
    assert done.returncode == 2
    assert "second" in done.stderr
    assert cli("exec", "--lab", "second", "server", "--", "true").returncode == 0


@pytest.mark.parametrize("bad", ["{star: {workers: 200}}", "hosts: {a: {role: server}}"])
def test_up_of_a_bad_topology_builds_nothing(cli: Cli, tmp_path: Path, state_dir: Path, bad: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(bad)
    done = cli("up", str(path))
    assert done.returncode == 2
    assert str(path) in done.stderr
    assert not state_dir.exists()


def test_doctor_finds_this_machine_ready(cli: Cli) -> None:
    done = cli("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ready" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80

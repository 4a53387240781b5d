"""Processes in namespaces: as whom they run, how they fail, and that they do not outlive their parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from netem.kernel.errors import KernelError, LabError
from netem.kernel.process import Child
from netem.kernel.user import User
from netem.lab import Lab, clean
from netem.spec.topology import star
from netem.state import read, start_ticks

NOBODY = 65534
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lab(state_dir: Path) -> Iterator[Lab]:
    with Lab.build(star(1), state_dir=state_dir) as built:
        yield built
    assert built.removed is not None
    assert built.removed.left == ()


def shell(lab: Lab, script: str, log: Path, **options: object) -> Child:
    return lab.spawn("server", ["/bin/sh", "-c", script], env={}, log=log, **options)  # type: ignore[arg-type]


def as_caller(monkeypatch: pytest.MonkeyPatch, uid: int = NOBODY) -> None:
    """As if `sudo` had been called by that user."""
    monkeypatch.setenv("SUDO_UID", str(uid))
    monkeypatch.setenv("SUDO_GID", str(uid))


def test_output_exit_status_and_namespace(lab: Lab, tmp_path: Path) -> None:
    child = shell(lab, "cat /proc/net/dev; echo wrong >&2; exit 7", tmp_path / "log")
    assert child.wait(10) == 7
    text = (tmp_path / "log").read_text()
    assert "eth0" in text
    assert "wrong" in text


def test_the_environment_is_what_was_given(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKED", "1")
    argv = ["/usr/bin/env"]
    lab.spawn("server", argv, env={"RANK": "0", "PATH": "/bin"}, log=tmp_path / "log").wait(10)
    names = {line.split("=")[0] for line in (tmp_path / "log").read_text().splitlines()}
    assert names == {"RANK", "PATH", "HOME", "USER", "LOGNAME"}
    assert "PATH=/bin" in (tmp_path / "log").read_text()


def test_workloads_run_as_the_caller_of_sudo(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_caller(monkeypatch)
    log = tmp_path / "log"
    script = "id -u; id -g; id -G; grep -E 'Cap(Eff|Prm)' /proc/self/status; cat /proc/net/dev; umask"
    assert shell(lab, script, log).wait(10) == 0
    lines = log.read_text().splitlines()
    assert lines[:3] == [str(NOBODY)] * 3
    assert all(line.split()[1] == "0" * 16 for line in lines if line.startswith("Cap"))
    assert any("eth0" in line for line in lines)
    assert log.stat().st_uid == NOBODY


def test_without_sudo_they_stay_root(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    shell(lab, "id -u", tmp_path / "log").wait(10)
    assert (tmp_path / "log").read_text() == "0\n"
    as_caller(monkeypatch)
    shell(lab, "id -u", tmp_path / "root-log", user=User.current()).wait(10)
    assert (tmp_path / "root-log").read_text() == "0\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["/nonexistent"], "No such file"), (["/etc/passwd"], "Permission denied"), (["nosuch"], "No such")],
)
def test_a_failed_exec_is_an_error_with_its_reason(lab: Lab, tmp_path: Path, argv: list[str], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        lab.spawn("server", argv, env={}, log=tmp_path / "log")


def test_a_working_directory_closed_to_the_user(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_caller(monkeypatch)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(KernelError, match="Permission denied"):
        shell(lab, "true", tmp_path / "log", cwd=closed)


def test_a_log_that_is_a_link_is_not_followed(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_caller(monkeypatch)
    target = tmp_path / "precious"
    target.write_text("old")
    (tmp_path / "symbolic").symlink_to(target)
    (tmp_path / "hard").hardlink_to(target)
    for name in ("symbolic", "hard"):
        with pytest.raises(LabError):
            shell(lab, "echo new", tmp_path / name)
    assert target.read_text() == "old"
    assert target.stat().st_uid == 0


def test_only_the_main_thread_may_start_processes(lab: Lab, tmp_path: Path) -> None:
    caught: list[BaseException] = []

    def attempt() -> None:
        try:
            shell(lab, "true", tmp_path / "log")
        except LabError as error:
            caught.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join(10)
    assert "main thread" in str(caught[0])


def test_terminate_asks_first_and_then_kills(lab: Lab, tmp_path: Path) -> None:
    polite = shell(lab, "trap 'exit 3' TERM; echo ready; while :; do sleep 0.01; done", tmp_path / "polite")
    wait_for(tmp_path / "polite", "ready")
    assert polite.terminate(5) == 3
    deaf = shell(lab, "trap '' TERM; echo ready; while :; do sleep 0.01; done", tmp_path / "deaf")
    wait_for(tmp_path / "deaf", "ready")
    assert deaf.terminate(0.1) == -signal.SIGKILL
    assert deaf.poll() == -signal.SIGKILL


def wait_for(path: Path, text: str, timeout_s: float = 10.0) -> None:
    """Until a log holds a text."""
    deadline = time.monotonic() + timeout_s
    while text not in path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_without_a_log_it_shares_the_terminal(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    """As `exec` does: same output, same session, so that Ctrl-C reaches it."""
    child = lab.spawn("server", ["/bin/sh", "-c", "cut -d' ' -f6 /proc/self/stat"], env={}, log=None)
    assert child.wait(10) == 0
    assert int(capfd.readouterr().out) == os.getsid(0)


def test_wait_is_limited(lab: Lab, tmp_path: Path) -> None:
    child = shell(lab, "sleep 100", tmp_path / "log")
    with pytest.raises(TimeoutError, match="still runs"):
        child.wait(0.05)
    child.terminate()


def test_a_child_is_recorded_before_it_runs(lab: Lab, tmp_path: Path, state_dir: Path) -> None:
    child = shell(lab, "sleep 100", tmp_path / "log")
    recorded = {c.pid: c for c in read(state_dir, lab.id).children}
    assert recorded[child.pid].alive
    assert recorded[child.pid].what == "server: /bin/sh"


def test_what_a_child_leaves_behind_ends_with_the_lab(lab: Lab, tmp_path: Path) -> None:
    child = shell(lab, "sleep 1000 & echo $!", tmp_path / "log")
    child.wait(10)
    orphan = int((tmp_path / "log").read_text())
    assert start_ticks(orphan) is not None
    removed = lab.close()
    assert orphan in removed.killed
    assert start_ticks(orphan) is None


@pytest.mark.parametrize("uid", [0, NOBODY])
def test_children_die_with_their_parent(uid: int, state_dir: Path, tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from netem.kernel.user import User
from netem.lab import Lab
from netem.spec.topology import star
lab = Lab.build(star(1), state_dir=Path({str(state_dir)!r}))
user = User.of({uid}) if {uid} else User.current()
child = lab.spawn("server", ["/bin/sleep", "1000"], env={{}}, log=Path({str(tmp_path / "log")!r}), user=user)
print(child.pid, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    fd = os.pidfd_open(pid)
    assert os.stat(f"/proc/{pid}").st_uid == uid
    parent.kill()
    parent.communicate(timeout=10)
    assert select.select([fd], [], [], 10)[0], "the child outlived its parent"
    os.close(fd)
    report = clean(state_dir)
    assert report.ok
    assert len(report.removed) == 1

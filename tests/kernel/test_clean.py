"""Clean-up after the worst: SIGKILL at any moment leaves a host that one `clean` makes as it was."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

from netem.kernel import netns
from netem.kernel.errors import LabError
from netem.kernel.snapshot import HostSnapshot, host_snapshot
from netem.lab import Lab, clean
from netem.spec.topology import star
from netem.state import lab_ids, path_of, read, start_ticks

ROOT = Path(__file__).resolve().parents[2]
SEED = 20

# For each number n read: a forked process builds a lab, starts processes and a capture in it and tears it down, but
# kills itself at the n-th call of a function of the package. Answers with its exit status; for n = 0 it runs through,
# and writes down the number of calls.
VICTIM = """
import os, signal, sys
from pathlib import Path
from netem.lab import Lab
from netem.spec.topology import star

folder = Path(sys.argv[1])
topology = star(3)
calls = 0

def count(frame, event, argument):
    global calls
    if event == "call" and "/netem/" in frame.f_code.co_filename:
        calls += 1
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)

def live():
    sys.setprofile(count)
    with Lab.build(topology, state_dir=folder) as lab:
        lab.capture(("port", "server"), folder.parent / "x.pcapng", snap_bytes=96)
        for host in lab.hosts:
            lab.spawn(host, ["/bin/sh", "-c", "sleep 1000 & sleep 1000"], env={}, log=folder.parent / "log")
    sys.setprofile(None)
    Path(sys.argv[2]).write_text(str(calls))

for line in sys.stdin:
    last = int(line)
    pid = os.fork()
    if pid == 0:
        live()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture
def victim(state_dir: Path, tmp_path: Path) -> Iterator[Callable[[int], int]]:
    """Runs the victim up to a call; returns its exit status."""
    command = [sys.executable, "-c", VICTIM, str(state_dir), str(tmp_path / "calls")]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(moment: int) -> int:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{moment}\n")
        process.stdin.flush()
        assert select.select([process.stdout], [], [], 60)[0]
        return int(process.stdout.readline())

    yield run
    process.kill()
    process.communicate(timeout=10)


def test_killed_at_any_call_one_clean_restores_the_host(
    victim: Callable[[int], int],
    state_dir: Path,
    tmp_path: Path,
    since: Callable[[HostSnapshot, Collection[str]], list[str]],
) -> None:
    before, made = host_snapshot(), set[str]()
    assert victim(0) == 0
    total = int((tmp_path / "calls").read_text())
    assert total > 300
    killed = 0
    for moment in random.Random(SEED).sample(range(1, total + 1), 20):
        status = victim(moment)  # waiting for the kernel takes now more calls, now fewer: it may end first
        assert status in (-signal.SIGKILL, 0)
        killed += status != 0
        made.update(lab_ids(state_dir) if state_dir.exists() else [])
        report = clean(state_dir)
        assert report.ok, f"call {moment} of {total}: {report}"
        assert not state_dir.exists() or os.listdir(state_dir) == [], f"call {moment} of {total}"
    assert since(before, made) == []
    assert killed >= 15


@pytest.fixture
def dead_lab(state_dir: Path) -> Iterator[str]:
    """The id of a lab whose owner was killed while holding it."""
    script = (
        "import sys; from pathlib import Path; from netem.lab import Lab; from netem.spec.topology import star\n"
        f"lab = Lab.build(star(2), state_dir=Path({str(state_dir)!r})); print(lab.id, flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, text=True, **pipes)  # type: ignore[call-overload]
    lab_id = process.stdout.readline().strip()
    assert clean(state_dir).kept == (f"{lab_id}: in use",)
    process.kill()
    process.communicate(timeout=10)
    yield lab_id
    clean(state_dir)


def test_what_others_made_stays(dead_lab: str, state_dir: Path) -> None:
    """Foreign namespaces, also with names like ours, and a lab that is alive."""
    foreign = ["dnffff-server", f"{dead_lab}-extra", "someone"]
    for name in foreign:
        netns.create(name)
    try:
        with Lab.build(star(1), state_dir=state_dir) as alive:
            report = clean(state_dir)
            assert [lab.lab_id for lab in report.removed] == [dead_lab]
            assert all(netns.identity(name) for name in (*foreign, *alive.namespaces))
    finally:
        for name in foreign:
            netns.remove(name)


def test_a_foreign_process_in_a_dead_lab_is_reported_not_killed(dead_lab: str, state_dir: Path) -> None:
    visitor = subprocess.Popen(
        ["/usr/bin/nsenter", f"--net=/run/netns/{dead_lab}-server", "/bin/sh", "-c", "echo in; exec sleep 1000"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert visitor.stdout is not None
    assert visitor.stdout.readline() == "in\n"
    try:
        report = clean(state_dir)
        assert not report.ok
        assert f"process {visitor.pid} (" in report.removed[0].left[0]
        assert visitor.poll() is None
    finally:
        visitor.kill()
        visitor.communicate(timeout=10)


def test_a_recorded_process_id_that_was_reused_is_not_killed(dead_lab: str, state_dir: Path) -> None:
    bystander = subprocess.Popen(["/bin/sleep", "1000"])
    path = path_of(state_dir, dead_lab)
    raw = json.loads(path.read_text())
    raw["children"] = [{"pid": bystander.pid, "start_ticks": (start_ticks(bystander.pid) or 0) - 1, "what": "x"}]
    path.write_text(json.dumps(raw))
    try:
        assert clean(state_dir).removed[0].killed == ()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait(10)


def test_a_damaged_state_file_is_reported_and_removes_nothing(dead_lab: str, state_dir: Path) -> None:
    path = path_of(state_dir, dead_lab)
    good = path.read_text()
    raw = json.loads(good)
    netns.create("dnfffe-x")
    try:
        for text in ("{", "[]", json.dumps({**raw, "namespaces": [*raw["namespaces"], "dnfffe-x"]})):
            path.write_text(text)
            report = clean(state_dir)
            assert not report.ok
            assert dead_lab in report.problems[0]
            assert netns.identity("dnfffe-x") is not None
        path.write_text(good)
        assert clean(state_dir).ok
    finally:
        netns.remove("dnfffe-x")


def test_after_a_restart_of_the_machine_nothing_is_alive(state_dir: Path) -> None:
    """The state directory may survive a restart; process ids mean nothing then."""
    lab = Lab.build(star(1), state_dir=state_dir)
    lab.detach()
    path = path_of(state_dir, lab.id)
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot": "another"}))
    assert [r.lab_id for r in clean(state_dir).removed] == [lab.id]


def test_two_cleans_at_once(dead_lab: str, state_dir: Path) -> None:
    script = f"from pathlib import Path; from netem.lab import clean; r = clean(Path({str(state_dir)!r})); print(r.ok)"
    cleaners = [
        subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, text=True, stdout=subprocess.PIPE) for _ in range(3)
    ]
    for cleaner in cleaners:
        assert cleaner.communicate(timeout=30)[0] == "True\n"
    assert os.listdir(state_dir) == []
    assert not any(name.startswith(dead_lab) for name in netns.names())


def test_an_interrupt_while_building_leaves_nothing(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real_create = netns.create

    def create(name: str) -> None:
        real_create(name)
        made.append(name)
        if len(made) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(netns, "create", create)
    with pytest.raises(KeyboardInterrupt):
        Lab.build(star(3), state_dir=state_dir)
    assert not any(netns.exists(name) for name in made)
    assert os.listdir(state_dir) == []


def test_a_namespace_name_that_cannot_go_is_reported(
    dead_lab: str, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_remove = netns.remove

    def remove(name: str, timeout_s: float = 1.0) -> bool:
        if name.endswith("-worker2"):
            raise LabError(f"remove namespace {name}: EBUSY")
        return real_remove(name, timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(netns, "remove", remove)
        report = clean(state_dir)
    assert not report.ok
    assert "EBUSY" in report.removed[0].left[0]
    assert read(state_dir, dead_lab).namespaces  # still on record: the next clean finishes it
    assert clean(state_dir).ok
    assert os.listdir(state_dir) == []


def test_the_killed_owner_is_noticed_at_once(dead_lab: str, state_dir: Path) -> None:
    record = read(state_dir, dead_lab)
    assert record.abandoned
    assert record.owner is not None
    assert clean(state_dir).ok

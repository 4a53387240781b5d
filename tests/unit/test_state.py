"""State files: locks, owners, and what a kill at any moment leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from netem import state
from netem.state import LabBusy, LabState, Process, Record, StateError, boot_id, this_process


def record(lab_id: str = "dn0001", owner: Process | None = None) -> Record:
    return Record(
        id=lab_id,
        name="star3",
        owner=owner or this_process(),
        boot=boot_id(),
        created_utc="2026-01-01T00:00:00+00:00",
        namespaces=(f"{lab_id}-sw",),
        plan={"hosts": []},
    )


def test_round_trip(tmp_path: Path) -> None:
    held = LabState.create(tmp_path, record())
    held.add_child(this_process())
    assert state.read(tmp_path, "dn0001") == held.record
    assert state.lab_ids(tmp_path) == ["dn0001"]
    held.delete()
    assert os.listdir(tmp_path) == []


def test_a_lab_in_use_cannot_be_opened(tmp_path: Path) -> None:
    held = LabState.create(tmp_path, record())
    for attempt in (LabState.open, lambda d, i: LabState.create(d, record(i))):
        with pytest.raises(LabBusy):
            attempt(tmp_path, "dn0001")
    seen = LabState.look(tmp_path, "dn0001")
    with pytest.raises(LabBusy):
        seen.add_child(this_process())
    held.release()
    seen.add_child(this_process())
    LabState.open(tmp_path, "dn0001").delete()
    with pytest.raises(StateError, match="no lab dn0001"):
        seen.acquire()


def test_an_id_whose_owner_left_is_not_taken_again(tmp_path: Path) -> None:
    LabState.create(tmp_path, record()).release()
    with pytest.raises(LabBusy, match="exists"):
        LabState.create(tmp_path, record())


def test_abandoned() -> None:
    me = this_process()
    assert not record().abandoned
    assert record(owner=Process(me.pid, me.start_ticks + 1)).abandoned
    assert record(owner=Process(2**22 + 1, 5)).abandoned
    standing = Record(**{**vars(record()), "owner": None})
    assert not standing.abandoned
    assert Record(**{**vars(standing), "boot": "before"}).abandoned


def test_ended_children_are_forgotten(tmp_path: Path) -> None:
    held = LabState.create(tmp_path, record())
    held.add_child(Process(2**22 + 1, 5, "ended"))
    held.add_child(this_process())
    assert [child.what for child in held.record.children] == ["owner"]
    held.release()


def test_a_zombie_is_not_alive() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert state.start_ticks(pid) is None
    os.waitpid(pid, 0)
    assert state.start_ticks(pid) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"version": 2}', '{"version": 1, "id": "x"}', "3", '"x"', '{"id": 1}']
)
def test_damaged_files_are_errors_that_name_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "dn0001.json").write_text(text)
    with pytest.raises(StateError, match=r"dn0001\.json is not a lab record \(.+\); delete it"):
        state.read(tmp_path, "dn0001")
    with pytest.raises(StateError, match=r"dn0001\.json"):
        LabState.open(tmp_path, "dn0001")
    assert os.listdir(tmp_path) == ["dn0001.json"]  # no stray lock


def test_folders_are_no_records(tmp_path: Path) -> None:
    for name in ("dn0001.json", "dnfoo", "dn0002.json.new", "dn0003.lock"):
        (tmp_path / name).mkdir()
    with pytest.raises(StateError, match="is not a lab record"):
        LabState.open(tmp_path, "dn0001")
    state.drop_orphans(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["dn0001.json", "dn0002.json.new", "dn0003.lock", "dnfoo"]


def test_orphans_of_a_kill_before_the_first_state_go(tmp_path: Path) -> None:
    (tmp_path / "dn0001.lock").touch()
    (tmp_path / "dn0002.json.new").write_text("{")
    held = LabState.create(tmp_path, record("dn0003"))
    state.drop_orphans(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["dn0003.json", "dn0003.lock"]
    held.release()


def test_a_lock_deleted_between_open_and_flock_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = LabState.create(tmp_path, record())
    real = state.fcntl.flock
    deleted = []

    def flock(fd: int, how: int) -> None:
        if not deleted:
            deleted.append(fd)
            held.delete()
        real(fd, how)

    monkeypatch.setattr(state.fcntl, "flock", flock)
    again = LabState.create(tmp_path, record())
    assert sorted(os.listdir(tmp_path)) == ["dn0001.json", "dn0001.lock"]
    again.delete()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="make state directory"):
        LabState.create(tmp_path / "file" / "state", record())

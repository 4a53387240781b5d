"""RunFolder and Hub as whoever runs the tests: links in the way are replaced or refused, never followed."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from netem.experiment.folder import SUBFOLDERS, RunFolder
from netem.experiment.hub import SOCKET_NAME, Hub
from netem.kernel.user import User
from netem.spec import load_scenario_text

SCENARIO = """\
name: small
topology: {star: {workers: 2}}
workload: {kind: replay, chunks: 4, iterations: 2}
profile: recommended
transports: {tcp: {}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder(tmp_path / "new" / "runs", load_scenario_text(SCENARIO).spec, 1, User.current()) as made:
        yield made


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "target"
    path.write_text("untouched")
    return path


def test_it_has_its_subfolders_and_the_scenario(folder: RunFolder) -> None:
    assert {path.name for path in folder.path.iterdir()} == {*SUBFOLDERS, "scenario.resolved.yaml"}
    assert folder.path.parent.name == "runs"


def test_write_replaces_a_link_and_leaves_no_part(folder: RunFolder, target: Path) -> None:
    (folder.path / "rounds.csv").symlink_to(target)
    (folder.path / "rounds.csv.part").symlink_to(target)
    path = folder.write("rounds.csv", "a,b\r\n", mode=0o600)
    assert path.read_bytes() == b"a,b\r\n"
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert target.read_text() == "untouched"
    (folder.path / "manifest.json").mkdir()
    with pytest.raises(OSError, match=r"manifest\.json"):
        folder.write_json("manifest.json", {})
    assert list(folder.path.glob(".*")) == []


def test_a_new_file_is_not_opened_where_a_link_is(folder: RunFolder, target: Path) -> None:
    for name in ("logs/x.log", "captures/x.pcapng", "events.jsonl"):
        (folder.path / name).symlink_to(target)
        with pytest.raises(FileExistsError):
            folder.open_new(name)
        with pytest.raises(FileExistsError):
            folder.append(name)
    assert target.read_text() == "untouched"


def test_an_exchanged_subfolder_gets_nothing(folder: RunFolder, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in SUBFOLDERS:
        (folder.path / name).rename(tmp_path / name)
        (folder.path / name).symlink_to(elsewhere)
        folder.write(f"{name}/a", "a")
        with folder.open_new(f"{name}/b") as file:
            file.write(b"b")
    assert list(elsewhere.iterdir()) == []
    assert {path.name for path in (tmp_path / "config").iterdir()} == {"a", "b"}


def test_an_exchanged_run_folder_gets_nothing(folder: RunFolder, tmp_path: Path) -> None:
    folder.path.rename(tmp_path / "moved")
    folder.path.mkdir()
    folder.write("summary.json", "{}")
    with folder.append("events.jsonl") as file:
        file.write("{}\n")
    assert list(folder.path.iterdir()) == []
    assert (tmp_path / "moved" / "events.jsonl").read_text() == "{}\n"


def test_what_cannot_be_made_is_an_error(tmp_path: Path, target: Path) -> None:
    with pytest.raises(OSError, match="target"):
        RunFolder(target, load_scenario_text(SCENARIO).spec, 1, User.current())


def test_its_descriptors_are_closed(tmp_path: Path) -> None:
    with RunFolder(tmp_path, load_scenario_text(SCENARIO).spec, 1, User.current()) as made:
        descriptor = made.descriptor
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_no_folder_for_figures_where_there_are_none(tmp_path: Path) -> None:
    for figure in (False, True):
        with RunFolder(tmp_path, load_scenario_text(SCENARIO).spec, 1, User.current()) as made:
            if figure:
                made.open_new("figures/a.svg").close()
        assert (made.path / "figures").exists() is figure


def hub(folder: RunFolder, uid: int) -> Hub:
    def no_socket(*_: object) -> socket.socket:
        raise AssertionError("nobody asks for a socket here")

    return Hub(
        folder.descriptor,
        uid=uid,
        workers=2,
        gates=(),
        open_gate=lambda round_: None,
        make_socket=no_socket,
        sink=lambda event: None,
    )


@pytest.mark.parametrize(("stranger", "mode"), [(0, 0o600), (1, 0o666)])
def test_the_socket_of_the_hub_replaces_a_link(folder: RunFolder, target: Path, stranger: int, mode: int) -> None:
    path = folder.path / SOCKET_NAME
    path.symlink_to(target)
    before = target.stat()
    serving = hub(folder, os.geteuid() + stranger)
    assert stat.S_IMODE(path.lstat().st_mode) == mode
    assert stat.S_ISSOCK(path.lstat().st_mode)
    serving.close()
    assert not path.is_symlink()
    assert not path.exists()
    assert (target.stat().st_mode, target.read_text()) == (before.st_mode, "untouched")

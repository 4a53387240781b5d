"""Who may execute what: the checks behind "the user cannot run this interpreter", and who the user is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from netem import preflight
from netem.kernel.errors import Unavailable
from netem.kernel.user import User
from netem.preflight import first_closed

STRANGER = User("stranger", 54321, 54321, (54321,), "/")


def test_the_first_closed_folder_is_named(tmp_path: Path) -> None:
    program = tmp_path / "a" / "b" / "program"
    program.parent.mkdir(parents=True)
    program.write_text("")
    program.chmod(0o755)
    for folder in (program.parent, tmp_path / "a"):
        folder.chmod(0o755)
    open_above = User("owner", os.getuid(), os.getgid(), (), "/")
    assert first_closed(program, open_above) is None
    (tmp_path / "a").chmod(0o750)
    found = first_closed(program, STRANGER)
    assert found is not None
    assert "is closed to them" in found


def test_a_link_is_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("")
    target.chmod(0o644)
    (tmp_path / "link").symlink_to(target)
    owner = User("owner", os.getuid(), os.getgid(), (), "/")
    if owner.uid:  # root passes everything
        assert str(target) in str(first_closed(tmp_path / "link", owner))
    assert "No such file" in str(first_closed(tmp_path / "missing", owner))


def test_the_caller_without_sudo_is_the_process_itself() -> None:
    assert User.caller({}).uid == os.geteuid()
    assert User.caller({"SUDO_UID": "0"}).uid == os.geteuid()


@pytest.mark.parametrize("environ", [{"SUDO_UID": "54321", "SUDO_GID": "54322"}])
def test_the_caller_of_sudo(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    user = User.caller(environ)
    assert (user.uid, user.gid, user.groups, user.name, user.home) == (54321, 54322, (54322,), "54321", "/")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert User.caller(environ).uid == 1000


@pytest.mark.parametrize("uid", ["abc", "", "-1", "1.5", "\u00b2", str(2**32 - 1), "9" * 30])
def test_a_caller_that_is_no_id_does_not_become_root(uid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(preflight, "_privileges", lambda: preflight.Check(True, "root"))
    for environ in ({"SUDO_UID": uid}, {"SUDO_UID": "1000", "SUDO_GID": uid}):
        with pytest.raises(Unavailable, match=r"is '.*', not the id of a user or group"):
            User.caller(environ)
    monkeypatch.setenv("SUDO_UID", uid)
    with pytest.raises(Unavailable, match="SUDO_UID"):
        preflight.require()
    assert not preflight._caller().ok


def test_a_gradient_that_cannot_fit_is_refused() -> None:
    preflight.require_memory(400 << 10, 3)
    with pytest.raises(Unavailable, match=r"needs about 9,216\.0 GiB, and this machine has [\d.,]+ GiB") as caught:
        preflight.require_memory(1 << 40, 3)
    assert caught.value.exit_status == 4


def test_the_command_with_sudo_works_as_it_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.sys, "argv", ["/venv/bin/dblp-netem"])
    assert preflight._program() == "/venv/bin/dblp-netem"
    monkeypatch.setattr(preflight.sys, "argv", ["/checkout/netem/cli.py"])
    monkeypatch.setenv("PYTHONPATH", "/a b")
    assert preflight._program() == f"env 'PYTHONPATH=/a b' {preflight.sys.executable} -m netem.cli"
    monkeypatch.delenv("PYTHONPATH")
    assert preflight._program() == f"{preflight.sys.executable} -m netem.cli"

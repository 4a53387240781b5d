"""User namespaces: what is refused, and how it is told. The real thing is tried in tests/kernel and tests/vm."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from netem import rootless
from netem.kernel import syscalls
from netem.kernel.errors import Unavailable


def test_a_map_of_everyone_to_itself_is_no_user_namespace(tmp_path: Path) -> None:
    path = tmp_path / "uid_map"
    path.write_text("         0          0 4294967295\n")
    assert not rootless.inside(path)
    path.write_text("         0       1000          1\n")
    assert rootless.inside(path)


def test_a_process_with_threads_stays_where_it_is() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, args=(30,))
    thread.start()
    try:
        with pytest.raises(Unavailable, match="threads"):
            rootless.enter()
    finally:
        done.set()
        thread.join()


def test_a_refusal_says_what_was_attempted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(flags: int) -> None:
        assert flags & syscalls.CLONE_NEWUSER
        raise PermissionError(1, "unshare")

    monkeypatch.setattr(rootless.os, "listdir", lambda path: ["1"])
    monkeypatch.setattr(syscalls, "unshare", refuse)
    with pytest.raises(Unavailable, match="make a user namespace: Operation not permitted") as caught:
        rootless.enter()
    assert "sudo" in caught.value.remedy
    assert caught.value.exit_status == 4

"""The doctor tries the real thing, leaves nothing, and refuses with a reason."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from netem import preflight
from netem.kernel.errors import KernelError, Unavailable
from netem.kernel.user import User
from netem.lab import Lab

NOBODY = 65534


@pytest.mark.usefixtures("unchanged_host")
def test_every_feature_is_tried_and_nothing_is_left(state_dir: Path) -> None:
    checks = preflight.doctor(state_dir)
    assert {"privileges", "namespace, veth, bridge", "bpf", "netem", "tbf", "prio", "user", "memory"} <= set(checks)
    assert checks["privileges"].ok
    assert checks["namespace, veth, bridge"].ok
    assert checks["bpf"].ok or checks["netem"].ok
    for name, check in checks.items():
        assert check.detail, name
        assert check.ok or check.remedy, f"{name}: {check.detail}"
    assert os.listdir(state_dir) == []


def test_without_namespaces_the_rest_is_not_tried(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: object, **options: object) -> Lab:
        raise KernelError("create namespace dn0000-sw", 1, "unshare: Operation not permitted")

    monkeypatch.setattr(preflight.Lab, "build", build)
    checks = preflight.probe(state_dir)
    assert "Operation not permitted" in checks["namespace, veth, bridge"].detail
    assert "privileged" in checks["namespace, veth, bridge"].remedy
    assert "not tried" in checks["bpf"].detail


def test_not_root(monkeypatch: pytest.MonkeyPatch, state_dir: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match="sudo") as caught:
        preflight.require()
    assert caught.value.exit_status == 4
    checks = preflight.probe(state_dir)
    assert not checks["bpf"].ok
    assert not state_dir.exists()


def test_an_interpreter_that_the_caller_cannot_execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "python").symlink_to("/bin/sh")
    monkeypatch.setattr(sys, "executable", str(closed / "python"))
    with pytest.raises(Unavailable, match="cannot execute") as caught:
        preflight.require(User.of(NOBODY))
    assert "is closed to them" in str(caught.value)
    assert caught.value.exit_status == 4


def test_packages_that_the_caller_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = Path("/usr/bin/python3")
    if not python.exists():
        pytest.skip("needs a python3 in /usr/bin, which every user can execute")
    monkeypatch.setattr(sys, "executable", str(python))
    open_folder = [p for p in sys.path if p.startswith("/usr/lib") and os.stat(p).st_mode & stat.S_IXOTH]
    packages = tmp_path / "packages"
    packages.mkdir(mode=0o700)
    monkeypatch.setattr(sys, "path", [*open_folder, str(packages)])
    with pytest.raises(Unavailable, match="cannot read"):
        preflight.require(User.of(NOBODY))

"""The doctor tries the real thing, leaves nothing, and refuses with a reason."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from netem import preflight
from netem.cli import main
from netem.experiment import calibrate
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
    there = [p for p in sys.path if p.startswith("/usr/lib") and os.path.exists(p)]
    open_folder = [p for p in there if os.stat(p).st_mode & stat.S_IXOTH]
    packages = tmp_path / "packages"
    packages.mkdir(mode=0o700)
    monkeypatch.setattr(sys, "path", [*open_folder, str(packages)])
    with pytest.raises(Unavailable, match="cannot read"):
        preflight.require(User.of(NOBODY))


def test_calibrate_measures_and_a_run_refers_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("DBLP_NETEM_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(calibrate, "_IDLE", calibrate._IDLE.replace("iterations: 200", "iterations: 40"))
    monkeypatch.setattr(calibrate, "_BULK", calibrate._BULK.replace("chunks: 5000", "chunks: 500"))
    assert main(["doctor", "--calibrate", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    measured = found["calibration"]
    assert Path(found["file"]) == tmp_path / "xdg/dblp-netem/calibration.json"
    assert 0 < measured["mean_s"] < measured["single_s"]
    assert measured["idle_p50_s"] <= measured["idle_p95_s"]
    assert measured["goodput_bps"] > 1e6
    scenario = tmp_path / "small.yaml"
    scenario.write_text(calibrate._BULK)
    assert main(["run", str(scenario), "--out", str(tmp_path / "runs")]) == 0
    assert "calibration: single rounds differ by up to" in capsys.readouterr().out
    (folder,) = (tmp_path / "runs").iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["calibration"]["same_kernel"] is True
    assert manifest["calibration"]["measured_utc"] == measured["measured_utc"]

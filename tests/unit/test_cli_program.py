"""The command line as a program: help, what it loads, pipes, doctor, consoles. Nothing is ever built here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from netem import cli, rootless
from netem.cli import main
from netem.commands import doctor, failure
from netem.kernel.errors import Unavailable
from netem.preflight import Check

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("run", "validate", "show", "up", "down", "exec", "status", "clean", "doctor", "schema", "compare"):
        assert f" {name} " in text
    assert max(map(len, text.splitlines())) <= 80


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert "Usage: dblp-netem" in captured.out
    assert captured.err == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from netem import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dblp-netem {__version__}\n"


def test_the_app_can_be_built_twice() -> None:
    assert cli.build_app() is not cli.build_app()


LEAN = """
import sys
from netem import rootless
from netem.kernel.errors import Unavailable
from netem.cli import main
status = main(sys.argv[1:])
heavy = {"torch", "pyroute2", "matplotlib", "scapy"} & set(sys.modules)
sys.exit(f"status {status}, loaded {heavy}" if status or heavy else 0)
"""


@pytest.mark.parametrize("arguments", [["validate", "burst90"], ["show", "star3"], ["schema"], ["status"], ["--help"]])
def test_commands_about_files_load_nothing_heavy(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAN, *arguments], cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_closed_pipe_is_no_error() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with os.fdopen(write_fd, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "netem.cli", "show", "burst90"],
            cwd=ROOT,
            timeout=60,
            stdout=pipe,
            stderr=subprocess.PIPE,
        )
    assert done.stderr == b""


def _checks(**ok: bool) -> dict[str, Check]:
    return {name: Check(each, "detail", "remedy", needed=name == "privileges") for name, each in ok.items()}


def test_doctor_needs_privileges_and_one_backend() -> None:
    assert doctor.missing(_checks(privileges=True, bpf=True, netem=False)) == []
    assert doctor.missing(_checks(privileges=True, bpf=False, netem=True)) == []
    assert doctor.missing(_checks(privileges=True, bpf=False, netem=False)) == ["bpf or netem"]
    assert doctor.missing(_checks(privileges=False, bpf=False, netem=False)) == ["privileges"]


def _refused() -> None:
    raise Unavailable("rootless: refused", rootless.REMEDY)


def test_doctor_without_root(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    monkeypatch.setattr(rootless, "enter", _refused)
    assert main(["doctor", "--state-dir", str(tmp_path)]) == 4
    text = capsys.readouterr().out
    assert "sudo" in text
    assert "not tried" in text
    assert main(["doctor", "--state-dir", str(tmp_path), "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["missing"] == ["privileges"]


def test_json_failure_of_an_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    assert failure.report(failure.translate(KeyboardInterrupt()), as_json=True) == 130
    assert json.loads(capsys.readouterr().out)["exit_status"] == 130


def test_console_of_run_is_standard_error_with_json(monkeypatch: pytest.MonkeyPatch) -> None:
    from netem import experiment, preflight

    seen: list[Any] = []

    def run(loaded: Any, settings: Any, console: Console) -> int:
        seen.append((settings.json_output, console.stderr, str(settings.out)))
        return 3

    monkeypatch.setattr(experiment, "run_scenario", run)
    monkeypatch.setattr(preflight, "require", lambda: None)
    assert main(["run", "burst90", "--json", "--out", "elsewhere"]) == 3
    assert main(["run", "burst90"]) == 3
    assert seen == [(True, True, "elsewhere"), (False, False, "runs")]

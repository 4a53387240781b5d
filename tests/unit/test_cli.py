"""The command line without privileges: statuses, messages, JSON, interrupts. Nothing is ever built here."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from netem import rootless
from netem.cli import main
from netem.commands import files
from netem.commands.interrupt import interruptible
from netem.kernel.errors import KernelError, Unavailable
from netem.links.base import UnsupportedFeature
from netem.spec import SpecError, load_scenario_text, load_topology

ROOT = Path(__file__).resolve().parents[2]

GOOD = """\
name: good
seed: 7
topology: star3
workload: {kind: replay, chunks: 100, iterations: 10}
transports:
  mlt: {fixed: 0.8%}
bursts:
  - {iteration: 4, loss: 90%}
"""


@pytest.fixture(autouse=True)
def _from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def _no_host() -> str:
    return GOOD + "capture: {at: [srever], rounds: all}\n"


def _twice() -> str:
    inline = (
        "topology:\n  hosts:\n    server: {role: server}\n    worker1: {role: worker}\n    worker1: {role: worker}\n"
    )
    return GOOD.replace("topology: star3\n", inline + "  switches: [sw]\n  links: [{between: ['*', sw]}]\n")


# What is in the file, the line to be named (None: the whole file), words of the message.
BAD = {
    "YAML syntax": (GOOD + "capture: {at: [server\n", 10, "expected"),
    "unknown key": (GOOD.replace("seed: 7", "sede: 7"), 2, "did you mean 'seed'?"),
    "loss 150 %": (GOOD.replace("90%", "150%"), 8, "0% to 100%"),
    "negative iteration": (GOOD.replace("iteration: 4", "iteration: -1"), 8, "0 or more"),
    "burst past the last": (GOOD.replace("iteration: 4", "iteration: 10"), 8, "after the last iteration, 9"),
    "unknown host": (_no_host(), 9, "did you mean 'server'?"),
    "duplicate host": (_twice(), 7, "worker1"),
    "200 workers": (GOOD.replace("star3", "{extends: star, workers: 200}"), 3, "1 to 64"),
    "missing unit": (GOOD.replace("90%", "90"), 8, "no unit"),
    "a list": ("- name: x\n", 1, "a mapping"),
    "empty": ("", None, "empty"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("command", ["run", "validate", "show"])
def test_bad_input_is_status_2_names_the_place_and_builds_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, what: str
) -> None:
    text, line, words = BAD[what]
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    state, out = tmp_path / "state", tmp_path / "runs"
    extra = ["--out", str(out), "--state-dir", str(state)] if command == "run" else []
    assert main([command, str(path), *extra]) == 2
    captured = capsys.readouterr()
    place = f"{path}:{line}: " if line is not None else f"{path}: "
    assert captured.err.startswith(f"error: {place}")
    assert words in captured.err
    assert captured.err.count("\n") <= 2 + text.count("\n")
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert not state.exists()
    assert not out.exists()


@pytest.mark.parametrize("command", ["run", "validate", "show"])
def test_a_missing_file_is_status_2(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "no/such.yaml"]) == 2
    assert "no/such.yaml" in capsys.readouterr().err


def test_an_unknown_name_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "brust90"]) == 2
    error = capsys.readouterr().err
    assert "burst90" in error
    assert "star3" in error


def test_errors_are_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(BAD["loss 150 %"][0])
    assert main(["show", str(path), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert found["exit_status"] == 2
    error = found["error"]
    assert (error["file"], error["line"], error["key"]) == (str(path), 8, "bursts.0.loss")


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["run"],
        ["run", "burst90", "--frob"],
        ["run", "burst90", "--seed", "x"],
        ["run", "burst90", "--seed", "-1"],
        ["run", "burst90", "--out", ""],
        ["run", "burst90", "--out", "pyproject.toml/x"],
    ],
)
def test_wrong_usage_is_status_2_with_a_hint(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "--help" in error


@pytest.mark.parametrize("assignment", ["nonsense", "bursts.7.loss=80%", "bursts.0.loss=80", "colour=red"])
def test_a_wrong_override_names_itself(capsys: pytest.CaptureFixture[str], assignment: str) -> None:
    assert main(["validate", "burst90", "--set", assignment]) == 2
    assert f"--set {assignment}" in capsys.readouterr().err


def test_what_only_the_transport_can_judge_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(GOOD + "profile: papre\n")
    assert main(["validate", str(path)]) == 2
    assert f"{path}:9: profile" in capsys.readouterr().err


def test_validate_takes_several_and_reports_each(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "burst90", "star3", str(scenario)]) == 0
    assert capsys.readouterr().out.count(": valid ") == 3
    assert main(["validate", "--json", "no-such", str(scenario)]) == 2
    first, second = json.loads(capsys.readouterr().out)["files"]
    assert (first["ok"], second["ok"]) == (False, True)


def test_every_shipped_file_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    shipped = [str(p) for folder in ("scenarios", "topologies") for p in sorted((ROOT / folder).rglob("*.yaml"))]
    assert main(["validate", *shipped]) == 0
    assert capsys.readouterr().out.count(": valid ") == len(shipped)


def test_show_gives_a_file_that_loads_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "burst90", "--seed", "11", "--set", "bursts.0.loss=80%"]) == 0
    text = capsys.readouterr().out
    spec = load_scenario_text(text).spec
    assert (spec.seed, spec.bursts[0].loss) == (11, 0.8)
    comment = [line for line in text.splitlines() if line.startswith("#")]
    assert max(map(len, comment)) <= 80
    assert "iteration 40 (epoch 2): 80% of data packets" in text


def test_show_of_a_topology(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "star3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "topology"
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nextends: star3\n")
    assert main(["show", str(path)]) == 0
    path.write_text(capsys.readouterr().out)
    assert load_topology(path).workers == ("worker1", "worker2", "worker3")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("extends: star3\n", "topology"),
        ("extends: burst90\n", "scenario"),
        ("star: {workers: 2}\n", "topology"),
        (GOOD, "scenario"),
        ("nonsense: 1\n", "scenario"),
    ],
)
def test_the_kind_of_a_file(tmp_path: Path, text: str, kind: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert files.kind_of(str(path)) == kind


def test_a_file_that_extends_itself_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("extends: x.yaml\n")
    assert main(["validate", str(path)]) == 2


@pytest.mark.parametrize("kind", ["scenario", "topology"])
def test_schema(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    assert main(["schema", kind]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == f"dblp-netem {kind}"


def test_dry_run_needs_no_privileges_and_builds_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    state, out = tmp_path / "state", tmp_path / "runs"
    assert main(["run", "burst90", "--dry-run", "--state-dir", str(state), "--out", str(out)]) == 0
    assert "40" in capsys.readouterr().out
    assert not state.exists()
    assert not out.exists()


def _refused() -> None:
    raise Unavailable("rootless: make a user namespace: Operation not permitted", rootless.REMEDY)


@pytest.mark.parametrize(
    "arguments", [["run", "burst90"], ["up", "star3"], ["exec", "worker1", "--", "true"], ["down"], ["clean"]]
)
def test_without_root_status_4_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    monkeypatch.setattr(rootless, "enter", _refused)
    monkeypatch.chdir(tmp_path)
    at = 1 if arguments[0] == "exec" else len(arguments)
    arguments = [*arguments[:at], "--state-dir", str(tmp_path / "state"), *arguments[at:]]
    assert main(arguments) == 4
    error = capsys.readouterr().err
    assert "sudo" in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_status_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--state-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no labs\n"
    assert main(["status", "--state-dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "labs": [], "problems": []}


def test_status_of_a_damaged_state_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dn0001.json").write_text("{")
    assert main(["status", "--state-dir", str(tmp_path)]) == 1
    assert "dn0001.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (SpecError("a.yaml", 3, "seed", "is wrong"), 2, "a.yaml:3: seed: is wrong"),
        (Unavailable("no root", "Run it with sudo."), 4, "no root. Run it with sudo."),
        (UnsupportedFeature("delay", ("netem",)), 4, "delay is not available (available with: netem)"),
        (KernelError("create namespace x", 1), 1, "create namespace x: EPERM"),
        (FileNotFoundError(2, "No such file or directory", "x"), 1, "x: No such file or directory"),
        (RuntimeError("oops"), 1, "internal error: RuntimeError: oops"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_every_error_is_one_line_and_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, status: int, words: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(files, "load", fail)
    assert main(["show", "burst90"]) == status
    first = capsys.readouterr().err.splitlines()[0]
    assert first.removeprefix("error: ") == words


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(files, "load", lambda *_: 1 / 0)
    assert main(["show", "burst90", "--debug"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err.split("error:")[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_status_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    monkeypatch.setattr(files, "load", lambda *_: signal.raise_signal(number))
    assert main(["show", "burst90"]) == 130
    assert signal.getsignal(number) is before


def test_a_second_signal_lets_the_clean_up_finish() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), interruptible():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            steps.append("cleaned up")
    assert steps == ["cleaned up"]


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)

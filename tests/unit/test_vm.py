"""The `vm` command up to the point where a machine would boot, and how its program is run, with a stand-in for it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from netem import vm
from netem.cli import main
from netem.commands.failure import CommandError
from netem.commands.vm import _inner, _patient
from netem.kernel.errors import Unavailable
from netem.vm import choose, user_mode, virtme
from netem.vm.machine import _bring_back
from netem.vm.virtme import Tools, Virtme

KERNEL = Path("/boot/vmlinuz-6.6.1")


def _engine(folder: Path, script: str) -> Virtme:
    """A `vng` that is a shell script; $script is what the machine's shell would run."""
    fake = folder / "vng"
    fake.write_text(f'#!/bin/sh\nfor script in "$@"; do :; done\n{script}\n')
    fake.chmod(0o755)
    return Virtme(Tools(fake, fake, fake, KERNEL), kvm=False)


def _run(engine: Virtme, tmp_path: Path, argv: list[str], limit_s: float = 20.0) -> int:
    return vm.run(engine, vm.Machine(), argv, cwd=tmp_path, limit_s=limit_s)


def test_status_of_the_program_comes_back(tmp_path: Path) -> None:
    engine = _engine(tmp_path, 'sh -c "$script"')
    assert _run(engine, tmp_path, ["sh", "-c", "exit 5"]) == 5
    assert _run(engine, tmp_path, ["test", "a b", "=", "a b"]) == 0


def test_output_goes_where_it_is_wanted(tmp_path: Path) -> None:
    engine = _engine(tmp_path, 'sh -c "$script"')
    with (tmp_path / "log").open("wb") as log:
        status = vm.run(
            engine, vm.Machine(), ["sh", "-c", "echo out; echo err >&2"], cwd=tmp_path, limit_s=20.0,
            output=log.fileno(),
        )  # fmt: skip
    assert status == 0
    assert sorted((tmp_path / "log").read_text().split()) == ["err", "out"]


def test_a_machine_that_does_not_boot(tmp_path: Path) -> None:
    with pytest.raises(vm.NotBooted, match="did not boot"):
        _run(_engine(tmp_path, "exit 1"), tmp_path, ["true"])


def test_a_machine_that_dies_with_the_program(tmp_path: Path) -> None:
    begun = 'sh -c "${script%%;*}"'
    with pytest.raises(vm.MachineFailed, match="ended before") as caught:
        _run(_engine(tmp_path, begun), tmp_path, ["true"])
    assert not isinstance(caught.value, vm.NotBooted)


def test_a_machine_that_hangs_is_ended(tmp_path: Path) -> None:
    hung = f'echo $$ > {shlex.quote(str(tmp_path / "pid"))}; sh -c "${{script%%;*}}"; exec sleep 60'
    with pytest.raises(vm.MachineFailed, match="not done in 1 s"):
        _run(_engine(tmp_path, hung), tmp_path, ["true"], limit_s=1.0)
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split(") ")[1]


def test_results_come_back_and_nothing_is_overwritten(tmp_path: Path) -> None:
    kept, results = tmp_path / "runs", tmp_path / "results"
    for folder in (kept, results / "new", results / "old", kept / "old"):
        folder.mkdir(parents=True)
    (results / "new" / "a").write_text("made in the machine")
    (results / "old" / "a").write_text("a second one")
    _bring_back(results, kept)
    assert (kept / "new" / "a").read_text() == "made in the machine"
    assert not (kept / "old" / "a").exists()


def test_the_command_line_of_virtme_ng() -> None:
    tools = Tools(Path("/v/vng"), Path("/q"), Path("/b"), KERNEL)
    machine = vm.Machine(cpus=3, memory="1G")
    argv = Virtme(tools, kvm=True).command_line(machine, "true", Path("/w"), Path("/s"))
    assert argv[:3] == ["/v/vng", "--run", str(KERNEL)]
    assert argv[-2:] == ["--", "true"]
    assert ("--disable-kvm" in argv, argv[argv.index("--rwdir") + 1]) == (False, "/s")
    assert "--disable-kvm" in Virtme(tools, kvm=False).command_line(machine, "true", Path("/w"), Path("/s"))


def test_newest_kernel_has_netem_and_can_be_read(tmp_path: Path) -> None:
    boot, modules = tmp_path / "boot", tmp_path / "modules"
    boot.mkdir()
    for age, (version, netem) in enumerate((("6.1.0", True), ("6.2.0", True), ("6.3.0", False))):
        image = boot / f"vmlinuz-{version}"
        image.write_bytes(b"x")
        os.utime(image, (1000 + age, 1000 + age))
        scheduler = modules / version / "kernel/net/sched"
        scheduler.mkdir(parents=True)
        (scheduler / ("sch_netem.ko.xz" if netem else "sch_tbf.ko")).write_bytes(b"x")
    assert virtme.newest_kernel(boot, modules) == boot / "vmlinuz-6.2.0"
    assert virtme.newest_kernel(tmp_path / "none", modules) is None


def _program(path: Path, script: str) -> Path:
    """A stand-in for user-mode Linux; a shell script does, where its first bytes are not looked at."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_the_machine_of_user_mode_linux(tmp_path: Path) -> None:
    """Paths with blanks survive, and what is said on standard error stays apart."""
    shared = tmp_path / "shared files"
    shared.mkdir()
    engine = user_mode.UserModeLinux(Path("/k"), "6.1", Path("/modules/6.1"))
    argv = engine.command_line(vm.Machine(memory="1G"), "echo 'a b'", tmp_path / "work here", shared)
    assert f'init="{shared}/init"' in argv
    assert {"mem=1G", "rootfstype=hostfs", "ro", "con0=null", "quiet", f"uml_dir={shared}"} <= set(argv)
    init = shared / "init"
    assert subprocess.run(["sh", "-n", init], check=False).returncode == 0
    assert f"cd '{tmp_path}/work here'" in init.read_text()
    verbose = engine.command_line(vm.Machine(verbose=True), "true", tmp_path, shared)
    assert ("quiet" in verbose, "con0=null,fd:2" in verbose) == (False, True)


def test_user_mode_linux_has_netem_among_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = tmp_path / "uml", tmp_path / "lib"
    monkeypatch.setattr(user_mode, "MODULE_FOLDERS", folders)
    monkeypatch.setattr(user_mode, "is_program", lambda file: file.exists())
    program = _program(tmp_path / "linux.uml", "echo 6.1.9")
    built_in = user_mode.find(program)
    assert built_in is not None
    assert (built_in.modules, built_in.name) == (None, "user-mode Linux 6.1.9")
    scheduler = folders[1] / "6.1.9" / "kernel/net/sched"
    scheduler.mkdir(parents=True)
    assert user_mode.find(program) is None, "it has modules, and netem is not among them"
    (scheduler / "sch_netem.ko").write_bytes(b"x")
    found = user_mode.find(program)
    assert found is not None
    assert found.modules == folders[1] / "6.1.9"
    assert user_mode.find(_program(tmp_path / "other", "exit 1")) is None


def test_an_image_for_the_bios_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "bzImage").write_bytes(b"MZ\0\0")
    assert not user_mode.is_program(tmp_path / "bzImage")
    assert not user_mode.is_program(tmp_path / "none")
    assert user_mode.is_program(Path(sys.executable).resolve())


def test_kvm_comes_first_and_emulation_last() -> None:
    tools, native = Tools(KERNEL, KERNEL, KERNEL, KERNEL), user_mode.UserModeLinux(Path("/k"), "6.1", None)
    lacking = Tools(None, KERNEL, KERNEL, KERNEL)

    def names(*args: Any, kvm: bool) -> list[str]:
        return [engine.name for engine in choose.order(*args, kvm=kvm)]

    assert names(tools, native, kvm=True) == ["KVM", native.name, "emulation"]
    assert names(tools, native, kvm=False) == [native.name, "emulation"]
    assert names(tools, None, kvm=False) == ["emulation"]
    assert names(lacking, native, kvm=False) == [native.name]
    with pytest.raises(Unavailable, match=r"user-mode-linux.*virtme-ng"):
        choose.order(lacking, None, kvm=False)


def test_what_is_missing_is_named_with_the_remedy() -> None:
    texts = Tools(None, None, None, None).missing()
    assert len(texts) == 4
    assert all(word in " ".join(texts) for word in ("virtme-ng", "qemu-system-x86", "busybox-static", "linux-image"))


def test_kernels_that_cannot_be_booted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="/nowhere"):
        choose.candidates(Path("/nowhere"))
    with pytest.raises(Unavailable, match="no user-mode Linux"):
        choose.candidates(Path(sys.executable).resolve())
    with pytest.raises(Unavailable, match="QEMU cannot boot"):
        choose.candidates(Path(sys.executable).resolve(), emulate=True)
    monkeypatch.setenv(choose.KERNEL_VARIABLE, "/none/either")
    with pytest.raises(Unavailable, match="/none/either"):
        choose.candidates()


def test_kvm_is_not_tried_without_the_processor_s_help(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu sse\n")
    assert not virtme.kvm_offered(tmp_path / "cpuinfo")


@pytest.mark.parametrize(
    ("command", "out"),
    [
        (["run", "burst90-replay"], Path("runs")),
        (["run", "x", "--out", "here"], Path("here")),
        (["run", "x", "--out=there"], Path("there")),
        (["doctor"], None),
    ],
)
def test_where_results_go(command: list[str], out: Path | None) -> None:
    assert _inner(command) == (command, out)


def test_a_slow_machine_is_given_time_and_the_user_has_the_last_word() -> None:
    argv = _patient(["run", "burst90", "--set", "deadlines.connect=5s"])
    assert argv == ["run", "--set", "latencies=reported", "--set", "deadlines.connect=600s", *argv[-3:]]
    assert argv[-3:] == ["burst90", "--set", "deadlines.connect=5s"]
    assert _patient(["doctor"]) == ["doctor"]


@pytest.mark.parametrize("command", [[], ["up", "star3"], ["--verbose", "run"]])
def test_what_makes_no_sense_in_a_machine(command: list[str]) -> None:
    with pytest.raises(CommandError, match="run SCENARIO"):
        _inner(command)


def test_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vm", "--limit", "5", "--", "run", "burst90-replay"]) == 2
    assert "has no unit" in capsys.readouterr().err
    assert main(["vm", "--kernel", "/nowhere", "--", "doctor"]) == 4
    assert "/nowhere" in capsys.readouterr().err

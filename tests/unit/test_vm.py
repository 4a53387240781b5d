"""The `vm` command up to the point where a machine would boot, and how its program is run, with a stand-in for it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from netem import vm
from netem.cli import main
from netem.commands.failure import CommandError
from netem.commands.vm import _inner
from netem.kernel.errors import Unavailable

KERNEL = Path("/boot/vmlinuz-6.6.1")


def _tools(folder: Path, script: str) -> vm.Tools:
    """A `vng` that is a shell script; $script is what the machine's shell would run."""
    fake = folder / "vng"
    fake.write_text(f'#!/bin/sh\nfor script in "$@"; do :; done\n{script}\n')
    fake.chmod(0o755)
    return vm.Tools(fake, fake, fake, KERNEL)


def _run(tools: vm.Tools, tmp_path: Path, argv: list[str], limit_s: float = 20.0, *, kvm: bool = False) -> int:
    return vm.run(vm.Machine(KERNEL, kvm), tools, argv, cwd=tmp_path, limit_s=limit_s)


def test_status_of_the_program_comes_back(tmp_path: Path) -> None:
    tools = _tools(tmp_path, 'sh -c "$script"')
    assert _run(tools, tmp_path, ["sh", "-c", "exit 5"]) == 5
    assert _run(tools, tmp_path, ["test", "a b", "=", "a b"]) == 0


def test_output_goes_where_it_is_wanted(tmp_path: Path) -> None:
    tools = _tools(tmp_path, 'sh -c "$script"')
    with (tmp_path / "log").open("wb") as log:
        status = vm.run(
            vm.Machine(KERNEL, False), tools, ["sh", "-c", "echo out; echo err >&2"], cwd=tmp_path, limit_s=20.0,
            output=log.fileno(),
        )  # fmt: skip
    assert status == 0
    assert sorted((tmp_path / "log").read_text().split()) == ["err", "out"]


def test_a_machine_that_does_not_boot(tmp_path: Path) -> None:
    with pytest.raises(vm.NotBooted, match="did not boot"):
        _run(_tools(tmp_path, "exit 1"), tmp_path, ["true"])


def test_a_machine_that_dies_with_the_program(tmp_path: Path) -> None:
    begun = 'sh -c "${script%%;*}"'
    with pytest.raises(vm.MachineFailed, match="ended before") as caught:
        _run(_tools(tmp_path, begun), tmp_path, ["true"])
    assert not isinstance(caught.value, vm.NotBooted)


def test_a_machine_that_hangs_is_ended(tmp_path: Path) -> None:
    hung = f'echo $$ > {shlex.quote(str(tmp_path / "pid"))}; sh -c "${{script%%;*}}"; exec sleep 60'
    with pytest.raises(vm.MachineFailed, match="not done in 1 s"):
        _run(_tools(tmp_path, hung), tmp_path, ["true"], limit_s=1.0)
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split(") ")[1]


def test_results_come_back_and_nothing_is_overwritten(tmp_path: Path) -> None:
    kept, results = tmp_path / "runs", tmp_path / "results"
    for folder in (kept, results / "new", results / "old", kept / "old"):
        folder.mkdir(parents=True)
    (results / "new" / "a").write_text("made in the machine")
    (results / "old" / "a").write_text("a second one")
    vm._bring_back(results, kept)
    assert (kept / "new" / "a").read_text() == "made in the machine"
    assert not (kept / "old" / "a").exists()


def test_the_command_line_of_virtme_ng() -> None:
    tools = vm.Tools(Path("/v/vng"), Path("/q"), Path("/b"), KERNEL)
    argv = vm.command_line(vm.Machine(KERNEL, kvm=True, cpus=3, memory="1G"), tools, "true", Path("/w"), Path("/s"))
    assert argv[:3] == ["/v/vng", "--run", str(KERNEL)]
    assert argv[-2:] == ["--", "true"]
    assert ("--disable-kvm" in argv, argv[argv.index("--rwdir") + 1]) == (False, "/s")
    assert "--disable-kvm" in vm.command_line(vm.Machine(KERNEL, kvm=False), tools, "true", Path("/w"), Path("/s"))


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
    assert vm.newest_kernel(boot, modules) == boot / "vmlinuz-6.2.0"
    assert vm.newest_kernel(tmp_path / "none", modules) is None


def test_what_is_missing_is_named_with_the_remedy() -> None:
    texts = vm.Tools(None, None, None, None).missing()
    assert len(texts) == 4
    assert all(word in " ".join(texts) for word in ("virtme-ng", "qemu-system-x86", "busybox-static", "linux-image"))


def test_a_kernel_that_is_not_there() -> None:
    with pytest.raises(Unavailable, match="/nowhere"):
        vm.require_tools(Path("/nowhere"))


def test_kvm_is_not_tried_without_the_processor_s_help(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu sse\n")
    assert not vm.kvm_offered(tmp_path / "cpuinfo")


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


@pytest.mark.parametrize("command", [[], ["up", "star3"], ["--verbose", "run"]])
def test_what_makes_no_sense_in_a_machine(command: list[str]) -> None:
    with pytest.raises(CommandError, match="run SCENARIO"):
        _inner(command)


def test_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vm", "--limit", "5", "--", "run", "burst90-replay"]) == 2
    assert "has no unit" in capsys.readouterr().err
    assert main(["vm", "--kernel", "/nowhere", "--", "doctor"]) == 4
    assert "/nowhere" in capsys.readouterr().err

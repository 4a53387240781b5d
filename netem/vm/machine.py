"""What all engines have in common: a program in the machine, its output, its status, and the files it leaves."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from netem.kernel.user import User

KILL_LIMIT_S = 10.0
POLL_S = 0.1
# The backlog of the kernel's receive path: the usual 1,000 packets are less than one batch of a slow processor's
# senders. The setting is the machine's own and gone with it.
BACKLOG_PACKETS = 100_000
# What a program in the machine sees of the caller's environment: who called sudo, and the product's own variables.
_HANDED_ON = ("SUDO_UID", "SUDO_GID", "SUDO_USER", "PYTHONPATH", "TERM", "LANG", "LC_ALL", "COLUMNS", "NO_COLOR")


class MachineFailed(Exception):
    """The virtual machine did not boot, or did not end in time; the message has its last words."""


class NotBooted(MachineFailed):
    """No program has run in the machine."""


@dataclass(frozen=True)
class Machine:
    """memory: as QEMU takes it. kept: a folder that exists; what is new in it comes back at the end."""

    cpus: int = 2
    memory: str = "4G"
    kept: Path | None = None
    verbose: bool = False


class Engine(Protocol):
    """One way to boot a kernel."""

    @property
    def kernel(self) -> Path: ...

    @property
    def name(self) -> str:
        """For the user: `booting KERNEL with NAME`."""
        ...

    @property
    def advice(self) -> str:
        """What the user should know before waiting for it; may be empty."""
        ...

    @property
    def boot_limit_s(self) -> float | None:
        """It has booted by then, or never will. None: no telling."""
        ...

    @property
    def full_speed(self) -> bool:
        """Whether a run's latencies can be those of its network."""
        ...

    def command_line(self, machine: Machine, script: str, cwd: Path, shared: Path) -> list[str]:
        """The argument vector that boots `machine` and has a shell there run `script` as root in `cwd`.

        Of this machine's files only those in `shared` can be changed, and Unix sockets cannot be made there.
        """
        ...

    def environment(self) -> Mapping[str, str]:
        """What the engine itself needs in its environment beside the caller's."""
        ...


def run(
    engine: Engine, machine: Machine, argv: Sequence[str], *, cwd: Path, limit_s: float, output: int | None = None
) -> int:
    """Runs a program in the machine as root and returns its exit status.

    output: file descriptor for what it and the machine say; None: the caller's own.

    Raises NotBooted when it has shown no sign of life, MachineFailed when there is no status for another reason.
    Nothing is left running.
    """
    with tempfile.TemporaryDirectory(prefix="dblp-netem-vm-") as name:
        shared = Path(name)
        alive, status, results = (shared / part for part in ("alive", "status", "results"))
        results.mkdir()
        script = _script([*_environment(), *argv], machine.kept, alive, status, results)
        child = _start(engine, engine.command_line(machine, script, cwd, shared), cwd)
        copies = _copy(child, output)
        try:
            _await(child, alive, limit_s, engine.boot_limit_s or limit_s)
        finally:
            _end(child)
            for copy in copies:
                copy.join(KILL_LIMIT_S)
            if machine.kept is not None:
                _bring_back(results, machine.kept)
        text = status.read_text().strip() if status.exists() else ""
        booted = alive.exists()
    if text.isdigit():
        return int(text)
    if not booted:
        raise NotBooted(f"the virtual machine with {engine.kernel} did not boot: --verbose shows what its kernel says")
    raise MachineFailed(f"the virtual machine with {engine.kernel} ended before the program in it did")


def _script(program: Sequence[str], kept: Path | None, alive: Path, status: Path, results: Path) -> str:
    """The machine has a file system of its own in place of `kept`, as sockets need it; its content is copied out."""
    a, s, r, k = (shlex.quote(str(path)) for path in (alive, status, results, kept))
    lines = [f"echo > {a}", f"echo {BACKLOG_PACKETS} > /proc/sys/net/core/netdev_max_backlog"]
    lines += [f"mount -t tmpfs tmpfs {k}"] if kept is not None else []
    lines += [shlex.join(program), "result=$?"]
    lines += [f"cp -r --preserve=mode,timestamps {k}/. {r}"] if kept is not None else []
    return "; ".join([*lines, f"echo $result > {s}"])


def _bring_back(results: Path, kept: Path) -> None:
    """Moves what is new, and gives it to whoever called sudo."""
    user = User.caller()
    for entry in results.iterdir():
        if (kept / entry.name).exists():
            continue
        place = Path(shutil.move(entry, kept / entry.name))
        if not user.is_current:
            for path in (place, *place.rglob("*")):
                os.chown(path, user.uid, user.gid, follow_symlinks=False)


def _environment() -> list[str]:
    """As arguments of env(1)."""
    return ["env", *(f"{name}={os.environ[name]}" for name in _HANDED_ON if name in os.environ)]


def _start(engine: Engine, vector: Sequence[str], cwd: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        vector, cwd=cwd, env={**os.environ, **engine.environment()}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def _copy(child: subprocess.Popen[bytes], output: int | None) -> list[threading.Thread]:
    """Through pipes: the machine opens its output anew, and would write over a file from the start."""

    def copy(source: int, target: int) -> None:
        while data := os.read(source, 1 << 16):
            while data:
                data = data[os.write(target, data) :]

    assert child.stdout is not None
    assert child.stderr is not None
    pairs = [(child.stdout, 1 if output is None else output), (child.stderr, 2 if output is None else output)]
    threads = [threading.Thread(target=copy, args=(each.fileno(), target), daemon=True) for each, target in pairs]
    for thread in threads:
        thread.start()
    return threads


def _await(child: subprocess.Popen[bytes], alive: Path, limit_s: float, boot_limit_s: float) -> None:
    began = time.monotonic()
    while not alive.exists():
        if child.poll() is not None or time.monotonic() - began > boot_limit_s:
            return
        time.sleep(POLL_S)  # a folder of another kernel: nothing tells when it changes
    try:
        child.wait(timeout=max(0.0, limit_s - (time.monotonic() - began)))
    except subprocess.TimeoutExpired:
        raise MachineFailed(f"the virtual machine was not done in {limit_s:g} s; see --limit") from None


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # its helpers too
    child.wait(timeout=KILL_LIMIT_S)

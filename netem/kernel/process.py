"""Processes in namespaces: started, watched and ended; their parent's death is theirs (prctl(2), PR_SET_PDEATHSIG).

The death signal is tied to the THREAD that started the process, not to the program: when that thread ends, the process
is killed. So processes are started from the main thread alone; `start` refuses others.
"""

from __future__ import annotations

import json
import os
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from netem.kernel.errors import KernelError, LabError, attempting
from netem.kernel.netns import RUN_DIR
from netem.kernel.user import User

LAUNCHER = Path(__file__).with_name("launch.py")
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
START_TIMEOUT_S = 60.0  # an emulated machine is 15 times slower


class Child:
    """A started process. `returncode` as subprocess has it: negative for a signal."""

    def __init__(self, popen: subprocess.Popen[bytes], argv: Sequence[str], leads_session: bool) -> None:
        """Use `start`."""
        self._popen = popen
        self._leads_session = leads_session
        self.argv = tuple(argv)
        self.pid = popen.pid

    @property
    def returncode(self) -> int | None:
        return self._popen.returncode

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self._popen.poll()

    def wait(self, timeout_s: float) -> int:
        """The exit status; TimeoutError when it still runs then."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"process {self.pid} ({self.argv[0]}) still runs after {timeout_s} s") from None

    def signal(self, number: int) -> None:
        """Signal the process and, where it leads a session, its process group. Nothing happens once it ended."""
        if self._popen.poll() is not None:
            return
        try:
            if self._leads_session:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def terminate(self, timeout_s: float = 2.0) -> int:
        """SIGTERM, and SIGKILL after `timeout_s`; returns the exit status."""
        self.signal(signal.SIGTERM)
        try:
            return self.wait(timeout_s)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            return self.wait(10.0)  # only a process stuck in the kernel outlives SIGKILL


def start(
    argv: Sequence[str],
    *,
    netns: str | None,
    env: Mapping[str, str],
    user: User,
    log: Path | BinaryIO | None = None,
    cwd: Path | str = "/",
    on_start: Callable[[int], None] = lambda pid: None,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Run argv[0] in a namespace as a user; returns once it has been executed.

    env: the whole environment; HOME, USER, LOGNAME and, unless given, PATH are set for `user`.
    log: standard output and error are appended to this file, which the user then owns, or go to one that is open;
        standard input is empty and the process leads a session. None: it shares the caller's terminal.
    on_start: called with the process id before the program gets control, to record it.
    pass_fds: descriptors that the program gets, under the same numbers.
    Errors: LabError when it cannot be executed (the message has the reason), or in a thread other than the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        raise LabError("processes of a lab start from the main thread: they die with the thread that started them")
    what = f"start {argv[0]}" + (f" in {netns}" if netns else "")
    with ExitStack() as stack, attempting(what):
        netns_fd = _open(stack, RUN_DIR / netns) if netns else None
        output = _open_log(stack, log, user) if isinstance(log, Path) else log
        orders_in, orders_out = _pipe(stack)
        status_in, status_out = _pipe(stack)
        popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(LAUNCHER), str(orders_in.fileno()), str(status_out.fileno())],
            stdin=subprocess.DEVNULL if log is not None else None,
            stdout=output,
            stderr=output,
            pass_fds=[fd for fd in (netns_fd, orders_in.fileno(), status_out.fileno(), *pass_fds) if fd is not None],
            start_new_session=log is not None,
            cwd="/",
        )
        try:
            on_start(popen.pid)
            status_out.close()
            orders_out.write(json.dumps(_orders(argv, netns_fd, env, user, cwd)).encode())
            orders_out.close()
            _await_exec(status_in.fileno(), what)
        except BaseException:
            popen.kill()
            popen.wait(10.0)
            raise
    return Child(popen, argv, log is not None)


def _orders(
    argv: Sequence[str], netns_fd: int | None, env: Mapping[str, str], user: User, cwd: Path | str
) -> dict[str, Any]:
    identity = {"HOME": user.home, "USER": user.name, "LOGNAME": user.name}
    change = None if user.is_current else {"uid": user.uid, "gid": user.gid, "groups": list(user.groups)}
    return {
        "argv": [os.fspath(a) for a in argv],
        "env": {"PATH": DEFAULT_PATH, **env, **identity},
        "netns_fd": netns_fd,
        "user": change,
        "cwd": str(cwd),
        "parent": os.getpid(),
    }


def _await_exec(status_fd: int, what: str) -> None:
    """The launcher's pipe: closed by exec, or an error report."""
    deadline = time.monotonic() + START_TIMEOUT_S
    report = b""
    while True:
        ready, _, _ = select.select([status_fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise LabError(f"{what}: not executed within {START_TIMEOUT_S} s")
        part = os.read(status_fd, 65536)
        if not part:
            break
        report += part
    if not report:
        raise LabError(f"{what}: {sys.executable} {LAUNCHER} failed")
    if report.strip():
        raw = json.loads(report)
        raise KernelError(what, raw["errno"], f"{raw['file'] or 'it'}: {raw['message']}")


def _open(stack: ExitStack, path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


def _pipe(stack: ExitStack) -> tuple[BinaryIO, BinaryIO]:
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    return stack.enter_context(os.fdopen(read_fd, "rb")), stack.enter_context(os.fdopen(write_fd, "wb"))


def _open_log(stack: ExitStack, path: Path, user: User) -> int:
    """A log file, for appending. In the user's folder: never follow a link or take over a hard-linked one."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(path, flags, 0o644)
    stack.callback(os.close, fd)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise LabError(f"{path} is not a plain file")
    if not user.is_current:
        os.fchown(fd, user.uid, user.gid)
    return fd

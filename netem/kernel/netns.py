"""Named network namespaces: files in /run/netns, as `ip netns` makes and lists them (ip-netns(8)).

No fork: a namespace is made or entered by a short-lived thread (both are properties of a thread), which is ten times
faster than pyroute2's child process and safe beside other threads.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from netem.kernel import syscalls
from netem.kernel.errors import KernelError, attempting
from netem.kernel.rtnetlink import Rtnetlink, open_socket

if TYPE_CHECKING:
    from pyroute2 import IPRoute

RUN_DIR = Path("/run/netns")
NAME_LIMIT = 15  # as interface names: both are printed side by side

T = TypeVar("T")


class _Call(threading.Thread, Generic[T]):
    """Runs a function in a namespace; the thread ends there, so nothing has to be restored."""

    def __init__(self, netns: str | None, function: Callable[[], T]) -> None:
        super().__init__(name=f"in {netns}", daemon=True)
        self._netns = netns
        self._function = function
        self.value: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            if self._netns is not None:
                enter(self._netns)
            self.value = self._function()
        except BaseException as error:
            self.error = error


def enter(name: str) -> None:
    """Move the calling thread, for good, into a namespace."""
    with attempting(f"enter namespace {name}"):
        fd = os.open(RUN_DIR / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            syscalls.setns(fd)
        finally:
            os.close(fd)


def call_in(netns: str | None, function: Callable[[], T]) -> T:
    """Return function(), run by a thread inside the namespace (None: where the caller is)."""
    call = _Call(netns, function)
    call.start()
    call.join()
    if call.error is not None:
        raise call.error
    return call.value  # type: ignore[return-value]


def open_netlink(netns: str | None) -> IPRoute:
    """An IPRoute in a namespace, about 1 ms (`IPRoute(netns=...)` forks: 10 to 30 ms).

    pyroute2 keeps one socket for each thread: use it in the thread that opened it only, and close it.
    """
    from pyroute2 import IPRoute  # takes a fifth of a second, and a lab without properties does without

    if netns is None:
        return IPRoute()
    with attempting(f"open a netlink socket in namespace {netns}"):
        # A datagram socket: asyncio, below pyroute2, accepts no other kind.
        family, protocol = socket.AF_NETLINK, socket.NETLINK_ROUTE
        fd = call_in(netns, lambda: socket.socket(family, socket.SOCK_DGRAM, protocol).detach())
        return IPRoute(fileno=fd)


def open_rtnetlink(netns: str | None) -> Rtnetlink:
    """A netlink socket of our own in a namespace (None: where the caller is); close it."""
    with attempting(f"open a netlink socket in namespace {netns}"):
        return Rtnetlink(call_in(netns, open_socket))


@dataclass(frozen=True)
class Inside:
    """Sockets of a namespace. With them any thread configures it from outside, one at a time; close them."""

    netlink: Rtnetlink
    control: socket.socket
    """For ioctl(2): it is about the interfaces of the socket's namespace."""

    def close(self) -> None:
        self.netlink.close()
        self.control.close()


def open_inside(name: str, then: Callable[[], None] = lambda: None) -> Inside:
    """Open sockets in a namespace; `then` runs in there as well, before this returns."""

    def enter_once() -> Inside:
        netlink, control = open_socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            then()
            return Inside(Rtnetlink(netlink), control)
        except BaseException:
            netlink.close()
            control.close()
            raise

    with attempting(f"open sockets in namespace {name}"):
        return call_in(name, enter_once)


def names() -> list[str]:
    """Names in /run/netns, sorted; leftover plain files count too."""
    try:
        return sorted(os.listdir(RUN_DIR))
    except FileNotFoundError:
        return []


def exists(name: str) -> bool:
    return os.path.lexists(RUN_DIR / name)


def identity(name: str) -> int | None:
    """The namespace's inode (what /proc/PID/ns/net shows), None when it is gone or only a plain file."""
    try:
        status = os.stat(RUN_DIR / name)
    except FileNotFoundError:
        return None
    return status.st_ino if status.st_dev != os.stat(RUN_DIR).st_dev else None


def create(name: str) -> None:
    """Make a namespace. KernelError with EEXIST when the name is taken: then nothing was touched."""
    if not 0 < len(name) <= NAME_LIMIT or "/" in name:
        raise KernelError(f"create namespace {name}", errno.EINVAL)
    path = str(RUN_DIR / name)
    with attempting(f"create namespace {name}"):
        _prepare_run_dir()
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0))

        def make() -> None:
            syscalls.unshare(syscalls.CLONE_NEWNET)
            syscalls.mount("/proc/thread-self/ns/net", path, syscalls.MS_BIND)

        try:
            call_in(None, make)
        except BaseException:
            os.unlink(path)
            raise


def _prepare_run_dir() -> None:
    """Make /run/netns a shared mount, once, as ip-netns does: namespaces then reach other mount namespaces."""
    RUN_DIR.mkdir(mode=0o755, exist_ok=True)
    fd = os.open(RUN_DIR, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # the lock iproute2 takes as well
        try:
            syscalls.mount("", str(RUN_DIR), syscalls.MS_SHARED | syscalls.MS_REC)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            syscalls.mount(str(RUN_DIR), str(RUN_DIR), syscalls.MS_BIND | syscalls.MS_REC)
            syscalls.mount("", str(RUN_DIR), syscalls.MS_SHARED | syscalls.MS_REC)
    finally:
        os.close(fd)


def remove(name: str, timeout_s: float = 1.0) -> bool:
    """Remove a namespace's name; False when there was none.

    The kernel frees the namespace when its last process and socket are gone. Unlinking is EBUSY for a moment while
    another mount namespace lets go of the file, so it is tried again up to `timeout_s`.
    """
    path = str(RUN_DIR / name)
    if not os.path.lexists(path):
        return False
    deadline = time.monotonic() + timeout_s
    with attempting(f"remove namespace {name}"):
        while True:
            _unmount_all(path)
            try:
                os.unlink(path)
                return True
            except FileNotFoundError:
                return True
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                    raise
            time.sleep(0.005)


def _unmount_all(path: str) -> None:
    while True:
        try:
            syscalls.umount(path)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):  # not, or no longer, a mount point
                return
            raise

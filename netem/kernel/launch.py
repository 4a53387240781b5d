"""Becomes another program inside a namespace, as another user. Run as a script by path, never imported by the lab.

Standard library only, so that `python -I -S launch.py` finds everything whatever the caller's environment. It reads one
JSON object from a pipe; at the end of input without one it leaves (its parent died). Errors go back as JSON on a second
pipe, which a successful exec closes (after one blank).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1


def _read_all(fd: int) -> bytes:
    parts = []
    while part := os.read(fd, 65536):
        parts.append(part)
    os.close(fd)
    return b"".join(parts)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)


def _become(orders: dict[str, Any]) -> None:
    """Change namespace, then user, then ask to die with the parent: changing user clears the death signal."""
    if orders["netns_fd"] is not None:
        _call("setns", orders["netns_fd"], CLONE_NEWNET)
        os.close(orders["netns_fd"])
    user = orders["user"]
    if user is not None:
        os.setgroups(user["groups"])
        os.setresgid(user["gid"], user["gid"], user["gid"])
        os.setresuid(user["uid"], user["uid"], user["uid"])
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != orders["parent"]:  # it died before the signal was asked for
        os._exit(1)
    os.umask(0o022)
    os.chdir(orders["cwd"])
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would hand that on
        signal.signal(number, signal.SIG_DFL)


def main() -> None:
    orders_fd, status_fd = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(status_fd, False)
    text = _read_all(orders_fd)
    if not text:
        os._exit(1)
    orders = json.loads(text)
    try:
        _become(orders)
        os.write(status_fd, b" ")  # all is done but exec: an end of the pipe without this is a crash
        os.execvpe(orders["argv"][0], orders["argv"], orders["env"])
    except OSError as error:
        report = {"errno": error.errno, "message": error.strerror, "file": str(error.filename or "")}
        os.write(status_fd, json.dumps(report).encode())
        os._exit(127)


if __name__ == "__main__":
    main()

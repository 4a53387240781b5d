"""System calls that Python 3.11 does not wrap (setns and unshare came with 3.12), through the C library."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x10000000, 0x40000000  # linux/sched.h
MS_BIND, MS_REC, MS_PRIVATE, MS_SHARED = 0x1000, 0x4000, 0x40000, 0x100000  # linux/mount.h
MNT_DETACH = 2


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def setns(fd: int, kind: int = CLONE_NEWNET) -> None:
    """setns(2), for the calling thread alone."""
    _checked(_libc().setns(fd, kind), "setns")


def unshare(flags: int) -> None:
    """unshare(2), for the calling thread alone."""
    _checked(_libc().unshare(flags), "unshare")


def mount(source: str, target: str, flags: int, *, kind: str = "none") -> None:
    """mount(2) without options."""
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)
    _checked(_libc().mount(*arguments), f"mount {target}")


def umount(target: str, flags: int = MNT_DETACH) -> None:
    """umount2(2), lazily."""
    _checked(_libc().umount2(target.encode(), flags), f"umount {target}")

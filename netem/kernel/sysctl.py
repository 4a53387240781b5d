"""Sysctls of one namespace. /proc/sys/net shows the namespace of the reading thread, so these run inside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from netem.kernel.errors import KernelError, attempting

ROOT = Path("/proc/sys/net")
OPTIONAL = ("ipv6.", "bridge.")
VALUE_BYTES = 4096


def read_here(key: str) -> str | None:
    """A value under net., blanks normalised, e.g. "ipv4.tcp_rmem" -> "4096 131072 6291456"; None: no such key."""
    try:
        return " ".join((ROOT / key.replace(".", "/")).read_text(encoding="ascii").split())
    except FileNotFoundError:
        return None


def write_here(values: Mapping[str, str]) -> None:
    """Write values under net. in the calling thread's namespace and read them back.

    Keys of what this kernel does not have (IPv6, netfilter on bridges) are passed over: what they switch off is not
    there.
    """
    for key, value in values.items():
        what = f"set sysctl net.{key} to {value}"
        with attempting(what):
            try:
                fd = os.open(f"{ROOT}/{key.replace('.', '/')}", os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                if key.startswith(OPTIONAL):
                    continue
                raise
            try:
                os.write(fd, value.encode("ascii"))
                found = " ".join(os.pread(fd, VALUE_BYTES, 0).decode("ascii").split())
            finally:
                os.close(fd)
        if found != value:
            raise KernelError(what, detail=f"reads back {found}")

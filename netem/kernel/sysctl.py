"""Sysctls of one namespace. /proc/sys/net shows the namespace of the reading thread, so these run inside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from netem.kernel.errors import KernelError, attempting

ROOT = Path("/proc/sys/net")
OPTIONAL = ("ipv6.", "bridge.")


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
        if key.startswith(OPTIONAL) and read_here(key) is None:
            continue
        with attempting(f"set sysctl net.{key} to {value}"):
            (ROOT / key.replace(".", "/")).write_text(value, encoding="ascii")
        found = read_here(key)
        if found != value:
            raise KernelError(f"set sysctl net.{key} to {value}", detail=f"reads back {found}")

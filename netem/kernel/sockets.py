"""Sockets inside a namespace, with buffers beyond rmem_max: CAP_NET_ADMIN may (socket(7), SO_RCVBUFFORCE)."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Literal

from netem.kernel.errors import KernelError, attempting
from netem.kernel.netns import call_in

SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33  # asm-generic/socket.h
_LISTEN = "0A"  # TCP_LISTEN in net/tcp_states.h


def set_buffers(sock: socket.socket, rcvbuf_bytes: int, sndbuf_bytes: int) -> None:
    """Set both buffers and read them back. The kernel doubles the numbers: half is its own book-keeping.

    The root of a user namespace may not exceed rmem_max and wmem_max: there the buffers are as large as these allow,
    and a receiver advertises what it got.
    """
    for force, plain, wanted in (
        (SO_RCVBUFFORCE, socket.SO_RCVBUF, rcvbuf_bytes),
        (SO_SNDBUFFORCE, socket.SO_SNDBUF, sndbuf_bytes),
    ):
        try:
            sock.setsockopt(socket.SOL_SOCKET, force, wanted)
        except PermissionError:
            sock.setsockopt(socket.SOL_SOCKET, plain, wanted)
            continue
        found = sock.getsockopt(socket.SOL_SOCKET, plain)
        if found < wanted:
            raise KernelError(f"set a socket buffer to {wanted} bytes", detail=f"reads back {found}")


def open_socket(netns: str, kind: Literal["udp", "tcp"], rcvbuf_bytes: int, sndbuf_bytes: int) -> socket.socket:
    """An unbound IPv4 socket of a namespace. It stays there, whichever process uses it."""
    types = {"udp": socket.SOCK_DGRAM, "tcp": socket.SOCK_STREAM}
    with attempting(f"open a {kind} socket in namespace {netns}"):
        sock = call_in(netns, lambda: socket.socket(socket.AF_INET, types[kind]))
        try:
            set_buffers(sock, rcvbuf_bytes, sndbuf_bytes)
        except BaseException:
            sock.close()
            raise
    return sock


def is_bound(pid: int, kind: Literal["udp", "tcp"], port: int) -> bool:
    """Whether a socket in the namespace of a process listens on a port, or (udp) is bound to it (proc_net(5))."""
    for family in ("", "6"):
        try:
            lines = Path(f"/proc/{pid}/net/{kind}{family}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state = line.split()[:4]
            if int(local.rpartition(":")[2], 16) == port and (kind == "udp" or state == _LISTEN):
                return True
    return False

"""Does every host of a lab reach every other? A datagram from each to each, through sockets inside the namespaces."""

from __future__ import annotations

import os
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from netem.kernel.errors import attempting
from netem.lab.lab import Lab

TIMEOUT_S = 3.0
AGAIN_AFTER_S = 0.1
BUFFER_BYTES = 1 << 20
_MESSAGE = struct.Struct("!16sHH")  # token of this check, sender's and receiver's number


@dataclass(frozen=True)
class Reach:
    """`missing`: (sender, receiver) of the pairs between which nothing arrived in time."""

    hosts: int
    pairs: int
    missing: tuple[tuple[str, str], ...]
    took_s: float

    @property
    def ok(self) -> bool:
        return not self.missing


def all_to_all(lab: Lab, timeout_s: float = TIMEOUT_S) -> Reach:
    """Ask for every ordered pair of hosts. What is lost on the way is sent again until the time is over.

    `took_s` is from the first datagram to the last arrival, without the opening of the sockets. KernelError.
    """
    with ExitStack() as stack:
        sockets = {}
        for host in lab.hosts.values():
            sock = stack.enter_context(lab.socket(host.name, "udp", BUFFER_BYTES, BUFFER_BYTES))
            with attempting(f"bind a socket at {host.name}"):
                sock.bind((host.address, 0))
            sock.setblocking(False)
            sockets[host.name] = sock
        return _exchange(sockets, timeout_s)


def _exchange(sockets: Mapping[str, socket.socket], timeout_s: float) -> Reach:
    names = list(sockets)
    pending = {(a, b) for a in range(len(names)) for b in range(len(names)) if a != b}
    pairs, token = len(pending), os.urandom(16)
    places = [sockets[name].getsockname() for name in names]
    began = time.monotonic()
    deadline = began + timeout_s
    with selectors.DefaultSelector() as selector:
        for number, name in enumerate(names):
            selector.register(sockets[name], selectors.EVENT_READ, number)
        while pending and time.monotonic() < deadline:
            for source in sorted({a for a, _ in pending}):
                _send(sockets[names[source]], source, [b for a, b in sorted(pending) if a == source], places, token)
                _receive(selector, pending, places, token, 0.0)
            again = min(deadline, time.monotonic() + AGAIN_AFTER_S)
            while pending and (left := again - time.monotonic()) > 0:
                _receive(selector, pending, places, token, left)
    missing = tuple((names[a], names[b]) for a, b in sorted(pending))
    return Reach(len(names), pairs, missing, time.monotonic() - began)


def _send(
    sock: socket.socket, source: int, targets: Sequence[int], places: Sequence[tuple[str, int]], token: bytes
) -> None:
    for target in targets:
        try:
            sock.sendto(_MESSAGE.pack(token, source, target), places[target])
        except OSError:  # no room, no way: not arrived, so sent again or missing
            continue


def _receive(
    selector: selectors.BaseSelector,
    pending: set[tuple[int, int]],
    places: Sequence[tuple[str, int]],
    token: bytes,
    timeout_s: float,
) -> None:
    """Take what has arrived: at the right host, with the sender's own address."""
    for key, _ in selector.select(timeout_s):
        sock: socket.socket = key.fileobj  # type: ignore[assignment]
        while True:
            try:
                data, sender = sock.recvfrom(_MESSAGE.size + 1)
            except BlockingIOError:
                break
            except OSError:  # an earlier datagram was refused somewhere
                continue
            if len(data) == _MESSAGE.size:
                found, source, target = _MESSAGE.unpack(data)
                if found == token and target == key.data and source < len(places) and places[source] == sender:
                    pending.discard((source, target))

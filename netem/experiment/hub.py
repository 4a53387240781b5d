"""The testbed's end of DBLP_EVENTS: collects what the workload reports, answers its gates, hands in sockets.

One thread, one selector: the same loop watches the processes, so that a dead rank never leaves the others waiting.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from netem.kernel.timer import Timer

LINE_LIMIT = 1 << 20
SOCKET_BYTES_LIMIT = 64 << 20
SOCKET_NAME = "events.sock"
CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid

clock = time.monotonic

Event = dict[str, Any]


class HubError(Exception):
    """A rank broke the protocol of DBLP_EVENTS."""


@dataclass
class _Peer:
    sock: socket.socket
    pending: bytearray = field(default_factory=bytearray)
    rank: int | None = None


class Hub:
    """Serves one job.

    Args:
        folder: descriptor of where the socket is made; the workload's working directory, so that its path is short.
        uid: the user whose processes may connect.
        workers: ranks that ask at gates.
        gates: rounds before which they ask.
        open_gate: puts the impairment of a round in place; the gate opens when it returns.
        make_socket: (rank, kind, receive buffer, send buffer) -> an unbound socket in that rank's host.
        sink: gets every event.
    """

    def __init__(
        self,
        folder: int,
        *,
        uid: int,
        workers: int,
        gates: tuple[int, ...],
        open_gate: Callable[[int], None],
        make_socket: Callable[[int, str, int, int], socket.socket],
        sink: Callable[[Event], None],
    ) -> None:
        self.workers, self.gates = workers, gates
        self._open_gate, self._make_socket, self._sink = open_gate, make_socket, sink
        self._waiting: dict[int, list[_Peer]] = {}
        self._complete: list[int] = []
        self._timer = Timer()
        self._alarm: Callable[[], None] | None = None
        self._selector = selectors.DefaultSelector()
        self._folder, self._uid = folder, uid
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._bind()
        except BaseException:
            self.close()
            raise

    def _bind(self) -> None:
        """The folder is the workload's, so its mode must be right from the start: a name in it cannot be trusted.

        It cannot be given to the user without a name either; anybody may knock then, and _accept looks who it is.
        """
        self._unlink()
        umask = os.umask(0o177 if self._uid == os.geteuid() else 0o111)
        try:
            self._listener.bind(f"/proc/self/fd/{self._folder}/{SOCKET_NAME}")  # at most 107 bytes
        finally:
            os.umask(umask)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._timer, selectors.EVENT_READ, self._timer)

    def watch(self, descriptor: int, action: Callable[[], None]) -> None:
        """Calls `action` from `step`, once, when a descriptor is readable: that of a process, when it has ended."""

        def act() -> None:
            self._selector.unregister(descriptor)
            action()

        self._selector.register(descriptor, selectors.EVENT_READ, act)

    def alarm(self, when_s: float | None, action: Callable[[], None] | None = None) -> None:
        """Calls `action` once from `step`, when `clock` shows this moment; None: never. There is one at a time."""
        self._alarm = action
        self._timer.set(when_s)

    def step(self, timeout_s: float) -> None:
        """Handles what is there, waiting at most `timeout_s`. Raises HubError, and what `open_gate` raises."""
        ready = [key.data for key, _ in self._selector.select(timeout_s)]
        if self._timer in ready:
            self._ring()
        for data in ready:
            if data is None:
                self._accept()
            elif isinstance(data, _Peer):
                self._read(data)
            elif data is not self._timer:
                data()
        while self._complete:
            self._let_go(self._complete.pop(0))

    def _ring(self) -> None:
        self._timer.clear()
        action, self._alarm = self._alarm, None
        if action is not None:
            action()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        if _uid_of(sock) not in (self._uid, os.geteuid()):
            sock.close()
            return
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, _Peer(sock))

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(1 << 18)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._forget(peer)
            return
        peer.pending += data
        *lines, rest = peer.pending.split(b"\n")
        peer.pending = bytearray(rest)
        if len(rest) > LINE_LIMIT:
            raise HubError(f"rank {peer.rank} sent a line of more than {LINE_LIMIT} bytes")
        for line in lines:
            self._handle(peer, bytes(line))

    def _handle(self, peer: _Peer, line: bytes) -> None:
        try:
            event = json.loads(line)
            self._act(peer, event)
            self._sink(event)
        except (ValueError, KeyError, TypeError) as error:
            raise HubError(f"rank {peer.rank} sent what is not an event: {bytes(line[:80])!r}") from error

    def _act(self, peer: _Peer, event: Event) -> None:
        """What an event asks for. Raises KeyError, TypeError or ValueError for one that is not as agreed."""
        match event["event"]:
            case "hello":
                peer.rank = int(event["rank"])
                self._reply(peer, {"reply": "hello", "gates": list(self.gates)})
            case "socket":
                self._hand_in(peer, str(event["kind"]), int(event["rcvbuf"]), int(event["sndbuf"]))
            case "gate":
                self._gate(peer, int(event["round"]))

    def _gate(self, peer: _Peer, round_: int) -> None:
        """Opens when every worker has asked: nobody is still in the round before."""
        asking = self._waiting.setdefault(round_, [])
        if peer in asking:
            raise HubError(f"rank {peer.rank} asked twice before round {round_}")
        asking.append(peer)
        if len(asking) == self.workers:
            self._complete.append(round_)

    def _let_go(self, round_: int) -> None:
        """What the ranks said before they asked is read first: the phase of the round, above all."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Peer):
                self._read(key.data)
        self._open_gate(round_)
        for one in self._waiting.pop(round_):
            self._reply(one, {"reply": "go", "round": round_})

    def _hand_in(self, peer: _Peer, kind: str, rcvbuf: int, sndbuf: int) -> None:
        """A socket with larger buffers than a user may ask for, within limits."""
        if peer.rank is None:
            raise HubError("a socket was asked for before the hello")
        if max(rcvbuf, sndbuf) > SOCKET_BYTES_LIMIT:
            raise HubError(f"rank {peer.rank} asked for a socket of more than {SOCKET_BYTES_LIMIT} bytes")
        with self._make_socket(peer.rank, kind, rcvbuf, sndbuf) as made:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [made.fileno()]))
            try:
                peer.sock.sendmsg([json.dumps({"reply": "socket"}).encode() + b"\n"], [rights])
            except OSError:
                self._forget(peer)

    def _reply(self, peer: _Peer, reply: Event) -> None:
        try:
            peer.sock.sendall(json.dumps(reply).encode() + b"\n")
        except OSError:
            self._forget(peer)  # it has died; whoever watches the processes says so

    def _forget(self, peer: _Peer) -> None:
        try:
            self._selector.unregister(peer.sock)
        except (KeyError, ValueError):
            return
        peer.sock.close()

    def close(self) -> None:
        for key in list((self._selector.get_map() or {}).values()):
            if isinstance(key.data, _Peer):
                key.data.sock.close()
        self._timer.close()
        self._selector.close()
        self._listener.close()
        self._unlink()

    def _unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET_NAME, dir_fd=self._folder)


def _uid_of(sock: socket.socket) -> int:
    """Who connected (unix(7), SO_PEERCRED: struct ucred)."""
    uid: int = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[1]
    return uid

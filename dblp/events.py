"""Optional reports to a testbed over a Unix socket (`DBLP_EVENTS`): JSON lines, gates, and sockets handed in.

Without the variable every call does nothing, and the program runs the same way.
"""

from __future__ import annotations

import array
import json
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from dblp.errors import ConnectError, PeerProtocolError

REPLY_LIMIT_S = 600.0


class Events(Protocol):
    """What the transport tells a testbed, and asks of it."""

    gates: frozenset[int]
    """Rounds before which a worker asks."""

    def emit(self, event: str, **fields: Any) -> None:
        """Report something. May be called from any thread."""
        ...

    def gate(self, round_: int) -> None:
        """Return when the testbed lets round `round_` start."""
        ...

    def socket(self, kind: str, rcvbuf: int, sndbuf: int) -> socket.socket | None:
        """An unbound socket ("udp") with buffers of that many bytes, or None: the caller makes its own."""
        ...

    def close(self) -> None: ...


class NoEvents:
    """No testbed."""

    gates: frozenset[int] = frozenset()

    def emit(self, event: str, **fields: Any) -> None:
        return

    def gate(self, round_: int) -> None:
        return

    def socket(self, kind: str, rcvbuf: int, sndbuf: int) -> socket.socket | None:
        return None

    def close(self) -> None:
        return


class SocketEvents:
    """A testbed behind a Unix stream socket."""

    def __init__(self, path: str, rank: int) -> None:
        """Connects and introduces this rank.

        Raises ConnectError when nobody listens at `path`, PeerProtocolError when the answer is none; both close.
        """
        self.rank = rank
        self._send_lock, self._ask_lock = threading.Lock(), threading.Lock()
        self._pending = b""
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.gates = self._introduce(path)
        except BaseException:
            self._sock.close()
            raise

    def _introduce(self, path: str) -> frozenset[int]:
        """Connects and says hello; the rounds before which the testbed wants to be asked."""
        self._sock.settimeout(REPLY_LIMIT_S)
        try:
            self._sock.connect(path)
        except OSError as error:
            raise ConnectError(f"DBLP_EVENTS={path}: {error.strerror or error}") from error
        gates = self._ask("hello", rank=self.rank, pid=os.getpid()).get("gates", ())
        try:
            return frozenset(int(round_) for round_ in gates)
        except (TypeError, ValueError) as error:
            raise PeerProtocolError(f"gates of the testbed are no list of rounds: {gates!r}") from error

    def emit(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, **fields}, separators=(",", ":")).encode() + b"\n"
        try:
            with self._send_lock:
                self._sock.sendall(line)
        except OSError as error:
            raise ConnectError(f"the testbed at DBLP_EVENTS has gone: {error}") from error

    def gate(self, round_: int) -> None:
        self._ask("gate", round=round_, rank=self.rank)

    def socket(self, kind: str, rcvbuf: int, sndbuf: int) -> socket.socket | None:
        reply = self._ask("socket", kind=kind, rcvbuf=rcvbuf, sndbuf=sndbuf)
        return reply.get("made")

    def close(self) -> None:
        self._sock.close()

    def _ask(self, event: str, **fields: Any) -> Mapping[str, Any]:
        with self._ask_lock:
            self.emit(event, **fields)
            return self._reply(event)

    def _reply(self, event: str) -> dict[str, Any]:
        made: socket.socket | None = None
        while b"\n" not in self._pending:
            try:
                data, ancillary, _, _ = self._sock.recvmsg(65536, socket.CMSG_SPACE(4))
            except OSError as error:
                raise ConnectError(f"no answer of the testbed to {event!r}: {error}") from error
            if not data:
                raise ConnectError(f"the testbed closed DBLP_EVENTS before it answered {event!r}")
            self._pending += data
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    made = socket.socket(fileno=array.array("i", payload[:4])[0])
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            reply: Any = json.loads(line)
        except ValueError as error:
            raise PeerProtocolError(f"answer of the testbed to {event!r} is not JSON: {line[:80]!r}") from error
        if not isinstance(reply, dict):
            raise PeerProtocolError(f"answer of the testbed to {event!r} is no object: {line[:80]!r}")
        if "error" in reply:
            raise PeerProtocolError(f"the testbed refused {event!r}: {reply['error']}")
        reply["made"] = made
        return reply


def events_from_environ(rank: int, environ: Mapping[str, str] | None = None) -> Events:
    path = (os.environ if environ is None else environ).get("DBLP_EVENTS")
    return SocketEvents(path, rank) if path else NoEvents()

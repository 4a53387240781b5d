"""Who is let in at a port of the server: all new connections are heard at once, so that a silent one delays nobody."""

from __future__ import annotations

import contextlib
import select
import socket
from dataclasses import dataclass

from dblp.collective.handshake import check_hello
from dblp.config import Config
from dblp.errors import ConnectError, DblpError, HandshakeError
from dblp.io import Control, clock
from dblp.wire import Frame, Hello

HELLO_LIMIT_S = 5.0
HELLO_MAX_BYTES = 16 << 20
"""Limit of the first frame, before its token is known: the metadata of a million tensors is smaller."""
MAX_UNHEARD = 128
"""Connections that have not said anything yet; of more than that the oldest is dropped."""


@dataclass
class Unheard:
    control: Control
    until: float


class Admission:
    """Accepts at `listener`, and hands out the connections whose Hello is one of this run. Used by one thread."""

    def __init__(self, listener: socket.socket, config: Config, workers: int) -> None:
        self.listener, self.config, self.workers = listener, config, workers
        listener.setblocking(False)
        self._unheard: list[Unheard] = []

    def next(self, deadline: float) -> tuple[Control, Hello] | None:
        """The next one that is let in; None at the deadline. Raises ConnectError when the port cannot be used."""
        while True:
            for known in list(self._unheard):
                hello = self._hear(known)
                if hello is not None:
                    return known.control, hello
            now = clock()
            if now >= deadline:
                return None
            self._wait(min([deadline, *(known.until for known in self._unheard)]) - now)

    def _wait(self, limit_s: float) -> None:
        poller = select.poll()
        for fd in (self.listener.fileno(), *(known.control.fileno() for known in self._unheard)):
            poller.register(fd, select.POLLIN)
        if self.listener.fileno() in {fd for fd, _ in poller.poll(max(0.0, limit_s) * 1000)}:
            self._accept()

    def _accept(self) -> None:
        try:
            sock, address = self.listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it has gone again
        except OSError as error:
            raise ConnectError(f"accepting a connection: {error.strerror}") from error
        try:
            control = Control(sock, f"{address[0]}:{address[1]}", max_bytes=HELLO_MAX_BYTES)
        except OSError:
            sock.close()
            return
        if len(self._unheard) >= MAX_UNHEARD:
            self._unheard.pop(0).control.close()
        self._unheard.append(Unheard(control, clock() + HELLO_LIMIT_S))

    def _hear(self, known: Unheard) -> Hello | None:
        """Its Hello, if it has come. A connection that cannot be of this run is told so and closed."""
        frames: list[Frame] = []
        with contextlib.suppress(DblpError):
            frames = known.control.poll()
            if not frames and clock() < known.until:
                return None
        self._unheard.remove(known)
        with contextlib.suppress(HandshakeError):
            if frames:
                hello = check_hello(known.control, frames[0], self.config, self.workers)
                known.control.trust()
                return hello
        known.control.close()
        return None

    def close(self) -> None:
        """Drops whoever has said nothing yet."""
        for known in self._unheard:
            known.control.close()
        self._unheard.clear()

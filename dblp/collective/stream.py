"""One direction of one round over TCP: the reliable transport that the bounded one is compared with."""

from __future__ import annotations

import select
import socket

import numpy as np

from dblp.collective.bounded import Sent, Watch
from dblp.collective.deadline import Deadline
from dblp.collective.link import Link
from dblp.dtypes import WireArray
from dblp.errors import PeerProtocolError
from dblp.io import clock, wait
from dblp.wire import STREAM_HEADER_BYTES, Stop, encode_stream_header, parse_stream_header


class StreamBroken(Exception):
    """The data connection cannot be used any more; the round is given up and the worker connects again."""


def send_stream(
    link: Link, sock: socket.socket, session: int, round_: int, direction: int, values: WireArray, deadline: float
) -> tuple[Sent, Stop | None]:
    """Sends the header and all values, then waits for the stop. (cost, None) when the deadline came first.

    Raises StreamBroken when the connection fails.
    """
    payload = values.reshape(-1).view(np.uint8).data
    header = encode_stream_header(session, round_, len(payload))
    left = [memoryview(header), payload]
    sent = Sent(began_s=clock())
    link.replay()
    while clock() < deadline:
        stop = _stop_of(link, round_, direction)
        if stop is not None:
            sent.ended_s = clock()
            return sent, stop
        if left:
            try:
                count = sock.send(left[0])
            except (BlockingIOError, InterruptedError):
                count = 0
            except OSError as error:
                raise StreamBroken(str(error.strerror)) from error
            sent.bytes += count
            left[0] = left[0][count:]
            left = [part for part in left if part]
            if not count:
                _wait_writable(link, sock, deadline)
        else:
            wait(link.fds(data=False), deadline - clock())
    sent.ended_s = clock()
    return sent, None


def _wait_writable(link: Link, sock: socket.socket, deadline: float) -> None:
    poller = select.poll()
    poller.register(sock.fileno(), select.POLLOUT)
    for fd in link.fds(data=False):
        poller.register(fd, select.POLLIN)
    poller.poll(max(0.0, deadline - clock()) * 1000)


def _stop_of(link: Link, round_: int, direction: int) -> Stop | None:
    found: Stop | None = None
    for frame, came_as_hint in link.poll():
        if isinstance(frame, Stop) and (frame.round, frame.direction) == (round_, direction):
            found = frame
        else:
            link.stray(frame, came_as_hint)
    return found


class StreamReceive:
    """Receives one direction of one round into `values`, all of it."""

    def __init__(
        self,
        link: Link,
        sock: socket.socket,
        session: int,
        round_: int,
        direction: int,
        values: WireArray,
        watch: Watch,
    ) -> None:
        self.link, self.sock, self.session, self.watch = link, sock, session, watch
        self.round, self.direction = round_, direction
        self.complete = False
        self.first_at: float | None = None
        self._header = bytearray()
        self._payload = values.reshape(-1).view(np.uint8).data
        self._filled = 0

    def run(self, deadline: Deadline) -> None:
        """Until complete, over or past the deadline. Raises StreamBroken when the connection fails."""
        self.link.replay()
        while not self.complete and not self.watch.over:
            busy = self._read()
            for frame, came_as_hint in self.link.poll():
                busy = True
                if not self.watch.take(frame):
                    self.link.stray(frame, came_as_hint)
            if busy and (self.first_at is not None or self.watch.begun):
                deadline.begin()
            if clock() >= deadline.at():
                break
            if not busy:
                wait([*self.link.fds(data=False), self.sock.fileno()], deadline.look() - clock())
        if not self.watch.over:
            self.finish(deadline.limit_s)

    def finish(self, limit_s: float) -> None:
        outcome = 0 if self.complete else 1
        delivered = self._filled
        self.link.finish(Stop(self.round, self.direction, outcome, 0xFFFFFFFF, 0, delivered, b""), clock() + limit_s)

    @property
    def delivered_bytes(self) -> int:
        return self._filled

    def _read(self) -> bool:
        try:
            if len(self._header) < STREAM_HEADER_BYTES:
                piece = self.sock.recv(STREAM_HEADER_BYTES - len(self._header))
                self._header += piece
                if piece and len(self._header) == STREAM_HEADER_BYTES:
                    self._check_header()
                count = len(piece)
            else:
                count = self.sock.recv_into(self._payload[self._filled :])
                self._filled += count
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise StreamBroken(str(error.strerror)) from error
        if not count:
            raise StreamBroken("the peer closed the data connection")
        self.first_at = self.first_at or clock()
        self.complete = self._filled == len(self._payload) and len(self._header) == STREAM_HEADER_BYTES
        return True

    def _check_header(self) -> None:
        session, round_, length = parse_stream_header(bytes(self._header))
        if (session, round_, length) != (self.session, self.round, len(self._payload)):
            raise PeerProtocolError(
                f"{self.link.peer} sent {length} bytes of round {round_}; "
                f"expected are {len(self._payload)} of round {self.round}"
            )

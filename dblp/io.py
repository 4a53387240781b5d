"""One clock, waiting, the framed control connection, and control frames as hint datagrams."""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from typing import Any

import numpy as np

from dblp import wire
from dblp.errors import ConnectError, DblpError, HandshakeError, PeerLost, PeerProtocolError, RoundTimeout
from dblp.wire import Frame, FrameReader, Refuse, encode, encode_hint, parse_hint

SO_MAX_PACING_RATE, SO_MEMINFO = 47, 55
PACING_HEADROOM = 1.25
"""How much above its rate the kernel lets a paced sender go, so that it can make up for having been late."""
# What the kernel charges the buffer for one MTU-sized datagram: 2 KiB of data and the skb, with room for a bad layout.
BUFFER_BYTES_PER_DATAGRAM = 3072

RECEIVE_BYTES = 1 << 16

clock = time.monotonic


def wait(fds: list[int], timeout_s: float | None, events: int = select.POLLIN) -> bool:
    """Whether one of `fds` became ready within the time."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, events)
    return bool(poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))


def socket_drops(sock: socket.socket) -> int:
    """Datagrams that this socket's buffer had no room for (sock_diag(7), SK_MEMINFO_DROPS); 0 where unknown."""
    try:
        return int(np.frombuffer(sock.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, 36), np.uint32)[8])
    except (OSError, IndexError):
        return 0


def limit_pacing(sock: socket.socket, rate_bps: float) -> None:
    """Lets the kernel space what this socket sends, at most PACING_HEADROOM above `rate_bps` (of whole frames).

    Only the qdisc fq does it for datagrams (socket(7), tc-fq(8)); elsewhere, and before Linux 3.13, nothing happens.
    """
    rate = min(int(PACING_HEADROOM * rate_bps / 8), (1 << 64) - 2)  # all ones: no limit
    for size in (8, 4):  # 64 bits from Linux 4.20 on
        with contextlib.suppress(OSError, OverflowError):
            sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate.to_bytes(size, sys.byteorder))
            return


def pacing_limit_bps(sock: socket.socket) -> float | None:
    """What the kernel keeps to for this socket, in bits a second; None: no limit, or not known."""
    try:
        rate = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8), sys.byteorder)
    except OSError:
        return None
    return None if rate >= (1 << 64) - 1 else 8.0 * rate


def path_rtt_s(sock: socket.socket) -> float | None:
    """Shortest round-trip time of this connection in seconds, as TCP has seen it (tcpi_min_rtt); None: unknown."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 152)
    except OSError:
        return None
    if len(info) < 152:
        return None
    microseconds = int(np.frombuffer(info, np.uint32)[37])
    return microseconds / 1e6 if 0 < microseconds < 0xFFFFFFFF else None


def runqueue_s() -> float | None:
    """Seconds that the calling thread was ready to run and waited for a core, so far (proc(5), schedstat); None where
    the kernel does not say."""
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            return int(file.read(96).split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


def since(before_s: float | None) -> float | None:
    """How much `runqueue_s` has grown."""
    now_s = runqueue_s()
    return None if now_s is None or before_s is None else now_s - before_s


def receive_window(sock: socket.socket) -> int:
    """How many datagrams the receive buffer surely holds."""
    return max(8, sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // BUFFER_BYTES_PER_DATAGRAM)


class Control:
    """The reliable channel to one peer: frames over TCP. `send` may be called by one thread, `poll` by one thread.

    `max_bytes` limits the frames that are taken until `trust` is called.
    """

    def __init__(self, sock: socket.socket, peer: str, max_bytes: int = wire.MAX_BODY_BYTES) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.peer = sock, peer
        self._reader = FrameReader(max_bytes)

    def trust(self) -> None:
        """The peer is known: frames of every size are taken from now on."""
        self._reader.max_bytes = wire.MAX_BODY_BYTES

    def fileno(self) -> int:
        return self.sock.fileno()

    def hosts(self) -> tuple[str, str]:
        """This side's address and the peer's. Raises PeerLost when the connection is gone already."""
        try:
            return self.sock.getsockname()[0], self.sock.getpeername()[0]
        except OSError as error:
            raise PeerLost(self.peer, 0, "opening the data plane", str(error.strerror)) from error

    def send(self, frame: Frame, deadline: float, round_: int = 0) -> None:
        """Raises PeerLost when the peer has gone, RoundTimeout when it takes nothing until the deadline.

        A peer that refused before it closed the connection has said why: then HandshakeError with its words.
        """
        data, began, phase = memoryview(encode(frame)), clock(), f"sending {type(frame).__name__}"
        while data:
            try:
                data = data[self.sock.send(data) :]
            except (BlockingIOError, InterruptedError):
                if not wait([self.fileno()], deadline - clock(), select.POLLOUT):
                    raise RoundTimeout(self.peer, round_, phase, deadline - began) from None
            except OSError as error:
                self._raise_refusal()
                raise PeerLost(self.peer, round_, phase, str(error.strerror)) from error

    def _raise_refusal(self) -> None:
        """HandshakeError when what is still unread holds a refusal."""
        try:
            frames = self.poll()
        except DblpError:
            return
        for frame in frames:
            if isinstance(frame, Refuse):
                raise HandshakeError(f"{self.peer}: {frame.reason.decode(errors='replace')}")

    def poll(self, round_: int = 0) -> list[Frame]:
        """Frames that have arrived, without waiting. Raises PeerLost when the peer has closed the connection."""
        frames: list[Frame] = []
        while True:
            try:
                data = self.sock.recv(RECEIVE_BYTES)
            except (BlockingIOError, InterruptedError):
                return frames
            except OSError as error:
                raise PeerLost(self.peer, round_, "reading control frames", str(error.strerror)) from error
            if not data:
                if frames:
                    return frames  # the next call tells that the peer has gone
                raise PeerLost(self.peer, round_, "reading control frames", "it closed the connection")
            frames.extend(self._reader.feed(data))
            if len(data) < RECEIVE_BYTES:
                return frames

    def close(self) -> None:
        self.sock.close()


class Hints:
    """Control frames as single datagrams beside the reliable channel. Losing one costs time, never correctness."""

    def __init__(self, sock: socket.socket, session: int, max_bytes: int) -> None:
        sock.setblocking(False)
        self.sock, self.session, self.max_bytes = sock, session, max_bytes

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()

    def send(self, frame: Frame) -> None:
        datagram = encode_hint(self.session, frame)
        if len(datagram) > self.max_bytes:
            return
        try:
            self.sock.send(datagram)
        except OSError:
            return

    def poll(self) -> list[Frame]:
        frames: list[Frame] = []
        while True:
            try:
                frame = parse_hint(self.session, self.sock.recv(self.max_bytes + 1))
            except (BlockingIOError, InterruptedError):
                return frames
            except PeerProtocolError:
                continue
            except OSError:
                return frames
            if frame is not None:
                frames.append(frame)


def udp_socket(bind: tuple[str, int], made: socket.socket | None = None) -> socket.socket:
    """A bound UDP socket: `made` (with enlarged buffers), or a new one with the largest buffers allowed."""
    family: Any = socket.getaddrinfo(*bind, type=socket.SOCK_DGRAM)[0][0]
    sock = made or socket.socket(family, socket.SOCK_DGRAM)
    try:
        if made is None:
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, 64 << 20)  # the kernel caps it at rmem_max and wmem_max
        sock.bind(bind)
    except OSError as error:
        sock.close()
        raise ConnectError(f"UDP port {bind[1]} on {bind[0]}: {error.strerror}") from error
    return sock

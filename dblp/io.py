"""Sockets: datagrams in batches, framed control connection, hint datagrams. The only place of the core that blocks.

Uses UDP_SEGMENT, UDP_GRO and recvmmsg where the kernel has them, and one datagram a call where it has not.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dblp import mmsg, wire
from dblp.chunks import FloatArray, IntArray, Layout
from dblp.errors import ConnectError, DblpError, HandshakeError, PeerLost, PeerProtocolError, RoundTimeout
from dblp.sender import Batch
from dblp.wire import HEADER_BYTES, Frame, FrameReader, Refuse, encode, encode_hint, headers_of, parse_hint

SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104
SO_MEMINFO = 55
QUEUE_PAUSE_S = 0.001
"""Pause after ENOBUFS: the full queue is the interface's, so the socket is writable all the time (udp(7))."""
MAX_DATAGRAM = 65507
MAX_SEGMENTS = 64
# What the kernel charges the buffer for one MTU-sized datagram: 2 KiB of data and the skb, with room for a bad layout.
BUFFER_BYTES_PER_DATAGRAM = 3072

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


def receive_window(sock: socket.socket) -> int:
    """How many datagrams the receive buffer surely holds."""
    return max(8, sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // BUFFER_BYTES_PER_DATAGRAM)


@dataclass
class Received:
    """Valid chunks of the current round in one batch. `rows` are their places in the receive buffer."""

    rows: IntArray
    sequences: IntArray
    passes: IntArray


@dataclass
class DataCounts:
    """What arrived that was not a chunk of the current round."""

    foreign: int = 0
    malformed: int = 0
    other_round: dict[int, int] = field(default_factory=dict)


class DataSocket:
    """One connected UDP socket that carries the chunks of one layout and session, in both directions of a batch."""

    def __init__(
        self, sock: socket.socket, layout: Layout, session: int, *, offload: bool = True, peer: str = "the peer"
    ) -> None:
        self.sock, self.layout, self.session, self.peer = sock, layout, session, peer
        self.stride = HEADER_BYTES + 4 * layout.chunk_values
        self.counts = DataCounts()
        self.segments = min(MAX_SEGMENTS, MAX_DATAGRAM // self.stride)
        sock.setblocking(False)
        self.gso = offload and self._set(UDP_SEGMENT, self.stride)
        gro = offload and mmsg.available() and self._set(UDP_GRO, 1)
        per_slot, slots = (self.segments, 64) if gro else (1, 256)
        self._staging = np.zeros((self.segments, self.stride), np.uint8)
        self._flat = self._staging.reshape(-1).data
        self._staging_headers = headers_of(self._staging)
        self._staging_headers["session"] = session
        self._staging_values = self._staging.view("<f4")[:, HEADER_BYTES // 4 :]
        self._buffer = np.zeros((slots * per_slot, self.stride), np.uint8)
        self._headers = headers_of(self._buffer)
        self._values = self._buffer.view("<f4")[:, HEADER_BYTES // 4 :]
        self._slots = self._buffer.reshape(slots, per_slot * self.stride)
        self._per_slot = per_slot
        self._many = mmsg.Receiver(self._slots) if mmsg.available() else None

    def _set(self, option: int, value: int) -> bool:
        try:
            self.sock.setsockopt(SOL_UDP, option, value)
        except OSError:
            return False
        return True

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()

    # Sending

    def send(self, values: FloatArray, round_: int, batch: Batch, deadline: float) -> int:
        """Sends the chunks of `batch` (at most `segments`) from `values` (chunks, chunk_values); returns payload bytes.

        Raises RoundTimeout when the socket takes nothing until the deadline.
        """
        began = clock()
        try:
            return self._send_batch(values, round_, batch, deadline)
        except TimeoutError as error:
            raise RoundTimeout(self.peer, round_, f"sending datagrams ({error})", deadline - began) from error

    def _send_batch(self, values: FloatArray, round_: int, batch: Batch, deadline: float) -> int:
        count, last = len(batch.sequences), self.layout.chunks - 1
        headers = self._staging_headers[:count]
        headers["round"] = round_
        headers["sequence"] = batch.sequences
        headers["pass"] = batch.passes
        headers["length"] = 4 * self.layout.chunk_values
        values.take(batch.sequences, axis=0, out=self._staging_values[:count], mode="clip")
        short: Sequence[int] | IntArray = (
            np.flatnonzero(batch.sequences == last) if self.layout.last_values < self.layout.chunk_values else []
        )
        if not len(short):
            return self._send_rows(0, count, self.stride, deadline)
        at = int(short[0])  # a shorter segment can only be the last of its super-packet
        headers["length"][at] = 4 * self.layout.last_values
        sent = self._send_rows(0, at + 1, HEADER_BYTES + 4 * self.layout.last_values, deadline)
        return sent + (self._send_rows(at + 1, count, self.stride, deadline) if at + 1 < count else 0)

    def _send_rows(self, start: int, end: int, last_bytes: int, deadline: float) -> int:
        flat = self._flat
        size = (end - start - 1) * self.stride + last_bytes
        if self.gso and self._send_one(flat[start * self.stride : start * self.stride + size], deadline):
            return size
        for row in range(start, end):
            begin = row * self.stride
            self._send_one(flat[begin : begin + (last_bytes if row == end - 1 else self.stride)], deadline)
        return size

    def _send_one(self, data: memoryview, deadline: float) -> bool:
        """False when the kernel refuses to segment here (no checksum offload on old kernels): use the plain path.

        Raises TimeoutError at the deadline.
        """
        while True:
            try:
                self.sock.send(data)
                return True
            except (BlockingIOError, InterruptedError):
                if not wait([self.fileno()], deadline - clock(), select.POLLOUT):
                    raise TimeoutError("the socket's buffer stays full") from None
            except ConnectionRefusedError:
                continue  # an ICMP answer to an earlier datagram; the peer may not be listening yet
            except OSError as error:
                if error.errno == errno.ENOBUFS:
                    if clock() >= deadline:
                        raise TimeoutError("the interface's queue stays full") from error
                    wait([], QUEUE_PAUSE_S)
                    continue
                if error.errno == errno.EIO and self.gso:
                    self.gso = False
                    self._set(UDP_SEGMENT, 0)
                    return False
                if error.errno == errno.EMSGSIZE:
                    raise ConnectError(
                        f"a datagram of {self.stride} bytes is larger than the path takes: set mtu lower"
                    ) from error
                raise ConnectError(f"sending a datagram: {error.strerror}") from error

    # Receiving

    def receive(self, round_: int) -> Received | None:
        """The chunks that were waiting, or None when the socket is empty. Everything else is counted in `counts`.

        The rows stay valid until the next call.
        """
        try:
            lengths, truncated = self._many.fill(self.fileno()) if self._many else self._fill_plain()
        except ConnectionRefusedError:
            return self.receive(round_)  # an ICMP answer to what this side sent; reading has cleared it
        except OSError as error:
            raise ConnectError(f"receiving datagrams: {error.strerror}") from error
        if not len(lengths):
            return None
        rows, row_bytes = self._rows(lengths.astype(np.int64), truncated)
        headers = self._headers[rows]
        ours = headers["session"] == self.session
        if not ours.all():
            self.counts.foreign += int(len(ours) - ours.sum())
            rows, row_bytes, headers = rows[ours], row_bytes[ours], headers[ours]
        sequences = headers["sequence"].astype(np.int64)
        expected = np.where(sequences == self.layout.chunks - 1, self.layout.last_values, self.layout.chunk_values) * 4
        sound = (
            (sequences < self.layout.chunks) & (headers["length"] == expected) & (row_bytes == expected + HEADER_BYTES)
        )
        current = headers["round"] == round_
        valid = sound & current
        if not valid.all():
            self.counts.malformed += int(len(sound) - sound.sum())
            for other, count in zip(*np.unique(headers["round"][sound & ~current], return_counts=True), strict=True):
                self.counts.other_round[int(other)] = self.counts.other_round.get(int(other), 0) + int(count)
            rows, sequences, headers = rows[valid], sequences[valid], headers[valid]
        return Received(rows, sequences, headers["pass"].astype(np.int64))

    def store(self, received: Received, chosen: IntArray, values: FloatArray) -> None:
        """Copies the payload of the chosen positions of a batch to their chunks in `values` (chunks, chunk_values)."""
        values[received.sequences[chosen]] = self._values[received.rows[chosen]]
        if self.layout.last_values < self.layout.chunk_values:
            values[-1, self.layout.last_values :] = 0.0  # the row behind a short chunk holds older bytes

    def _rows(self, lengths: IntArray, truncated: NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
        """(row, bytes in it) of every datagram; one message holds several when the kernel has coalesced them."""
        if truncated.any():
            self.counts.malformed += int(truncated.sum())
            lengths = np.where(truncated, 0, lengths)
        per_message = -(-lengths // self.stride)
        inside = np.arange(self._per_slot) < per_message[:, None]
        message, segment = np.nonzero(inside)
        row_bytes = np.where(segment == per_message[message] - 1, lengths[message] - segment * self.stride, self.stride)
        rows = message * self._per_slot + segment
        whole = row_bytes >= HEADER_BYTES
        self.counts.malformed += int(len(whole) - whole.sum())
        return rows[whole], row_bytes[whole]

    def _fill_plain(self) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        lengths: list[int] = []
        truncated: list[bool] = []
        for slot in self._slots:
            try:
                length, _, flags, _ = self.sock.recvmsg_into([slot.data])
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionRefusedError:
                if lengths:
                    break
                raise
            lengths.append(length)
            truncated.append(bool(flags & socket.MSG_TRUNC))
        return np.array(lengths, np.uint32), np.array(truncated, np.bool_)


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
                data = self.sock.recv(1 << 18)
            except (BlockingIOError, InterruptedError):
                return frames
            except OSError as error:
                raise PeerLost(self.peer, round_, "reading control frames", str(error.strerror)) from error
            if not data:
                if frames:
                    return frames  # the next call tells that the peer has gone
                raise PeerLost(self.peer, round_, "reading control frames", "it closed the connection")
            frames.extend(self._reader.feed(data))
            if len(data) < 1 << 18:
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
                frame = parse_hint(self.session, self.sock.recv(65535))
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

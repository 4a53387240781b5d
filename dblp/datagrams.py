"""The chunks of one peer as UDP datagrams, many a system call, without Python work for each.

Uses UDP_SEGMENT, UDP_GRO, sendmmsg and recvmmsg where the kernel has them, and one datagram a call where it has not.
"""

from __future__ import annotations

import errno
import select
import socket
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dblp import mmsg
from dblp.chunks import IntArray, Layout
from dblp.dtypes import WireArray
from dblp.errors import ConnectError, RoundTimeout
from dblp.io import clock, wait
from dblp.sender import Batch
from dblp.wire import HEADER_BYTES, headers_of

SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104
QUEUE_PAUSE_S = 0.001
"""Pause after ENOBUFS: the full queue is the interface's, so the socket is writable all the time (udp(7))."""
MAX_DATAGRAM = 65507
MAX_SEGMENTS = 64
BATCH_MESSAGES = 4
"""Super-packets between two looks for a stop: what a look costs is shared by more, and more are sent in vain."""
GRO_SLOTS, SINGLE_SLOTS, STORE_ROWS = 16, 256, 32
LARGE_CHUNKS, FEW_SLOTS = 10_000, 4
"""Full messages that are read at once: all slots where a gradient is large, few where their 1 MB would be much beside
it. A slot that is never written to its end takes no memory."""

_PAIR = np.dtype(np.complex128)
"""A header moved as one item of 16 bytes: numpy gathers those ten times faster than structured items."""


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


class PacketBuffer:
    """All chunks of one vector as the datagrams that carry them: header and payload side by side.

    Attributes:
        rows: uint8 (chunks, bytes of a datagram); of a shorter last chunk the row ends in zeros.
        flat: the same bytes as one memoryview.
        round: what `address` has written.
        values: the payloads, (chunks, chunk_values); shares the memory of `rows`, so it is not contiguous.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.rows = np.zeros((layout.chunks, HEADER_BYTES + layout.chunk_bytes), np.uint8)
        self.flat = self.rows.reshape(-1).data
        self.values: WireArray = self.rows.view(layout.dtype.storage)[:, HEADER_BYTES // layout.dtype.value_bytes :]
        self._headers = headers_of(self.rows)
        self._headers["sequence"] = np.arange(layout.chunks)
        self._headers["length"] = layout.chunk_bytes
        self._headers["length"][-1:] = layout.last_bytes
        self.round, self._addressed = 0, (-1, -1)

    def address(self, session: int, round_: int) -> None:
        """Writes the session and the round that the datagrams belong to. Threads that write the same may overlap."""
        if self._addressed != (session, round_):
            self._headers["session"], self._headers["round"] = session, round_
            self.round, self._addressed = round_, (session, round_)


class Slots(Protocol):
    """How a receive buffer is filled: mmsg.Receiver, or PlainSlots where there is none."""

    def fill(self, fd: int, most: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]: ...


class Rows(Protocol):
    """How rows leave as one datagram each: mmsg.Sender, or PlainRows where there is none."""

    def send(self, fd: int, start: int, end: int, last_bytes: int) -> int: ...


class PlainRows:
    """mmsg.Sender by the standard library alone."""

    def __init__(self, sock: socket.socket, buffer: NDArray[np.uint8]) -> None:
        self._sock, self._buffer = sock, buffer

    def send(self, fd: int, start: int, end: int, last_bytes: int) -> int:
        self._sock.send(self._buffer[start, : last_bytes if start == end - 1 else None].data)
        return 1


class PlainSlots:
    """mmsg.Receiver by the standard library alone."""

    def __init__(self, sock: socket.socket, buffer: NDArray[np.uint8]) -> None:
        self._sock, self._buffer = sock, buffer

    def fill(self, fd: int, most: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        lengths: list[int] = []
        truncated: list[int] = []
        for slot in self._buffer[:most]:
            try:
                length, _, flags, _ = self._sock.recvmsg_into([slot.data])
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionRefusedError:
                if lengths:
                    break
                raise
            lengths.append(length)
            truncated.append(flags & socket.MSG_TRUNC)
        return np.array(lengths, np.uint32), np.array(truncated, np.uint32)


class DataSocket:
    """One connected UDP socket that carries the chunks of one layout and session, in both directions of a batch.

    Attributes:
        segments: most chunks of one super-packet.
        batch: most chunks that `send` takes at once.
        drained: the last `receive` has emptied the socket.
    """

    def __init__(
        self, sock: socket.socket, layout: Layout, session: int, *, offload: bool = True, peer: str = "the peer"
    ) -> None:
        self.sock, self.layout, self.session, self.peer = sock, layout, session, peer
        self.stride = HEADER_BYTES + layout.chunk_bytes
        self.counts = DataCounts()
        self.drained = True
        self.segments = max(1, min(MAX_SEGMENTS, MAX_DATAGRAM // self.stride))
        self.batch = BATCH_MESSAGES * self.segments
        sock.setblocking(False)
        self.gso = offload and self._set(UDP_SEGMENT, self.stride)
        self._short = layout.last_values < layout.chunk_values
        fast = mmsg.available()
        self._staging = np.zeros((self.segments, self.stride), np.uint8)
        self._flat = self._staging.reshape(-1).data
        self._staging_passes = headers_of(self._staging)["pass"]
        self._singles: Rows = mmsg.Sender(self._staging) if fast else PlainRows(sock, self._staging)
        gro = offload and fast and self._set(UDP_GRO, 1)
        self._per_slot, slots = (self.segments, GRO_SLOTS) if gro else (1, SINGLE_SLOTS)
        self._buffer = np.zeros((slots * self._per_slot, self.stride), np.uint8)
        shaped = self._buffer.reshape(slots, self._per_slot * self.stride)
        self._slots: Slots = mmsg.Receiver(shaped) if fast else PlainSlots(sock, shaped)
        self._most = self._largest_bytes = 0  # _expects sets them
        self._full_slots = FEW_SLOTS if gro and layout.chunks < LARGE_CHUNKS else slots
        self._run = np.arange(max(layout.chunks, len(self._buffer)), dtype=np.int64).tobytes()
        self._prepare_checks(slots)

    def _prepare_checks(self, slots: int) -> None:
        """Views and constants with which `receive` recognises a usual batch."""
        self._headers = headers_of(self._buffer)
        self._pairs = self._buffer[:, :HEADER_BYTES].view(_PAIR)[:, 0]
        self._bodies = self._buffer.view(self.layout.dtype.storage)[:, HEADER_BYTES // self.layout.dtype.value_bytes :]
        self._slot_rows = np.arange(slots, dtype=np.int64) * self._per_slot
        self._steps = np.arange(len(self._buffer), dtype=np.int64)
        self._full_lengths = np.full(slots, self.stride, np.uint32).tobytes()
        self._payload_lengths = np.full(len(self._buffer), self.stride - HEADER_BYTES, ">u2").tobytes()
        # Sequences from here on need a closer look: none that exists, or the chunk that is shorter than the others.
        self._plain_sequences = self.layout.chunks - self._short
        self._expects(0)

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

    def send(self, packets: PacketBuffer, batch: Batch, deadline: float) -> int:
        """Sends the chunks of `batch` (at most `batch`), which `packets` has for this session and round.

        Returns the bytes that were sent, with headers. Raises RoundTimeout when the socket takes nothing until the
        deadline.
        """
        sequences, passes, began = batch.sequences, batch.passes, clock()
        begin, count = int(sequences[0]), len(sequences)
        try:
            if self.gso and not np.count_nonzero(passes) and self._is_run(sequences, begin):
                # As they lie there, they are first transmissions.
                return self._send_part(packets.flat[begin * self.stride :], sequences, deadline)
            sent = 0
            for start in range(
                0, count, self.segments
            ):  # a super-packet at once: it is still in the cache when it goes
                part = sequences[start : start + self.segments]
                # Gathered in one place: the kernel would take longer over scattered pieces than numpy does.
                packets.rows.take(part, axis=0, out=self._staging[: len(part)], mode="clip")  # "raise" copies twice
                self._staging_passes[: len(part)] = passes[start : start + self.segments]
                sent += self._send_part(self._flat, part, deadline)
            return sent
        except TimeoutError as error:
            raise RoundTimeout(self.peer, packets.round, f"sending datagrams ({error})", deadline - began) from error

    def _send_part(self, flat: memoryview, sequences: IntArray, deadline: float) -> int:
        """Sends the rows at the start of `flat`, which are these chunks. Returns the bytes."""
        count, stride = len(sequences), self.stride
        last = sequences == self.layout.chunks - 1 if self._short else None
        if last is None or not last.any():
            self._send_rows(flat, 0, count, stride, deadline)
            return count * stride
        cut = int(last.argmax()) + 1  # a shorter segment can only be the last of its super-packet
        last_bytes = HEADER_BYTES + self.layout.last_bytes
        self._send_rows(flat, 0, cut, last_bytes, deadline)
        self._send_rows(flat, cut, count, stride, deadline)
        return (count - 1) * stride + last_bytes

    def _is_run(self, sequences: IntArray, begin: int) -> bool:
        """Whether they count up from `begin` one by one."""
        return sequences.tobytes() == self._run[8 * begin : 8 * (begin + len(sequences))]

    def _send_rows(self, flat: memoryview, start: int, end: int, last_bytes: int, deadline: float) -> None:
        while start < end:
            stop = min(start + self.segments, end)
            ending = last_bytes if stop == end else self.stride
            part = flat[start * self.stride :][: (stop - start - 1) * self.stride + ending]
            try:
                if self.gso:
                    self.sock.send(part)
                    start = stop
                elif flat is self._flat:
                    start += self._singles.send(self.fileno(), start, end, last_bytes)
                else:  # the kernel has just refused to segment what lies among the packets
                    self._flat[: len(part)] = part
                    start += self._singles.send(self.fileno(), 0, stop - start, ending)
            except OSError as error:
                self._overcome(error, deadline)

    def _overcome(self, error: OSError, deadline: float) -> None:
        """Returns when the same may be tried again. Raises TimeoutError at the deadline, or ConnectError."""
        if isinstance(error, BlockingIOError | InterruptedError):
            if not wait([self.fileno()], deadline - clock(), select.POLLOUT):
                raise TimeoutError("the socket's buffer stays full") from None
        elif error.errno == errno.ENOBUFS:
            if clock() >= deadline:
                raise TimeoutError("the interface's queue stays full") from error
            wait([], QUEUE_PAUSE_S)
        elif error.errno == errno.EIO and self.gso:
            # The kernel refuses to segment here (no checksum offload on old kernels): one datagram each from now on.
            self.gso = False
            self._set(UDP_SEGMENT, 0)
        elif error.errno == errno.EMSGSIZE:
            raise ConnectError(
                f"a datagram of {self.stride} bytes is larger than the path takes: set mtu lower"
            ) from error
        elif not isinstance(error, ConnectionRefusedError):  # the answer to an earlier one: the peer may come yet
            raise ConnectError(f"sending a datagram: {error.strerror}") from error

    # Receiving

    def receive(self, round_: int) -> Received | None:
        """The chunks that were waiting, or None when the socket is empty. Everything else is counted in `counts`.

        The rows stay valid until the next call.
        """
        try:
            lengths, truncated = self._slots.fill(self.fileno(), self._most)
        except ConnectionRefusedError:
            return self.receive(round_)  # an ICMP answer to what this side sent; reading has cleared it
        except OSError as error:
            raise ConnectError(f"receiving datagrams: {error.strerror}") from error
        self.drained = len(lengths) < self._most
        if not len(lengths):
            return None
        rows, row_bytes = self._rows(lengths, truncated)
        if self._full_slots < len(self._slot_rows):
            self._adapt(int(lengths.max()))
        return self._usual(rows, row_bytes, round_) or self._sift(rows, row_bytes, round_)

    def _adapt(self, largest_bytes: int) -> None:
        """How many messages to read next: what `_full_slots` full ones hold, if all are as large as the largest lately.

        Under loss the kernel coalesces few packets, and then many messages have to be read at once.
        """
        self._largest_bytes = max(largest_bytes, self._largest_bytes * 15 // 16)
        fitting = self._full_slots * self._per_slot * self.stride // max(self.stride, self._largest_bytes)
        self._most = min(max(self._full_slots, fitting), len(self._slot_rows))

    def _rows(self, lengths: NDArray[np.uint32], truncated: NDArray[np.uint32]) -> tuple[IntArray, IntArray | None]:
        """(row, bytes in it) of every datagram; one message holds several when the kernel has coalesced them.

        None instead of the bytes: every row is full.
        """
        messages = len(lengths)
        # Comparing bytes costs a tenth of a numpy comparison, and most batches are small.
        spoilt = np.count_nonzero(truncated)
        if not spoilt and lengths.tobytes() == self._full_lengths[: 4 * messages]:
            return self._slot_rows[:messages], None
        sizes = lengths.astype(np.int64)
        if spoilt:
            self.counts.malformed += int(spoilt)
            sizes[truncated != 0] = 0
        counts = -(-sizes // self.stride)
        ends = counts.cumsum()
        rows = self._steps[: ends[-1]] + (self._slot_rows[:messages] - ends + counts).repeat(counts)
        rest = sizes - counts * self.stride
        if not np.count_nonzero(rest):
            return rows, None
        row_bytes = np.full(len(rows), self.stride)
        partial = rest < 0
        row_bytes[ends[partial] - 1] += rest[partial]
        return rows, row_bytes

    def _expects(self, round_: int) -> None:
        """What the first half of a sound header looks like in memory in this round."""
        expected = np.zeros(len(self._buffer), [("session", ">u4"), ("round", ">u4")])
        expected["session"], expected["round"] = self.session, round_
        self._expected_round, self._expected = round_, expected.tobytes()
        self._largest_bytes, self._most = self._per_slot * self.stride, self._full_slots

    def _usual(self, rows: IntArray, row_bytes: IntArray | None, round_: int) -> Received | None:
        """The batch when all of it are full chunks of this round; otherwise None."""
        count = len(rows)
        if row_bytes is not None or not count:
            return None
        if round_ != self._expected_round:
            self._expects(round_)
        headers = self._pairs[rows]
        halves = headers.view(">u2")
        if (
            headers.view(np.uint64)[::2].tobytes() != self._expected[: 8 * count]
            or halves[7::8].tobytes() != self._payload_lengths[: 2 * count]
        ):
            return None
        sequences = headers.view(">u4")[2::4].astype(np.int64)
        if sequences.max() >= self._plain_sequences:
            return None
        return Received(rows, sequences, halves[6::8].astype(np.int64))

    def _sift(self, rows: IntArray, row_bytes: IntArray | None, round_: int) -> Received:
        """The chunks of this round among whatever has come."""
        if row_bytes is None:
            row_bytes = np.full(len(rows), self.stride)
        whole = row_bytes >= HEADER_BYTES
        self.counts.malformed += int(len(whole) - whole.sum())
        headers = self._headers[rows]
        ours = whole & (headers["session"] == self.session)
        self.counts.foreign += int(whole.sum() - ours.sum())
        rows, row_bytes, headers = rows[ours], row_bytes[ours], headers[ours]
        sequences = headers["sequence"].astype(np.int64)
        expected = np.where(sequences == self.layout.chunks - 1, self.layout.last_bytes, self.layout.chunk_bytes)
        sound = (
            (sequences < self.layout.chunks) & (headers["length"] == expected) & (row_bytes == expected + HEADER_BYTES)
        )
        current = headers["round"] == round_
        valid = sound & current
        self.counts.malformed += int(len(sound) - sound.sum())
        for other, count in zip(*np.unique(headers["round"][sound & ~current], return_counts=True), strict=True):
            self.counts.other_round[int(other)] = self.counts.other_round.get(int(other), 0) + int(count)
        return Received(rows[valid], sequences[valid], headers["pass"][valid].astype(np.int64))

    def store(self, received: Received, chosen: IntArray, values: WireArray) -> None:
        """Copies the payload of the chosen positions of a batch to their chunks in `values` (chunks, chunk_values)."""
        sequences, rows = received.sequences, received.rows
        if len(chosen) < len(rows):
            sequences, rows = sequences[chosen], rows[chosen]
        for start in range(0, len(rows), STORE_ROWS):  # in portions: numpy gathers them in a place of their own first
            to, at = sequences[start : start + STORE_ROWS], rows[start : start + STORE_ROWS]
            begin, first, count = int(to[0]), int(at[0]), len(to)
            if self._is_run(to, begin) and self._is_run(at, first):
                values[begin : begin + count] = self._bodies[first : first + count]
            else:
                values[to] = self._bodies[at]
        if self._short:
            values[-1, self.layout.last_values :] = 0  # the row behind a short chunk holds older bytes

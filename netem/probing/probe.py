"""Numbered packets from one socket to another: which arrived, in which order, when each left and when it came.

A packet looks like a chunk of the transport (16 bytes of header), so that the links decide about it as about one.
Behind that lies the time at which it was handed to the kernel; when it arrived is the receiving kernel's time
(SO_TIMESTAMPNS, socket(7)). All namespaces share one clock. Both ends are served by one thread, many packets with one
call each way (udp(7), UDP_SEGMENT; recvmmsg(2)): a machine with one core is then as good as any.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netem.kernel.errors import KernelError, attempting
from netem.traffic.plan import HEADERS_BYTES, NS
from netem.traffic.probe import SO_TIMESTAMPNS
from netem.traffic.source import MAX_DATAGRAM_BYTES, MAX_SEGMENTS, SOL_UDP, UDP_SEGMENT

ROUND = 40
"""Of all probe packets: the index that rules with a window ask for."""
ECT_0, CE = 2, 3  # the two bits of ECN in the type of service (RFC 3168)
_SLOTS, _READ_BYTES, _CONTROL_BYTES = 1024, 32, 64
_DRAIN_EVERY = 512  # packets: a receiver's buffer holds many times that
_BEAT_NS = 2_000_000
_LAST_NS = 20_000_000
_BEHIND_S = 0.001
_SEND_LIMIT_S = 10.0

PAYLOAD_MIN = 24
_CONTROL = np.dtype(
    {"names": ["s", "ns", "tos"], "formats": ["<i8", "<i8", "u1"], "offsets": [16, 24, 48], "itemsize": _CONTROL_BYTES}
)
"""Two control messages: the time of arrival, and the type of service (cmsg(3))."""
_MMSGHDR = np.dtype(
    {
        "names": ["iov", "iovlen", "control", "controllen", "flags", "len"],
        "formats": ["<u8", "<u8", "<u8", "<u8", "<u4", "<u4"],
        "offsets": [16, 24, 32, 40, 48, 56],
        "itemsize": 64,
    }
)
_IOVEC = np.dtype([("base", "<u8"), ("len", "<u8")])


def header(itemsize: int) -> np.dtype[Any]:
    """A packet's payload of that many bytes."""
    return np.dtype(
        {
            "names": ["session", "round", "sequence", "pass", "length", "sent_ns"],
            "formats": [">u4", ">u4", ">u4", ">u2", ">u2", "<i8"],
            "offsets": [0, 4, 8, 12, 14, 16],
            "itemsize": itemsize,
        }
    )


Times = NDArray[np.int64]
clock_ns = time.monotonic_ns


@dataclass(frozen=True)
class Sending:
    """`packets` of `packet_bytes` (as IPv4 has them), `batch` at a time, each batch `interval_ns` after the one before.

    linger_ns: how long a packet may be on its way at most, the base path aside. segment: the packets of a batch with
    one call (UDP_SEGMENT).
    """

    packets: int
    packet_bytes: int = HEADERS_BYTES + PAYLOAD_MIN
    batch: int = MAX_SEGMENTS
    interval_ns: int = 0
    linger_ns: int = 0
    ecn: bool = False
    segment: bool = True

    def __post_init__(self) -> None:
        if self.packet_bytes < HEADERS_BYTES + PAYLOAD_MIN:
            raise ValueError(f"probe packets have {HEADERS_BYTES + PAYLOAD_MIN} bytes or more")

    @property
    def payload_bytes(self) -> int:
        return self.packet_bytes - HEADERS_BYTES

    @property
    def train(self) -> int:
        """Packets of one call."""
        if not self.segment:
            return 1
        return max(1, min(self.batch, MAX_SEGMENTS, MAX_DATAGRAM_BYTES // self.payload_bytes))


@dataclass(frozen=True)
class Samples:
    """What arrived, in order of arrival: `sequence`, `sent_ns`, `arrived_ns`, `tos`, each (arrivals,).

    took_ns: from the first packet sent to the last. dropped: by the link, by its own count. late_s: how much later than
    asked this machine's timers let the sender go on meanwhile, (waits,).
    """

    sent: int
    sequence: Times
    sent_ns: Times
    arrived_ns: Times
    tos: NDArray[np.uint8]
    took_ns: int = 0
    dropped: int | None = None
    late_s: tuple[float, ...] = field(default=(), repr=False)

    @property
    def copies(self) -> Times:
        """How often each packet arrived, (sent,)."""
        return np.bincount(self.sequence, minlength=self.sent).astype(np.int64)

    @property
    def lost(self) -> NDArray[np.bool_]:
        """(sent,)."""
        return np.asarray(self.copies == 0, np.bool_)

    @property
    def one_way_s(self) -> NDArray[np.float64]:
        """Of each arrival."""
        return np.asarray((self.arrived_ns - self.sent_ns) / NS, np.float64)


class Inlet:
    """Reads numbered packets from a socket. Not for several threads at once."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
        self._data: NDArray[Any] = np.zeros(_SLOTS, header(_READ_BYTES))
        self._control: NDArray[Any] = np.zeros(_SLOTS, _CONTROL)
        self._iov: NDArray[Any] = np.zeros(_SLOTS, _IOVEC)
        self._headers: NDArray[Any] = np.zeros(_SLOTS, _MMSGHDR)
        number = np.arange(_SLOTS, dtype=np.uint64)
        self._iov["base"] = self._data.ctypes.data + number * np.uint64(_READ_BYTES)
        self._iov["len"] = _READ_BYTES
        self._headers["iov"] = self._iov.ctypes.data + number * np.uint64(_IOVEC.itemsize)
        self._headers["iovlen"] = 1
        self._headers["control"] = self._control.ctypes.data + number * np.uint64(_CONTROL_BYTES)
        self._call = ctypes.CDLL(None, use_errno=True).recvmmsg
        self._call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p)
        self._found: list[tuple[Any, ...]] = []
        self.arrivals = 0

    def wait(self, timeout_s: float) -> bool:
        return bool(select.select([self._sock], [], [], max(0.0, timeout_s))[0])

    def drain(self) -> int:
        """Read what is there; how many packets that were. Raises KernelError."""
        before = self.arrivals
        while (count := self._read()) > 0:
            data, control = self._data[:count], self._control[:count]
            arrived = control["s"] * NS + control["ns"]
            self._found.append(
                (data["sequence"].astype(np.int64), data["sent_ns"].copy(), arrived, control["tos"].copy())
            )
            self.arrivals += count
            if count < _SLOTS:
                break
        return self.arrivals - before

    def _read(self) -> int:
        self._headers["controllen"] = _CONTROL_BYTES
        count = int(self._call(self._sock.fileno(), self._headers.ctypes.data, _SLOTS, socket.MSG_DONTWAIT, None))
        if count < 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            raise KernelError("read probe packets", ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return max(0, count)

    def taken(self, sent: int, took_ns: int, dropped: int | None, late_s: Sequence[float] = ()) -> Samples:
        """What has arrived since the last call."""
        numbers, sent_ns, arrived_ns = (self._column(column) for column in range(3))
        tos = np.concatenate([np.zeros(0, np.uint8), *(part[3] for part in self._found)])
        self._found, self.arrivals = [], 0
        return Samples(sent, numbers, sent_ns, arrived_ns, tos, took_ns, dropped, tuple(late_s))

    def _column(self, column: int) -> Times:
        return np.concatenate([np.zeros(0, np.int64), *(part[column] for part in self._found)])


class Outlet:
    """Sends numbered packets from a connected socket, several with one call where the kernel can."""

    def __init__(self, sock: socket.socket, sending: Sending) -> None:
        self._sock = sock
        self._size = sending.payload_bytes
        sock.settimeout(_SEND_LIMIT_S)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, ECT_0 if sending.ecn else 0)
        self.train = sending.train if self._segments(sending.train) else 1
        self._rows: NDArray[Any] = np.zeros(max(1, self.train), header(self._size))
        self._rows["round"], self._rows["length"] = ROUND, self._size

    def _segments(self, train: int) -> bool:
        try:
            self._sock.setsockopt(SOL_UDP, UDP_SEGMENT, self._size if train > 1 else 0)
        except OSError:
            return False
        return train > 1

    def send(self, first: int, count: int) -> None:
        """Packets first..first+count-1. Raises OSError."""
        for start in range(first, first + count, self.train):
            rows = self._rows[: min(self.train, first + count - start)]
            rows["sequence"] = np.arange(start, start + len(rows))
            rows["sent_ns"] = time.time_ns()
            self._sock.send(rows.data.cast("B") if len(rows) > 1 else rows.tobytes())


def exchange(out: socket.socket, inlet: Inlet, sending: Sending, dropped: Callable[[], int]) -> Samples:
    """Send it all and read what arrives, until as many are there as the link has not dropped (`dropped` says how many
    it has) or nothing comes any more. Errors: KernelError.
    """
    late: list[float] = []
    with attempting("send probe packets"):
        outlet = Outlet(out, sending)
        dropped_before = dropped()
        began = due = clock_ns()
        for first in range(0, sending.packets, sending.batch):
            if sending.interval_ns:
                late.append(_wait_until(inlet, due))
            outlet.send(first, min(sending.batch, sending.packets - first))
            due += sending.interval_ns
            if late and late[-1] > _BEHIND_S:  # a sender that was held up does not catch up in a burst
                due = max(due, clock_ns())
            if sending.batch >= _DRAIN_EVERY or first % _DRAIN_EVERY < sending.batch:
                inlet.drain()
        took = clock_ns() - began
    limit = clock_ns() + sending.linger_ns + NS // 2
    while clock_ns() < limit:
        before = inlet.arrivals
        late.append(_wait_until(inlet, clock_ns() + _BEAT_NS))
        if inlet.arrivals == before and before + dropped() - dropped_before >= sending.packets:
            break
    _wait_until(inlet, clock_ns() + _LAST_NS)  # a copy may come behind the last one
    return inlet.taken(sending.packets, took, dropped() - dropped_before, late)


def _wait_until(inlet: Inlet, due_ns: int) -> float:
    """Reads meanwhile. Seconds by which it is later."""
    while (left_ns := due_ns - clock_ns()) > 0:
        if inlet.wait(left_ns / NS):
            inlet.drain()
    return -left_ns / NS

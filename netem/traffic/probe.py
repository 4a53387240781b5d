"""Light probe packets between two hosts, with the kernel's own time stamps at both ends (timestamping.rst).

A probe is stamped where it enters the sender's queueing discipline (SOF_TIMESTAMPING_TX_SCHED) and where the receiver's
kernel takes it in (SO_TIMESTAMPNS). Both read CLOCK_REALTIME of one machine, so what lies between is the one-way delay,
whatever else the process that sends them has to do.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from netem.traffic.source import REFUSED

SO_TIMESTAMPNS, SO_TIMESTAMPING = 35, 37  # asm-generic/socket.h; the control messages have the same numbers
SOFTWARE, OPT_ID, TX_SCHED, OPT_TSONLY = 1 << 4, 1 << 7, 1 << 8, 1 << 11  # linux/net_tstamp.h
IP_RECVERR, ORIGIN_TIMESTAMPING, TYPE_SCHED = 11, 4, 1  # linux/in.h, linux/errqueue.h
BUFFER_BYTES = 1 << 20
WARM_UP = 3
"""Probes that are not looked at: the first ones find cold caches, and a kernel that is only about to stamp packets."""

_PROBE = struct.Struct("!4sI")
_MARK = b"prob"
_TIME = struct.Struct("=qq")
_EXTENDED_ERROR = struct.Struct("=IBBBBII")
NS = 10**9


@dataclass(frozen=True)
class Probe:
    """Times are CLOCK_REALTIME in nanoseconds; `arrived_ns` None: it has not (yet)."""

    sent_ns: int
    arrived_ns: int | None

    @property
    def delay_s(self) -> float | None:
        return None if self.arrived_ns is None else (self.arrived_ns - self.sent_ns) / NS


@dataclass
class ProbePath:
    """From one host to another. `sender` is connected to the address that `receiver` is bound to."""

    name: str
    sender: socket.socket
    receiver: socket.socket
    _called_ns: list[int] = field(default_factory=list)
    _sent_ns: dict[int, int] = field(default_factory=dict)
    _arrived_ns: dict[int, int] = field(default_factory=dict)
    _forgotten: int = 0

    def __post_init__(self) -> None:
        self.sender.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, SOFTWARE | OPT_ID | TX_SCHED | OPT_TSONLY)
        self.receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self.sender.setblocking(False)
        self.receiver.setblocking(False)

    def send(self) -> None:
        """One probe. One that the host's own queue has no room for is a lost one."""
        number = self._forgotten + len(self._called_ns)
        self._called_ns.append(time.clock_gettime_ns(time.CLOCK_REALTIME))
        try:
            self.sender.send(_PROBE.pack(_MARK, number))
        except OSError as error:
            if error.errno not in REFUSED:
                raise

    def collect(self) -> bool:
        """Take what both kernels have said since; True: every probe has arrived."""
        while (stamp := _sent(self.sender)) is not None:
            self._sent_ns.setdefault(*stamp)  # every port on the way stamps it as well, until the receiver has it
        while (stamp := _arrived(self.receiver)) is not None:
            self._arrived_ns.setdefault(*stamp)  # of copies the first
        return len(self._arrived_ns) >= len(self._called_ns)

    def forget(self) -> None:
        """What was sent so far, and what comes of it later."""
        self._forgotten += len(self._called_ns)
        self._called_ns, self._sent_ns, self._arrived_ns = [], {}, {}

    def probes(self) -> list[Probe]:
        """In the order of sending. Where the kernel has no stamp of a probe's sending, it is the time of the call."""
        numbered = enumerate(self._called_ns, self._forgotten)
        return [Probe(self._sent_ns.get(n, called), self._arrived_ns.get(n)) for n, called in numbered]

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def _sent(sock: socket.socket) -> tuple[int, int] | None:
    """(number, time) of the next stamp in the error queue."""
    while True:
        try:
            _, control, _, _ = sock.recvmsg(1, 256, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            continue  # an ICMP error, which this call has taken off the socket
        stamp_ns = number = None
        for level, kind, data in control:
            if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPING):
                stamp_ns = _ns(data)
            elif (level, kind) == (socket.IPPROTO_IP, IP_RECVERR):
                _, origin, _, _, _, what, identity = _EXTENDED_ERROR.unpack_from(data)
                number = identity if (origin, what) == (ORIGIN_TIMESTAMPING, TYPE_SCHED) else None
        if stamp_ns is not None and number is not None:
            return number, stamp_ns


def _arrived(sock: socket.socket) -> tuple[int, int] | None:
    """(number, time) of the next probe."""
    while True:
        try:
            data, control, _, _ = sock.recvmsg(64, 64, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            continue
        stamps = [_ns(raw) for level, kind, raw in control if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS)]
        if stamps and len(data) == _PROBE.size and data.startswith(_MARK):
            return int(_PROBE.unpack(data)[1]), stamps[0]


def _ns(raw: bytes) -> int:
    seconds, nanoseconds = _TIME.unpack_from(raw)
    return int(seconds) * NS + int(nanoseconds)


def exchange(paths: Sequence[ProbePath], count: int, interval_s: float, limit_s: float) -> list[float]:
    """`count` probes on each path, one every `interval_s`, the paths in turn; then waits for them, up to `limit_s`.

    Returns by how many seconds each sleep in between ended late: what this machine's timers are worth.
    """
    late = []
    began = time.monotonic()
    for number in range(count * len(paths)):
        due = began + number * interval_s / len(paths)
        if (left := due - time.monotonic()) > 0:
            time.sleep(left)
            late.append(time.monotonic() - due)
        paths[number % len(paths)].send()
    await_all(paths, limit_s)
    return late


def await_all(paths: Sequence[ProbePath], limit_s: float) -> None:
    """Until every probe has arrived, or some are taken for lost after this time."""
    deadline = time.monotonic() + limit_s
    while waiting := [path.receiver for path in paths if not path.collect()]:
        left = deadline - time.monotonic()
        if left <= 0:
            return
        select.select(waiting, [], [], left)


def warm_up(paths: Sequence[ProbePath], limit_s: float) -> None:
    """Probes that nobody looks at."""
    exchange(paths, WARM_UP, 0.001, limit_s)
    for path in paths:
        path.forget()

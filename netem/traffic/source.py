"""A packet source: `python -m netem.traffic.source FD`, started by `netem.traffic.process`. Standard library only.

It needs no privileges: sockets, connected and inside their hosts, come over the control socket FD, with what to send
from them. Then it sends when told. All senders of a burst are this one process, which takes turns between them, so
that they are aligned whatever the scheduler does; many packets go with one call (UDP_SEGMENT, udp(7)).

Messages, one JSON object each (SOCK_SEQPACKET). In: {"plan": ..., "segment": bool} with the sockets; {"fire": plan,
"start_ns": time}; {"stop": plan}. Out: {"ready": plan}; {"sent": ...} (see `Sent`). It ends when the other end closes.
"""

from __future__ import annotations

import errno
import json
import select
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from netem.traffic.plan import HEADERS_BYTES, NS, TRAIN_PACKETS, Burst, Sent, Stream, due, from_json, on_off

SOL_UDP, UDP_SEGMENT = 17, 103  # linux/udp.h
MAX_DATAGRAM_BYTES = 65_507
MAX_SEGMENTS = 44
MAX_MESSAGE_BYTES, MAX_SOCKETS = 1 << 16, 250
SPIN_NS = 500_000  # a sleep ends up to this late on an idle machine
TICK_S = 0.001
MAX_BEHIND_NS = 20_000_000
REFUSED = (errno.EAGAIN, errno.ENOBUFS)

clock = time.monotonic_ns


@dataclass
class Sender:
    """Sends packets of one size from one connected socket."""

    sock: socket.socket
    packet_bytes: int
    segment: bool
    sent: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        self._size = self.packet_bytes - HEADERS_BYTES
        self.train = 1
        if self.segment:
            self.train = max(1, min(MAX_SEGMENTS, MAX_DATAGRAM_BYTES // self._size))
        self.sock.setblocking(False)
        self._payload = memoryview(bytes(self._size * self.train))

    def begin(self) -> None:
        """Counts from zero. Plans may share a socket, so its size of packets is set here."""
        self.sent = self.refused = 0
        if self.segment:
            self.sock.setsockopt(SOL_UDP, UDP_SEGMENT, self._size)

    def send(self, packets: int) -> None:
        """Raises OSError, but not for a full buffer: these packets are counted."""
        while packets > 0:
            now = min(packets, self.train)
            try:
                self.sock.send(self._payload[: now * self._size])
                self.sent += now
            except OSError as error:
                if error.errno not in REFUSED:
                    raise
                self.refused += now
            packets -= now


@dataclass
class Job:
    """A plan, its senders, and when it is to begin."""

    number: int
    plan: Burst | Stream
    senders: list[Sender]
    start_ns: int | None = None
    stream: StreamState | None = None

    def begin(self) -> None:
        for sender in self.senders:
            sender.begin()

    def report(self, planned_ns: int, began_ns: int, skipped: int = 0) -> dict[str, Any]:
        sent = tuple(sender.sent for sender in self.senders)
        refused = sum(sender.refused for sender in self.senders)
        return {"sent": asdict(Sent(self.number, planned_ns, began_ns, clock(), sent, refused, skipped))}


def send_burst(job: Job, plan: Burst, start_ns: int) -> dict[str, Any]:
    """Waits for the start, the last half millisecond of it busily, and sends.

    A duration is kept whatever was sent by then: a rate that the machine cannot keep shows in the number of packets.
    """
    job.begin()
    while (left := start_ns - clock()) > 0:
        if left > SPIN_NS:
            time.sleep((left - SPIN_NS) / NS)
    began = clock()
    limit = sys.maxsize if plan.planned is None else plan.planned
    length = sys.maxsize if plan.duration_ns is None else plan.duration_ns
    done = [0] * len(job.senders)
    over = False
    while not over and min(done) < limit:
        elapsed = clock() - began
        over = elapsed >= length
        target = limit if plan.rate_bps is None else min(limit, plan.due(min(elapsed, length)))
        for number, sender in enumerate(job.senders):
            step = min(target - done[number], TRAIN_PACKETS)
            if step > 0:
                sender.send(step)
                done[number] += step
            if plan.rate_bps is None and clock() - began >= length:
                over = True
                break
    return job.report(start_ns, began)


@dataclass
class StreamState:
    """A stream that runs: how much of its time on is over. Behind by too much, it skips instead of catching up."""

    plan: Stream
    began_ns: int
    skipped: int = 0
    _done: int = 0
    _on_ns: int = 0  # time on before the present phase
    _phase_ns: int = 0
    _lengths: Any = field(default=None)

    def __post_init__(self) -> None:
        self._lengths = on_off(self.plan)
        self._phase_ns = self.began_ns
        self._on, self._off = (round(length * NS) for length in next(self._lengths))

    def step(self, now_ns: int) -> tuple[int, float]:
        """(packets to send now, seconds until the next step)."""
        while now_ns >= self._phase_ns + self._on + self._off:
            self._on_ns += self._on
            self._phase_ns += self._on + self._off
            self._on, self._off = (round(length * NS) for length in next(self._lengths))
        inside = min(now_ns - self._phase_ns, self._on)
        target = due(self._on_ns + inside, self.plan.rate_bps, self.plan.packet_bytes)
        packets = target - self._done
        allowed = due(MAX_BEHIND_NS, self.plan.rate_bps, self.plan.packet_bytes)
        if packets > allowed:
            self.skipped += packets - allowed
            packets = allowed
        self._done = target
        until_on = (self._phase_ns + self._on + self._off - now_ns) / NS if inside == self._on else 0.0
        return packets, max(TICK_S, until_on)


class Source:
    """The loop: commands in, packets and reports out."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._jobs: list[Job] = []

    def run(self) -> None:
        """Until the other end has closed the control socket. Raises OSError, ValueError, KeyError, TypeError."""
        wait_s: float | None = None
        while True:
            ready, _, _ = select.select([self._control], [], [], wait_s)
            if ready and not self._command():
                return
            wait_s = self._advance()

    def _command(self) -> bool:
        text, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, MAX_SOCKETS)
        if not text:
            return False
        message = json.loads(text)
        if "plan" in message:
            plan = from_json(message["plan"])
            sockets = [socket.socket(fileno=fd) for fd in descriptors]
            senders = [Sender(sock, plan.packet_bytes, bool(message["segment"])) for sock in sockets]
            self._jobs.append(Job(len(self._jobs), plan, senders))
            self._answer({"ready": len(self._jobs) - 1})
        elif "fire" in message:
            self._jobs[message["fire"]].start_ns = message["start_ns"]
        else:
            self._stop(self._jobs[message["stop"]])
        return True

    def _answer(self, message: dict[str, Any]) -> None:
        self._control.send(json.dumps(message).encode())

    def _advance(self) -> float | None:
        """Does what is due; seconds until there is more, None: only a command can bring something."""
        waits: list[float] = []
        for job in sorted(self._jobs, key=lambda job: job.start_ns or 0):
            if job.stream is not None:
                packets, wait_s = job.stream.step(clock())
                job.senders[0].send(packets)
                waits.append(wait_s)
            elif job.start_ns is not None:
                left_ns = job.start_ns - clock()
                if left_ns <= 4 * SPIN_NS:
                    self._begin(job, job.start_ns)
                    waits.append(0.0)
                else:
                    waits.append((left_ns - 3 * SPIN_NS) / NS)
        return min(waits, default=None)

    def _begin(self, job: Job, start_ns: int) -> None:
        job.start_ns = None
        if isinstance(job.plan, Stream):
            job.begin()
            job.stream = StreamState(job.plan, max(start_ns, clock()))
        else:
            self._answer(send_burst(job, job.plan, start_ns))

    def _stop(self, job: Job) -> None:
        job.start_ns = None
        if job.stream is not None:
            self._answer(job.report(job.stream.began_ns, job.stream.began_ns, job.stream.skipped))
            job.stream = None


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as control:
        Source(control).run()


if __name__ == "__main__":
    main()

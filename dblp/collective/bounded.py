"""One direction of one round over UDP: moves bytes between the sockets and the state machines."""

from __future__ import annotations

from dataclasses import dataclass

from dblp.chunks import FloatArray
from dblp.collective.link import Link
from dblp.io import DataSocket, clock, wait
from dblp.receiver import Receiver
from dblp.sender import Sender
from dblp.wire import Bitmap, Frame, Probe, Stop


@dataclass
class Sent:
    """What one direction of a round cost its sender. Times in seconds, by the sender's clock."""

    bytes: int = 0
    began_s: float = 0.0
    ended_s: float = 0.0

    @property
    def latency_s(self) -> float:
        """From the first send to the read of the stop."""
        return self.ended_s - self.began_s


def send_round(link: Link, machine: Sender, values: FloatArray, deadline: float) -> Sent:
    """Sends `values` (chunks, chunk_values) until the receiver says stop; aborts the machine at the deadline."""
    data = _data(link)
    sent = Sent(began_s=clock())
    link.replay()
    while not machine.finished:
        now = clock()
        if now >= deadline:
            machine.abort()
            break
        for frame, came_as_hint in link.poll():
            if isinstance(frame, Bitmap) and frame.round == machine.round:
                machine.on_bitmap(frame, now)
            elif isinstance(frame, Stop) and frame.round == machine.round:
                machine.on_stop(frame)
            else:
                link.stray(frame, came_as_hint)
        batch = machine.take(now, data.segments)
        if batch is not None:
            sent.bytes += data.send(values, machine.round, batch, deadline)
        for effect in machine.effects():
            link.hint(effect.probe)
            if not effect.again:
                link.control.send(effect.probe, deadline, machine.round)
        if batch is None and not machine.finished:
            _sleep(link, machine, deadline)
    sent.ended_s = clock()
    link.rtt_s = machine.rtt_s
    return sent


def _sleep(link: Link, machine: Sender, deadline: float) -> None:
    timer = machine.next_timer()
    wait(link.fds(data=False), (deadline if timer is None else min(timer, deadline)) - clock())
    machine.handle_timer(clock())


class ReceiveLoop:
    """Receives one direction of one round into `values` (chunks, chunk_values).

    `on_frame` gets every frame that is not a probe of this round; it returns True when it has used it. A frame
    that it uses may call `cancel`, which ends the loop without a stop.
    """

    def __init__(self, link: Link, machine: Receiver, values: FloatArray) -> None:
        self.link, self.machine, self.values = link, machine, values
        self.data = _data(link)
        self.first_at: float | None = None
        self.cancelled = False
        self._answered = -1

    def cancel(self) -> None:
        self.cancelled = True

    def on_frame(self, frame: Frame) -> bool:
        return False

    def run(self, first_limit_s: float, limit_s: float) -> None:
        """Until complete, cancelled, or given up `limit_s` after the first sign of the round.

        Raises nothing at the deadline: the machine then says so. The first sign may take `first_limit_s`.
        """
        deadline = clock() + first_limit_s
        started = False
        self.link.replay()
        while not self.machine.finished and not self.cancelled:
            busy = self._drain()
            busy = self._frames(deadline) or busy
            if busy and not started and (self.first_at is not None or self.started()):
                started, deadline = True, clock() + limit_s
            if clock() >= deadline:
                self.machine.give_up()
            elif not busy:
                self.link.rest(deadline, data=True)
        if not self.cancelled:
            self.link.finish(self.machine.stop(), clock() + limit_s)

    def started(self) -> bool:
        """Whether frames have already shown that the round has begun."""
        return False

    def _drain(self) -> bool:
        busy = False
        while not self.machine.finished:
            received = self.data.receive(self.machine.round)
            if received is None:
                break
            busy = True
            if len(received.sequences):
                self.first_at = self.first_at or clock()
                chosen = self.machine.accept(received.sequences, received.passes)
                self.data.store(received, chosen, self.values)
        return busy

    def _frames(self, deadline: float) -> bool:
        frames = self.link.poll()
        for frame, came_as_hint in frames:
            if isinstance(frame, Probe) and frame.round == self.machine.round:
                self._answer(frame, came_as_hint, deadline)
            elif not self.on_frame(frame):
                self.link.stray(frame, came_as_hint)
        return bool(frames)

    def _answer(self, probe: Probe, came_as_hint: bool, deadline: float) -> None:
        """A probe comes twice where there are hints; the second copy costs nothing, a repetition gets a hint."""
        if probe.probe <= self._answered and not came_as_hint:
            return
        self._drain()
        answer = self.machine.on_probe(probe)
        if answer is None or isinstance(answer, Stop):
            return  # the stop goes out at the end of the loop
        if probe.probe <= self._answered:
            self.link.hint(answer)
            return
        self._answered = probe.probe
        self.link.tell(answer, deadline)


def _data(link: Link) -> DataSocket:
    assert link.data is not None, "a bounded round needs a data socket"
    return link.data

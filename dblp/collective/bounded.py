"""One direction of one round over UDP: moves bytes between the sockets and the state machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dblp.chunks import need, send_order
from dblp.collective.deadline import Deadline
from dblp.collective.link import Link
from dblp.config import Config
from dblp.datagrams import DataSocket, PacketBuffer
from dblp.dtypes import WireArray
from dblp.errors import RoundTimeout
from dblp.io import clock, path_rtt_s, runqueue_s, since
from dblp.pacing import overrun_of
from dblp.receiver import Receiver, ReceiverState
from dblp.sender import Sender
from dblp.wire import IP_UDP_BYTES, Bitmap, Frame, Probe, Stop

UP, DOWN = range(2)
"""Numbers of wire.DIRECTIONS."""
REPROBE_S = 0.001
PROBE_EVERY, PROBES_A_PASS = 1024, 4
"""An answer costs its sender work for every chunk of the round, so large rounds ask more rarely."""
GATHER_S, GATHER_LEAST_S, GATHER_PARTS = 0.002, 0.00006, 8
"""A receiver looks at least this often, and at least this many times in what is left of the round by its pace."""


@dataclass
class Sent:
    """What one direction of a round cost its sender. Times in seconds, by the sender's clock."""

    bytes: int = 0
    began_s: float = 0.0
    ended_s: float = 0.0
    runqueue_s: float | None = None
    """Of that time, how long the sender's thread waited for a core; None: not known."""

    @property
    def latency_s(self) -> float:
        """From the first send to the read of the stop."""
        return self.ended_s - self.began_s


def make_sender(
    config: Config, link: Link, round_: int, direction: int, rank: int, *, window: int, tolerance: float
) -> Sender:
    """The state machine for one direction of one round of worker `rank`, as the profile says."""
    profile, data = config.profile, _data(link)
    chunks = data.layout.chunks
    pace_hz = profile.pace_bps / (8 * (data.stride + IP_UDP_BYTES[4])) if profile.pace_bps else None
    order = send_order(profile.send_order, chunks, seed=config.seed, round_=round_, rank=rank, direction=direction)
    return Sender(
        round_,
        direction,
        order,
        window=window,
        pipelined=profile.probing == "pipelined",
        probe_every=max(PROBE_EVERY, chunks // PROBES_A_PASS),
        reprobe_s=REPROBE_S if profile.hints else None,
        pass_overhead_s=profile.pass_overhead_s,
        rtt_s=link.rtt_s,
        need=need(chunks, tolerance, profile.threshold),
        path_rtt_s=path_rtt_s(link.control.sock),
        overrun=overrun_of(data.segments, pace_hz),
        pace_hz=pace_hz,
    )


def send_round(link: Link, machine: Sender, packets: PacketBuffer, deadline: float) -> Sent:
    """Sends `packets` until the receiver says stop; aborts the machine at the deadline.

    Nothing is raised at the deadline, also where the network takes no more data: it ends this round, not the run.
    """
    waited_s = runqueue_s()
    sent = Sent(began_s=clock())
    try:
        _send_until_stopped(link, machine, packets, deadline, sent)
    except RoundTimeout:
        machine.abort()
    sent.ended_s = clock()
    sent.runqueue_s = since(waited_s)
    link.rtt_s = machine.rtt_s
    return sent


def _send_until_stopped(link: Link, machine: Sender, packets: PacketBuffer, deadline: float, sent: Sent) -> None:
    data = _data(link)
    packets.address(data.session, machine.round)
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
        batch = machine.take(now, data.batch)
        if batch is not None:
            sent.bytes += data.send(packets, batch, deadline)
        for effect in machine.effects():
            link.hint(effect.probe)
            if not effect.again:
                link.control.send(effect.probe, deadline, machine.round)
        if batch is None and not machine.finished:
            _sleep(link, machine, deadline)


def _sleep(link: Link, machine: Sender, deadline: float) -> None:
    timer = machine.next_timer()
    link.rest(deadline if timer is None else min(timer, deadline), data=False)
    machine.handle_timer(clock())


class Watch(Protocol):
    """What a receiver looks for among the frames that are not probes of its round."""

    @property
    def begun(self) -> bool:
        """A frame has shown that the peer has begun this round."""
        ...

    @property
    def over(self) -> bool:
        """A frame has shown that there is nothing to receive."""
        ...

    def take(self, frame: Frame) -> bool:
        """Whether this frame was looked for."""
        ...


class ReceiveLoop:
    """Receives one direction of one round into `values` (chunks, chunk_values).

    Args:
        quiet: tell the sender nothing of a round of which no sign has come before the deadline.

    Attributes:
        told: the stop that the sender has been told, or None.
        runqueue_s: how long this thread waited for a core since the first chunk; None: not known.
    """

    def __init__(self, link: Link, machine: Receiver, values: WireArray, watch: Watch, *, quiet: bool = False) -> None:
        self.link, self.machine, self.values, self.watch = link, machine, values, watch
        self.quiet = quiet
        self.data = _data(link)
        self.first_at: float | None = None
        self.told: Stop | None = None
        self.runqueue_s: float | None = None
        self._answered = -1

    def run(self, deadline: Deadline) -> None:
        """Until complete, over, or given up at the deadline: it raises nothing then, the machine says so."""
        self.link.replay()
        frames = chunks = True
        waited_s = None
        while not self.machine.finished and not self.watch.over:
            busy = chunks and self._drain()
            if not self.machine.finished:  # the stop goes out first: it is the answer to every probe
                busy = (frames and self._frames(deadline)) or busy
            if waited_s is None and self.first_at is not None:
                waited_s = runqueue_s()
            if busy and (self.first_at is not None or self.watch.begun or self._answered >= 0):
                deadline.begin()
            if clock() >= deadline.at():
                self.machine.give_up()
            elif not self.machine.finished:
                frames, chunks = self._rest(deadline)
        if self.watch.over or (self.quiet and self.machine.state is ReceiverState.GIVEN_UP and not deadline.begun):
            return
        self.runqueue_s = since(waited_s)
        self.told = self.machine.stop()
        self.link.finish(self.told, clock() + deadline.limit_s)

    def _rest(self, deadline: Deadline) -> tuple[bool, bool]:
        """Waits for more. Whether there are (frames, chunks).

        While the end of the round is far, chunks gather for a moment: to wake for every few of them would take the
        core from whoever sends.
        """
        machine = self.machine
        if self.first_at is not None and machine.delivered:
            to_go_s = (clock() - self.first_at) * (machine.need - machine.delivered) / machine.delivered
            pause_s = min(GATHER_S, to_go_s / GATHER_PARTS)
            if pause_s >= GATHER_LEAST_S and self.link.gather(pause_s):
                return True, True
        return self.link.rest(deadline.look(), data=True)

    def _drain(self) -> bool:
        """Takes in what the data socket holds. Whether that was anything."""
        received = self.data.receive(self.machine.round)
        busy = received is not None
        while received is not None:
            if len(received.sequences):
                self.first_at = self.first_at or clock()
                chosen = self.machine.accept(received.sequences, received.passes)
                self.data.store(received, chosen, self.values)
            if self.data.drained or self.machine.finished:
                break
            received = self.data.receive(self.machine.round)
        return busy

    def _frames(self, deadline: Deadline) -> bool:
        frames = self.link.poll()
        for frame, came_as_hint in frames:
            if isinstance(frame, Probe) and frame.round == self.machine.round:
                self._answer(frame, came_as_hint, deadline)
            elif not self.watch.take(frame):
                self.link.stray(frame, came_as_hint)
        return bool(frames)

    def _answer(self, probe: Probe, came_as_hint: bool, deadline: Deadline) -> None:
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
        self.link.tell(answer, clock() + deadline.limit_s)


def _data(link: Link) -> DataSocket:
    assert link.data is not None, "a bounded round needs a data socket"
    return link.data

"""What connects two peers: the control connection, hints beside it, and the data plane."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable
from typing import TypeVar

from dblp.chunks import Layout
from dblp.config import Config
from dblp.datagrams import DataSocket
from dblp.errors import HandshakeError, PeerLost, RoundTimeout
from dblp.events import Events
from dblp.io import Control, Hints, clock, limit_pacing, path_rtt_s, udp_socket
from dblp.wire import ETHERNET_BYTES, HEADER_BYTES, IP_UDP_BYTES, End, Frame, Probe, Refuse, Start, Stop

F = TypeVar("F", bound=Frame)

REPEAT_FIRST_S, REPEAT_LAST_S = 0.005, 0.08
SOCKET_BYTES = 64 << 20
SELECT_LIMIT = 1024
"""select(2) takes file descriptors below this."""


class Link:
    """One peer. Used by one thread.

    Frames that come before they are wanted wait in a list; frames of rounds that are over are dropped, except
    that a repeated probe of a finished round gets its stop again.
    """

    def __init__(self, control: Control, data: DataSocket | None, hints: Hints | None) -> None:
        self.control, self.data, self.hints = control, data, hints
        self._frames, self._anything = select.poll(), select.poll()
        for fd in self.fds(data=False):
            self._frames.register(fd, select.POLLIN)
        for fd in self.fds(data=True):
            self._anything.register(fd, select.POLLIN)
        self.round = 0
        self.rtt_s = path_rtt_s(control.sock)  # then as each round that was sent has measured it
        self._early: list[tuple[Frame, bool]] = []
        self._again: list[tuple[Frame, bool]] = []
        self._last_stop: Stop | None = None
        self._last_end: End | None = None
        self.last_heard: End | None = None  # the last end of a round that the peer has told
        self._standing: list[Frame] = []
        self._repeat_at = 0.0
        self._repeat_after_s = REPEAT_FIRST_S

    @property
    def peer(self) -> str:
        return self.control.peer

    def fds(self, *, data: bool) -> list[int]:
        """File descriptors to wait on for frames, and for chunks too when `data`."""
        fds = [self.control.fileno()]
        if self.hints is not None:
            fds.append(self.hints.fileno())
        if data and self.data is not None:
            fds.append(self.data.fileno())
        return fds

    def advance(self, round_: int) -> None:
        """From now on this is the current round; frames that were early come up again."""
        self.round = round_
        self._standing.clear()
        self.replay()

    def replay(self) -> None:
        """Frames that were early come up again at the next poll.

        Whoever begins to wait for another kind of frame calls it: a stop and the frame behind it (the end of the
        round, the probe of the broadcast) may be read together, and the second one is not repeated.
        """
        self._again, self._early = self._again + self._early, []

    def tell(self, frame: Frame, deadline: float) -> None:
        """Send a frame over the reliable channel, and as a hint where there are hints."""
        if self.hints is not None:
            self.hints.send(frame)
        self.control.send(frame, deadline, self.round)

    def stand_by(self, frame: Frame) -> None:
        """Repeat this frame as a hint, less and less often, while this side waits in the current round.

        So a frame that TCP holds back after losses costs milliseconds, not its time-outs.
        """
        self._standing.append(frame)
        self._repeat_after_s = REPEAT_FIRST_S
        self._repeat_at = clock() + self._repeat_after_s

    def rest(self, deadline: float, *, data: bool) -> tuple[bool, bool]:
        """Wait until there is something to read, at most until the deadline. Whether there are (frames, chunks)."""
        standing = self.hints is not None and bool(self._standing)
        until = min(deadline, self._repeat_at) if standing else deadline
        poller = self._anything if data else self._frames
        ready = [fd for fd, _ in poller.poll(max(0.0, until - clock()) * 1000)]
        if standing and not ready and clock() >= self._repeat_at:
            for frame in self._standing:
                self.hint(frame)
            self._repeat_after_s = min(2 * self._repeat_after_s, REPEAT_LAST_S)
            self._repeat_at = clock() + self._repeat_after_s
        chunks = data and self.data is not None and self.data.fileno() in ready
        return len(ready) > chunks, chunks

    def gather(self, longest_s: float) -> bool:
        """Let chunks gather in the socket for this long, or until a frame comes. Whether there are frames."""
        fds = self.fds(data=False)
        if max(fds) >= SELECT_LIMIT:
            return False
        return bool(select.select(fds, (), (), longest_s)[0])  # poll(2) as Python has it counts milliseconds

    def hint(self, frame: Frame) -> None:
        if self.hints is not None:
            self.hints.send(frame)

    def finish(self, stop: Stop, deadline: float) -> None:
        """Send the stop of a round, and remember it for probes that come late."""
        self._last_stop = stop
        self.tell(stop, deadline)

    def end(self, end: End, deadline: float) -> None:
        """Send the end of a round, and remember it for a peer that has missed it."""
        self._last_end = end
        self.tell(end, deadline)

    def poll(self) -> list[tuple[Frame, bool]]:
        """(frame, came as a hint) in order of arrival, without waiting. Raises HandshakeError when the peer refuses."""
        frames, self._again = self._again, []
        ready = {fd for fd, _ in self._frames.poll(0)}
        if not ready:  # the usual case while sending: one system call, nothing allocated
            return frames
        if self.hints is not None and self.hints.fileno() in ready:
            frames.extend((frame, True) for frame in self.hints.poll())
        if self.control.fileno() not in ready:
            return frames
        try:
            frames.extend((frame, False) for frame in self.control.poll(self.round))
        except PeerLost:
            if not frames:
                raise
            return frames  # its last words first; the next call tells that the peer has gone
        for frame, _ in frames:
            if isinstance(frame, End):
                self.last_heard = frame
            if isinstance(frame, Refuse):
                raise HandshakeError(f"{self.peer}: {frame.reason.decode(errors='replace')}")
        return frames

    def stray(self, frame: Frame, came_as_hint: bool) -> None:
        """Keep a frame that is early, drop one that is over."""
        stop = self._last_stop
        if isinstance(frame, Probe) and stop and (frame.round, frame.direction) == (stop.round, stop.direction):
            if came_as_hint:
                self.hint(stop)
            return
        end = self._last_end
        if isinstance(frame, Start | Stop) and end and frame.round == end.round < self.round:
            if came_as_hint:
                self.hint(end)  # the peer still waits in that round
            return
        if getattr(frame, "round", self.round) >= self.round:
            self._early.append((frame, came_as_hint))

    def close(self) -> None:
        for part in (self.control, self.data, self.hints):
            if part is not None:
                part.close()

    def wait_for(self, kind: type[F], matches: Callable[[F], bool], limit_s: float, phase: str) -> F:
        """The first frame of a kind that matches; everything else is kept or dropped as `stray` says.

        Raises RoundTimeout after `limit_s`.
        """
        deadline = clock() + limit_s
        self.replay()
        while True:
            found: F | None = None
            for frame, came_as_hint in self.poll():
                if found is None and isinstance(frame, kind) and matches(frame):
                    found = frame
                else:
                    self.stray(frame, came_as_hint)
            if found is not None:
                return found
            self.rest(deadline, data=False)
            if clock() >= deadline:
                raise RoundTimeout(self.peer, self.round, phase, limit_s)


def frame_rate_bps(config: Config, layout: Layout) -> float:
    """The profile's rate of IP packets as one of Ethernet frames, which is what a qdisc counts."""
    packet_bytes = layout.chunk_bytes + HEADER_BYTES + IP_UDP_BYTES[4]
    return config.profile.pace_bps * (packet_bytes + ETHERNET_BYTES) / packet_bytes


def open_link(
    control: Control,
    config: Config,
    events: Events,
    layout: Layout,
    session: int,
    *,
    own_ports: tuple[int, int],
    peer_ports: tuple[int, int],
) -> Link:
    """The data plane beside a control connection: data and hint sockets, connected to the peer's (data, hint) ports.

    The `tcp` transport has none of them. Raises ConnectError when a port is taken; only `control` stays open then.
    """
    if config.is_tcp:
        return Link(control, None, None)
    own, peer = control.hosts()
    made = events.socket("udp", SOCKET_BYTES, SOCKET_BYTES)
    with contextlib.ExitStack() as opened:
        sock = opened.enter_context(udp_socket((own, own_ports[0]), made))
        sock.connect((peer, peer_ports[0]))
        if config.profile.pace_bps:
            limit_pacing(sock, frame_rate_bps(config, layout))
        data, hints = DataSocket(sock, layout, session, offload=config.offload, peer=control.peer), None
        if config.profile.hints:
            sock = opened.enter_context(udp_socket((own, own_ports[1])))
            sock.connect((peer, peer_ports[1]))
            hints = Hints(sock, session, config.mtu - IP_UDP_BYTES[4])
        link = Link(control, data, hints)
        opened.pop_all()  # they are the link's now
    return link

"""Frames that are read together with the stop of a round: none of them may be lost, because none is repeated."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dblp.chunks import Layout
from dblp.collective import link
from dblp.collective.bounded import ReceiveLoop, send_round
from dblp.collective.deadline import Deadline
from dblp.collective.link import Link
from dblp.collective.stream import StreamReceive, send_stream
from dblp.collective.worker_flow import Ending
from dblp.datagrams import DataSocket, PacketBuffer
from dblp.errors import ConnectError, HandshakeError, PeerLost, RoundTimeout
from dblp.events import NoEvents
from dblp.io import Control, Hints, clock, udp_socket, wait
from dblp.receiver import Receiver
from dblp.sender import Batch, Sender
from dblp.wire import Bitmap, Bye, End, Frame, FrameReader, Hello, Probe, Refuse, Start, Stop, encode
from tests.loopback.collective_world import config_of, free_base

UP, DOWN = 0, 1
LAYOUT = Layout(8 * 364, 364)
STOP = Stop(0, UP, 0, 7, 0, 8, b"\xff")
END = End(0, 1, 0, 0.0)


class Pair:
    """A link to a peer that this test plays by hand."""

    def __init__(self) -> None:
        ours, self.peer = socket.socketpair()
        self.peer.settimeout(2.0)
        self.socks = [self.peer]
        self.peer_data, self.data = self._udp(), self._udp()
        self.peer_hint, hint = self._udp(), self._udp()
        for one, other in ((self.peer_data, self.data), (self.peer_hint, hint)):
            one.connect(other.getsockname())
            other.connect(one.getsockname())
        control = Control.__new__(Control)  # a Unix socket has no TCP_NODELAY
        ours.setblocking(False)
        control.__dict__.update(sock=ours, peer="peer", _reader=FrameReader())
        self.link = Link(control, DataSocket(self.data, LAYOUT, 5), Hints(hint, 5, 1472))
        self.socks += [ours, hint]

    def _udp(self) -> socket.socket:
        sock = udp_socket(("127.0.0.1", 0))
        self.socks = [*getattr(self, "socks", []), sock]
        return sock

    def says(self, *frames: Frame) -> None:
        self.peer.sendall(b"".join(map(encode, frames)))

    def heard(self) -> list[Frame]:
        return list(FrameReader().feed(self.peer.recv(1 << 16)))

    def hinted(self) -> list[Frame]:
        """Hints that have come so far."""
        return Hints(self.peer_hint, 5, 1472).poll()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for sock in made.socks:
        sock.close()


def sent_up(pair: Pair) -> None:
    pair.link.advance(0)
    machine = Sender(0, UP, np.arange(8), window=64, pipelined=False)
    send_round(pair.link, machine, PacketBuffer(LAYOUT), clock() + 2.0)
    assert machine.stop == STOP


def receive_down(pair: Pair) -> Ending:
    ending = Ending(0)
    ReceiveLoop(pair.link, Receiver(0, DOWN, 8, 8), LAYOUT.matrix(), ending).run(Deadline(1.0, 1.0))
    return ending


def test_end_that_is_read_with_the_stop_ends_the_wait_for_the_broadcast(pair: Pair) -> None:
    pair.says(STOP, END)
    sent_up(pair)
    assert receive_down(pair).end == END


def test_probe_of_the_broadcast_that_is_read_with_the_stop_is_answered(pair: Pair) -> None:
    pair.says(STOP, Probe(0, DOWN, 0, 3), END)
    sent_up(pair)
    receive_down(pair)
    assert pair.heard()[0] == Bitmap(0, DOWN, 0, 3, b"\x00")


def test_a_complete_receiver_says_stop_before_it_looks_at_probes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every probe that came meanwhile would cost a look at the socket, and the sender goes on until it has the stop."""
    machine, polled = Receiver(0, DOWN, 8, 8), []
    genuine = pair.link.poll
    monkeypatch.setattr(pair.link, "poll", lambda: polled.append(machine.finished) or genuine())
    packets = PacketBuffer(LAYOUT)
    packets.address(5, 0)
    order = np.arange(8)
    DataSocket(pair.peer_data, LAYOUT, 5).send(packets, Batch(order, np.zeros(8, np.int64)), clock() + 1.0)
    pair.says(Probe(0, DOWN, 0, 8), Probe(0, DOWN, 1, 8))
    wait([pair.data.fileno()], 2.0)
    ReceiveLoop(pair.link, machine, LAYOUT.matrix(), Ending(0)).run(Deadline(2.0, 2.0))
    assert [type(frame) for frame in pair.heard()] == [Stop]
    assert not any(polled)


def test_end_that_is_read_with_the_stop_of_a_stream_ends_the_wait(pair: Pair) -> None:
    ours, theirs = socket.socketpair()
    pair.socks += [ours, theirs]
    ours.setblocking(False)
    pair.link.advance(0)
    pair.says(STOP, END)
    _, stop = send_stream(pair.link, ours, 5, 0, UP, LAYOUT.matrix(), clock() + 2.0)
    assert stop == STOP
    ending = Ending(0)
    StreamReceive(pair.link, ours, 5, 0, DOWN, LAYOUT.matrix(), ending).run(Deadline(1.0, 1.0))
    assert ending.end == END


def test_frames_of_a_round_that_is_over_are_dropped_and_of_the_next_are_kept(pair: Pair) -> None:
    pair.link.advance(4)
    for round_ in (3, 4, 5):
        pair.link.stray(Start(round_, 1.0, 0), False)
    pair.link.advance(5)
    found = pair.link.wait_for(Start, lambda frame: frame.round == 5, 1.0, "testing")
    assert found == Start(5, 1.0, 0)
    pair.link.advance(6)
    with pytest.raises(RoundTimeout, match=r"peer, round 6: testing took longer than 0\.01 s"):
        pair.link.wait_for(Start, lambda frame: True, 0.01, "testing")


def test_repeated_probe_of_a_finished_round_gets_its_stop_again_as_a_hint(pair: Pair) -> None:
    stop = Stop(0, DOWN, 0, 7, 0, 8, b"\xff")
    pair.link.finish(stop, clock() + 1.0)
    pair.peer_hint.recv(1 << 16)
    pair.link.stray(Probe(0, DOWN, 1, 8), True)
    pair.peer_hint.settimeout(2.0)
    assert encode(stop) in pair.peer_hint.recv(1 << 16)
    pair.link.stray(Probe(0, DOWN, 1, 8), False)  # over the reliable channel the stop is already on its way
    pair.peer_hint.setblocking(False)
    with pytest.raises(BlockingIOError):
        pair.peer_hint.recv(1)


def test_refusal_is_told_as_the_reason_even_where_sending_fails_first(pair: Pair) -> None:
    pair.says(Refuse(b"lost worker 2"))
    pair.peer.close()
    with pytest.raises(HandshakeError, match="lost worker 2"):
        pair.link.tell(Start(0, 1.0, 0), clock() + 1.0)


def test_last_words_of_a_peer_that_has_gone_are_heard_first(pair: Pair) -> None:
    """A goodbye that was read with the answer before it."""
    pair.says(Start(0, 1.0, 0), Bye(1))
    pair.link.wait_for(Start, lambda frame: True, 1.0, "testing")
    pair.peer.close()
    assert pair.link.wait_for(Bye, lambda frame: True, 1.0, "testing") == Bye(1)
    with pytest.raises(PeerLost):
        pair.link.poll()


def test_data_plane_that_cannot_be_opened_leaves_no_socket_open(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def remember(*args: Any) -> socket.socket:
        made.append(udp_socket(*args))
        return made[-1]

    monkeypatch.setattr(link, "udp_socket", remember)
    base = free_base()
    with (
        socket.create_server(("127.0.0.1", base)) as listener,
        socket.create_connection(("127.0.0.1", base)) as sock,
        udp_socket(("127.0.0.1", base + 301)),
    ):
        ports = {"own_ports": (base + 101, base + 301), "peer_ports": (base + 201, base + 401)}
        with pytest.raises(ConnectError, match=f"UDP port {base + 301}"):
            link.open_link(Control(sock, "peer"), config_of({"kind": "bounded"}), NoEvents(), LAYOUT, 5, **ports)
        listener.accept()[0].close()
        assert sock.fileno() >= 0
    assert [one.fileno() for one in made] == [-1]


def test_network_that_takes_nothing_ends_the_round_at_its_deadline(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(data: DataSocket, packets: object, batch: object, deadline: float) -> int:
        raise RoundTimeout(data.peer, 0, "sending datagrams", 0.1)

    monkeypatch.setattr(DataSocket, "send", full)
    machine = Sender(0, DOWN, np.arange(8), window=64, pipelined=False)
    send_round(pair.link, machine, PacketBuffer(LAYOUT), clock() + 0.1)
    assert machine.finished
    assert machine.stop is None


def test_closed_connection_is_a_lost_peer(pair: Pair) -> None:
    pair.peer.close()
    with pytest.raises(PeerLost, match="lost peer in round 9 while sending Hello"):
        pair.link.control.send(Hello(b"0" * 16, 1, 0, b""), clock() + 1.0, 9)
    with pytest.raises(PeerLost, match="closed the connection"):
        pair.link.poll()


def test_a_peer_that_missed_the_end_gets_it_again_as_a_hint(pair: Pair) -> None:
    pair.link.advance(0)
    pair.link.end(END, clock() + 1.0)
    pair.link.advance(1)
    assert pair.heard() == [END]
    pair.link.stray(Start(0, 1.0, 0), True)
    pair.link.stray(Stop(0, DOWN, 0, 7, 0, 8, b"\xff"), True)
    pair.link.stray(Start(0, 1.0, 0), False)  # the copy that TCP delivers late asks for nothing
    assert pair.hinted().count(END) == 3
    pair.peer.setblocking(False)
    with pytest.raises(BlockingIOError):
        pair.peer.recv(1)


def test_frames_that_stand_are_repeated_while_waiting_and_end_with_the_round(pair: Pair) -> None:
    start = Start(0, 1.0, 0)
    pair.link.advance(0)
    pair.link.stand_by(start)
    with pytest.raises(RoundTimeout):
        pair.link.wait_for(End, lambda frame: True, 0.1, "testing")
    repeated = pair.hinted().count(start)
    assert 2 <= repeated <= 6
    pair.link.advance(1)
    with pytest.raises(RoundTimeout):
        pair.link.wait_for(End, lambda frame: True, 0.05, "testing")
    assert pair.hinted().count(start) == 0

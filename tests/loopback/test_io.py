"""Datagram sockets on loopback: the fast path and the plain one give the same, and strangers are counted."""

from __future__ import annotations

import errno
import select
import socket
import struct
from typing import Any

import numpy as np
import pytest

from dblp import mmsg
from dblp.chunks import Layout
from dblp.config import Profile
from dblp.datagrams import DataCounts, DataSocket, PacketBuffer
from dblp.dtypes import BFLOAT16
from dblp.errors import ConnectError, RoundTimeout
from dblp.io import (
    Hints,
    clock,
    limit_pacing,
    pacing_limit_bps,
    receive_window,
    socket_drops,
    udp_socket,
    wait,
)
from dblp.sender import Batch
from dblp.wire import Bitmap, Probe, encode_hint
from tests.loopback.collective_world import config_of, rounds_body, run_world, tensors_of

LAYOUT = Layout(20 * 364 + 100, 364)
SESSION = 0xDEADBEEF
VALUES = np.arange(LAYOUT.chunks * 364, dtype=np.float32).reshape(LAYOUT.chunks, 364)
VALUES[-1, 100:] = 0.0
PATHS = ["fast", "no offload", "no recvmmsg", "plain"]


def make(sock: socket.socket, path: str, monkeypatch: pytest.MonkeyPatch, session: int = SESSION) -> DataSocket:
    with monkeypatch.context() as patch:
        if path in ("no recvmmsg", "plain"):
            patch.setattr(mmsg, "available", lambda: False)
        made = DataSocket(sock, LAYOUT, session, offload=path in ("fast", "no recvmmsg"))
    assert isinstance(made._slots, mmsg.Receiver) == (path in ("fast", "no offload"))
    return made


def packed(round_: int, values: Any = VALUES) -> PacketBuffer:
    packets = PacketBuffer(LAYOUT)
    packets.values[:] = values
    packets.address(SESSION, round_)
    return packets


def batch(sequences: list[int], passes: list[int] | None = None) -> Batch:
    return Batch(np.array(sequences, np.int64), np.array(passes or [0] * len(sequences), np.int64))


def drain(data: DataSocket, round_: int, count: int, values: Any = None) -> list[tuple[int, int]]:
    """(sequence, pass) of what arrives until `count` chunks have, or nothing more comes."""
    got: list[tuple[int, int]] = []
    while len(got) < count and wait([data.fileno()], 2.0):
        received = data.receive(round_)
        if received is not None:
            got += zip(received.sequences.tolist(), received.passes.tolist(), strict=True)
            if values is not None:
                data.store(received, np.arange(len(received.rows)), values)
    return got


@pytest.mark.parametrize("sends", PATHS)
@pytest.mark.parametrize("receives", PATHS)
def test_all_paths_carry_the_same_chunks(socks: Any, sends: str, receives: str, monkeypatch: Any) -> None:
    sender, receiver = make(socks[0], sends, monkeypatch), make(socks[1], receives, monkeypatch)
    order = list(range(LAYOUT.chunks))[::-1]  # the short chunk first
    values = np.full_like(VALUES, 7.0)
    size = sender.send(packed(3), batch(order, order), clock() + 5.0)
    assert size == 4 * LAYOUT.values + 16 * LAYOUT.chunks
    assert drain(receiver, 3, LAYOUT.chunks, values) == list(zip(order, order, strict=True))
    assert np.array_equal(values, VALUES)
    assert receiver.counts == DataCounts()
    assert socket_drops(socks[1]) == 0


@pytest.mark.parametrize("receives", PATHS)
@pytest.mark.parametrize("at", [0, 1, 9, 20])
def test_short_last_chunk_anywhere_in_a_segmented_batch(
    socks: Any, at: int, receives: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = make(socks[0], "fast", monkeypatch), make(socks[1], receives, monkeypatch)
    sequences = list(range(20))
    sequences.insert(at, 20)
    values = np.full_like(VALUES, 7.0)
    sender.send(packed(0), batch(sequences), clock() + 5.0)
    assert [sequence for sequence, _ in drain(receiver, 0, 21, values)] == sequences
    assert np.array_equal(values, VALUES)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("last_values", [728, 2, 1], ids="last {}".format)
def test_chunks_of_16_bit_values_carry_twice_as_many(
    socks: Any, path: str, last_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a last chunk whose length is no multiple of 4."""
    layout = Layout(9 * 728 + last_values, 728, BFLOAT16)
    with monkeypatch.context() as patch:
        patch.setattr("tests.loopback.test_io.LAYOUT", layout)
        sender, receiver = make(socks[0], path, monkeypatch), make(socks[1], path, monkeypatch)
        values = np.random.default_rng(1).integers(0, 1 << 16, layout.matrix().shape, np.uint16)
        values[-1, last_values:] = 0
        size = sender.send(packed(3, values), batch(list(range(10))), clock() + 5.0)
    assert size == 10 * 16 + 2 * layout.values
    got = np.full_like(values, 7)
    assert drain(receiver, 3, 10, got) == [(sequence, 0) for sequence in range(10)]
    assert np.array_equal(got, values)
    assert receiver.counts == DataCounts()


@pytest.mark.parametrize("receives", PATHS)
def test_row_behind_a_short_chunk_holds_no_older_bytes(
    socks: Any, receives: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = make(socks[0], "fast", monkeypatch), make(socks[1], receives, monkeypatch)
    values = np.zeros_like(VALUES)
    for sequence in (19, 20):  # both land at the start of the receive buffer
        sender.send(packed(0, VALUES + np.float32(1)), batch([sequence]), clock() + 5.0)
        assert drain(receiver, 0, 1, values) == [(sequence, 0)]
    assert not values[20, 100:].any()
    assert values[20, :100].all()


def test_segmentation_offload_is_in_use_on_this_kernel(socks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message holds many chunks where the kernel coalesces; the rows are then parts of one slot."""
    sender, receiver = make(socks[0], "fast", monkeypatch), make(socks[1], "fast", monkeypatch)
    assert sender.gso
    sender.send(packed(0), batch(list(range(20))), clock() + 5.0)
    wait([receiver.fileno()], 2.0)
    lengths, truncated = receiver._slots.fill(receiver.fileno(), 1)
    assert lengths.tolist() == [20 * receiver.stride]
    assert not truncated.any()


def test_kernel_that_refuses_to_segment_gets_single_datagrams(socks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = make(socks[0], "fast", monkeypatch), make(socks[1], "plain", monkeypatch)

    class Refusing:
        """Fails as Linux before 5.3 does for a device without checksum offload: udp_send_skb, -EIO."""

        def __init__(self, sock: socket.socket) -> None:
            self.sock = sock

        def send(self, data: memoryview) -> int:
            raise OSError(errno.EIO, "Input/output error")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.sock, name)

    sender.sock = Refusing(socks[0])  # type: ignore[assignment]
    for _ in range(2):
        sender.send(packed(0), batch(list(range(21))), clock() + 5.0)
        assert [sequence for sequence, _ in drain(receiver, 0, 21)] == list(range(21))
    assert not sender.gso


@pytest.mark.parametrize("receives", PATHS)
def test_strangers_are_counted_and_dropped(socks: Any, receives: str, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = make(socks[1], receives, monkeypatch)
    full, short = b"\x01" * (4 * 364), b"\x02" * 400

    def chunk(
        session: int = SESSION, round_: int = 3, sequence: int = 1, length: int = 1456, data: bytes = full
    ) -> bytes:
        return struct.pack("!IIIHH", session, round_, sequence, 0, length) + data

    sound = [chunk(), chunk(sequence=20, length=400, data=short)]
    foreign = [chunk(session=1), chunk(session=2, data=b"")]
    malformed = [
        b"x",
        chunk(sequence=21),
        chunk(sequence=0xFFFFFFFF),
        chunk(length=1452),
        chunk(length=1452, data=full[:-4]),
        chunk(sequence=20),
        chunk(data=full[:-1]),
    ]
    if receives != "fast":  # coalesced segments are cut at the chunk's size, so the surplus is a segment of its own
        malformed.append(chunk(data=full + b"more"))
    others = [chunk(round_=2), chunk(round_=2), chunk(round_=0xFFFFFFFF)]
    for datagram in [*foreign, *malformed, *others, *sound]:
        socks[0].send(datagram)
    assert drain(receiver, 3, 2) == [(1, 0), (20, 0)]
    assert receiver.counts == DataCounts(len(foreign), len(malformed), {2: 2, 0xFFFFFFFF: 1})


@pytest.mark.parametrize("receives", PATHS)
def test_answer_of_a_closed_port_is_no_failure(receives: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sock, other = udp_socket(("127.0.0.1", 0)), udp_socket(("127.0.0.1", 0))
    sock.connect(other.getsockname())
    other.connect(sock.getsockname())
    with sock, other:
        data = make(sock, receives, monkeypatch)
        other.send(struct.pack("!IIIHH", SESSION, 0, 1, 0, 1456) + bytes(1456))
        other.close()
        for _ in range(3):
            data.send(packed(0), batch([1, 20]), clock() + 5.0)
        assert drain(data, 0, 1) == [(1, 0)]
        assert data.receive(0) is None


def test_full_socket_is_a_timeout_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with one, other:
        data = make(one, "no offload", monkeypatch)
        with pytest.raises(RoundTimeout, match=r"the peer, round 4: sending datagrams \(.*full\) took longer than 0.0"):
            for _ in range(10_000):
                data.send(packed(4), batch([1]), clock() + 0.05)


def test_full_interface_queue_is_asked_again_after_pauses(socks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make(socks[0], "no offload", monkeypatch)
    calls = []

    def full(fd: int, start: int, end: int, last_bytes: int) -> int:
        """An interface without room: it says so at once, however often it is asked."""
        calls.append(clock())
        raise OSError(errno.ENOBUFS, "No buffer space available")

    monkeypatch.setattr(data._singles, "send", full)
    with pytest.raises(RoundTimeout, match="interface's queue stays full"):
        data.send(packed(0), batch([1]), clock() + 0.05)
    assert 2 <= len(calls) <= 60


def test_too_large_datagram_names_the_mtu() -> None:
    sock = udp_socket(("127.0.0.1", 0))
    sock.connect(("127.0.0.1", 9))
    with sock:
        layout = Layout(16_380, 16_380)
        data = DataSocket(sock, layout, SESSION, offload=False)
        with pytest.raises(ConnectError, match=r"65536 bytes.*set mtu lower"):
            data.send(PacketBuffer(layout), batch([0]), clock() + 1.0)


def test_port_in_use_names_the_port() -> None:
    with udp_socket(("127.0.0.1", 0)) as taken, pytest.raises(ConnectError, match=str(taken.getsockname()[1])):
        udp_socket(taken.getsockname()[:2])


def test_window_is_what_the_buffer_holds_without_a_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many datagrams as advertised, one by one (the dearest way), while the receiver does not read."""
    for rcvbuf in (4096, 65536, 212_992):
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        with udp_socket(("127.0.0.1", 0)) as sock, udp_socket(("127.0.0.1", 0), receiver) as target:
            sock.connect(target.getsockname())
            target.connect(sock.getsockname())
            data = make(sock, "no offload", monkeypatch)
            window = receive_window(target)
            if rcvbuf == 4096:
                continue  # the floor of 8 is a promise that such a buffer cannot keep; re-probing repairs it
            for number in range(window):
                data.send(packed(0), batch([number % 20]), clock() + 5.0)
            got = make(target, "plain", monkeypatch)
            assert len(drain(got, 0, window)) == window
            assert socket_drops(target) == 0


def test_hints_are_checked_and_never_too_large() -> None:
    one, other = udp_socket(("127.0.0.1", 0)), udp_socket(("127.0.0.1", 0))
    with one, other:
        one.connect(other.getsockname())
        other.connect(one.getsockname())
        ours, theirs = Hints(one, 5, 100), Hints(other, 5, 100)
        ours.send(Bitmap(0, 0, 0, 0, bytes(100)))  # larger than max_bytes: left to the reliable channel
        one.send(encode_hint(6, Probe(1, 0, 0, 0)))
        one.send(b"garbage")
        one.send(b"")
        ours.send(Probe(2, 0, 0, 0))
        wait([theirs.fileno()], 2.0)
        assert theirs.poll() == [Probe(2, 0, 0, 0)]
        assert theirs.poll() == []
        other.close()
        ours.send(Probe(3, 0, 0, 0))  # nobody there: a lost hint is no error
        ours.send(Probe(4, 0, 0, 0))
        assert ours.poll() == []


def test_wait_is_limited_and_wakes() -> None:
    one, other = socket.socketpair()
    with one, other:
        began = clock()
        assert not wait([one.fileno()], 0.02)
        assert clock() - began >= 0.02
        assert not wait([one.fileno()], -1.0)
        other.send(b"x")
        assert wait([one.fileno()], None)
        assert wait([one.fileno()], 0.0, select.POLLOUT)


# Pacing


@pytest.mark.parametrize("rate_bps", [8_000.0, 500e6, 40e9, 400e9, 1e30])
def test_the_kernel_is_told_the_rate_of_a_paced_sender(socks: Any, rate_bps: float) -> None:
    """Read back. 40 Gbit/s do not fit into the 32 bits of kernels before 4.20."""
    assert pacing_limit_bps(socks[0]) is None
    limit_pacing(socks[0], rate_bps)
    assert pacing_limit_bps(socks[0]) == pytest.approx(min(1.25 * rate_bps, 8 * 2.0**64))
    assert pacing_limit_bps(socks[1]) is None
    socks[0].send(b"x")  # no qdisc here keeps to it, and none minds
    assert wait([socks[1].fileno()], 2.0)


def test_only_a_paced_profile_sets_a_rate_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []
    genuine = DataSocket.__init__

    def spy(self: DataSocket, sock: socket.socket, *args: Any, **more: Any) -> None:
        limits.append(pacing_limit_bps(sock))
        genuine(self, sock, *args, **more)

    monkeypatch.setattr(DataSocket, "__init__", spy)
    tensors = tensors_of(3)
    for pace, expected in ((0.0, None), (750e6, 1.25 * 750e6 * (1500 + 14) / 1500)):
        config = config_of({"kind": "bounded", "fixed": 0.0}, Profile(pace_bps=pace))
        run_world(config, rounds_body(tensors, 1), tensors, workers=1).well()
        assert limits == [pytest.approx(expected)] * 2 if expected else limits == [None] * 2
        limits.clear()

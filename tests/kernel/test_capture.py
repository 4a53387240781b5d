"""Captures: what they keep, what they count, whose they are."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from scapy.all import rdpcap

from netem.kernel import capture
from netem.kernel.errors import KernelError, LabError
from netem.kernel.packet_filter import PacketFilter
from netem.kernel.user import User
from netem.lab import Lab
from netem.spec.topology import star

NOBODY = 65534
PORT = 29601


@pytest.fixture
def lab(state_dir: Path) -> Iterator[Lab]:
    with Lab.build(star(1), state_dir=state_dir) as built:
        yield built


def chunk(round_number: int, sequence: int, size: int = 1472) -> bytes:
    head = bytes(4) + round_number.to_bytes(4, "big") + sequence.to_bytes(4, "big")
    return head + bytes(size - len(head))


def send(lab: Lab, rounds: range, per_round: int, port: int = PORT) -> None:
    """worker1 -> server; a receiver exists, so that no ICMP errors answer."""
    with (
        lab.socket("server", "udp", 256 << 20, 1 << 20) as receiver,
        lab.socket("worker1", "udp", 1 << 20, 8 << 20) as s,
    ):
        receiver.bind((lab.hosts["server"].address, port))
        s.connect((lab.hosts["server"].address, port))
        for number in rounds:
            for sequence in range(per_round):
                s.send(chunk(number, sequence))


def test_a_filter_by_round_keeps_exactly_those(lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "rounds.pcapng"
    wanted = PacketFilter(udp_ports=((29600, 29699),), values=((3, 4), (8, 8)))
    running = lab.capture(("port", "server"), path, snap_bytes=96, packets=wanted, direction="egress")
    send(lab, range(10), 200)
    send(lab, range(3, 5), 50, port=29400)  # another port
    stats = running.stop()
    assert stats == running.stop()
    assert (stats.received, stats.missed_by_kernel, stats.tool) == (600, 0, "builtin")
    packets = rdpcap(str(path))
    keys = [(int.from_bytes(bytes(p)[46:50], "big"), int.from_bytes(bytes(p)[50:54], "big")) for p in packets]
    assert keys == [(number, sequence) for number in (3, 4, 8) for sequence in range(200)]
    assert {(len(p), p.wirelen) for p in packets} == {(96, 1514)}
    times = [p.time for p in packets]
    assert times == sorted(times)
    assert any(int(t * 10**9) % 1000 for t in times), "nanoseconds"


@pytest.mark.parametrize(("direction", "expected"), [("ingress", 20), ("egress", 30), ("both", 50)])
@pytest.mark.parametrize("by_expression", [False, True])
def test_directions_as_the_interface_sees_them(
    lab: Lab, tmp_path: Path, direction: capture.Direction, expected: int, by_expression: bool
) -> None:
    packets = f"udp port {PORT}" if by_expression else PacketFilter(udp_ports=((PORT, PORT),))
    if by_expression and shutil.which("tcpdump") is None:
        pytest.skip("needs tcpdump")
    running = lab.capture(("port", "server"), tmp_path / "x.pcapng", packets=packets, direction=direction)
    with lab.socket("server", "udp", 1 << 20, 1 << 20) as one, lab.socket("worker1", "udp", 1 << 20, 1 << 20) as two:
        one.bind((lab.hosts["server"].address, PORT))
        two.bind((lab.hosts["worker1"].address, PORT))
        for _ in range(30):
            two.sendto(b"to the server", one.getsockname())
        for _ in range(20):
            one.sendto(b"from the server", two.getsockname())
    assert running.stop().received == expected
    assert len(rdpcap(str(tmp_path / "x.pcapng"))) == expected


def test_whole_packets_and_everything_by_default(lab: Lab, tmp_path: Path) -> None:
    running = lab.capture("worker1", tmp_path / "all.pcapng")
    send(lab, range(1), 10)
    assert running.stop().received == 10
    packets = rdpcap(str(tmp_path / "all.pcapng"))
    assert [bytes(p)[42:] for p in packets] == [chunk(0, n) for n in range(10)]


def test_a_long_filter_and_one_that_is_too_long(lab: Lab, tmp_path: Path) -> None:
    every_other = tuple((n, n) for n in range(0, 2000, 2))
    running = lab.capture(
        ("port", "server"), tmp_path / "x.pcapng", packets=PacketFilter(udp_ports=((PORT, PORT),), values=every_other)
    )
    send(lab, range(100), 1)
    assert running.stop().received == 50
    too_many = PacketFilter(udp_ports=((PORT, PORT),), values=tuple((n, n) for n in range(0, 4000, 2)))
    with pytest.raises(ValueError, match="instructions"):
        lab.capture(("port", "server"), tmp_path / "y.pcapng", packets=too_many)


def test_what_finds_no_room_is_counted(lab: Lab, tmp_path: Path) -> None:
    """A ring of 512 KiB and a writer that sleeps in the meantime: received and missed make up all that was sent."""
    running = capture.start(
        lab.port_of("server").netns,
        lab.port_of("server").ifname,
        tmp_path / "small.pcapng",
        packets=PacketFilter(udp_ports=((PORT, PORT),)),
        user=User.current(),
        ring_bytes=512 << 10,
    )
    os.kill(running.pid, signal.SIGSTOP)
    send(lab, range(1), 2000)
    os.kill(running.pid, signal.SIGCONT)
    stats = running.stop()
    assert stats.missed_by_kernel > 1000
    assert stats.received > 100
    assert stats.received + stats.missed_by_kernel == 2000
    assert len(rdpcap(str(tmp_path / "small.pcapng"))) == stats.received


def test_a_fast_burst_misses_nothing(lab: Lab, tmp_path: Path) -> None:
    running = lab.capture(("port", "server"), tmp_path / "fast.pcapng", snap_bytes=96)
    size = (1472).to_bytes(2, sys.byteorder)
    with (
        lab.socket("worker1", "udp", 1 << 20, 8 << 20) as sock,
        lab.socket("server", "udp", 256 << 20, 1 << 20) as sink,
    ):
        sink.bind((lab.hosts["server"].address, PORT))
        for _ in range(500):
            sock.sendmsg([bytes(1472 * 40)], [(17, 103, size)], 0, (lab.hosts["server"].address, PORT))
    stats = running.stop()
    assert (stats.received, stats.missed_by_kernel) == (20000, 0)


def test_the_file_belongs_to_the_caller_of_sudo(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("needs a python3 in /usr/bin, which every user can execute")
    monkeypatch.setattr(sys, "executable", python)
    folder = Path(tempfile.mkdtemp())  # the checkout may be closed to that user
    folder.chmod(0o755)
    monkeypatch.setattr(capture, "WORKER", Path(shutil.copy(capture.WORKER, folder)))
    running = lab.capture(("port", "server"), tmp_path / "x.pcapng", user=User.of(NOBODY))
    try:
        assert os.stat(f"/proc/{running.pid}").st_uid == NOBODY
        send(lab, range(1), 5)
        assert running.stop().received == 5
        assert (tmp_path / "x.pcapng").stat().st_uid == NOBODY
    finally:
        shutil.rmtree(folder)


def test_a_capture_ends_with_the_lab(lab: Lab, tmp_path: Path) -> None:
    lab.capture("server", tmp_path / "x.pcapng")
    send(lab, range(1), 7)
    lab.close()
    assert lab.problems == []
    assert len(rdpcap(str(tmp_path / "x.pcapng"))) == 7


def test_errors_name_what_was_attempted(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="nosuch"):
        lab.capture("server", tmp_path / "nosuch" / "x.pcapng")
    with pytest.raises(LabError, match="worker9"):
        lab.capture("worker9", tmp_path / "x.pcapng")
    if shutil.which("tcpdump"):
        with pytest.raises(KernelError, match="expression"):
            lab.capture("server", tmp_path / "x.pcapng", packets="udp prot 5")
    running = lab.capture("server", tmp_path / "x.pcapng")
    os.kill(running.pid, signal.SIGKILL)
    with pytest.raises(LabError, match="writer died"):
        running.stop()


def test_the_ring_is_read_around_its_end(lab: Lab, tmp_path: Path) -> None:
    """Three times as many blocks as the ring has."""
    running = capture.start(
        lab.port_of("server").netns, "p0", tmp_path / "x.pcapng", user=User.current(), ring_bytes=1 << 20
    )
    for _ in range(4):
        send(lab, range(1), 500)
    stats = running.stop()
    assert stats.received + stats.missed_by_kernel == 2000
    assert stats.received >= 1500

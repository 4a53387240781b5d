"""Labs as they come up: connected, quiet, as set, and gone without a trace."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from netem.kernel import netns
from netem.kernel.errors import KernelError, Unavailable
from netem.kernel.packet_filter import PacketFilter
from netem.kernel.snapshot import host_snapshot
from netem.lab import Lab, Settings
from netem.lab.teardown import clean
from netem.spec.topology import star

SOL_UDP, UDP_SEGMENT = 17, 103

pytestmark = pytest.mark.usefixtures("unchanged_host")


def exchange(lab: Lab, source: str, target: str, kind: str = "udp") -> socket.socket:
    """Send a few bytes from one host to another; returns the sender's socket."""
    receiver = lab.socket(target, kind, 1 << 20, 1 << 20)  # type: ignore[arg-type]
    sender = lab.socket(source, kind, 1 << 20, 1 << 20)  # type: ignore[arg-type]
    for sock in (receiver, sender):
        sock.settimeout(5)
    receiver.bind((lab.hosts[target].address, 29600))
    if kind == "tcp":
        receiver.listen()
    sender.connect((lab.hosts[target].address, 29600))
    sender.sendall(b"hello")
    peer = receiver.accept()[0] if kind == "tcp" else receiver
    peer.settimeout(5)
    assert peer.recv(100) == b"hello"
    for sock in {peer, receiver}:
        sock.close()
    return sender


def test_every_host_reaches_every_other(state_dir: Path) -> None:
    with Lab.build(star(3), state_dir=state_dir) as lab:
        assert [host.rank for host in lab.hosts.values()] == [0, 1, 2, 3]
        for source in lab.hosts:
            for target in lab.hosts:
                if source != target:
                    exchange(lab, source, target).close()
    assert lab.removed is not None
    assert lab.removed.left == ()
    assert os.listdir(state_dir) == []


def test_the_root_namespace_never_gets_an_interface(state_dir: Path) -> None:
    before = host_snapshot()
    with Lab.build(star(2), state_dir=state_dir) as lab:
        during = host_snapshot()
        assert during.links == before.links
        assert during.sysctls == before.sysctls
        assert set(during.namespaces) - set(before.namespaces) >= set(lab.namespaces)
        assert all(len(name) <= 15 for name in lab.namespaces)


def test_the_settings_are_in_force(state_dir: Path) -> None:
    with Lab.build(star(2, mtu=1400), state_dir=state_dir) as lab:
        settings = lab.settings()["worker1"]
        assert settings["mtu_bytes"] == 1400
        assert settings["congestion_control"] == "cubic"
        assert settings["offloads"]["tx-udp-segmentation"] is False
        assert settings["offloads"]["rx-gro"] is True
        assert settings["offloads"]["tx-checksum-ip-generic"] is True
        inside = netns.call_in(lab.hosts["worker1"].netns, lambda: Path("/proc/thread-self/net/if_inet6").read_text())
        assert inside == ""  # no IPv6 address at all
        with exchange(lab, "worker1", "server", "tcp") as sock:
            name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert name.rstrip(b"\0") == b"cubic"
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= 1360


@pytest.mark.parametrize("name", ["reno", "cubic"])
def test_a_listening_socket_has_the_congestion_control_too(name: str, state_dir: Path) -> None:
    with Lab.build(star(1), state_dir=state_dir, settings=Settings(congestion_control=name)) as lab:
        listener = lab.socket("server", "tcp", 1 << 16, 1 << 16)
        listener.bind((lab.hosts["server"].address, 29500))
        listener.listen()
        client = lab.socket("worker1", "tcp", 1 << 16, 1 << 16)
        client.connect((lab.hosts["server"].address, 29500))
        with listener, client, listener.accept()[0] as accepted:
            value = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert value.rstrip(b"\0") == name.encode()


def test_an_unknown_congestion_control_is_named_and_nothing_is_left(state_dir: Path) -> None:
    with pytest.raises(Unavailable, match="nonesuch"):
        Lab.build(star(2), state_dir=state_dir, settings=Settings(congestion_control="nonesuch"))
    assert os.listdir(state_dir) == []


def test_super_packets_are_cut_before_the_switch_and_no_arp_is_sent(state_dir: Path, tmp_path: Path) -> None:
    from scapy.all import rdpcap

    with Lab.build(star(2), state_dir=state_dir) as lab:
        capture = lab.capture(("port", "server"), tmp_path / "all.pcapng")
        with lab.socket("worker1", "udp", 1 << 20, 1 << 20) as sock:
            size = (1472).to_bytes(2, sys.byteorder)
            sock.sendmsg([bytes(1472 * 40)], [(SOL_UDP, UDP_SEGMENT, size)], 0, (lab.hosts["server"].address, 29601))
        exchange(lab, "server", "worker2").close()
        stats = capture.stop()
    packets = rdpcap(str(tmp_path / "all.pcapng"))
    assert stats.received == len(packets)
    udp = [p for p in packets if p.haslayer("UDP") and p["UDP"].dport == 29601]
    assert len(udp) == 40
    assert {p.wirelen for p in udp} == {1514}
    others = [p.summary() for p in packets if p not in udp and not p.haslayer("IP")]
    assert others == []


def test_checksums_are_computed_before_the_wire_where_asked(state_dir: Path, tmp_path: Path) -> None:
    """Without checksum offload a capture shows right checksums."""
    from scapy.all import UDP, rdpcap

    with Lab.build(star(1), state_dir=state_dir, settings=Settings(checksum_offload=False)) as lab:
        assert lab.settings()["server"]["offloads"]["tx-checksum-ip-generic"] is False
        capture = lab.capture(("port", "server"), tmp_path / "x.pcapng", direction="egress")
        exchange(lab, "worker1", "server").close()
        capture.stop()
    (packet,) = rdpcap(str(tmp_path / "x.pcapng"))
    found = packet[UDP].chksum
    del packet[UDP].chksum
    assert type(packet)(bytes(packet))[UDP].chksum == found


@dataclass(frozen=True)
class _Link:
    between: tuple[str, str]
    mtu: int = 1500


@dataclass(frozen=True)
class _Host:
    role: str


@dataclass(frozen=True)
class _Tree:
    name: str
    hosts: dict[str, _Host]
    switches: tuple[str, ...]
    links: tuple[_Link, ...]


def test_a_tree_of_switches(state_dir: Path) -> None:
    hosts = {"server": _Host("server"), "near": _Host("worker"), "a-host-with-a-long-name": _Host("worker")}
    links = [("server", "core"), ("near", "edge1"), ("a-host-with-a-long-name", "edge2")]
    links += [("edge1", "core"), ("core", "edge2")]
    tree = _Tree("tree", hosts, ("edge1", "core", "edge2"), tuple(_Link(pair) for pair in links))
    with Lab.build(tree, state_dir=state_dir) as lab:
        exchange(lab, "near", "a-host-with-a-long-name").close()
        exchange(lab, "a-host-with-a-long-name", "server", "tcp").close()
        assert lab.port_of("near").netns == f"{lab.id}-edge1"


def test_two_labs_with_the_same_addresses_do_not_meet(state_dir: Path, tmp_path: Path) -> None:
    with Lab.build(star(1), state_dir=state_dir) as one, Lab.build(star(1), state_dir=state_dir) as two:
        watch = two.capture(("port", "server"), tmp_path / "two.pcapng", packets=PacketFilter(udp_ports=((1, 65535),)))
        exchange(one, "worker1", "server").close()
        assert watch.stop().received == 0
        report = clean(state_dir)
        assert len(report.kept) == 2
        assert report.removed == ()
        exchange(two, "worker1", "server").close()


def test_sixty_four_workers(state_dir: Path) -> None:
    with Lab.build(star(64), state_dir=state_dir) as lab:
        exchange(lab, "worker64", "server").close()
        exchange(lab, "worker1", "worker64").close()


def test_no_descriptor_stays_open_and_set_up_is_quick(state_dir: Path, tmp_path: Path) -> None:
    def cycle() -> float:
        began = time.perf_counter()
        with Lab.build(star(3), state_dir=state_dir) as lab:
            took = time.perf_counter() - began
            lab.capture("server", tmp_path / "x.pcapng")
            lab.spawn("server", ["/bin/true"], env={}, log=tmp_path / "log").wait(10)
        return took

    cycle()
    before = sorted(os.listdir("/proc/self/fd"))
    times = sorted(cycle() for _ in range(5))
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert times[0] < 1.0, times  # about 0.1 s; the bound leaves room for a busy machine


def test_detach_and_attach(state_dir: Path, tmp_path: Path) -> None:
    built = Lab.build(star(2), name="standing", state_dir=state_dir)
    built.detach()
    assert len(clean(state_dir).kept) == 1
    with Lab.attach("standing", state_dir=state_dir) as lab:
        assert lab.port_of("worker2") == built.port_of("worker2")
        exchange(lab, "worker1", "server").close()
        with Lab.attach(lab.id, state_dir=state_dir) as second:
            log = tmp_path / "log"
            assert second.spawn("server", ["/bin/cat", "/proc/net/dev"], env={}, log=log).wait(10) == 0
            assert "eth0" in log.read_text()
    lab = Lab.attach("standing", state_dir=state_dir)
    assert lab.close().left == ()
    assert os.listdir(state_dir) == []


def test_socket_buffers_beyond_the_system_maximum(state_dir: Path) -> None:
    with Lab.build(star(1), state_dir=state_dir) as lab, lab.socket("server", "udp", 64 << 20, 32 << 20) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 128 << 20
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 64 << 20


def test_a_taken_namespace_name_is_not_touched(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone makes the namespace between the plan and its creation: the build fails, theirs stays."""
    foreign: list[str] = []
    real_create = netns.create

    def create(name: str) -> None:
        if name.endswith("-worker1") and not foreign:
            foreign.append(name)
            real_create(name)
        real_create(name)

    monkeypatch.setattr(netns, "create", create)
    with pytest.raises(KernelError, match="worker1"):
        Lab.build(star(2), state_dir=state_dir)
    assert netns.identity(foreign[0]) is not None
    assert os.listdir(state_dir) == []
    netns.remove(foreign[0])

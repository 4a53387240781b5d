"""A real path for tests of the bpf backend: sender - switch (bridge) - receiver, and traffic on it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from netem.kernel import bridge, netns, offload, veth
from netem.kernel.sockets import open_socket
from netem.links.base import Flow, Key
from netem.links.bpf import BpfPort

SERVER, WORKERS, UNKNOWN = "10.77.0.1", ("10.77.0.2", "10.77.0.3"), "10.77.0.4"
BRIDGE = 2  # its index
DATA_PORT, MARKER_PORT, TCP_PORT = 29601, 29500, 29501
UDP_FLOW, KEY = Flow("udp", dst_ports=(29600, 29699)), Key(((4, 14),), (4, 8), (8, 12))
CHUNK_BYTES, BATCH, SOL_UDP, UDP_SEGMENT = 1472, 44, 17, 103
FRAME_BYTES = CHUNK_BYTES + 42
LIMIT_S = 10.0


@dataclass(frozen=True)
class Path:
    sender: str
    switch: str
    receiver: str

    def port(self, name: str = "server") -> BpfPort:
        return BpfPort(name, self.switch, "pr", receiver=(self.receiver, "eth0"))


def _connect(switch: str, host: str, port: veth.End, mac: str, addresses: tuple[str, ...]) -> None:
    far = veth.End(host, "eth0", f"02:00:02:{mac}", 2)
    with closing(netns.open_inside(switch)) as inside:
        veth.create(inside.netlink, [veth.Pair(port, far, 1500)], BRIDGE)
    with closing(netns.open_netlink(host)) as inside:
        index = veth.index_of(inside, "eth0")
        for address in addresses:
            inside.addr("add", index=index, address=address, prefixlen=24)
        inside.link("set", index=index, state="up")
    offload.write(host, "eth0", dict.fromkeys(offload.TSO, False) | {offload.UDP_SEGMENTATION: False})


@contextmanager
def build_path() -> Iterator[Path]:
    """Named after the process: one at a time."""
    names = [f"bp{kind}{os.getpid()}" for kind in "swr"]
    made = Path(*names)
    try:
        for name in names:
            netns.create(name)
        with closing(netns.open_inside(made.switch)) as inside:
            bridge.create(inside.netlink, "br", "02:00:03:00:00:01", BRIDGE)
        ports = [veth.End(made.switch, f"p{kind}", f"02:00:01:00:00:0{n}", 2 + n) for n, kind in ((1, "s"), (2, "r"))]
        _connect(made.switch, made.sender, ports[0], "00:00:01", (*WORKERS, UNKNOWN))
        _connect(made.switch, made.receiver, ports[1], "00:00:02", (SERVER,))
        yield made
    finally:
        for name in names:
            netns.remove(name)


class Traffic:
    """Numbered datagrams from any worker to the server, and which of them arrived."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._senders: dict[tuple[str, bool], socket.socket] = {}
        self._data = self._receiver(DATA_PORT)
        self._marker = self._receiver(MARKER_PORT)
        self._data.setblocking(False)
        self._marker.settimeout(0.2)
        self._marked = 0

    def _receiver(self, port: int) -> socket.socket:
        sock = open_socket(self._path.receiver, "udp", 64 << 20, 1 << 20)
        sock.bind((SERVER, port))
        return sock

    def _sender(self, source: str, gso: bool) -> socket.socket:
        if (source, gso) not in self._senders:
            sock = open_socket(self._path.sender, "udp", 1 << 20, 8 << 20)
            sock.bind((source, 0))
            if gso:
                sock.setsockopt(SOL_UDP, UDP_SEGMENT, CHUNK_BYTES)
            self._senders[source, gso] = sock
        return self._senders[source, gso]

    def send(self, source: str, round_: int, sequences: range, *, pass_: int = 1, gso: bool = False) -> None:
        sock = self._sender(source, gso)
        chunks = [_chunk(source, round_, n, pass_) for n in sequences]
        step = BATCH if gso else 1
        for first in range(0, len(chunks), step):
            sock.sendto(b"".join(chunks[first : first + step]), (SERVER, DATA_PORT))

    def arrived(self) -> list[tuple[str, int, int]]:
        """(source, round, sequence) of all data before this call, in order of arrival."""
        self._wait_for_marker()
        out = []
        while True:
            try:
                data = self._data.recv(2000)
            except BlockingIOError:
                return out
            out.append((socket.inet_ntoa(data[:4]), *(int.from_bytes(data[at : at + 4], "big") for at in (4, 8))))

    def _wait_for_marker(self) -> None:
        """Send a numbered marker, again when a full queue drops it, until it or a later one is there."""
        self._marked += 1
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            self._sender(UNKNOWN, False).sendto(b"%d" % self._marked, (SERVER, MARKER_PORT))
            try:
                while int(self._marker.recv(100)) != self._marked:
                    pass
                return
            except TimeoutError:
                continue
        raise TimeoutError("no marker arrived")

    def close(self) -> None:
        for sock in (*self._senders.values(), self._data, self._marker):
            sock.close()


def _chunk(source: str, round_: int, sequence: int, pass_: int) -> bytes:
    """Like DBLP's: 16 bytes of header, with the sender in place of the session."""
    head = socket.inet_aton(source) + round_.to_bytes(4, "big") + sequence.to_bytes(4, "big")
    return (head + pass_.to_bytes(2, "big")).ljust(CHUNK_BYTES, b"\0")

"""Guest side: two namespaces with a veth pair, and senders and receivers in them. Standard library and pyroute2."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial

from netem.kernel import netns, sysctl, veth
from netem.kernel.netns import call_in, open_netlink
from netem.lab.build import NO_IPV6

RECEIVER = "10.77.0.1"
DATA_PORT = 29601  # the window 29600..29699 that a server's DBLP ports lie in
OTHER_PORT = 29500
HEADER = struct.Struct("!IIIHH")  # session, round, sequence, pass, length
SO_RCVBUFFORCE = 33


class Network:
    """The port under test is the near end's egress; its namespace also holds the senders' addresses."""

    def __init__(self, senders: list[str], mtu: int = 1500) -> None:
        self.senders = senders
        self.mtu = mtu
        self.near = veth.End("vmt-near", "near", "02:00:0a:4d:01:01")
        self.far = veth.End("vmt-far", "far", "02:00:0a:4d:01:02")
        self.ifindex = 0
        self._stack = ExitStack()

    def __enter__(self) -> Network:
        with self._stack:
            for name in (self.near.netns, self.far.netns):
                netns.create(name)
                self._stack.callback(netns.remove, name)
                call_in(name, partial(sysctl.write_here, NO_IPV6))  # what the kernel sends by itself would be counted
            with closing(netns.open_inside(self.near.netns)) as inside:
                veth.create(inside.netlink, [veth.Pair(self.near, self.far, self.mtu)])
            with open_netlink(self.near.netns) as ipr:
                self.ifindex = veth.index_of(ipr, self.near.ifname)
                for address in self.senders:
                    ipr.addr("add", index=self.ifindex, address=address, prefixlen=16)
                ipr.link("set", index=self.ifindex, state="up")
            with open_netlink(self.far.netns) as ipr:
                far = veth.index_of(ipr, self.far.ifname)
                ipr.addr("add", index=far, address=RECEIVER, prefixlen=16)
                ipr.link("set", index=far, state="up")
            self._static_neighbours()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _static_neighbours(self) -> None:
        """So that no ARP request is among the packets counted."""
        with open_netlink(self.near.netns) as ipr:
            ipr.neigh("replace", dst=RECEIVER, lladdr=self.far.mac, ifindex=self.ifindex, state=0x80)
        with open_netlink(self.far.netns) as ipr:
            far = veth.index_of(ipr, self.far.ifname)
            for address in self.senders:
                ipr.neigh("replace", dst=address, lladdr=self.near.mac, ifindex=far, state=0x80)

    def udp(self, where: str, address: str, port: int) -> socket.socket:
        """A bound, non-blocking UDP socket with 16 MiB of receive buffer."""
        space = {"near": self.near.netns, "far": self.far.netns}[where]

        def make() -> socket.socket:
            sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 16 << 20)
            sock.bind((address, port))
            sock.setblocking(False)
            return sock

        return call_in(space, make)

    def tcp(self, where: str, make: Callable[[], socket.socket]) -> socket.socket:
        return call_in({"near": self.near.netns, "far": self.far.netns}[where], make)


class Traffic:
    """One sender's sockets and the receiver's: data and other packets, each with its own port."""

    def __init__(self, network: Network, sender: str, receiver: Traffic | None = None) -> None:
        self._owned = ExitStack()
        if receiver is None:
            self._data_in = self._owned.enter_context(network.udp("far", RECEIVER, DATA_PORT))
            self._other_in = self._owned.enter_context(network.udp("far", RECEIVER, OTHER_PORT))
        else:
            self._data_in, self._other_in = receiver._data_in, receiver._other_in
        self._out = self._owned.enter_context(network.udp("near", sender, 30000))

    @classmethod
    def sharing(cls, receiver: Traffic, network: Network, sender: str) -> Traffic:
        """Another sender to the same receiving sockets."""
        return cls(network, sender, receiver)

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *exc: object) -> None:
        self._owned.close()

    def send(self, count: int, *, index: int = 0, other: bool = False, payload_bytes: int = 64) -> None:
        port = OTHER_PORT if other else DATA_PORT
        filling = bytes(payload_bytes - HEADER.size)
        for sequence in range(count):
            self._out.sendto(HEADER.pack(1, index, sequence, 0, 0) + filling, (RECEIVER, port))

    def ecn(self, capable: bool) -> None:
        """Whether what is sent says that it may be marked instead of dropped (RFC 3168: ECT(0))."""
        self._out.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 2 if capable else 0)

    def receive(self, *, quiet_s: float, first_s: float = 0, other: bool = False) -> list[tuple[int, float]]:
        """(index, arrival) of all packets until none arrives for `quiet_s`, for the first one at least `first_s`."""
        sock = self._other_in if other else self._data_in
        found: list[tuple[int, float]] = []
        while select.select([sock], [], [], quiet_s if found else max(quiet_s, first_s))[0]:
            try:
                while True:
                    data = sock.recv(2048)
                    found.append((HEADER.unpack_from(data)[1], time.monotonic()))
            except BlockingIOError:
                pass
        return found

    def count(self, packets: int, *, batch: int = 250, other: bool = False) -> int:
        """Send in batches that the socket buffers hold; how many arrived."""
        arrived = 0
        for start in range(0, packets, batch):
            self.send(min(batch, packets - start), other=other)
            arrived += len(self.receive(quiet_s=0.02, other=other))
        return arrived + len(self.receive(quiet_s=0.2, other=other))

    def round_trips_s(self, count: int, *, other: bool = False) -> list[float]:
        """Round trips of an echo: one packet at a time, out through the port, back directly."""
        sock = self._other_in if other else self._data_in
        times = []
        for sequence in range(count):
            began = time.monotonic()
            self._out.sendto(HEADER.pack(1, 0, sequence, 0, 0), (RECEIVER, OTHER_PORT if other else DATA_PORT))
            self._wait(sock, "at the receiver")
            data, address = sock.recvfrom(2048)
            sock.sendto(data, address)
            self._wait(self._out, "on its way back")
            self._out.recv(2048)
            times.append(time.monotonic() - began)
        return times

    @staticmethod
    def _wait(sock: socket.socket, where: str) -> None:
        if not select.select([sock], [], [], 5.0)[0]:
            raise TimeoutError(f"no packet {where} within 5 s")

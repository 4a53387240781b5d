"""A recorded loss mask at a switch port: exactly the transmissions of a list are lost, whatever the timing.

A program of its own on the egress of the port, behind the one that makes all other loss (`bpf`), which has seen and
counted the packet by then. It looks the packet's key up in a hash map; what is there is dropped, and counted in place.
"""

from __future__ import annotations

import errno
import ipaddress
import sys
from collections.abc import Iterable
from contextlib import ExitStack, closing
from typing import NamedTuple

from netem.kernel import bpf, veth
from netem.kernel.bpf_asm import FP, R0, R1, R2, R3, R4, R6, Assembler, Register
from netem.kernel.errors import KernelError, attempting
from netem.kernel.netns import open_netlink
from netem.links.base import Flow, Key, LinkError

KEY_BYTES_MAX = 12
ENTRIES_MAX = 4_000_000
"""About 100 bytes of kernel memory each."""

_EGRESS, _PRIORITY, _HANDLE, _DIRECT_ACTION, _ETH_P_ALL = 0xFFFFFFF3, 40, 1, 1, 0x0003
_LOOKUP, _LOAD_BYTES = 1, 26
_SKB_PROTOCOL = 16
_SHOT, _NEXT_FILTER = 2, -1
_ETHERNET, _IPV4, _UDP = 14, 20, 8
_MAP_KEY = 16
"""Of the packet's key 12 bytes, zero-padded, then its IPv4 source."""


class Hits(NamedTuple):
    """Drops of one sender's packets with this index field (DBLP: round)."""

    source: str
    position: int
    dropped: int


def program(flow: Flow, key: Key) -> Assembler:
    """The program's text. ValueError for a key that is too long, or a flow that is not UDP."""
    size = sum(stop - start for start, stop in key.ranges)
    if flow.proto != "udp" or size > KEY_BYTES_MAX:
        raise ValueError(f"a recorded mask needs a UDP flow and a key of at most {KEY_BYTES_MAX} bytes, not {size}")
    need = _IPV4 + _UDP + key.payload_bytes
    headers = -_MAP_KEY - (need + 7) // 8 * 8
    a = Assembler()
    a.mov(R6, Register(R1))
    a.load(4, R2, R6, _SKB_PROTOCOL)
    a.swap_be(R2, 16)
    a.jump_if(R2, "!=", 0x0800, "pass")
    a.mov(R2, _ETHERNET)
    a.mov(R3, Register(FP))
    a.alu("add", R3, headers)
    a.mov(R4, need)
    a.call(_LOAD_BYTES)
    a.jump_if(R0, "!=", 0, "pass")
    _classify(a, flow, key, headers)
    _look_up(a, key, headers)
    a.label("pass")
    a.mov(R0, _NEXT_FILTER)
    a.exit()
    return a


def _classify(a: Assembler, flow: Flow, key: Key, headers: int) -> None:
    """Falls through for a whole, unfragmented data packet without IPv4 options."""
    a.load(1, R1, FP, headers)
    a.jump_if(R1, "!=", 0x45, "pass")
    a.load(2, R1, FP, headers + 6)
    a.swap_be(R1, 16)
    a.alu("and", R1, 0x3FFF)
    a.jump_if(R1, "!=", 0, "pass")
    a.load(1, R1, FP, headers + 9)
    a.jump_if(R1, "!=", 17, "pass")
    for window, at in ((flow.src_ports, 0), (flow.dst_ports, 2)):
        if window is not None:
            a.load(2, R1, FP, headers + _IPV4 + at)
            a.swap_be(R1, 16)
            a.jump_if(R1, "<", window[0], "pass")
            a.jump_if(R1, ">", window[1], "pass")
    a.load(2, R1, FP, headers + _IPV4 + 4)
    a.swap_be(R1, 16)
    a.jump_if(R1, "<", _UDP + key.payload_bytes, "pass")


def _look_up(a: Assembler, key: Key, headers: int) -> None:
    a.store(8, FP, -_MAP_KEY, 0)
    a.store(8, FP, -_MAP_KEY + 8, 0)
    payload = headers + _IPV4 + _UDP
    places = [payload + at for start, stop in key.ranges for at in range(start, stop)]
    for number, place in enumerate(places):
        a.load(1, R1, FP, place)
        a.store(1, FP, -_MAP_KEY + number, Register(R1))
    a.load(4, R1, FP, headers + 12)
    a.store(4, FP, -4, Register(R1))
    a.load_map(R1, "drops")
    a.mov(R2, Register(FP))
    a.alu("add", R2, -_MAP_KEY)
    a.call(_LOOKUP)
    a.jump_if(R0, "==", 0, "pass")
    a.mov(R1, 1)
    a.atomic_add(R0, 0, R1)
    a.mov(R0, _SHOT)
    a.exit()


class RecordedLoss:
    """The program on one port, with its list. A context manager; `install` again replaces the list."""

    def __init__(self, netns: str | None, ifname: str) -> None:
        self._netns, self._ifname = netns, ifname
        self._owned: ExitStack | None = None
        self._map: bpf.Map | None = None

    def install(self, flow: Flow, key: Key, drops: Iterable[tuple[str, bytes]], entries: int) -> None:
        """`drops`: (source address, the key's bytes as in the packet), `entries` of them. Counters start at zero.

        The key must begin with its index. Raises LinkError.
        """
        if not 1 <= entries <= ENTRIES_MAX:
            raise LinkError(f"recorded mask at {self._ifname}: {entries} transmissions, expected 1 to {ENTRIES_MAX}")
        self.close()
        try:
            with ExitStack() as stack:
                self._map = stack.enter_context(bpf.Map("drops", bpf.HASH, _MAP_KEY, 8, entries))
                for source, name in drops:
                    packed = ipaddress.IPv4Address(source).packed
                    self._map.update(name.ljust(KEY_BYTES_MAX, b"\0") + packed, bytes(8))
                text = program(flow, key).assemble({"drops": self._map.fd})
                loaded = stack.enter_context(bpf.Program("dblp_recorded", text))
                self._attach(loaded)
                self._owned = stack.pop_all()
        except KernelError as error:
            raise LinkError(f"recorded mask at {self._ifname}: {error}") from error

    def hits(self) -> list[Hits]:
        """What was dropped, by sender and index."""
        found: dict[tuple[str, int], int] = {}
        for key, value in self._map.items() if self._map is not None and self._owned is not None else ():
            count = int.from_bytes(value, sys.byteorder)
            if count:
                place = (str(ipaddress.IPv4Address(key[12:])), int.from_bytes(key[:4], "big"))
                found[place] = found.get(place, 0) + count
        return [Hits(source, index, count) for (source, index), count in sorted(found.items())]

    def _attach(self, loaded: bpf.Program) -> None:
        name = f"dblp_recorded:{loaded.id}"
        with closing(open_netlink(self._netns)) as netlink:
            index = veth.index_of(netlink, self._ifname)
            try:
                with attempting("add clsact"):
                    netlink.tc("add", "clsact", index)
            except KernelError as error:
                if error.code != errno.EEXIST:
                    raise
            with attempting("add the filter of a recorded mask"):
                netlink.tc(
                    "replace-filter", "bpf", index, handle=_HANDLE, fd=loaded.fd, name=name,
                    parent=_EGRESS, prio=_PRIORITY, protocol=_ETH_P_ALL, flags=_DIRECT_ACTION,
                )  # fmt: skip
                filters = netlink.get_filters(index=index, parent=_EGRESS)
        if name not in {each.get_nested("TCA_OPTIONS", "TCA_BPF_NAME") for each in filters}:
            raise LinkError(f"recorded mask at {self._ifname}: the program is not in the filter list")

    def close(self) -> None:
        """Detach. The interface or its namespace may be gone already."""
        if self._owned is None:
            return
        try:
            with closing(open_netlink(self._netns)) as netlink:
                index = veth.index_of(netlink, self._ifname)
                with attempting("remove the filter of a recorded mask"):
                    netlink.tc(
                        "del-filter", "bpf", index, handle=_HANDLE, parent=_EGRESS, prio=_PRIORITY,
                        protocol=_ETH_P_ALL,
                    )  # fmt: skip
        except KernelError:
            pass  # gone with its interface or namespace
        self._owned.close()
        self._owned = None

    def __enter__(self) -> RecordedLoss:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""Which packets a capture keeps, as a classic BPF program that the kernel runs (networking/filter.rst). Pure.

The kernel discards the rest before anything is copied, so a capture of two rounds costs nothing in the others.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from netem.kernel.errors import KernelError, Unavailable

Direction = Literal["ingress", "egress", "both"]
Range = tuple[int, int]

# linux/bpf_common.h, linux/filter.h
_LD_B_ABS, _LD_H_ABS, _LD_H_IND, _LD_W_IND = 0x30, 0x28, 0x48, 0x40
_LDX_MSH, _JA, _JEQ, _JGT, _JGE, _JSET, _RET = 0xB1, 0x05, 0x15, 0x25, 0x35, 0x45, 0x06
_SKF_PKTTYPE = 0xFFFFF000 + 4
_PACKET_OUTGOING = 4  # linux/if_packet.h
_ETHERNET_BYTES, _UDP_BYTES = 14, 8
_IPPROTO_TCP, _IPPROTO_UDP = 6, 17
PROGRAM_LIMIT = 4096  # BPF_MAXINSNS
WHOLE_PACKET = 262144


@dataclass(frozen=True)
class PacketFilter:
    """IPv4 packets to keep; every range is inclusive. The default keeps everything.

    udp_ports, tcp_ports: kept when source or destination port lies in one of the ranges. With one of the two given, a
        packet of another protocol is dropped; fragments other than the first, which show no port, are kept.
    values: of the UDP packets, only those whose 32-bit big-endian number at payload byte `value_offset` lies in one of
        these ranges (for DBLP: the round, at byte 4). None: all.
    """

    udp_ports: tuple[Range, ...] = ()
    tcp_ports: tuple[Range, ...] = ()
    value_offset: int = 4
    values: tuple[Range, ...] | None = None

    def __post_init__(self) -> None:
        for low, high in (*self.udp_ports, *self.tcp_ports):
            if not 0 <= low <= high <= 65535:
                raise ValueError(f"port range {low}..{high}: expected 0 <= first <= last <= 65535")
        for low, high in self.values or ():
            if not 0 <= low <= high < 2**32:
                raise ValueError(f"value range {low}..{high}: expected 0 <= first <= last < 2**32")


def ranges_of(values: Sequence[int]) -> tuple[Range, ...]:
    """Merge single values into inclusive ranges: [1, 2, 5] -> ((1, 2), (5, 5))."""
    merged: list[list[int]] = []
    for value in sorted(set(values)):
        if merged and value == merged[-1][1] + 1:
            merged[-1][1] = value
        else:
            merged.append([value, value])
    return tuple((low, high) for low, high in merged)


@dataclass
class _Program:
    """Instructions with labels. Conditional jumps reach 255 instructions, so they only skip a few; `ja` goes far."""

    lines: list[tuple[int, int, int, int | str]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def add(self, code: int, k: int | str = 0, true: int = 0, false: int = 0) -> None:
        self.lines.append((code, true, false, k))

    def label(self, name: str) -> None:
        self.labels[name] = len(self.lines)

    def unless(self, code: int, k: int, target: str) -> None:
        """Go to `target` when the comparison is false."""
        self.add(code, k, true=1, false=0)
        self.add(_JA, target)

    def when(self, code: int, k: int, target: str) -> None:
        """Go to `target` when the comparison is true."""
        self.add(code, k, true=0, false=1)
        self.add(_JA, target)

    def when_in(self, ranges: Sequence[Range], target: str) -> None:
        """Go to `target` when the accumulator lies in one of the ranges."""
        for low, high in ranges:
            self.add(_JGE, low, true=0, false=2)
            self.add(_JGT, high, true=1, false=0)
            self.add(_JA, target)

    def assemble(self) -> bytes:
        """Packed struct sock_filter."""
        if len(self.lines) > PROGRAM_LIMIT:
            raise ValueError(f"the filter needs {len(self.lines)} instructions; the kernel takes {PROGRAM_LIMIT}")
        return b"".join(
            struct.pack("=HBBI", code, true, false, self.labels[k] - at - 1 if isinstance(k, str) else k)
            for at, (code, true, false, k) in enumerate(self.lines)
        )


def compile_filter(wanted: PacketFilter, direction: Direction, snap_bytes: int) -> bytes:
    """The program: it returns how many bytes of the packet to keep, 0 for none. Ethernet link layer.

    direction: as the interface sees it; at a switch port, egress goes to the host.
    ValueError: too many value ranges (about 1,300 fit).
    """
    program = _Program()
    if wanted.udp_ports or wanted.tcp_ports:
        _match_ports(program, wanted)
    elif wanted.values is not None:
        raise ValueError("a filter by value needs UDP ports")
    else:
        program.add(_JA, "keep")
    program.label("drop")
    program.add(_RET, 0)
    program.label("keep")
    program.add(_RET, snap_bytes or WHOLE_PACKET)
    return direction_check(direction) + program.assemble()


def direction_check(direction: Direction) -> bytes:
    """Instructions to put in front of a program: they drop the packets of the other direction."""
    program = _Program()
    if direction != "both":
        program.add(_LD_B_ABS, _SKF_PKTTYPE)
        keep_outgoing = direction == "egress"
        program.add(_JEQ, _PACKET_OUTGOING, true=int(keep_outgoing), false=int(not keep_outgoing))
        program.add(_RET, 0)
    return program.assemble()


def _match_ports(program: _Program, wanted: PacketFilter) -> None:
    program.add(_LD_H_ABS, 12)
    program.unless(_JEQ, 0x0800, "drop")
    program.add(_LD_H_ABS, _ETHERNET_BYTES + 6)
    program.when(_JSET, 0x1FFF, "keep")  # not the first fragment: no ports to look at
    program.add(_LDX_MSH, _ETHERNET_BYTES)  # X = length of the IP header
    program.add(_LD_B_ABS, _ETHERNET_BYTES + 9)
    program.when(_JEQ, _IPPROTO_UDP, "udp")
    program.unless(_JEQ, _IPPROTO_TCP, "drop")
    for offset in (0, 2):
        program.add(_LD_H_IND, _ETHERNET_BYTES + offset)
        program.when_in(wanted.tcp_ports, "keep")
    program.add(_JA, "drop")
    program.label("udp")
    for offset in (0, 2):
        program.add(_LD_H_IND, _ETHERNET_BYTES + offset)
        program.when_in(wanted.udp_ports, "value")
    program.add(_JA, "drop")
    program.label("value")
    if wanted.values is None:
        program.add(_JA, "keep")
    else:
        program.add(_LD_W_IND, _ETHERNET_BYTES + _UDP_BYTES + wanted.value_offset)
        program.when_in(wanted.values, "keep")


def compile_expression(expression: str, snap_bytes: int) -> bytes:
    """A pcap-filter(7) expression, compiled by tcpdump (-ddd: only print the program).

    Unavailable when there is no tcpdump; KernelError with tcpdump's own message when the expression is wrong.
    """
    tcpdump = shutil.which("tcpdump", path="/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin")
    if tcpdump is None:
        raise Unavailable(
            "a capture filter expression needs tcpdump", "Install tcpdump, or capture without an expression."
        )
    command = [tcpdump, "-ddd", "-y", "EN10MB", "-s", str(snap_bytes or WHOLE_PACKET), "--", expression]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise KernelError(f"compile the filter {expression!r}", detail=done.stderr.strip())
    lines = done.stdout.split("\n")[1:]
    return b"".join(struct.pack("=HBBI", *map(int, line.split())) for line in lines if line)

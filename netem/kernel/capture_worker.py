"""Writes a packet ring to a pcapng file. Run as a script by path, unprivileged, with its sockets and files handed in.

Standard library only (`python -I -S`). The ring is TPACKET_V3 (networking/packet_mmap.rst): the kernel fills blocks of
packets, cut to the snap length, and this program copies whole blocks; a burst that is faster than it waits in memory.
The file format is pcapng (draft-ietf-opsawg-pcapng).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import socket
import struct
import sys
from typing import Any, BinaryIO

SOL_PACKET, PACKET_STATISTICS = 263, 6  # linux/if_packet.h
SO_ATTACH_FILTER = 26
TP_STATUS_USER, TP_STATUS_KERNEL = 1, 0
BLOCK_STATUS_AT = 8
PACKET_OUTGOING = 4
PACKET_TYPE_AT = 48 + 10  # sll_pkttype, behind the aligned struct tpacket3_hdr

_BLOCK = struct.Struct("=III")  # block_status, num_pkts, offset_to_first_pkt (at byte 8)
_PACKET = struct.Struct("=IIIIIIHH")  # next_offset, sec, nsec, snaplen, len, status, mac, net
_EPB_HEAD = struct.Struct("=IIIIIII")  # type, length, interface, time high, time low, captured, original
_EPB_TAIL = {out: struct.pack("=HHIHH", 2, 4, 2 if out else 1, 0, 0) for out in (False, True)}  # epb_flags: direction


def _option(code: int, value: bytes) -> bytes:
    return struct.pack("=HH", code, len(value)) + value + bytes(-len(value) % 4)


def _block(kind: int, body: bytes) -> bytes:
    length = 12 + len(body)
    return struct.pack("=II", kind, length) + body + struct.pack("=I", length)


def file_head(interface: str, snap_bytes: int, comment: str) -> bytes:
    """Section header and the description of one Ethernet interface with timestamps in nanoseconds."""
    end = _option(0, b"")
    section = struct.pack("=IHHq", 0x1A2B3C4D, 1, 0, -1) + _option(4, b"dblp-netem") + end
    options = _option(2, interface.encode()) + _option(9, b"\x09")
    options += _option(1, comment.encode()) if comment else b""
    return _block(0x0A0D0D0A, section) + _block(1, struct.pack("=HHI", 1, 0, snap_bytes) + options + end)


def file_tail(received: int, missed: int) -> bytes:
    """Interface statistics: packets that passed the filter, and those of them that the kernel had no room for."""
    counts = _option(4, struct.pack("=Q", received)) + _option(5, struct.pack("=Q", missed)) + _option(0, b"")
    return _block(5, struct.pack("=III", 0, 0, 0) + counts)


class Ring:
    """The reader's side of a TPACKET_V3 ring."""

    def __init__(self, sock: socket.socket, block_bytes: int, blocks: int) -> None:
        self._map = mmap.mmap(sock.fileno(), block_bytes * blocks)
        self._view = memoryview(self._map)
        self._block_bytes = block_bytes
        self._blocks = blocks
        self._next = 0
        self.packets = 0

    def drain(self, out: BinaryIO) -> None:
        """Write all blocks that the kernel has handed over, and hand them back."""
        while True:
            start = self._next * self._block_bytes
            status, count, first = _BLOCK.unpack_from(self._view, start + BLOCK_STATUS_AT)
            if not status & TP_STATUS_USER:
                return
            out.write(self._convert(start + first, count))
            struct.pack_into("=I", self._view, start + BLOCK_STATUS_AT, TP_STATUS_KERNEL)
            self._next = (self._next + 1) % self._blocks
            self.packets += count

    def _convert(self, at: int, count: int) -> bytes:
        """The packets of one block as enhanced packet blocks."""
        view, parts = self._view, []
        for _ in range(count):
            step, seconds, nanoseconds, kept, length, _, mac, _ = _PACKET.unpack_from(view, at)
            time = seconds * 1_000_000_000 + nanoseconds
            padding = -kept % 4
            total = 32 + kept + padding + 12
            parts.append(_EPB_HEAD.pack(6, total, 0, time >> 32, time & 0xFFFFFFFF, kept, length))
            parts.append(bytes(view[at + mac : at + mac + kept + padding]))
            parts.append(_EPB_TAIL[view[at + PACKET_TYPE_AT] == PACKET_OUTGOING])
            parts.append(total.to_bytes(4, sys.byteorder))
            at += step
        return b"".join(parts)


def _stop_receiving(sock: socket.socket) -> None:
    """From here on the kernel takes nothing more: a filter that keeps no byte (SO_ATTACH_FILTER)."""
    code = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(code))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def run(orders: dict[str, Any]) -> dict[str, int]:
    """Capture until the control pipe ends; returns the counts."""
    os.nice(5)  # the workload comes first; the ring holds what waits
    sock = socket.socket(fileno=orders["socket_fd"])
    ring = Ring(sock, orders["block_bytes"], orders["blocks"])
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    poll.register(orders["control_fd"], select.POLLIN)
    with os.fdopen(orders["file_fd"], "wb", buffering=1 << 20) as out:
        out.write(file_head(orders["interface"], orders["snap_bytes"], orders["comment"]))
        out.flush()
        os.write(orders["status_fd"], b"ready\n")
        while not any(fd == orders["control_fd"] for fd, _ in poll.poll()):
            ring.drain(out)
        _stop_receiving(sock)
        poll.unregister(orders["control_fd"])
        # A block that is not full is handed over by a timer: two quiet periods mean that none is left.
        while poll.poll(2 * orders["retire_ms"]):
            ring.drain(out)
        ring.drain(out)
        total, missed, _ = struct.unpack("=III", sock.getsockopt(SOL_PACKET, PACKET_STATISTICS, 12))
        out.write(file_tail(total, missed))
    return {"received": ring.packets, "missed_by_kernel": missed}


def main() -> None:
    orders = json.loads(sys.argv[1])
    try:
        report: dict[str, Any] = run(orders)
    except OSError as error:
        report = {"error": f"{error.strerror} {error.filename or ''}".strip()}
    os.write(orders["status_fd"], json.dumps(report).encode() + b"\n")


if __name__ == "__main__":
    main()

"""Reads the packets of a pcapng file as arrays (draft-ietf-opsawg-pcapng). Fast enough for millions of packets.

Of the file only enhanced packet blocks, interface statistics and the byte order count; one interface of Ethernet frames
is expected, as `netem.kernel.capture`, tcpdump and dumpcap write it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SECTION, INTERFACE, PACKET, STATISTICS = 0x0A0D0D0A, 1, 6, 5
_MAGIC = 0x1A2B3C4D
_DATA_AT = 28  # of an enhanced packet block: type, length, interface, time (2), captured, original
_DROPPED_BY_INTERFACE = 5  # isb_ifdrop
LINKTYPE_ETHERNET = 1


class CaptureError(Exception):
    """A file is not a capture that can be read; the message names it and the byte."""


@dataclass(frozen=True)
class Frames:
    """The first bytes of the packets that have at least so many, and the count of all.

    data: (n, width) uint8. packets: packets in the file, shorter ones included. missed: what the capture had no room
    for, by its own account. truncated: the file ends in the middle of a block (the writer was killed).
    """

    data: NDArray[np.uint8]
    packets: int
    missed: int
    truncated: bool


def read_frames(path: Path, width: int) -> Frames:
    """The first `width` bytes of every Ethernet frame that was kept to this length. Raises CaptureError, OSError."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size == 0:
            raise CaptureError(f"{path} is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _read(content, size, width, path)


def _read(content: mmap.mmap, size: int, width: int, path: Path) -> Frames:
    order = _byte_order(content, size, path)
    offsets: list[int] = []
    packets = missed = at = 0
    captured_length = struct.Struct(f"{order}I")
    for kind, at, length in _blocks(content, size, order, path):
        if kind == PACKET:
            packets += 1
            if captured_length.unpack_from(content, at + 20)[0] >= width:
                offsets.append(at + _DATA_AT)
        elif kind == STATISTICS:
            missed += _missed(content[at : at + length], order)
        elif kind == INTERFACE and struct.unpack_from(f"{order}H", content, at + 8)[0] != LINKTYPE_ETHERNET:
            raise CaptureError(f"{path}: not a capture of Ethernet frames")
    data = np.empty((0, width), np.uint8)
    if offsets:
        everything = np.frombuffer(content, np.uint8)
        windows = np.lib.stride_tricks.sliding_window_view(everything, width)
        data = windows[np.array(offsets)]
        del windows, everything  # they export the mapping's memory, which cannot be closed meanwhile
    return Frames(data, packets, missed, at + length != size)


def _byte_order(content: mmap.mmap, size: int, path: Path) -> str:
    if size >= 28 and struct.unpack_from("<I", content, 0)[0] == SECTION:
        for order in "<>":
            if struct.unpack_from(f"{order}I", content, 8)[0] == _MAGIC:
                return order
    raise CaptureError(f"{path} is not a pcapng file")


def _blocks(content: mmap.mmap, size: int, order: str, path: Path) -> Iterator[tuple[int, int, int]]:
    """(type, offset, length) of the whole blocks."""
    head = struct.Struct(f"{order}II")
    at = 0
    while at + 12 <= size:
        kind, length = head.unpack_from(content, at)
        if length < 12 or length % 4 or (kind == PACKET and length < _DATA_AT + 4):
            raise CaptureError(f"{path}: byte {at}: a block of {length} bytes")
        if at + length > size:
            return
        yield kind, at, length
        at += length


def _missed(block: bytes, order: str) -> int:
    """The interface's count of packets without room, of an interface statistics block; 0 where it has none."""
    at = 20
    while at + 4 <= len(block) - 4:
        code, length = struct.unpack_from(f"{order}HH", block, at)
        if code == _DROPPED_BY_INTERFACE and length == 8:
            value: Any = struct.unpack_from(f"{order}Q", block, at + 4)[0]
            return int(value)
        if code == 0:
            return 0
        at += 4 + length + (-length % 4)
    return 0

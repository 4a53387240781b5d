"""cls_u32 filters that steer packets into a class by bytes of their IPv4 header and payload (tc-u32(8)).

Filters are grouped by priority; a group is replaced by adding the new one under another priority and then removing
the old one, so that no packet falls between the two.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pyroute2 import IPRoute

from netem.kernel.errors import KernelError, attempting

ETH_P_IP = 0x0800
_SEL_HEADER_BYTES = 4 + 16  # attribute header, struct tc_u32_sel


@dataclass(frozen=True)
class Match:
    """Bytes at an offset from the start of the IPv4 header, under a mask."""

    offset: int
    value: bytes
    mask: bytes

    def __post_init__(self) -> None:
        if len(self.value) != len(self.mask) or not 0 <= self.offset <= 256 - len(self.value):
            raise ValueError(f"{self}: expected value and mask of one length within the first 256 bytes")

    def bytewise(self) -> dict[int, tuple[int, int]]:
        """offset -> (value, mask), where the mask is not 0."""
        pairs = zip(self.value, self.mask, strict=True)
        return {self.offset + i: (v & m, m) for i, (v, m) in enumerate(pairs) if m}


@dataclass(frozen=True)
class Filter:
    """IPv4 packets that fit every match go to class `target` of qdisc `parent`."""

    parent: int
    priority: int
    target: int
    matches: tuple[Match, ...]

    def bytewise(self) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for match in self.matches:
            if found.keys() & match.bytewise().keys():
                raise ValueError(f"{self}: two matches on one byte")
            found |= match.bytewise()
        return found


def prefixes(first: int, last: int, bits: int) -> list[tuple[int, int]]:
    """The fewest (value, mask) pairs that cover the inclusive window: a u32 key knows masks, no comparisons."""
    full = 2**bits - 1
    if not 0 <= first <= last <= full:
        raise ValueError(f"window {first}..{last}: expected 0 <= first <= last <= {full}")
    pairs = []
    while first <= last:
        size = (first & -first) or 2**bits
        while size > last - first + 1:
            size //= 2
        pairs.append((first, full & ~(size - 1)))
        first += size
    return pairs


def add(ipr: IPRoute, ifindex: int, filters: Iterable[Filter]) -> None:
    for item in filters:
        # One key a byte: pyroute2 0.9 misplaces the bytes behind a zero byte inside a mask.
        keys = [f"0x{v:02x}/0x{m:02x}+{offset}" for offset, (v, m) in sorted(item.bytewise().items())]
        with attempting(f"add {item} on interface {ifindex}"):
            ipr.tc(
                "add-filter",
                "u32",
                index=ifindex,
                parent=item.parent,
                prio=item.priority,
                protocol=ETH_P_IP,
                target=item.target,
                keys=keys,
            )


def remove(ipr: IPRoute, ifindex: int, parent: int, priority: int) -> None:
    """Remove the filters of one priority, all at once."""
    info = socket.htons(ETH_P_IP) | priority << 16
    with attempting(f"remove filters of priority {priority} on interface {ifindex}"):
        ipr.tc("del-filter", index=ifindex, parent=parent, info=info)


@dataclass(frozen=True)
class _Found:
    priority: int
    target: int
    bytewise: dict[int, tuple[int, int]]
    hits: int


def verify(ipr: IPRoute, ifindex: int, parent: int, wanted: Sequence[Filter]) -> list[int]:
    """How many packets each filter has matched. KernelError unless exactly the wanted filters are in place.

    A kernel without CONFIG_CLS_U32_PERF counts none: all 0.
    """
    found = _dump(ipr, ifindex, parent)
    hits = []
    missing = []
    for item in wanted:
        expected = (item.priority, item.target, item.bytewise())
        same = [f for f in found if (f.priority, f.target, f.bytewise) == expected]
        if not same:
            missing.append(item)
            continue
        found.remove(same[0])
        hits.append(same[0].hits)
    if missing or found:
        what = f"read back the filters of interface {ifindex}"
        raise KernelError(what, detail=f"missing {missing}, not asked for {found}")
    return hits


def _dump(ipr: IPRoute, ifindex: int, parent: int) -> list[_Found]:
    with attempting(f"read the filters of interface {ifindex}"):
        messages = ipr.get_filters(index=ifindex, parent=parent)
        decoded = (_decode(message) for message in messages if message["index"] == ifindex)
        return [entry for entry in decoded if entry is not None]


def _decode(message: Any) -> _Found | None:
    """A dumped filter; None for the hash tables that the kernel lists beside them."""
    options = message.get_attr("TCA_OPTIONS")
    selector = options.get_attr("TCA_U32_SEL") if options is not None else None
    if selector is None:
        return None
    bytewise: dict[int, tuple[int, int]] = {}
    # pyroute2 0.9 decodes the keys four bytes too early; so they are read here.
    for i in range(selector["nkeys"]):
        start = selector.offset + _SEL_HEADER_BYTES + 16 * i
        mask, value, offset, _ = struct.unpack_from(">4s4s4si", selector.data, start)
        bytewise |= Match(int.from_bytes(offset, sys.byteorder, signed=True), value, mask).bytewise()
    counted = options.get_attr("TCA_U32_PCNT")
    hits = counted["rhit"] if counted is not None else 0
    return _Found(message["info"] >> 16, options.get_attr("TCA_U32_CLASSID"), bytewise, hits)

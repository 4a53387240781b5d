"""cls_u32 filters that steer packets into a class by bytes of their IPv4 header and payload (tc-u32(8)).

Filters are grouped by priority; a group is replaced by adding the new one under another priority and then removing
the old one, so that no packet falls between the two.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from netem.kernel import qdisc
from netem.kernel import rtnetlink as rt
from netem.kernel.errors import KernelError

ETH_P_IP = 0x0800
_NEWTFILTER, _DELTFILTER, _GETTFILTER = 44, 45, 46  # linux/rtnetlink.h
_CLASSID, _SEL, _PCNT = 1, 5, 9  # TCA_U32_*
_TERMINAL = 1  # TC_U32_TERMINAL: a match decides
_SELECTOR = struct.Struct("=BBBxHHhhI")  # struct tc_u32_sel without its keys: flags, shift, number of keys, ...
_KEY = struct.Struct("=4s4sii")  # struct tc_u32_key: mask, value, offset, offset mask
_COUNTS = struct.Struct("=QQ")  # struct tc_u32_pcnt: looked at, matched


@dataclass(frozen=True)
class Match:
    """Bytes at an offset from the start of the IPv4 header, under a mask."""

    offset: int
    value: bytes
    mask: bytes

    def __post_init__(self) -> None:
        if len(self.value) != len(self.mask) or not 0 <= self.offset <= 256 - len(self.value):
            raise ValueError(f"{self}: expected value and mask of one length within the first 256 bytes")

    def __str__(self) -> str:
        return f"{self.offset}:{self.value.hex()}/{self.mask.hex()}"

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

    def __str__(self) -> str:
        """Short: each request about a filter names it, and few of them fail."""
        where = f"priority {self.priority} at {qdisc.show(self.parent)} to {qdisc.show(self.target)}"
        return f"filter of {where} ({', '.join(map(str, self.matches))})"

    def bytewise(self) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for match in self.matches:
            own = match.bytewise()
            if found.keys() & own.keys():
                raise ValueError(f"{self}: two matches on one byte")
            found |= own
        return found

    @cached_property
    def selector(self) -> bytes:
        """TCA_U32_SEL: one key for each aligned word that is looked at. The kernel reports it as it got it."""
        words: dict[int, tuple[bytearray, bytearray]] = {}
        for offset, (value, mask) in self.bytewise().items():
            masks, values = words.setdefault(offset & ~3, (bytearray(4), bytearray(4)))
            masks[offset & 3], values[offset & 3] = mask, value
        keys = [_KEY.pack(bytes(masks), bytes(values), at, 0) for at, (masks, values) in sorted(words.items())]
        return _SELECTOR.pack(_TERMINAL, 0, len(keys), 0, 0, 0, 0, 0) + b"".join(keys)


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


def add(ifindex: int, item: Filter) -> rt.Request:
    """Adds a filter; the kernel chooses its handle, see `verify`."""
    body = qdisc.TCMSG.pack(0, ifindex, 0, item.parent, _info(item.priority))
    body += rt.encode({qdisc.KIND: "u32", qdisc.OPTIONS: {_CLASSID: item.target, _SEL: item.selector}})
    return rt.Request(f"add {item} on interface {ifindex}", _NEWTFILTER, rt.CREATE | rt.EXCLUSIVE, body)


def remove(ifindex: int, parent: int, priority: int) -> rt.Request:
    """Removes the filters of one priority, all at once."""
    what = f"remove filters of priority {priority} on interface {ifindex}"
    return rt.Request(what, _DELTFILTER, 0, qdisc.TCMSG.pack(0, ifindex, 0, parent, _info(priority)))


def get(ifindex: int, item: Filter, handle: int) -> rt.Request:
    """Asks for one filter by the handle that `verify` found."""
    body = qdisc.TCMSG.pack(0, ifindex, handle, item.parent, _info(item.priority))
    return rt.Request(f"read {item} on interface {ifindex}", _GETTFILTER, 0, body)


def dump(ifindex: int, parent: int) -> rt.Request:
    """Asks for all filters of a qdisc."""
    body = qdisc.TCMSG.pack(0, ifindex, 0, parent, 0)
    return rt.Request(f"read the filters of interface {ifindex}", _GETTFILTER, rt.DUMP, body)


def _info(priority: int) -> int:
    return socket.htons(ETH_P_IP) | priority << 16


class Found(NamedTuple):
    """A filter as the kernel describes it. `hits`: packets that it has matched (0 without CONFIG_CLS_U32_PERF)."""

    handle: int
    priority: int
    target: int
    selector: bytes
    hits: int


def verify(found: Iterable[Found], wanted: Sequence[Filter]) -> list[Found]:
    """For each wanted filter what the kernel has. KernelError unless it has exactly the wanted ones."""
    there: dict[tuple[int, int, bytes], list[Found]] = {}
    for entry in found:
        there.setdefault((entry.priority, entry.target, entry.selector), []).append(entry)
    missing, matched = [], []
    for item in wanted:
        same = there.get((item.priority, item.target, item.selector))
        if same:
            matched.append(same.pop(0))
        else:
            missing.append(item)
    foreign = [entry for entries in there.values() for entry in entries]
    if missing or foreign:
        raise KernelError("read back the filters", detail=f"missing {missing}, not asked for {foreign}")
    return matched


def decode(body: bytes) -> Found | None:
    """A filter (RTM_NEWTFILTER); None for the hash tables that the kernel lists beside them."""
    _, _, handle, _, info = qdisc.TCMSG.unpack_from(body)
    values = rt.attributes(rt.attributes(body, qdisc.TCMSG.size).get(qdisc.OPTIONS, b""))
    if _SEL not in values:
        return None
    hits = _COUNTS.unpack_from(values[_PCNT])[1] if _PCNT in values else 0
    target = rt.number(values[_CLASSID]) if _CLASSID in values else 0
    return Found(handle, info >> 16, target, values[_SEL], hits)

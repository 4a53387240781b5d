"""Queueing disciplines as values: sch_netem, sch_tbf, sch_prio and pfifo as netlink messages, read back after writing.

A tree is a tuple of qdiscs, parents first. `plan` compares the tree in place with the tree wanted and returns
commands; `execute` sends them; `verify` compares the kernel's state with the tree. Every change carries a qdisc's full
state: `change` keeps what a message leaves out (tc-netem(8), net/sched/sch_netem.c).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from netem.kernel import netem_options
from netem.kernel import rtnetlink as rt
from netem.kernel.errors import KernelError
from netem.kernel.loss_models import U32_MAX
from netem.kernel.netem_options import NetemOptions

NEWQDISC, DELQDISC, GETQDISC = 36, 37, 38  # linux/rtnetlink.h
KIND, OPTIONS, STATS2 = 1, 2, 7  # TCA_*
TCMSG = struct.Struct("=BxxxiIII")  # struct tcmsg: family, interface, handle, parent, info
ROOT = U32_MAX  # TC_H_ROOT
BANDS_MAX = 16  # TCQ_PRIO_BANDS
TBF_RATE_MAX_BPS = U32_MAX * 8  # the attribute of 32 bits is in bytes per second

_TBF_PARMS, _TBF_BURST = 1, 6  # TCA_TBF_*
_RATESPEC = struct.Struct("=BBHhHI")  # struct tc_ratespec: cell log, link layer, overhead, cell align, mpu, rate
_TBF = struct.Struct(f"={_RATESPEC.size}s{_RATESPEC.size}sIII")  # rate, peak rate, limit, buffer, mtu
_ETHERNET = 1  # TC_LINKLAYER_ETHERNET: else the kernel asks for a table of times
_PRIO = struct.Struct("=i16s")
_STATS_BASIC, _STATS_QUEUE = 1, 3  # TCA_STATS_*
_BASIC, _QUEUE = struct.Struct("=QI"), struct.Struct("=3I")  # bytes, packets; waiting, their bytes, drops
_QDISC_FLAGS = {"add": rt.CREATE | rt.EXCLUSIVE, "change": 0, "delete": 0}


def handle(major: int, minor: int = 0) -> int:
    """`tc`'s 10:1 is handle(0x10, 1)."""
    return major << 16 | minor


def show(value: int) -> str:
    """A handle as `tc` prints it."""
    return "root" if value == ROOT else f"{value >> 16:x}:{(value & 0xFFFF) or ''}"


@dataclass(frozen=True)
class Netem:
    """Delay, loss and all else that `NetemOptions` says."""

    handle: int
    parent: int
    options: NetemOptions

    @cached_property
    def report(self) -> dict[int, bytes]:
        return netem_options.report(self.options)

    @cached_property
    def reported(self) -> bytes:
        """The report as it is laid out where the kernel adds nothing."""
        head, *rest = self.report.items()
        return head[1] + rt.encode(dict(rest))


@dataclass(frozen=True)
class Tbf:
    """A token bucket. A packet longer than `burst_bytes` is dropped: at least the link's MTU and its header.

    `limit_bytes` bounds the queue only as long as no child qdisc replaces it.
    """

    handle: int
    parent: int
    rate_bps: int
    burst_bytes: int
    limit_bytes: int

    def __post_init__(self) -> None:
        if not 8 <= self.rate_bps <= TBF_RATE_MAX_BPS:
            raise ValueError(f"rate {self.rate_bps} bit/s: expected 8..{TBF_RATE_MAX_BPS}")
        if not 0 < self.burst_bytes <= U32_MAX or not 0 < self.limit_bytes <= U32_MAX:
            raise ValueError(f"tbf burst {self.burst_bytes}, limit {self.limit_bytes} bytes: expected 1..{U32_MAX}")

    @property
    def rate_bytes(self) -> int:
        return math.ceil(self.rate_bps / 8)


@dataclass(frozen=True)
class Prio:
    """Bands served in strict order; what no filter steers goes to band 0."""

    handle: int
    parent: int
    bands: int

    def __post_init__(self) -> None:
        if not 2 <= self.bands <= BANDS_MAX:
            raise ValueError(f"prio with {self.bands} bands: expected 2..{BANDS_MAX}")


@dataclass(frozen=True)
class Pfifo:
    """A queue in order of arrival. A veth that has any qdisc holds packets back while its peer's ring is full.

    Without one it drops them (drivers/net/veth.c, veth_xmit; since Linux 6.16, earlier kernels drop in any case).
    """

    handle: int
    parent: int
    limit_packets: int


Qdisc = Netem | Tbf | Prio | Pfifo
Tree = tuple[Qdisc, ...]


@dataclass(frozen=True)
class Command:
    verb: Literal["add", "change", "delete"]
    qdisc: Qdisc

    def __str__(self) -> str:
        return f"{self.verb} {kind_of(self.qdisc)} ({show(self.qdisc.handle)})"


class Stats(NamedTuple):
    """Packets that reached the qdisc (`seen`: passed, waiting or dropped), and those that wait or were dropped.

    Bytes are those of packets that passed or wait: the kernel does not count dropped bytes.
    """

    seen: int = 0
    dropped: int = 0
    waiting: int = 0
    bytes_kept: int = 0

    def since(self, before: Stats) -> Stats:
        """The difference of two readings (the kernel's packet counters wrap at 2**32).

        A packet that a qdisc above had taken out and put back was counted twice before: never less than none.
        """
        seen = (self.seen - before.seen) % 2**32
        return Stats(
            0 if seen == U32_MAX else seen,
            (self.dropped - before.dropped) % 2**32,
            self.waiting,
            max(0, self.bytes_kept - before.bytes_kept),
        )


class Found(NamedTuple):
    """A qdisc as the kernel describes it (RTM_NEWQDISC). `options`: the raw TCA_OPTIONS."""

    ifindex: int
    handle: int
    parent: int
    kind: str
    options: bytes
    stats: Stats


def burst_bytes(rate_bps: int, mtu: int, queue_bytes: int | None = None) -> int:
    """1 ms at the rate, at least four frames: short enough to shape, long enough for the timer's jitter.

    What a bucket holds passes a queue at once. So one in front of a queue that was asked for is at most a quarter of
    it: else a shallow queue would be in effect several times as deep.
    """
    bucket = math.ceil(rate_bps / 8 / 1000)
    return max(4 * (mtu + 14), bucket if queue_bytes is None else min(bucket, queue_bytes // 4))


def kind_of(qdisc: Qdisc) -> str:
    return type(qdisc).__name__.lower()


def _shape_of(tree: Tree) -> list[tuple[type, int, int, int]]:
    return [(type(q), q.handle, q.parent, q.bands if isinstance(q, Prio) else 0) for q in tree]


def plan(current: Tree, wanted: Tree) -> tuple[Command, ...]:
    """Commands that turn one tree into the other: in place where only parameters differ, else anew."""
    if current and _shape_of(current) == _shape_of(wanted):
        pairs = list(zip(current, wanted, strict=True))
        if all(_replaceable(old, new) for old, new in pairs):
            return tuple(Command("change", new) for old, new in pairs if old != new)
    remove = (Command("delete", current[0]),) if current else ()  # its children go with it
    return (*remove, *(Command("add", qdisc) for qdisc in wanted))


def _replaceable(old: Qdisc, new: Qdisc) -> bool:
    if isinstance(old, Netem) and isinstance(new, Netem):
        return netem_options.replaceable(old.options, new.options)
    return True


def options(qdisc: Qdisc) -> bytes:
    """TCA_OPTIONS with the full state."""
    match qdisc:
        case Netem():
            return netem_options.encode(qdisc.options)
        case Tbf():
            rate = _RATESPEC.pack(0, _ETHERNET, 0, -1, 0, qdisc.rate_bytes)
            parms = _TBF.pack(rate, bytes(_RATESPEC.size), qdisc.limit_bytes, 0, 0)
            return rt.encode({_TBF_PARMS: parms, _TBF_BURST: qdisc.burst_bytes})
        case Prio():
            return _PRIO.pack(qdisc.bands, bytes(16))
        case Pfifo():
            return struct.pack("=I", qdisc.limit_packets)


def request(ifindex: int, command: Command) -> rt.Request:
    """The message of a command."""
    qdisc, flags = command.qdisc, _QDISC_FLAGS[command.verb]
    body = TCMSG.pack(0, ifindex, qdisc.handle, qdisc.parent, 0)
    what = f"{command} on interface {ifindex}"
    if command.verb == "delete":
        return rt.Request(what, DELQDISC, flags, body)
    body += rt.encode({KIND: kind_of(qdisc), OPTIONS: options(qdisc)})
    return rt.Request(what, NEWQDISC, flags, body)


def execute(netlink: rt.Rtnetlink, ifindex: int, commands: Iterable[Command]) -> None:
    """Send commands in order; KernelError names the one that failed, and those behind it are not sent."""
    for command in commands:
        netlink.ask([request(ifindex, command)])


def get(ifindex: int, qdisc: Qdisc) -> rt.Request:
    """Asks for one qdisc at its place. (ECHO: without it the kernel tells listeners only.)

    ENOENT where there is none, EINVAL where there is another one.
    """
    what = f"read back {kind_of(qdisc)} ({show(qdisc.handle)})"
    return rt.Request(what, GETQDISC, rt.ECHO, TCMSG.pack(0, ifindex, qdisc.handle, qdisc.parent, 0))


def dump(netlink: rt.Rtnetlink, ifindex: int) -> dict[int, Found]:
    """The kernel's qdiscs of an interface, by handle."""
    what = f"read the qdiscs of interface {ifindex}"
    answers = netlink.ask([rt.Request(what, GETQDISC, rt.DUMP, TCMSG.pack(0, ifindex, 0, 0, 0))])
    return by_handle(body for kind, body in answers if kind == NEWQDISC and TCMSG.unpack_from(body)[1] == ifindex)


def by_handle(bodies: Iterable[bytes]) -> dict[int, Found]:
    """RTM_NEWQDISC messages, by the qdiscs' handles."""
    return {found.handle: found for found in map(decode, bodies)}


def decode(body: bytes) -> Found:
    _, ifindex, number, parent, _ = TCMSG.unpack_from(body)
    values = rt.attributes(body, TCMSG.size)
    kind = rt.text(values.get(KIND, b""))
    return Found(ifindex, number, parent, kind, values.get(OPTIONS, b""), _stats(values.get(STATS2, b"")))


def _stats(raw: bytes) -> Stats:
    values = rt.attributes(raw)
    size, packets = _BASIC.unpack_from(values.get(_STATS_BASIC, bytes(_BASIC.size)))
    waiting, backlog, drops = _QUEUE.unpack_from(values.get(_STATS_QUEUE, bytes(_QUEUE.size)))
    return Stats(packets + waiting + drops, drops, waiting, size + backlog)


def verify(found: Mapping[int, Found], tree: Sequence[Qdisc]) -> None:
    """KernelError when the kernel's state (see `dump`) differs from the tree."""
    for qdisc in tree:
        attempted = f"read back {kind_of(qdisc)} ({show(qdisc.handle)})"
        there = found.get(qdisc.handle)
        if there is None:
            raise KernelError(attempted, detail="it is not there")
        if there.kind != kind_of(qdisc) or there.parent != qdisc.parent:
            raise KernelError(attempted, detail=f"found {there.kind} below {show(there.parent)}")
        wrong = differences(qdisc, there.options)
        if wrong:
            raise KernelError(attempted, detail="; ".join(wrong))


def differences(qdisc: Qdisc, found: bytes) -> list[str]:
    """What the kernel's TCA_OPTIONS say that the qdisc does not, in words; empty when they agree."""
    match qdisc:
        case Netem():
            if found == qdisc.reported or netem_options.agrees(qdisc.report, found):
                return []
            return netem_options.differences(qdisc.options, found)
        case Tbf():
            values = rt.attributes(found)
            parms = _TBF.unpack_from(values.get(_TBF_PARMS, bytes(_TBF.size)))
            wrong = _unequal("rate in bytes/s", qdisc.rate_bytes, _RATESPEC.unpack(parms[0])[-1])
            wrong += _unequal("limit", qdisc.limit_bytes, parms[2])
            return wrong + _burst_differs(qdisc, values.get(_TBF_BURST), parms[3])
        case Prio():
            bands, priomap = _PRIO.unpack_from(found)
            return _unequal("bands", qdisc.bands, bands) + _unequal("map", bytes(16), priomap)
        case Pfifo():
            return _unequal("limit", qdisc.limit_packets, struct.unpack_from("=I", found)[0])


def _burst_differs(tbf: Tbf, told: bytes | None, buffer_ticks: int) -> list[str]:
    """The kernel reports the time that a full bucket takes; a message says its bytes (TCA_TBF_BURST) instead."""
    ticks_per_s = 1e9 / netem_options.TICK_NS
    size = rt.number(told) if told else round(buffer_ticks * tbf.rate_bytes / ticks_per_s)
    one_tick = tbf.rate_bytes / ticks_per_s
    if abs(size - tbf.burst_bytes) <= 1 + one_tick + tbf.burst_bytes / 1000:
        return []
    return [f"burst is {size} bytes instead of {tbf.burst_bytes}"]


def _unequal(name: str, wanted: object, found: object) -> list[str]:
    return [] if wanted == found else [f"{name} is {found} instead of {wanted}"]

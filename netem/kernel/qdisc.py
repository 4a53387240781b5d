"""Queueing disciplines as values: sch_netem, sch_tbf, sch_prio and pfifo through pyroute2, read back after writing.

A tree is a tuple of qdiscs, parents first. `plan` compares the tree in place with the tree wanted and returns
commands; `execute` sends them; `verify` reads the kernel's state back. Every change carries a qdisc's full
state: `change` keeps what a message leaves out (tc-netem(8), net/sched/sch_netem.c). pyroute2's own netem request
leaves out what is 0 and cannot carry a rate, so its message is put together here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pyroute2 import IPRoute
from pyroute2.netlink import NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST
from pyroute2.netlink.rtnl import RTM_NEWQDISC, TC_H_ROOT
from pyroute2.netlink.rtnl.tcmsg import tcmsg
from pyroute2.netlink.rtnl.tcmsg.common import tick_in_usec

from netem.kernel.errors import KernelError, attempting

ROOT: int = TC_H_ROOT
U32_MAX = 2**32 - 1
LOSS_TOLERANCE = 1e-6
BANDS_MAX = 16  # TCQ_PRIO_BANDS
# The legacy attributes are 32 bits wide: ticks of 64 ns, and bytes per second.
DELAY_MAX_US = int(U32_MAX / tick_in_usec)
RATE_MAX_BPS = U32_MAX * 8


def handle(major: int, minor: int = 0) -> int:
    """`tc`'s 10:1 is handle(0x10, 1)."""
    return major << 16 | minor


def show(value: int) -> str:
    """A handle as `tc` prints it."""
    return "root" if value == ROOT else f"{value >> 16:x}:{(value & 0xFFFF) or ''}"


@dataclass(frozen=True)
class Netem:
    """Delay, jitter and random, independent loss. `limit_packets` bounds all that waits, the delayed included.

    `in_order` keeps jitter from reordering packets: netem sends none before its predecessor where it has a rate
    (sch_netem.c, netem_enqueue), so it gets the highest that there is, 0.35 us for a packet of 1,500 bytes.
    """

    handle: int
    parent: int
    limit_packets: int
    delay_us: int = 0
    jitter_us: int = 0
    loss_ratio: float = 0.0
    in_order: bool = False

    @property
    def rate_bytes(self) -> int:
        """Bytes per second; 0 is none, and must be sent: what a change leaves out stays."""
        return U32_MAX if self.in_order else 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.loss_ratio <= 1.0:
            raise ValueError(f"netem loss ratio {self.loss_ratio}: expected 0..1")
        if not 0 <= self.delay_us <= DELAY_MAX_US or not 0 <= self.jitter_us <= DELAY_MAX_US:
            raise ValueError(
                f"netem delay {self.delay_us} us, jitter {self.jitter_us} us: expected 0..{DELAY_MAX_US} us"
            )
        if not 0 < self.limit_packets <= U32_MAX:
            raise ValueError(f"netem limit {self.limit_packets} packets: expected 1..{U32_MAX}")


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
        if not 8 <= self.rate_bps <= RATE_MAX_BPS:
            raise ValueError(f"rate {self.rate_bps} bit/s: expected 8..{RATE_MAX_BPS}")
        if min(self.burst_bytes, self.limit_bytes) <= 0:
            raise ValueError(f"tbf burst {self.burst_bytes}, limit {self.limit_bytes} bytes: expected > 0")


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
        return f"{self.verb} {self.qdisc}"


@dataclass(frozen=True)
class Stats:
    """Packets that reached the qdisc (`seen`: passed, waiting or dropped), and those that wait or were dropped.

    Bytes are those of packets that passed or wait: the kernel does not count dropped bytes.
    """

    seen: int = 0
    dropped: int = 0
    waiting: int = 0
    bytes_kept: int = 0

    def since(self, before: Stats) -> Stats:
        """The difference of two readings (the kernel's packet counters wrap at 2**32)."""
        return Stats(
            (self.seen - before.seen) % 2**32,
            (self.dropped - before.dropped) % 2**32,
            self.waiting,
            max(0, self.bytes_kept - before.bytes_kept),
        )


def loss_probability(ratio: float) -> int:
    """The kernel drops when its 32-bit random number is <= the probability: 0 is never, U32_MAX always."""
    return round(ratio * U32_MAX)


def loss_ratio(probability_u32: int) -> float:
    """The inverse of `loss_probability`."""
    return probability_u32 / U32_MAX


def burst_bytes(rate_bps: int, mtu: int, queue_bytes: int | None = None) -> int:
    """1 ms at the rate, at least four frames: short enough to shape, long enough for the timer's jitter.

    What a bucket holds passes a queue at once. So one in front of a queue that was asked for is at most a quarter of
    it: else a shallow queue would be in effect several times as deep.
    """
    bucket = math.ceil(rate_bps / 8 / 1000)
    return max(4 * (mtu + 14), bucket if queue_bytes is None else min(bucket, queue_bytes // 4))


def _shape_of(tree: Tree) -> list[tuple[type, int, int, int]]:
    return [(type(q), q.handle, q.parent, q.bands if isinstance(q, Prio) else 0) for q in tree]


def plan(current: Tree, wanted: Tree) -> tuple[Command, ...]:
    """Commands that turn one tree into the other: in place where only parameters differ, else anew."""
    if current and _shape_of(current) == _shape_of(wanted):
        pairs = zip(current, wanted, strict=True)
        return tuple(Command("change", new) for old, new in pairs if old != new)
    remove = (Command("delete", current[0]),) if current else ()  # its children go with it
    return (*remove, *(Command("add", qdisc) for qdisc in wanted))


def options(qdisc: Qdisc) -> dict[str, Any]:
    """The full state as pyroute2 encodes it: TCA_OPTIONS of netem, keyword arguments of `tc` for the others."""
    match qdisc:
        case Netem():
            return {
                "delay": round(qdisc.delay_us * tick_in_usec),
                "limit": qdisc.limit_packets,
                "loss": loss_probability(qdisc.loss_ratio),
                "gap": 0,
                "duplicate": 0,
                "jitter": round(qdisc.jitter_us * tick_in_usec),
                "attrs": [
                    ("TCA_NETEM_CORR", {"delay_corr": 0, "loss_corr": 0, "dup_corr": 0}),
                    ("TCA_NETEM_REORDER", {"prob_reorder": 0, "corr_reorder": 0}),
                    ("TCA_NETEM_CORRUPT", {"prob_corrupt": 0, "corr_corrupt": 0}),
                    ("TCA_NETEM_RATE", {"rate": qdisc.rate_bytes, **_NO_CELLS}),
                ],
            }
        case Tbf():
            # Bytes/s as a number: a string would be bit/s.
            rate = math.ceil(qdisc.rate_bps / 8)
            return {"rate": rate, "burst": qdisc.burst_bytes, "limit": qdisc.limit_bytes}
        case Prio():
            return {"bands": qdisc.bands, "priomap": [0] * 16}
        case Pfifo():
            return {"limit": qdisc.limit_packets}


_NO_CELLS = {"packet_overhead": 0, "cell_size": 0, "cell_overhead": 0}
_FLAGS = {
    "add": NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL,
    "change": NLM_F_REQUEST | NLM_F_ACK,
}


def netem_message(ifindex: int, netem: Netem) -> tcmsg:
    """The request that adds or changes a netem qdisc."""
    message = tcmsg()
    message["index"] = ifindex
    message["handle"] = netem.handle
    message["parent"] = netem.parent
    message["attrs"] = [("TCA_KIND", "netem"), ("TCA_OPTIONS", options(netem))]
    return message


def _send(ipr: IPRoute, ifindex: int, command: Command) -> None:
    qdisc = command.qdisc
    place = {"index": ifindex, "handle": qdisc.handle, "parent": qdisc.parent}
    if command.verb == "delete":
        ipr.tc("delete", **place)
    elif isinstance(qdisc, Netem):
        message = netem_message(ifindex, qdisc)
        message["header"]["type"] = RTM_NEWQDISC
        message["header"]["flags"] = _FLAGS[command.verb]
        ipr.nlm_request_batch([message])
    else:
        ipr.tc(command.verb, kind=type(qdisc).__name__.lower(), **place, **options(qdisc))


def execute(ipr: IPRoute, ifindex: int, commands: Sequence[Command]) -> None:
    """Send commands in order; KernelError names the one that failed."""
    for command in commands:
        with attempting(f"{command} on interface {ifindex}"):
            _send(ipr, ifindex, command)


def dump(ipr: IPRoute, ifindex: int) -> dict[int, Any]:
    """The kernel's qdiscs of an interface, by handle."""
    with attempting(f"read the qdiscs of interface {ifindex}"):
        messages = ipr.get_qdiscs(index=ifindex)
        return {m["handle"]: m for m in messages if m["index"] == ifindex}


def verify(found: dict[int, Any], tree: Tree) -> None:
    """KernelError when the kernel's state (see `dump`) differs from the tree."""
    for qdisc in tree:
        attempted = f"read back {type(qdisc).__name__.lower()} ({show(qdisc.handle)})"
        message = found.get(qdisc.handle)
        if message is None:
            raise KernelError(attempted, detail="it is not there")
        kind = message.get_attr("TCA_KIND")
        if kind != type(qdisc).__name__.lower() or message["parent"] != qdisc.parent:
            raise KernelError(attempted, detail=f"found {kind} below {show(message['parent'])}")
        wrong = differences(qdisc, message.get_attr("TCA_OPTIONS"))
        if wrong:
            raise KernelError(attempted, detail="; ".join(wrong))


def differences(qdisc: Qdisc, found: Any) -> list[str]:
    """What the kernel's TCA_OPTIONS say that the qdisc does not, in words; empty when they agree."""
    match qdisc:
        case Netem():
            return _netem_differences(qdisc, found)
        case Tbf():
            rate = found.get_attr("TCA_TBF_PARMS")["rate"]
            return _unequal("rate in bytes/s", math.ceil(qdisc.rate_bps / 8), rate)
        case Prio():
            priomap = list(found["priomap"])
            return _unequal("bands", qdisc.bands, found["bands"]) + _unequal("map", [0] * 16, priomap)
        case Pfifo():
            return _unequal("limit", qdisc.limit_packets, found["limit"])


def _netem_differences(qdisc: Netem, found: Any) -> list[str]:
    wrong = _unequal("limit", qdisc.limit_packets, found["limit"])
    for name in ("delay", "jitter"):
        us = found[name] / tick_in_usec
        if abs(us - getattr(qdisc, f"{name}_us")) > 1:
            wrong.append(f"{name} is {us:.1f} us instead of {getattr(qdisc, f'{name}_us')} us")
    loss = loss_ratio(found["loss"])
    if abs(loss - qdisc.loss_ratio) > LOSS_TOLERANCE or (qdisc.loss_ratio == 0) != (found["loss"] == 0):
        wrong.append(f"loss is {loss:.9f} instead of {qdisc.loss_ratio:.9f}")
    for name in ("duplicate", "gap"):
        wrong += _unequal(name, 0, found[name])
    wrong += _unequal("rate", qdisc.rate_bytes, (found.get_attr("TCA_NETEM_RATE") or {"rate": 0})["rate"])
    for attribute in ("CORR", "REORDER", "CORRUPT"):
        values = found.get_attr(f"TCA_NETEM_{attribute}") or {}
        foreign = {k: v for k, v in values.items() if v and not k.startswith(("attrs", "header"))}
        if foreign:
            wrong.append(f"{attribute.lower()} is set: {foreign}")
    return wrong


def _unequal(name: str, wanted: object, found: object) -> list[str]:
    return [] if wanted == found else [f"{name} is {found} instead of {wanted}"]


def stats(message: Any) -> Stats:
    """The counters of one dumped qdisc."""
    both = message.get_attr("TCA_STATS2")
    basic = both.get_attr("TCA_STATS_BASIC")
    queue = both.get_attr("TCA_STATS_QUEUE")
    return Stats(
        seen=basic["packets"] + queue["qlen"] + queue["drops"],
        dropped=queue["drops"],
        waiting=queue["qlen"],
        bytes_kept=basic["bytes"] + queue["backlog"],
    )

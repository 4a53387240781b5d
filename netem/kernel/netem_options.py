"""All that sch_netem can be told, as one value, and its TCA_OPTIONS both ways (linux/pkt_sched.h, tc-netem(8)).

A message always carries the whole state: sch_netem keeps what a change leaves out (net/sched/sch_netem.c,
netem_change). Two things it never forgets and never reports are the tables of distributions: see `replaceable`.

Correlations of loss, duplication, reordering and corruption are not offered: netem mixes each random number with the
one before, which no longer spreads evenly, and 10 % of loss at 25 % of correlation becomes 1.7 %.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, fields, replace
from typing import Any

from netem.kernel import distributions
from netem.kernel import rtnetlink as rt
from netem.kernel.loss_models import (
    U32_MAX,
    FourState,
    GilbertElliott,
    Loss,
    check_ratios,
    decode_loss,
    probability,
    ratio_of,
)

I32_MAX = 2**31 - 1
I64_MAX = 2**63 - 1
TICK_NS = 64  # PSCHED_SHIFT; the attributes of 64 bits are in nanoseconds

CORR, DELAY_DIST, REORDER, CORRUPT, LOSS, RATE, ECN, RATE64 = 1, 2, 3, 4, 5, 6, 7, 8  # TCA_NETEM_*
LATENCY64, JITTER64, SLOT, SLOT_DIST, PRNG_SEED = 10, 11, 12, 13, 14

_QOPT = struct.Struct("=6I")  # latency, limit, loss, gap, duplicate, jitter
FIXED_BYTES = _QOPT.size
_CORR = struct.Struct("=3I")  # delay, loss, duplicate
_PAIR = struct.Struct("=2I")  # probability, correlation
_RATE = struct.Struct("=IiIi")  # bytes/s, packet overhead, cell size, cell overhead
_SLOT = struct.Struct("=qqiiqq")  # least and most delay, packets, bytes, delay and jitter of a distribution
_U64, _I64 = struct.Struct("=Q"), struct.Struct("=q")


@dataclass(frozen=True)
class Overhead:
    """What a packet weighs beyond its frame, in bytes, perhaps negative; with cells (as in ATM) up to whole ones."""

    packet_overhead: int = 0
    cell_bytes: int = 0
    cell_overhead: int = 0

    def __post_init__(self) -> None:
        _within(self, "cell_bytes", 0, U32_MAX)
        for name in ("packet_overhead", "cell_overhead"):
            _within(self, name, -(2**31), I32_MAX)
        if self.cell_overhead and not self.cell_bytes:
            raise ValueError("a cell overhead without a cell size does nothing")


@dataclass(frozen=True)
class Rate:
    """netem's own rate limiter, in bytes per second."""

    bytes_per_s: int
    overhead: Overhead = field(default_factory=Overhead)

    def __post_init__(self) -> None:
        _within(self, "bytes_per_s", 1, I64_MAX)


@dataclass(frozen=True)
class Slot:
    """Packets leave in slots: some time after the last one, so many packets or bytes at once (0: any number).

    Either the time between slots is even in min..max, or it comes from a distribution of a mean and a deviation.
    """

    min_delay_ns: int = 0
    max_delay_ns: int = 0
    packets: int = 0
    bytes: int = 0
    mean_ns: int = 0
    deviation_ns: int = 0
    table: distributions.Table | None = None

    def __post_init__(self) -> None:
        for name in ("min_delay_ns", "max_delay_ns", "mean_ns"):
            _within(self, name, 0, I64_MAX)
        for name in ("packets", "bytes", "deviation_ns"):
            _within(self, name, 0, I32_MAX)
        if self.table is not None:
            distributions.check(self.table)
        if (self.deviation_ns > 0) == (self.max_delay_ns > 0):
            raise ValueError("a slot has either a longest delay or a deviation of its distribution, above 0")
        if self.min_delay_ns > self.max_delay_ns:
            raise ValueError(f"slot of {self.min_delay_ns}..{self.max_delay_ns} ns: expected least <= most")


@dataclass(frozen=True)
class NetemOptions:
    """The whole state of a netem qdisc. ValueError for what the kernel would cut, or what would do nothing.

    limit_packets: bounds all that waits. table: the distribution of the jitter; None is even in delay +- jitter.
    reorder_ratio: of every `reorder_gap`-th packet this share is not delayed. prng_seed needs Linux 6.6.
    """

    limit_packets: int
    delay_ns: int = 0
    jitter_ns: int = 0
    delay_correlation: float = 0.0
    table: distributions.Table | None = None
    loss: Loss = 0.0
    duplicate_ratio: float = 0.0
    reorder_ratio: float = 0.0
    reorder_gap: int = 0
    corrupt_ratio: float = 0.0
    rate: Rate | None = None
    slot: Slot | None = None
    ecn: bool = False
    prng_seed: int | None = None

    def __post_init__(self) -> None:
        _within(self, "limit_packets", 1, U32_MAX)
        _within(self, "delay_ns", 0, I64_MAX)
        _within(self, "jitter_ns", 0, I32_MAX)  # the kernel cuts it there, at 2.1 s
        _within(self, "reorder_gap", 0, U32_MAX)
        check_ratios(self, "delay_correlation", "duplicate_ratio", "reorder_ratio", "corrupt_ratio")
        if not isinstance(self.loss, GilbertElliott | FourState):
            check_ratios(self, "loss")
        if self.table is not None:
            distributions.check(self.table)
        if self.prng_seed is not None:
            _within(self, "prng_seed", 0, 2**64 - 1)
        if not self.jitter_ns and (self.table is not None or self.delay_correlation):
            raise ValueError("a distribution or a correlation of the delay does nothing without jitter")
        if (self.reorder_ratio > 0) != (self.reorder_gap > 0):
            raise ValueError("reordering needs both a ratio and a gap of 1 or more")
        if self.reorder_ratio and not self.delay_ns:
            raise ValueError("reordering does nothing without a delay")

    @property
    def loss_ratio(self) -> float:
        """Mean share of packets lost."""
        return self.loss.mean_ratio if isinstance(self.loss, GilbertElliott | FourState) else self.loss

    @property
    def clustering(self) -> float:
        """Variance of the number of losses over that of independent ones."""
        return self.loss.clustering if isinstance(self.loss, GilbertElliott | FourState) else 1.0


def _within(value: object, name: str, low: int, high: int) -> None:
    if not low <= getattr(value, name) <= high:
        raise ValueError(f"{type(value).__name__} {name} {getattr(value, name)}: expected {low}..{high}")


def replaceable(old: NetemOptions, new: NetemOptions) -> bool:
    """Whether a change in place leads from one to the other: a table can be replaced, but not taken away."""
    had_slot_table = old.slot is not None and old.slot.table is not None
    has_slot_table = new.slot is not None and new.slot.table is not None
    return (old.table is None or new.table is not None) and (not had_slot_table or has_slot_table)


def encode(options: NetemOptions) -> bytes:
    """TCA_OPTIONS with the whole state."""
    model = isinstance(options.loss, GilbertElliott | FourState)
    rate, slot = options.rate, options.slot
    speed, extra = (rate.bytes_per_s, rate.overhead) if rate else (0, Overhead())
    cells = (extra.packet_overhead, extra.cell_bytes, extra.cell_overhead)
    # In the order in which the kernel reports them (netem_dump), so that a report can be compared as it is.
    values: dict[int, rt.Value] = {
        LATENCY64: _I64.pack(options.delay_ns),
        JITTER64: _I64.pack(options.jitter_ns),
        CORR: _CORR.pack(probability(options.delay_correlation), 0, 0),
        REORDER: _PAIR.pack(probability(options.reorder_ratio), 0),
        CORRUPT: _PAIR.pack(probability(options.corrupt_ratio), 0),
    }
    if speed > U32_MAX:
        values[RATE64] = _U64.pack(speed)
    values[RATE] = _RATE.pack(min(speed, U32_MAX), *cells)
    values[ECN] = int(options.ecn)
    if isinstance(options.loss, GilbertElliott | FourState):
        values[LOSS] = options.loss.encode()
    values[SLOT] = _slot_bytes(slot)
    if options.table is not None:
        values[DELAY_DIST] = _table_bytes(options.table)
    if slot is not None and slot.table is not None:
        values[SLOT_DIST] = _table_bytes(slot.table)
    if options.prng_seed is not None:
        values[PRNG_SEED] = _U64.pack(options.prng_seed)
    ticks = [min(ns // TICK_NS, U32_MAX) for ns in (options.delay_ns, options.jitter_ns)]
    loss = 0 if model else probability(options.loss_ratio)
    fixed = (ticks[0], options.limit_packets, loss, options.reorder_gap, probability(options.duplicate_ratio), ticks[1])
    return _QOPT.pack(*fixed) + rt.encode(values)


def _table_bytes(table: distributions.Table) -> bytes:
    return struct.pack(f"={len(table)}h", *table)


def _slot_bytes(slot: Slot | None) -> bytes:
    if slot is None:
        return _SLOT.pack(0, 0, 0, 0, 0, 0)  # switches slots off
    return _SLOT.pack(slot.min_delay_ns, slot.max_delay_ns, slot.packets, slot.bytes, slot.mean_ns, slot.deviation_ns)


def decode(raw: bytes) -> NetemOptions:
    """What TCA_OPTIONS say, as a kernel reports it or as `encode` makes it. ValueError for what is not offered."""
    if len(raw) < _QOPT.size:
        raise ValueError(f"netem options of {len(raw)} bytes, expected {_QOPT.size} or more")
    latency, limit, loss, gap, duplicate, jitter = _QOPT.unpack_from(raw)
    found = rt.attributes(raw, _QOPT.size)
    delay_corr, *others = _CORR.unpack(found.get(CORR, bytes(_CORR.size)))
    reorder, *more = _PAIR.unpack(found.get(REORDER, bytes(_PAIR.size)))
    corrupt, *most = _PAIR.unpack(found.get(CORRUPT, bytes(_PAIR.size)))
    if any((*others, *more, *most)):
        raise ValueError(f"a correlation is set that is not offered: {[*others, *more, *most]}")
    return NetemOptions(
        limit_packets=limit,
        delay_ns=_I64.unpack(found[LATENCY64])[0] if LATENCY64 in found else latency * TICK_NS,
        jitter_ns=_I64.unpack(found[JITTER64])[0] if JITTER64 in found else jitter * TICK_NS,
        delay_correlation=ratio_of(delay_corr),
        table=_table_of(found.get(DELAY_DIST)),
        loss=decode_loss(found.get(LOSS), loss),
        duplicate_ratio=ratio_of(duplicate),
        reorder_ratio=ratio_of(reorder),
        reorder_gap=gap,
        corrupt_ratio=ratio_of(corrupt),
        rate=_rate_of(found),
        slot=_slot_of(found),
        ecn=rt.number(found[ECN]) != 0 if ECN in found else False,
        prng_seed=_U64.unpack(found[PRNG_SEED])[0] if PRNG_SEED in found else None,
    )


def _rate_of(found: dict[int, bytes]) -> Rate | None:
    speed, *cells = _RATE.unpack(found.get(RATE, bytes(_RATE.size)))
    if RATE64 in found:
        speed = max(speed, _U64.unpack(found[RATE64])[0])
    return Rate(speed, Overhead(*cells)) if speed else None


def _slot_of(found: dict[int, bytes]) -> Slot | None:
    least, most, packets, size, mean, deviation = _SLOT.unpack(found.get(SLOT, bytes(_SLOT.size)))
    if not (least or most or deviation):
        return None
    # 0 stands for any number; kernels report one of the two that way, the other as the largest integer.
    packets, size = (0 if count == I32_MAX else count for count in (packets, size))
    return Slot(least, most, packets, size, mean, deviation, _table_of(found.get(SLOT_DIST)))


def _table_of(raw: bytes | None) -> distributions.Table | None:
    return None if raw is None else struct.unpack(f"={len(raw) // 2}h", raw)


def report(options: NetemOptions) -> dict[int, bytes]:
    """TCA_OPTIONS as a kernel will report them, by attribute; 0 stands for the fixed part. For `agrees`."""
    raw = encode(options)
    found = {0: raw[: _QOPT.size], **rt.attributes(raw, _QOPT.size)}
    absent = {DELAY_DIST, SLOT_DIST}
    if not options.ecn:
        absent.add(ECN)
    if options.slot is None:
        absent.add(SLOT)
    return {kind: value for kind, value in found.items() if kind not in absent}


def agrees(expected: dict[int, bytes], raw: bytes) -> bool:
    """Whether a kernel's TCA_OPTIONS are the expected report: a quick yes. After a no, `differences` decides."""
    found = rt.attributes(raw, _QOPT.size)
    found[0] = raw[: _QOPT.size]
    if PRNG_SEED not in expected:
        found.pop(PRNG_SEED, None)
    return found == expected


def differences(wanted: NetemOptions, raw: bytes) -> list[str]:
    """What a kernel's TCA_OPTIONS say that `wanted` does not, in words; empty when they agree."""
    try:
        found = decode(raw)
        expected = _without_tables(decode(encode(wanted)))
    except ValueError as error:
        return [f"the kernel reports what was not asked for: {error}"]
    wrong = []
    for name in (each.name for each in fields(NetemOptions)):
        ours, theirs = getattr(expected, name), getattr(found, name)
        if name == "prng_seed" and ours is None:
            continue  # a kernel that has one reports the seed that it took
        if ours != theirs:
            word = name.removesuffix("_ns").removesuffix("_ratio").removesuffix("_packets")
            wrong.append(f"{word} is {_shown(theirs)} instead of {_shown(ours)}")
            if name == "prng_seed" and theirs is None:
                wrong[-1] += " (this kernel cannot seed netem: it takes Linux 6.6 or newer)"
    return wrong


def _without_tables(options: NetemOptions) -> NetemOptions:
    """As a kernel reports it: tables are left out. (A correlation or jitter beside them stays.)"""
    slot = replace(options.slot, table=None) if options.slot is not None else None
    return replace(options, table=None, slot=slot)


def _shown(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)

"""The qdiscs of the `netem` backend for a shape (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from netem.kernel import qdisc
from netem.kernel.loss_models import U32_MAX, FourState, GilbertElliott, Loss
from netem.kernel.netem_options import NetemOptions, Rate
from netem.kernel.qdisc import Found, Netem, Prio, Stats, Tbf, Tree, handle
from netem.links.base import Shape
from netem.links.bucket import QUEUE_BYTES, bucket_bytes

TBF_HANDLE = handle(1)
PRIO_HANDLE = handle(0x10)
UNLIMITED_BPS = 10 * 10**9  # what the limit is sized for where no rate is set: a veth pair reaches no more
RATED_LIMIT_MIN = 1_000
UNRATED_LIMIT_MIN = 10_000
# Keeps jitter from reordering: with a rate netem sends no packet before its predecessor (sch_netem.c, netem_enqueue).
# The highest of 32 bits takes 0.35 us for a packet of 1,500 bytes.
IN_ORDER = Rate(U32_MAX)


def netem_handle(band: int) -> int:
    return handle(0x100 + band)


def above_handle(band: int) -> int:
    """Of the qdisc that tells drops from marks, above the netem of a band with ECN."""
    return handle(0x200 + band)


def limit_packets(shape: Shape, mtu: int) -> int:
    """netem's limit: 1.5 x rate x delay in packets of `mtu` bytes, and the room that the rate limiter's queue takes.

    At least 1,000 packets (10,000 without a rate), except where `queue_bytes` asks for a short queue.
    """
    if shape.extras.limit_packets is not None:
        return shape.extras.limit_packets
    if shape.limit_packets is not None:
        return shape.limit_packets
    rate_bps = shape.rate_bps or UNLIMITED_BPS
    delayed = math.ceil(1.5 * rate_bps * (shape.delay_us + shape.jitter_us) / 8e6 / mtu)
    if shape.rate_bps is not None and shape.queue_bytes is not None:
        wanted = delayed + math.ceil(shape.queue_bytes / mtu)
    else:
        wanted = max(delayed, UNRATED_LIMIT_MIN if shape.rate_bps is None else RATED_LIMIT_MIN)
    return min(wanted, U32_MAX)


def tree(shape: Shape, mtu: int, losses: Sequence[Loss]) -> Tree:
    """The qdiscs for a shape with one band for each loss; a single one needs no bands.

    ValueError for what the kernel would not do as it is said.
    """
    parts: list[qdisc.Qdisc] = []
    parent, extras = qdisc.ROOT, shape.extras
    if shape.rate_bps is not None and extras.overhead is None:
        burst = bucket_bytes(shape.rate_bps, mtu, shape.queue_bytes or QUEUE_BYTES, shape.queue_bytes)
        parts.append(Tbf(TBF_HANDLE, parent, shape.rate_bps, burst, limit_bytes=shape.queue_bytes or burst))
        parent = TBF_HANDLE | 1
    if len(losses) > 1:
        parts.append(Prio(PRIO_HANDLE, parent, len(losses)))
    for band, loss in enumerate(losses):
        place = PRIO_HANDLE | band + 1 if len(losses) > 1 else parent
        options = NetemOptions(
            limit_packets(shape, mtu),
            delay_ns=1000 * shape.delay_us,
            jitter_ns=1000 * shape.jitter_us,
            table=extras.table,
            loss=loss,
            duplicate_ratio=extras.duplicate_ratio,
            reorder_ratio=extras.reorder_ratio,
            reorder_gap=extras.reorder_gap,
            corrupt_ratio=extras.corrupt_ratio,
            rate=_own_rate(shape),
            slot=extras.slot,
            ecn=extras.ecn,
        )
        if extras.ecn:
            parts.append(Prio(above_handle(band), place, 2))
            place = above_handle(band) | 1
        parts.append(Netem(netem_handle(band), place, options))
    return tuple(parts)


def stats_of(found: Mapping[int, Found], netem: Netem | Found) -> Stats:
    """What a netem has passed and dropped. With ECN it counts marked packets as passed and as drops; the qdisc above it
    counts only what did not come in (net/sched/sch_netem.c, netem_enqueue; sch_prio.c, prio_enqueue).
    """
    own = found[netem.handle].stats
    above = found.get(netem.parent & ~0xFFFF)
    if above is None or above.handle != above_handle(netem.handle - netem_handle(0) >> 16):
        return own
    marked = max(0, own.dropped - above.stats.dropped)
    return own._replace(seen=own.seen - marked, dropped=own.dropped - marked)


def _own_rate(shape: Shape) -> Rate | None:
    if shape.rate_bps is None:
        return None
    if shape.extras.overhead is not None:
        return Rate(math.ceil(shape.rate_bps / 8), shape.extras.overhead)
    return IN_ORDER if shape.jitter_us else None


def own_loss(shape: Shape) -> Loss:
    """A link's own loss, as netem makes it: its chain is random, not the one that a seed repeats."""
    chain = shape.chain
    if chain is not None:
        return GilbertElliott(chain.p, chain.r, chain.h, chain.k)
    return shape.extras.loss or shape.loss_ratio


def combined(base: Loss, ratio: float) -> Loss:
    """The loss of two independent processes. ValueError on top of four states."""
    if isinstance(base, GilbertElliott | FourState):
        return on_top(base, ratio)
    return 1.0 - (1.0 - base) * (1.0 - ratio)


def on_top(model: GilbertElliott | FourState, ratio: float) -> GilbertElliott | FourState:
    """A model of loss, and a further loss of what it lets pass. ValueError for four states: no form of theirs is it."""
    if not ratio:
        return model
    if isinstance(model, FourState):
        raise ValueError("a further loss on top of four_state is not possible; use gilbert_elliott")
    return model.with_loss(ratio)

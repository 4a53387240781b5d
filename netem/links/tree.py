"""The qdiscs of the `netem` backend for a shape (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from netem.kernel import qdisc
from netem.kernel.loss_models import U32_MAX
from netem.kernel.netem_options import NetemOptions, Rate
from netem.kernel.qdisc import Netem, Prio, Tbf, Tree, handle
from netem.links.base import Shape

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


def limit_packets(shape: Shape, mtu: int) -> int:
    """netem's limit: 1.5 x rate x delay in packets of `mtu` bytes, and the room that the rate limiter's queue takes.

    At least 1,000 packets (10,000 without a rate), except where `queue_bytes` asks for a short queue.
    """
    if shape.limit_packets is not None:
        return shape.limit_packets
    rate_bps = shape.rate_bps or UNLIMITED_BPS
    delayed = math.ceil(1.5 * rate_bps * (shape.delay_us + shape.jitter_us) / 8e6 / mtu)
    if shape.rate_bps is not None and shape.queue_bytes is not None:
        wanted = delayed + math.ceil(shape.queue_bytes / mtu)
    else:
        wanted = max(delayed, UNRATED_LIMIT_MIN if shape.rate_bps is None else RATED_LIMIT_MIN)
    return min(wanted, U32_MAX)


def tree(shape: Shape, mtu: int, losses: Sequence[float]) -> Tree:
    """The qdiscs for a shape with one band for each loss ratio; a single one needs no bands."""
    parts: list[qdisc.Qdisc] = []
    parent = qdisc.ROOT
    if shape.rate_bps is not None:
        burst = qdisc.burst_bytes(shape.rate_bps, mtu, shape.queue_bytes)
        parts.append(Tbf(TBF_HANDLE, parent, shape.rate_bps, burst, limit_bytes=shape.queue_bytes or burst))
        parent = TBF_HANDLE | 1
    if len(losses) > 1:
        parts.append(Prio(PRIO_HANDLE, parent, len(losses)))
    in_order = shape.jitter_us > 0 and shape.rate_bps is not None
    for band, loss in enumerate(losses):
        place = PRIO_HANDLE | band + 1 if len(losses) > 1 else parent
        options = NetemOptions(
            limit_packets(shape, mtu),
            delay_ns=1000 * shape.delay_us,
            jitter_ns=1000 * shape.jitter_us,
            loss=loss,
            rate=IN_ORDER if in_order else None,
        )
        parts.append(Netem(netem_handle(band), place, options))
    return tuple(parts)


def combined(base_ratio: float, rule_ratio: float) -> float:
    """The loss of two independent processes."""
    return 1.0 - (1.0 - base_ratio) * (1.0 - rule_ratio)

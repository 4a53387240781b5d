"""What only netem can do to a link, from the topology's terms to those of the links."""

from __future__ import annotations

from netem.kernel.netem_options import Overhead, Slot
from netem.links.base import Extras
from netem.spec import LinkShape, impairments
from netem.spec.impairments import FourStateLoss, table_of


def extras_of(shape: LinkShape) -> Extras:
    """What only netem can do."""
    reorder = shape.reorder
    return Extras(
        table=table_of(shape.distribution),
        loss=shape.loss.model if isinstance(shape.loss, FourStateLoss) else None,
        overhead=_overhead(shape.overhead),
        limit_packets=shape.limit,
        duplicate_ratio=shape.duplicate,
        corrupt_ratio=shape.corrupt,
        reorder_ratio=reorder.ratio if reorder else 0.0,
        reorder_gap=reorder.gap if reorder else 0,
        slot=_slot(shape.slot),
        ecn=shape.ecn,
    )


def _overhead(asked: impairments.Overhead | None) -> Overhead | None:
    if asked is None:
        return None
    return Overhead(asked.packet_bytes, asked.cell_bytes, asked.cell_overhead_bytes)


def _slot(asked: impairments.Slot | None) -> Slot | None:
    if asked is None:
        return None
    packets, size = asked.packets or 0, asked.size_bytes or 0
    if not asked.jitter_s:
        return Slot(_ns(asked.min_s), _ns(asked.max_s), packets, size)
    table = table_of(asked.distribution or "uniform")
    return Slot(0, 0, packets, size, _ns(asked.delay_s), _ns(asked.jitter_s), table)


def _ns(seconds: float | None) -> int:
    return round((seconds or 0.0) * 1e9)

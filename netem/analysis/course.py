"""The exact course of rounds under stop-and-wait, where a mask or a list says which transmissions are lost."""

from __future__ import annotations

import numpy as np

from netem.analysis import oracle
from netem.analysis.check import Check
from netem.analysis.fates import Flow, Keys
from netem.analysis.records import RoundRow
from netem.analysis.run import OrderFn, RunData, TransportRun


def by_loss_alone(run: TransportRun) -> list[RoundRow]:
    """Completed burst rounds in which nothing but the loss took packets away, or brought more."""
    others = (*run.device_drops.values(), *run.queue_drops.values(), *run.uplink_drops.values())
    changed = {(c.round, c.worker, c.direction) for c in run.counts if c.corrupted or c.duplicated}
    return [
        row
        for row in (() if any(others) or run.altered.ratios else run.rows)
        if row.burst
        and row.loss_requested
        and row.outcome == "ok"
        and row.passes is not None
        and not row.dropped_socket
        and (row.round, row.worker, row.direction) not in changed
    ]


def recorded_exact(run: TransportRun, data: RunData) -> Check:
    """The same of a recorded mask: a round in which nothing else loses takes the course that the list says."""
    problems: list[str] = []
    compared = 0
    others = (*run.device_drops.values(), *run.queue_drops.values(), *run.uplink_drops.values())
    for row in run.rows if not any(others) and not run.altered.ratios else ():
        keys = run.recorded.get(Flow(row.direction, row.worker, row.round))
        alone = data.plan.requested(row.iteration, row.worker, row.direction, row.phase) == (0.0, False)
        usable = alone and row.outcome == "ok" and not row.dropped_socket
        if keys is None or not usable or not row.chunks or not row.delivered or run.order is None:
            continue
        compared += 1
        problems += _unlike(row, run.order, recorded_drop(keys), "list")
    detail = problems[0] if problems else f"{compared} rounds equal the recorded losses' prediction to the packet"
    return Check("recorded mask", run.name, run.repeat, not problems, detail)


def _unlike(row: RoundRow, order: OrderFn, drop: oracle.DropFn, source: str) -> list[str]:
    """Where a round's course is not the one that these losses make, what `source` says of it."""
    assert row.chunks is not None
    assert row.delivered is not None
    sent = order(row.round, row.worker, row.direction, row.chunks)
    want = oracle.predict(sent, row.delivered, row.chunks, drop)
    if (want.passes, want.packets_at_need) == (row.passes, row.packets_at_need):
        return []
    return [
        f"round {row.round}, worker {row.worker} {row.direction}: {row.passes} passes and "
        f"{row.packets_at_need} packets, the {source} says {want.passes} and {want.packets_at_need}"
    ]


def recorded_drop(keys: Keys) -> oracle.DropFn:
    """The decision of a recorded mask on one flow of one round."""
    return lambda sequence, number: np.isin(sequence.astype(np.uint64) << np.uint64(16) | np.uint64(number), keys)


def mask_exact(run: TransportRun, data: RunData) -> Check:
    """Passes and packets up to the completing chunk are what the loss mask says, to the packet."""
    problems: list[str] = []
    compared = 0
    for row in by_loss_alone(run):
        loss = row.loss_requested
        if run.order is None or run.mask_seed is None or loss is None or not row.chunks or not row.delivered:
            continue
        if row.packets_at_need is None:
            continue
        compared += 1
        drop = oracle.mask_drop(run.mask_seed, row.direction, row.worker, row.round, loss)
        problems += _unlike(row, run.order, drop, "mask")
    detail = problems[0] if problems else f"{compared} burst rounds equal the mask's prediction to the packet"
    return Check("mask", run.name, run.repeat, not problems, detail)

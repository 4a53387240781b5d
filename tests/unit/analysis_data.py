"""A run without a network: events and counters as a faithful stop-and-wait run under the mask leaves them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from netem.analysis import oracle
from netem.analysis.merge import LossPlan, merge_epochs, merge_rounds
from netem.analysis.oracle import IntArray
from netem.analysis.records import Event, LinkCount
from netem.analysis.run import CaptureCount, RunData, TransportRun

SEED = 7
OVERSHOOT = 5


@dataclass(frozen=True)
class FakeBurst:
    iteration: int
    loss: float
    direction: str = "up"
    workers: Any = "all"
    for_s: float | None = None


def order_of(round_: int, worker: int, direction: str, chunks: int) -> IntArray:
    return np.roll(np.arange(chunks, dtype=np.int64), -(round_ * 31 + worker * 17) % chunks)


def plan(*bursts: FakeBurst) -> LossPlan:
    return LossPlan(bursts or (FakeBurst(4, 0.9), FakeBurst(9, 0.9)), {"worker1": 1, "worker2": 2, "worker3": 3}, {})


def flow_events(
    loss_plan: LossPlan, round_: int, worker: int, direction: str, chunks: int, tolerance: float
) -> tuple[list[Event], LinkCount]:
    """What both ends report of one flow in one round, and what the link counted."""
    loss = loss_plan.requested(round_, worker, direction)[0] or 0.0
    needed = oracle.need(chunks, tolerance)
    drop = oracle.mask_drop(SEED, direction, worker, round_, loss)
    went = oracle.predict(order_of(round_, worker, direction, chunks), needed, chunks, drop)
    sent = went.packets_at_need + OVERSHOOT
    dropped = went.packets_at_need - needed
    common = {"round": round_, "iteration": round_, "bucket": 0, "epoch": round_ // 5, "worker": worker}
    common["direction"] = direction
    latency_s = 0.0005 + 0.0001 * went.passes + 1e-6 * went.packets_at_need
    events: list[Event] = [
        {
            "event": "sent",
            **common,
            "packets": sent,
            "bytes": sent * 1472,
            "passes": went.passes,
            "packets_at_need": went.packets_at_need,
            "latency_s": latency_s,
            "wait_s": 0.0,
            "outcome": "ok",
        },
        {
            "event": "received",
            **common,
            "phase": "normal",
            "tolerance": tolerance,
            "chunks": chunks,
            "need": needed,
            "delivered": needed,
            "passes": went.passes,
            "duplicate": 0,
            "dropped_socket": 0,
            "outcome": "ok",
        },
        {"event": "late", "round": round_, "worker": worker, "direction": direction, "count": OVERSHOOT},
    ]
    return events, LinkCount(direction, worker, round_, sent, dropped, sent * 1514)


def transport(name: str, loss_plan: LossPlan, tolerance: float, *, rounds: int = 15, chunks: int = 500) -> TransportRun:
    events: list[Event] = []
    counts: list[LinkCount] = []
    for round_ in range(rounds):
        for direction, p in (("up", tolerance), ("down", 0.0)):
            for worker in (1, 2, 3):
                new, count = flow_events(loss_plan, round_, worker, direction, chunks, p)
                events += new
                counts.append(count)
    for epoch in range(rounds // 5):
        events.append({"event": "replicas", "epoch": epoch, "identical": True, "divergence": 0.0})
        for worker in (1, 2, 3):
            values = {"train_loss": 0.1, "metric": "accuracy", "value": 0.97, "wall_s": 0.5}
            events.append({"event": "epoch", "epoch": epoch, "worker": worker, **values})
    return TransportRun(
        name=name,
        kind=name,
        repeat=0,
        rows=tuple(merge_rounds(events, counts, loss_plan, transport=name)),
        epochs=tuple(merge_epochs(events, transport=name)),
        counts=tuple(counts),
        total_s=1.5,
        stop_and_wait=True,
        mask_seed=SEED,
        order=order_of,
    )


@cache
def faithful_run(*expect: str, bursts: tuple[FakeBurst, ...] = (), chunks: int = 500) -> RunData:
    loss_plan = plan(*bursts)
    return RunData(
        scenario="burst90",
        seed=SEED,
        backend="bpf",
        loss_engine="bpf",
        plan=loss_plan,
        runs=(
            transport("dblp", loss_plan, 0.408, chunks=chunks),
            transport("mlt", loss_plan, 0.008, chunks=chunks),
        ),
        captures=(CaptureCount("server", "dblp", 12_000, 0, "tcpdump"),),
        expect=expect,
    )


def with_run(data: RunData, index: int, **changes: Any) -> RunData:
    runs = list(data.runs)
    runs[index] = replace(runs[index], **changes)
    return replace(data, runs=tuple(runs))

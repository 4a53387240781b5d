"""Joins what sender, receiver and links reported about each round into one row."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from netem.analysis import oracle
from netem.analysis.records import EpochRow, Event, LinkCount, RoundRow, counts_by_flow
from netem.spec.loss import BurstyLoss, together

FlowKey = tuple[int, int, str]
"""(round, worker, direction)"""


class BurstLike(Protocol):
    """The part of `netem.spec`'s burst that is needed here. `workers`: "all", or host names or ranks."""

    @property
    def iteration(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def direction(self) -> str: ...
    @property
    def workers(self) -> Any: ...
    @property
    def for_s(self) -> float | None: ...


class TopologyLike(Protocol):
    @property
    def ranks(self) -> Mapping[str, int]: ...


RoundsLike = tuple[int, int, BurstLike, float | None]
"""(first iteration, last, burst that covers them, its length if it ends within the round)."""


@dataclass(frozen=True)
class LossPlan:
    """Which loss was asked for, round by round.

    `ranks` maps the workers' host names to ranks; `base_loss` is the steady loss of a flow's path, by
    (worker, direction), where there is any. `windows` and `phases` are events by iteration and by phase; a loss of 0
    stands for an event that changes something else.
    """

    bursts: tuple[BurstLike, ...]
    ranks: Mapping[str, int]
    base_loss: Mapping[tuple[int, str], float]
    windows: tuple[RoundsLike, ...] = ()
    phases: tuple[tuple[str, BurstLike], ...] = ()
    recorded: frozenset[FlowKey] = frozenset()
    """Flows that a recorded mask loses something of; how much, only who sent knows."""
    in_bursts: frozenset[tuple[int, str]] = frozenset()
    """Flows that lose packets by a model, not each by itself: no interval of independent losses holds for them."""

    @cached_property
    def _by_iteration(self) -> dict[int, list[tuple[BurstLike, float | None]]]:
        """What covers a single iteration; longer windows are few."""
        found: dict[int, list[tuple[BurstLike, float | None]]] = {}
        for burst in self.bursts:
            found.setdefault(burst.iteration, []).append((burst, burst.for_s))
        for first, last, burst, for_s in self.windows:
            if first == last:
                found.setdefault(first, []).append((burst, for_s))
        return found

    @cached_property
    def _long(self) -> list[RoundsLike]:
        return [window for window in self.windows if window[0] != window[1]]

    def covers(self, burst: BurstLike, worker: int, direction: str) -> bool:
        if burst.direction not in (direction, "both"):
            return False
        if isinstance(burst.workers, str):
            return burst.workers == "all" or self.ranks.get(burst.workers) == worker
        return any(item == worker or self.ranks.get(str(item)) == worker for item in burst.workers)

    def requested(
        self, iteration: int, worker: int, direction: str, phase: str = "", by_time: Collection[float] = (0.0,)
    ) -> tuple[float | None, bool]:
        """(loss ratio, whether a burst covers this round). The ratio is None where it holds for a part of
        it only, or on average.

        Of two bursts the higher loss holds: both compare the same hash with their threshold. `by_time`: all the
        losses that events by time asked for within the round.
        """
        base = self.base_loss.get((worker, direction), 0.0)
        there = [*self._by_iteration.get(iteration, ())]
        there += [(burst, for_s) for first, last, burst, for_s in self._long if first <= iteration <= last]
        there += [(burst, None) for name, burst in self.phases if name == phase]
        covering = [(burst, for_s) for burst, for_s in there if self.covers(burst, worker, direction)]
        highest = max((burst.loss for burst, for_s in covering if for_s is None), default=0.0)
        asked = {max(highest, loss) for loss in by_time}
        asked |= {max(highest, burst.loss) for burst, for_s in covering if for_s is not None}
        if len(asked) != 1:
            return None, True
        if (worker, direction) in self.in_bursts:
            return None, bool(covering)
        return together(base, asked.pop()), bool(covering)


@dataclass
class _Reports:
    """Events of one transport's run, sorted by what they are about."""

    sent: dict[FlowKey, Event]
    received: dict[FlowKey, Event]
    late: dict[FlowKey, int]
    phases: dict[int, str]
    places: dict[int, tuple[int, int, int]]
    """Round -> (iteration, bucket, epoch): only the workers know them, and say so in one report a round."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> _Reports:
        found = cls({}, {}, {}, {}, {})
        for event in events:
            kind = event.get("event")
            if event.get("phase") and "round" in event:
                found.phases[event["round"]] = str(event["phase"])
            if kind not in ("sent", "received", "late"):
                continue
            key = (event["round"], event["worker"], event["direction"])
            if kind == "late":
                found.late[key] = found.late.get(key, 0) + event["count"]
            else:
                (found.sent if kind == "sent" else found.received)[key] = event
            if "iteration" in event:
                found.places[key[0]] = (event["iteration"], event.get("bucket", 0), event.get("epoch", 0))
        return found


def merge_rounds(
    events: Iterable[Event],
    counts: Sequence[LinkCount],
    plan: LossPlan,
    *,
    transport: str,
    repeat: int = 0,
    timed: Mapping[FlowKey, Collection[float]] | None = None,
) -> list[RoundRow]:
    """One row a (round, worker, direction) that any side reported, sorted by round, direction (up first) and worker.

    A side that reported nothing leaves its columns None; without the sender's report the outcome is lost_worker. A
    round whose iteration no worker named counts as one iteration. `timed`: losses of events by time, of the flows that
    they touched.
    """
    reports = _Reports.of(events)
    by_flow = counts_by_flow(counts)
    keys = reports.sent.keys() | reports.received.keys()
    return [
        _row(transport, repeat, key, reports, by_flow.get(key), plan, timed or {})
        for key in sorted(keys, key=lambda k: (k[0], k[2] != "up", k[1]))
    ]


def _row(
    transport: str,
    repeat: int,
    key: FlowKey,
    reports: _Reports,
    count: LinkCount | None,
    plan: LossPlan,
    timed: Mapping[FlowKey, Collection[float]],
) -> RoundRow:
    round_, worker, direction = key
    sent, received = reports.sent.get(key, {}), reports.received.get(key, {})
    iteration, bucket, epoch = reports.places.get(round_, (round_, 0, 0))
    phase = str(received.get("phase") or reports.phases.get(round_, ""))
    loss, burst = plan.requested(iteration, worker, direction, phase, timed.get(key, (0.0,)))
    if key in plan.recorded:
        loss, burst = None, True
    counted = received.get("passes") is not None  # TCP has no passes, and its own way to repeat
    oracle_passes, oracle_packets = _oracle(received, loss) if counted else (None, None)
    late = reports.late.get(key, 0) + received.get("after_need", 0)
    return RoundRow(
        transport=transport,
        repeat=repeat,
        round=round_,
        iteration=iteration,
        bucket=bucket,
        epoch=epoch,
        worker=worker,
        direction=direction,
        phase=phase,
        tolerance=received.get("tolerance"),
        chunks=received.get("chunks"),
        delivered=received.get("delivered"),
        passes=received.get("passes"),
        packets_sent=sent.get("packets"),
        packets_at_need=sent.get("packets_at_need"),
        bytes_sent=sent.get("bytes"),
        latency_s=sent.get("latency_s"),
        wait_s=sent.get("wait_s"),
        goodput_bps=_goodput(sent, received.get("delivered")),
        outcome=_outcome(sent, received),
        burst=int(burst or key in timed),
        dropped_link=None if count is None else count.dropped,
        dropped_socket=received.get("dropped_socket"),
        late=late if counted or late else None,
        duplicate=received.get("duplicate"),
        oracle_passes=oracle_passes,
        oracle_packets=oracle_packets,
        loss_requested=loss,
        runqueue_s=_longest(sent.get("runqueue_s"), received.get("runqueue_s")),
    )


def _longest(*waits_s: float | None) -> float | None:
    return max((wait_s for wait_s in waits_s if wait_s is not None), default=None)


def _outcome(sent: Event, received: Event) -> str:
    """The worse of what the two sides saw. A sender's "ok" is the receiver's word: it has read its stop."""
    seen = [str(side["outcome"]) for side in (sent, received) if side.get("outcome")]
    bad = [outcome for outcome in seen if outcome != "ok"]
    return bad[0] if bad else ("ok" if sent.get("outcome") == "ok" else "lost_worker")


def _goodput(sent: Event, delivered: int | None) -> float | None:
    """Delivered bytes, at the mean size of a packet sent, over the latency; the whole volume where nothing
    is counted.
    """
    size, packets, latency_s = sent.get("bytes"), sent.get("packets"), sent.get("latency_s")
    if not size or not latency_s:
        return None
    share = delivered / packets if packets and delivered is not None else 1.0
    return float(8 * size * min(1.0, share) / latency_s)


def _oracle(received: Event, loss: float | None) -> tuple[float | None, float | None]:
    chunks, needed = received.get("chunks"), received.get("need")
    if not chunks or needed is None or loss is None or loss >= 1.0:
        return None, None
    if isinstance(loss, BurstyLoss):  # the chunks of a pass are not lost independently
        return None, None
    passes = oracle.passes(chunks, needed, loss)
    return (passes.mean if passes else None), oracle.Packets(needed, loss).mean


def merge_epochs(events: Iterable[Event], *, transport: str, repeat: int = 0) -> list[EpochRow]:
    """One row an (epoch, worker); the divergence of the replicas is that of the epoch."""
    epochs: dict[tuple[int, int], Event] = {}
    divergence: dict[int, float | None] = {}
    for event in events:
        if event.get("event") == "epoch":
            epochs[event["epoch"], event["worker"]] = event
        elif event.get("event") == "replicas":
            known = event.get("divergence")
            divergence[event["epoch"]] = 0.0 if event.get("identical") else known
    return [
        EpochRow(
            transport=transport,
            repeat=repeat,
            epoch=epoch,
            worker=worker,
            train_loss=event.get("train_loss"),
            metric=event.get("metric", ""),
            value=event.get("value"),
            wall_s=event.get("wall_s"),
            replica_divergence=divergence.get(epoch),
        )
        for (epoch, worker), event in sorted(epochs.items())
    ]

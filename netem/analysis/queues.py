"""A port's queue from records of single packets: depth, time in the queue, drops, and what a microburst has to do with
them. Pure; times are CLOCK_MONOTONIC in nanoseconds, bytes those of link-layer frames.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Records = NDArray[Any]
"""Structured: time_in_ns, time_out_ns (0: dropped), bytes, kind."""
IntArray = NDArray[np.int64]
BUSY_PACKETS = 20
"""Fewer that waited say nothing of a rate."""
IN_FLIGHT_FRAMES = 2
"""Packets that are counted while they are on their way into the queue or out of it, beyond its limit."""
CSV_HEADER = "time_s,kind,bytes,depth_bytes,depth_packets,sojourn_s,dropped"


@dataclass(frozen=True)
class Depth:
    """What the queue holds after each arrival and departure, in order. All arrays have one length."""

    times_ns: IntArray
    size_bytes: IntArray
    packets: IntArray


@dataclass(frozen=True)
class FlowDrops:
    """Packets of one kind at the port, over the whole run of a transport."""

    kind: str
    packets_in: int
    packets_out: int

    @property
    def dropped(self) -> int:
        return self.packets_in - self.packets_out


@dataclass(frozen=True)
class BurstReport:
    """One microburst as it was asked for and as it was sent; seconds since the run began, None: it never came."""

    number: int
    to: str
    senders: int
    planned_packets: int | None
    """Of all senders; None: the clock ended it."""
    planned_duration_s: float | None
    planned_s: float | None = None
    began_s: float | None = None
    ended_s: float | None = None
    packets: int = 0
    refused: int = 0
    iteration: int | None = None

    @property
    def late_s(self) -> float | None:
        return None if self.began_s is None or self.planned_s is None else self.began_s - self.planned_s

    @property
    def duration_s(self) -> float | None:
        return None if self.began_s is None or self.ended_s is None else self.ended_s - self.began_s


@dataclass(frozen=True)
class QueueReport:
    """One port of one transport's run. `drops_*` are of recorded packets, `flows` of all.

    limit_bytes, rate_bps: as the topology asks; None where the link has no rate. unrecorded: packets inside a window
    for which there was no room. counted_drops: by the queueing discipline itself; None where it cannot tell.
    sojourn_*: time in the queue of the packets that passed. drops_in_burst: share of the recorded drops that fell into
    a microburst or the time in which the queue that it filled drains; None without drops or bursts.
    """

    host: str
    limit_bytes: int | None
    rate_bps: int | None
    flows: tuple[FlowDrops, ...]
    counted_drops: int | None
    recorded: int
    unrecorded: int
    peak_bytes: int
    peak_packets: int
    largest_frame: int
    sojourn_mean_s: float | None
    sojourn_p99_s: float | None
    sojourn_max_s: float | None
    drops_by_kind: dict[str, int]
    drops_in_burst: float | None
    busy_rate_bps: float | None = None
    """Link-layer bits per second while packets waited: what the rate was when it mattered; None: they hardly did."""

    @property
    def dropped(self) -> int:
        """Of all kinds."""
        return sum(flow.dropped for flow in self.flows)

    def dropped_of(self, kind: str) -> int:
        return sum(flow.dropped for flow in self.flows if flow.kind == kind)

    @property
    def peak_share(self) -> float | None:
        """Peak depth over the queue's limit."""
        return self.peak_bytes / self.limit_bytes if self.limit_bytes else None

    @property
    def too_deep(self) -> bool:
        """Deeper than the limit and what can be under way beside it."""
        room = IN_FLIGHT_FRAMES * self.largest_frame
        return self.limit_bytes is not None and self.peak_bytes > self.limit_bytes + room

    def to_json(self) -> dict[str, Any]:
        flows = [{**asdict(flow), "dropped": flow.dropped} for flow in self.flows]
        return {**asdict(self), "flows": flows, "dropped": self.dropped, "peak_share": self.peak_share}


def of_data(drops: Mapping[str, int], queues: Sequence[QueueReport], ranks: Mapping[str, int]) -> dict[str, int]:
    """Queue drops by direction, without the packets of other kinds where a recorded port tells them apart."""
    found = dict(drops)
    for queue in queues:
        if queue.counted_drops is not None and queue.host in ranks:
            direction = "down" if ranks[queue.host] else "up"
            found[direction] = max(0, found[direction] - queue.dropped + queue.dropped_of("data"))
    return found


def busy_rate_bps(records: Records) -> float | None:
    """Of the packets that had entered before the one in front of them left, so that the queue was never empty.

    The first packets of a busy time, which a token bucket lets go at once, are not among them.
    """
    left = passed(records)
    left = left[np.argsort(left["time_out_ns"], kind="stable")]
    waited = left["time_in_ns"][1:] < left["time_out_ns"][:-1]
    took_ns = int(np.diff(left["time_out_ns"])[waited].sum())
    if np.count_nonzero(waited) < BUSY_PACKETS or not took_ns:
        return None
    return 8e9 * int(left["bytes"][1:][waited].sum()) / took_ns


def passed(records: Records) -> Records:
    """Packets that came out again."""
    return records[records["time_out_ns"] > 0]


def depth(records: Records) -> Depth:
    """Depth over time. Dropped packets were never in the queue. At equal times departures come first."""
    inside = passed(records)
    times = np.concatenate([inside["time_in_ns"], inside["time_out_ns"]]).astype(np.int64)
    sizes = inside["bytes"].astype(np.int64)
    ones = np.ones(len(inside), np.int64)
    change_bytes, change_packets = np.concatenate([sizes, -sizes]), np.concatenate([ones, -ones])
    # Only of different packets: one that arrives and leaves in the same nanosecond has to arrive first.
    order = np.lexsort((change_packets, times)) if _no_instant(inside) else np.argsort(times, kind="stable")
    return Depth(times[order], np.cumsum(change_bytes[order]), np.cumsum(change_packets[order]))


def _no_instant(inside: Records) -> bool:
    return bool((inside["time_out_ns"] > inside["time_in_ns"]).all())


def depth_at(records: Records) -> tuple[IntArray, IntArray]:
    """(bytes, packets) in the queue as each recorded packet arrives, without itself."""
    inside = passed(records)
    arrivals = np.sort(inside["time_in_ns"])
    order_in, order_out = np.argsort(inside["time_in_ns"]), np.argsort(inside["time_out_ns"])
    came = _running(inside["bytes"][order_in])
    went = _running(inside["bytes"][order_out])
    departures = inside["time_out_ns"][order_out]
    before = np.searchsorted(arrivals, records["time_in_ns"], side="left")
    gone = np.minimum(np.searchsorted(departures, records["time_in_ns"], side="right"), before)
    return (came[before] - went[gone]).clip(0), (before - gone).astype(np.int64)


def _running(sizes: NDArray[Any]) -> IntArray:
    return np.concatenate([[0], np.cumsum(sizes.astype(np.int64))])


def share_in_windows(times_ns: NDArray[Any], windows: Sequence[tuple[int, int]]) -> float | None:
    """Share of these moments that lie in any window (both ends included). None without moments or windows."""
    if not len(times_ns) or not windows:
        return None
    hit = np.zeros(len(times_ns), np.bool_)
    for start, end in windows:
        hit |= (times_ns >= start) & (times_ns <= end)
    return float(hit.mean())


def drain_ns(limit_bytes: int | None, rate_bps: int | None) -> int:
    """How long a full queue takes to drain: so long after its end a microburst may still cause drops."""
    return round(limit_bytes * 8e9 / rate_bps) if limit_bytes and rate_bps else 0


def report(
    host: str,
    records: Records,
    kinds: Sequence[str],
    *,
    flows: tuple[FlowDrops, ...],
    counted_drops: int | None,
    unrecorded: int,
    limit_bytes: int | None,
    rate_bps: int | None,
    bursts_ns: Sequence[tuple[int, int]],
) -> QueueReport:
    """What a port's records say. `bursts_ns`: begin and end of the microbursts that it received."""
    held = depth(records)
    dropped = records[records["time_out_ns"] == 0]
    left = passed(records)
    sojourn = (left["time_out_ns"] - left["time_in_ns"]).astype(np.float64) / 1e9
    after = drain_ns(limit_bytes, rate_bps)
    windows = [(start, end + after) for start, end in bursts_ns]
    return QueueReport(
        host=host,
        limit_bytes=limit_bytes,
        rate_bps=rate_bps,
        flows=flows,
        counted_drops=counted_drops,
        recorded=len(records),
        unrecorded=unrecorded,
        peak_bytes=int(held.size_bytes.max(initial=0)),
        peak_packets=int(held.packets.max(initial=0)),
        largest_frame=int(records["bytes"].max(initial=0)),
        sojourn_mean_s=float(sojourn.mean()) if len(sojourn) else None,
        sojourn_p99_s=float(np.quantile(sojourn, 0.99)) if len(sojourn) else None,
        sojourn_max_s=float(sojourn.max()) if len(sojourn) else None,
        busy_rate_bps=busy_rate_bps(records),
        drops_by_kind={
            kind: int((dropped["kind"] == number).sum())
            for number, kind in enumerate(kinds)
            if (dropped["kind"] == number).any()
        },
        drops_in_burst=share_in_windows(dropped["time_in_ns"], windows),
    )


def csv_text(records: Records, kinds: Sequence[str], began_ns: int) -> str:
    """A line for each recorded packet, in the order of arrival; `time_s` since `began_ns`."""
    held_bytes, held_packets = depth_at(records)
    out = io.StringIO()
    out.write(CSV_HEADER + "\n")
    rows = zip(records.tolist(), held_bytes.tolist(), held_packets.tolist(), strict=True)
    for (time_in, time_out, size, kind), in_queue, packets in rows:
        sojourn = f"{(time_out - time_in) / 1e9:.9f}" if time_out else ""
        lost = 0 if time_out else 1
        out.write(f"{(time_in - began_ns) / 1e9:.9f},{kinds[kind]},{size},{in_queue},{packets},{sojourn},{lost}\n")
    return out.getvalue()

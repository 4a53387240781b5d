"""A queue from its records: depth, time inside, drops, and a model of a drop-tail queue to compare with."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.analysis import congestion, queue_figure, queues
from netem.analysis.queues import BurstReport, FlowDrops, QueueReport
from netem.links.queue_program import MAX_WINDOWS
from netem.links.queue_recorder import RECORD, merged_windows

KINDS = ("other", "data", "microburst")
LIMIT, RATE_BPS = 6000, 8_000_000  # a byte takes a microsecond


def drop_tail(arrivals: list[tuple[int, int, int]]) -> np.ndarray:
    """Records of a queue of LIMIT bytes in front of a link of RATE_BPS: (time, bytes, kind) in, in order of time.

    A packet is in the queue until its last bit is sent.
    """
    rows, waiting, free_at = [], [], 0
    for time, size, kind in arrivals:
        waiting = [(out, held) for out, held in waiting if out > time]
        if sum(held for _, held in waiting) + size > LIMIT:
            rows.append((time, 0, size, kind))
            continue
        free_at = max(free_at, time) + size * 1000
        waiting.append((free_at, size))
        rows.append((time, free_at, size, kind))
    return np.array(rows, RECORD)


def in_order(rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """(gap, bytes, kind) -> (time, bytes, kind)."""
    times = itertools.accumulate((gap for gap, _, _ in rows), initial=1)
    return [(time, size, kind) for time, (_, size, kind) in zip(times, rows, strict=False)]


arrivals = st.lists(
    st.tuples(st.integers(0, 3_000_000), st.integers(60, 1514), st.integers(0, 2)), min_size=1, max_size=80
).map(in_order)


def report(records: np.ndarray, bursts: list[tuple[int, int]], flows: tuple[FlowDrops, ...] = ()) -> QueueReport:
    return queues.report(
        "server", records, KINDS, flows=flows, counted_drops=None, unrecorded=0, limit_bytes=LIMIT,
        rate_bps=RATE_BPS, bursts_ns=bursts,
    )  # fmt: skip


@given(arrivals)
def test_depth_is_never_above_the_limit_and_ends_at_nothing(rows: list[tuple[int, int, int]]) -> None:
    records = drop_tail(rows)
    depth = queues.depth(records)
    assert depth.size_bytes.max(initial=0) <= LIMIT
    assert (depth.size_bytes >= 0).all()
    assert (depth.packets >= 0).all()
    assert (np.diff(depth.times_ns) >= 0).all()
    if len(depth.times_ns):
        assert (depth.size_bytes[-1], depth.packets[-1]) == (0, 0)


@given(arrivals)
def test_depth_at_an_arrival_is_what_a_count_by_hand_gives(rows: list[tuple[int, int, int]]) -> None:
    records = drop_tail(rows)
    sizes, packets = queues.depth_at(records)
    for index, record in enumerate(records):
        earlier = [
            r for r in records[records["time_out_ns"] > 0]
            if r["time_in_ns"] < record["time_in_ns"] < r["time_out_ns"]
        ]  # fmt: skip
        assert packets[index] == len(earlier)
        assert sizes[index] == sum(int(r["bytes"]) for r in earlier)


@given(arrivals)
def test_what_was_dropped_found_no_room(rows: list[tuple[int, int, int]]) -> None:
    """The same condition that the queue had: the depth that an arrival sees tells whether it is dropped."""
    records = drop_tail(rows)
    if len(set(records["time_in_ns"].tolist())) < len(records):
        return  # packets of one moment do not see each other
    sizes, _ = queues.depth_at(records)
    fits = sizes + records["bytes"].astype(np.int64) <= LIMIT
    assert (fits == (records["time_out_ns"] > 0)).all()


def test_a_packet_that_leaves_at_once_is_in_the_queue_for_a_moment() -> None:
    records = np.array([(5, 5, 100, 0), (7, 9, 50, 0)], RECORD)
    assert queues.depth(records).size_bytes.tolist() == [100, 0, 50, 0]


def test_a_report_says_who_lost_what_and_when() -> None:
    records = drop_tail([(0, 1500, 1)] + [(1000 + n, 1500, 2) for n in range(5)] + [(2000, 1500, 1)])
    flows = (FlowDrops("data", 20, 18), FlowDrops("microburst", 5, 3), FlowDrops("other", 4, 4))
    found = report(records, [(1000, 1100)], flows)
    assert found.drops_by_kind == {"data": 1, "microburst": 2}
    assert (found.dropped, found.dropped_of("data")) == (4, 2), "of the whole run, not of the records alone"
    assert (found.peak_bytes, found.peak_packets, found.peak_share) == (6000, 4, 1.0)
    assert found.sojourn_max_s == pytest.approx(0.006 - 1e-6, abs=2e-9)
    assert found.drops_in_burst == 1.0, "the data packet fell into the time in which the queue drains"
    assert queues.drain_ns(LIMIT, RATE_BPS) == 6_000_000
    assert report(records, [(10**7, 10**7)]).drops_in_burst == 0.0
    assert report(records, []).drops_in_burst is None
    assert report(records[:1], [(0, 1)]).drops_in_burst is None


def test_a_report_of_nothing() -> None:
    found = report(np.array([], RECORD), [])
    assert (found.peak_bytes, found.sojourn_max_s, found.recorded, found.drops_by_kind) == (0, None, 0, {})
    assert queues.csv_text(np.array([], RECORD), KINDS, 0) == queues.CSV_HEADER + "\n"


@given(arrivals)
def test_the_csv_has_every_packet_and_the_figure_reads_it_back(rows: list[tuple[int, int, int]]) -> None:
    records = drop_tail(rows)
    packets = queue_figure.read(queues.csv_text(records, KINDS, 0))
    assert packets.kind.tolist() == [KINDS[kind] for kind in records["kind"]]
    assert packets.dropped.tolist() == (records["time_out_ns"] == 0).tolist()
    assert packets.time_ms == pytest.approx(records["time_in_ns"] / 1e6)
    _, held = queue_figure.steps(packets)
    assert held.max(initial=0.0) * 1024 == pytest.approx(queues.depth(records).size_bytes.max(initial=0))


def test_the_figure_shows_the_stretch_with_most_drops() -> None:
    second = 10**9
    rows = [(0, 1, 100, 1), (second, 0, 100, 1), (second + 1, 0, 100, 1), (3 * second, 0, 100, 1)]
    packets = queue_figure.read(queues.csv_text(np.array(rows, RECORD), KINDS, 0))
    assert queue_figure.chosen(packets, []) == pytest.approx((1000.0, 1000.000001))
    assert queue_figure.chosen(packets, [(2999.0, 3001.0)]) == pytest.approx((1000.0, 1000.000001)), "not recorded"
    assert queue_figure.chosen(packets, [(3000.0, 3001.0)]) == (3000.0, 3000.0), "one with a burst comes first"
    clean = queue_figure.read(queues.csv_text(np.array([(0, 1, 9, 1), (second, second + 1, 9, 1)], RECORD), KINDS, 0))
    assert queue_figure.chosen(clean, [(1000.0, 1000.0)]) == (1000.0, 1000.0)


def test_the_figure_is_drawn_around_the_drops_of_a_burst() -> None:
    ms = 10**6
    times = [0, 100, 101, 102, 150, 151, 199]
    records = np.array([(t * ms, 0 if 100 <= t < 160 else t * ms + 1, 100, 1) for t in times], RECORD)
    packets = queue_figure.read(queues.csv_text(records, KINDS, 0))
    assert queue_figure.limits(packets, (0.0, 199.0), []) == (97.0, 108.0)
    assert queue_figure.limits(packets, (0.0, 199.0), [(148.0, 150.5)]) == (147.0, 157.0)
    clean = queue_figure.read(queues.csv_text(records[:1], KINDS, 0))
    assert queue_figure.limits(clean, (0.0, 199.0), []) == (0.0, 199.0)


def test_queue_drops_of_data_alone_explain_missing_data() -> None:
    flows = (FlowDrops("data", 20, 18), FlowDrops("microburst", 50, 20))
    known = replace(report(np.array([], RECORD), [], flows), counted_drops=32)
    ranks = {"server": 0, "worker1": 1}
    assert queues.of_data({"up": 35, "down": 4}, [known], ranks) == {"up": 5, "down": 4}
    assert queues.of_data({"up": 35, "down": 4}, [replace(known, counted_drops=None)], ranks) == {"up": 35, "down": 4}
    assert queues.of_data({"up": 35, "down": 40}, [replace(known, host="worker1")], ranks) == {"up": 35, "down": 10}


BURST = BurstReport(
    number=0, to="server", senders=3, planned_packets=300, planned_duration_s=0.001, planned_s=5.0, began_s=5.0001,
    ended_s=5.00115, packets=300,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"began_s": None}, "never came"),
        ({"began_s": 5.0011, "ended_s": 5.0021}, "1.10 ms late"),
        ({"packets": 299}, "299 of 300 packets"),
        ({"refused": 1}, "1 refused"),
        ({"ended_s": 5.0015}, "took 1.400 ms instead of 1.000 ms"),
        ({"ended_s": 5.0003}, "took 0.200 ms instead"),
    ],
)
def test_a_microburst_that_was_not_as_asked(change: dict[str, object], words: str) -> None:
    name, ok, detail = congestion._sent([replace(BURST, **change)])  # type: ignore[arg-type]
    assert (name, ok) == ("microbursts", False)
    assert words in detail


def test_a_microburst_as_asked() -> None:
    assert congestion._sent([BURST]) == ("microbursts", True, "300 packets in 1, at most 100 us late")
    unbound = replace(BURST, planned_packets=None, planned_duration_s=None, packets=123)
    assert congestion._sent([unbound])[1]


def test_the_accounts_of_a_queue() -> None:
    flows = (FlowDrops("data", 20, 18), FlowDrops("microburst", 50, 20))
    good = replace(report(np.array([], RECORD), [], flows), counted_drops=32, largest_frame=1500)
    assert congestion._accounts([good])[1]
    assert not congestion._accounts([replace(good, counted_drops=31)])[1]
    assert congestion._accounts([replace(good, counted_drops=None)])[1], "a discipline that cannot tell"
    assert congestion._accounts([replace(good, peak_bytes=LIMIT + 3000)])[1], "two frames may be under way"
    assert not congestion._accounts([replace(good, peak_bytes=LIMIT + 3001)])[1]


def test_values_for_expectations_are_sums_and_extremes() -> None:
    flows = (FlowDrops("data", 20, 18), FlowDrops("microburst", 50, 20))
    one = report(drop_tail([(n, 1500, 2) for n in range(5)]), [(0, 10)], flows).to_json()
    other = {**one, "drops_in_burst": 0.5, "peak_share": 0.25, "sojourn_max_s": None}
    found = congestion.values([one, other])
    assert found == {
        "queue.drops": 64.0, "queue.drops_data": 4.0, "queue.drops_in_burst": 0.5, "queue.peak": 1.0,
        "queue.sojourn_max": one["sojourn_max_s"],
    }  # fmt: skip
    assert set(congestion.values([]).values()) == {None}


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 100)), max_size=60), st.integers(0, 1100))
def test_windows_cover_what_was_asked_and_is_not_over(asked: list[tuple[int, int]], now: int) -> None:
    windows = [(start, start + length) for start, length in asked]
    found = merged_windows(windows, now)
    assert len(found) <= MAX_WINDOWS
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))
    for start, end in windows:
        if end > now:
            assert any(first <= start and end <= last for first, last in found)
    if len(windows) <= MAX_WINDOWS:
        for first, last in found:
            assert all(any(s <= moment <= e for s, e in windows) for moment in (first, last))


def test_the_rate_is_that_of_the_times_when_packets_waited() -> None:
    busy = [(n, 1500, 1) for n in range(4)]
    rows = [(start + time, size, kind) for start in range(0, 100_000_000, 10_000_000) for time, size, kind in busy]
    found = report(drop_tail(rows), [])
    assert found.busy_rate_bps == pytest.approx(RATE_BPS), "the pauses of 4 ms between them do not count"
    assert found.to_json()["busy_rate_bps"] == found.busy_rate_bps
    apart = [(n * 2_000_000, 1500, 1) for n in range(100)]
    assert report(drop_tail(apart), []).busy_rate_bps is None
    assert report(drop_tail(busy), []).busy_rate_bps is None, "too few"

"""Rows from events and counters, and their CSV form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from netem.analysis import oracle
from netem.analysis.merge import LossPlan, merge_epochs, merge_rounds
from netem.analysis.records import EpochRow, LinkCount, RoundRow, columns, counts_by_flow, read_csv, write_csv
from netem.links.base import Counter
from tests.unit.analysis_data import FakeBurst, faithful_run, flow_events, plan

ROUND_COLUMNS = (
    "transport repeat round iteration bucket epoch worker direction phase tolerance chunks delivered passes "
    "packets_sent packets_at_need bytes_sent latency_s wait_s goodput_bps outcome burst dropped_link "
    "dropped_socket late duplicate oracle_passes oracle_packets loss_requested runqueue_s"
)
EPOCH_COLUMNS = "transport repeat epoch worker train_loss metric value wall_s replica_divergence"


def test_columns_are_the_documented_ones() -> None:
    assert columns(RoundRow) == ROUND_COLUMNS.split()
    assert columns(EpochRow) == EPOCH_COLUMNS.split()


def test_csv_keeps_every_value(tmp_path: Path) -> None:
    run = faithful_run().runs[0]
    rows = [replace(run.rows[0], latency_s=0.1 + 0.2, tolerance=None, outcome="censored"), *run.rows[1:]]
    write_csv(tmp_path / "rounds.csv", RoundRow, rows)
    assert read_csv(tmp_path / "rounds.csv", RoundRow) == rows
    write_csv(tmp_path / "epochs.csv", EpochRow, run.epochs)
    assert read_csv(tmp_path / "epochs.csv", EpochRow) == list(run.epochs)
    assert (tmp_path / "rounds.csv").read_text().splitlines()[0] == ",".join(ROUND_COLUMNS.split())


def test_a_broken_csv_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "epochs.csv"
    path.write_text("a,b\n")
    with pytest.raises(ValueError, match=r"epochs\.csv:1: columns"):
        read_csv(path, EpochRow)
    path.write_text(",".join(EPOCH_COLUMNS.split()) + "\ndblp,0,zero,1,,,,,\n")
    with pytest.raises(ValueError, match=r"epochs\.csv:2: .*zero"):
        read_csv(path, EpochRow)


def test_a_burst_row_joins_both_ends_the_link_and_the_oracle() -> None:
    events, count = flow_events(plan(), 4, 2, "up", 500, 0.408)
    (row,) = merge_rounds(events, [count], plan(), transport="dblp")
    assert (row.burst, row.outcome, row.phase, row.worker) == (1, "ok", "normal", 2)
    assert row.delivered == oracle.need(500, 0.408)
    assert (row.dropped_link, row.late) == (count.dropped, 5)
    assert row.packets_sent == count.seen
    assert row.oracle_packets == pytest.approx(row.delivered / 0.1)
    assert row.oracle_passes == pytest.approx(9.0, abs=0.1)
    assert row.goodput_bps == pytest.approx(8 * 1472 * row.delivered / row.latency_s)


def test_a_row_without_loss_costs_one_pass() -> None:
    events, count = flow_events(plan(), 5, 2, "up", 500, 0.0)
    (row,) = merge_rounds(events, [count], plan(), transport="dblp")
    assert (row.burst, row.oracle_passes, row.oracle_packets, row.dropped_link) == (0, 1.0, 500.0, 0)


def test_a_silent_side_leaves_gaps_and_is_named() -> None:
    events, count = flow_events(plan(), 0, 1, "up", 100, 0.0)
    (only_sender,) = merge_rounds(events[:1], [count], plan(), transport="dblp")
    assert (only_sender.outcome, only_sender.delivered, only_sender.late) == ("ok", None, None)
    (only_receiver,) = merge_rounds(events[1:], [], plan(), transport="dblp")
    assert (only_receiver.outcome, only_receiver.packets_sent, only_receiver.dropped_link) == (
        "lost_worker",
        None,
        None,
    )
    events[0]["outcome"] = "censored"
    (aborted,) = merge_rounds(events, [count], plan(), transport="dblp")
    assert aborted.outcome == "censored"


def test_tcp_has_no_chunks_but_goodput() -> None:
    sent = {
        "event": "sent",
        "round": 0,
        "iteration": 0,
        "worker": 1,
        "direction": "up",
        "bytes": 1000,
        "latency_s": 0.5,
    }
    received = {"event": "received", "round": 0, "iteration": 0, "worker": 1, "direction": "up", "outcome": "ok"}
    received |= {"chunks": 10, "need": 10, "delivered": 10}
    phase = {"event": "phase", "round": 0, "phase": "normal", "tolerance": 0.0, "reason": "x"}
    (row,) = merge_rounds([sent | {"outcome": "ok"}, received, phase], [], plan(), transport="tcp")
    assert (row.goodput_bps, row.oracle_passes, row.phase, row.tolerance) == (16_000.0, None, "normal", None)


def test_place_and_packets_behind_the_last_needed_one() -> None:
    """The server's reports name no iteration; what came behind the completing packet is late as well."""
    events, _ = flow_events(plan(), 4, 1, "up", 100, 0.408)
    sent, received, late = events
    for event in (sent, received):
        event["round"] = late["round"] = 9
    del received["iteration"], received["epoch"]
    received["after_need"], late["count"] = 3, 2
    (row,) = merge_rounds([received, sent, late], [], plan(), transport="dblp")
    assert (row.round, row.iteration, row.late, row.burst) == (9, 4, 5, 1)


def test_rows_are_sorted_up_before_down() -> None:
    rows = faithful_run().runs[0].rows
    assert [(r.round, r.direction, r.worker) for r in rows[:7]] == [
        *((0, "up", w) for w in (1, 2, 3)),
        *((0, "down", w) for w in (1, 2, 3)),
        (1, "up", 1),
    ]


def test_which_loss_was_asked_for() -> None:
    bursts = (
        FakeBurst(3, 0.5, "both", ("worker2",)),
        FakeBurst(3, 0.8, "up", "all"),
        FakeBurst(6, 0.5, for_s=0.005),
    )
    asked = LossPlan(bursts, {"worker1": 1, "worker2": 2}, {(1, "down"): 0.01})
    assert asked.requested(3, 2, "up") == (pytest.approx(0.8), True)
    assert asked.requested(3, 2, "down") == (0.5, True)
    assert asked.requested(3, 1, "down") == (pytest.approx(0.01), False)
    assert asked.requested(6, 1, "up") == (None, True)
    assert asked.requested(7, 1, "up") == (0.0, False)


def test_which_loss_was_asked_for_by_events() -> None:
    """Longer windows, phases, what changed within the round, and events that change something else than the loss."""
    windows = ((2, 4, FakeBurst(0, 0.3), None), (4, 4, FakeBurst(0, 0.0, workers=("worker1",)), None))
    phases = (("critical", FakeBurst(0, 0.05)),)
    asked = LossPlan((FakeBurst(3, 0.9),), {"worker1": 1, "worker2": 2}, {}, windows, phases)
    found = [asked.requested(i, 1, "up", "normal") for i in (1, 2, 3)]
    assert found == [(0.0, False), (pytest.approx(0.3), True), (0.9, True)]
    assert asked.requested(1, 1, "up", "critical") == (pytest.approx(0.05), True)
    assert asked.requested(9, 1, "up", "normal", (0.0, 0.5)) == (None, True)
    assert asked.requested(9, 1, "up", "normal", (0.5,)) == (0.5, False)
    assert asked.requested(3, 1, "up", "normal", (0.0, 0.5)) == (0.9, True), "the burst is higher all the time"
    other = LossPlan((), {"worker1": 1, "worker2": 2}, {}, windows[1:])
    assert other.requested(4, 1, "up") == (0.0, True)
    assert other.requested(4, 2, "up") == (0.0, False)


def test_epochs_carry_the_divergence_of_the_replicas() -> None:
    values = {"train_loss": 0.5, "metric": "accuracy", "value": 0.9, "wall_s": 1.0}
    events = [
        {"event": "epoch", "epoch": 0, "worker": 2, **values},
        {"event": "epoch", "epoch": 0, "worker": 1, **values},
        {"event": "epoch", "epoch": 1, "worker": 1, **values},
        {"event": "replicas", "epoch": 0, "identical": True, "divergence": None},
        {"event": "replicas", "epoch": 1, "identical": False, "divergence": 0.25},
    ]
    rows = merge_epochs(events, transport="dblp", repeat=3)
    assert [(r.epoch, r.worker, r.replica_divergence, r.repeat) for r in rows] == [
        (0, 1, 0.0, 3),
        (0, 2, 0.0, 3),
        (1, 1, 0.25, 3),
    ]


def test_counters_become_counts_of_flows() -> None:
    count = LinkCount.from_counter(Counter("10.77.0.2", 40, 100, 90, 151_400), "up", 1)
    assert count == LinkCount("up", 1, 40, 100, 90, 151_400)
    table = counts_by_flow([count, count, replace(count, round=None)])
    assert table == {(40, 1, "up"): LinkCount("up", 1, 40, 200, 180, 302_800, 200, 180)}

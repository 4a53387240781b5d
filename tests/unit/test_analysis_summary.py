"""Fidelity, statistics, summary and table of a run that is known in every detail."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from netem.analysis.fidelity import fidelity
from netem.analysis.records import LinkCount, RoundRow
from netem.analysis.run import RunData
from netem.analysis.stats import cost_model, latency
from netem.analysis.summary import expectations_held, summarise
from netem.analysis.table import render, seconds
from tests.unit.analysis_data import SEED, FakeBurst, faithful_run, with_run


def failed(data: RunData) -> set[str]:
    return {check.name for check in fidelity(data).failed}


def change_row(data: RunData, round_: int, **changes: Any) -> RunData:
    """The first transport's row of worker 1 up in this round, changed."""
    rows = [
        replace(row, **changes) if (row.round, row.worker, row.direction) == (round_, 1, "up") else row
        for row in data.runs[0].rows
    ]
    return with_run(data, 0, rows=tuple(rows))


def change_count(data: RunData, round_: int, **changes: Any) -> RunData:
    counts = [
        replace(count, **changes) if (count.round, count.worker, count.direction) == (round_, 1, "up") else count
        for count in data.runs[0].counts
    ]
    return with_run(data, 0, counts=tuple(counts))


def test_a_faithful_run_is_called_faithful_and_shows_its_evidence() -> None:
    found = fidelity(faithful_run())
    assert found.faithful
    assert found.statistical_checks == 2 * (2 * 3 + 1)
    names = {check.name for check in found.checks}
    assert names >= {"burst loss", "passes", "rounds beside a burst", "other rounds", "totals", "replicas", "mask"}
    loss = next(check for check in found.checks if check.name == "burst loss")
    assert loss.low is not None
    assert loss.high is not None
    assert loss.low < 0.9 < loss.high


def test_too_little_loss_in_a_burst_is_found() -> None:
    data = faithful_run()
    count = next(c for c in data.runs[0].counts if (c.round, c.worker, c.direction) == (4, 1, "up"))
    assert "burst loss" in failed(change_count(data, 4, dropped=round(0.8 * count.seen)))
    assert "burst loss" in failed(with_run(data, 0, counts=tuple(c for c in data.runs[0].counts if c.round != 4)))


@pytest.mark.parametrize(
    ("round_", "name"), [(3, "rounds beside a burst"), (5, "rounds beside a burst"), (7, "other rounds")]
)
def test_one_drop_outside_the_burst_is_found(round_: int, name: str) -> None:
    assert failed(change_count(faithful_run(), round_, dropped=1)) == {name, "totals"}


def test_a_packet_that_is_not_accounted_for_is_found() -> None:
    assert failed(change_row(faithful_run(), 2, late=4)) == {"totals"}
    assert failed(change_row(faithful_run(), 2, packets_sent=7)) == {"totals"}


def test_behind_the_last_round_nobody_reads() -> None:
    assert failed(change_row(faithful_run(), 14, late=0)) == set()
    assert failed(change_row(faithful_run(), 14, late=6)) == {"totals"}


def test_socket_drops_close_over_the_run() -> None:
    """A drop of the socket is noticed with a later packet: its round is not known."""
    data = change_row(change_row(faithful_run(), 2, late=4), 3, dropped_socket=1)
    assert failed(data) == set()


def test_drops_of_a_device_are_told_from_a_leak_and_limited() -> None:
    data = change_row(faithful_run(), 2, late=2)
    assert failed(data) == {"totals"}
    assert failed(with_run(data, 0, device_drops={"down": 3})) == {"totals"}
    assert failed(with_run(data, 0, device_drops={"up": 3})) == set()
    assert failed(with_run(data, 0, device_drops={"up": 500})) == {"unrequested drops"}
    assert failed(with_run(change_row(data, 3, late=6), 0, device_drops={"up": 3})) == {"totals"}


def test_totals_of_a_backend_that_counts_by_run() -> None:
    data = faithful_run()
    for index, run in enumerate(data.runs):
        bursts = [count for count in run.counts if count.round in (4, 9)]
        rest = [
            LinkCount(d, w, None, sum(c.seen for c in others), sum(c.dropped for c in others))
            for d in ("up", "down")
            for w in (1, 2, 3)
            for others in [[c for c in run.counts if c.round not in (4, 9) and (c.direction, c.worker) == (d, w)]]
        ]
        data = with_run(data, index, counts=(*bursts, *rest), by_round=False)
    assert failed(data) == set()
    leak = [replace(count, dropped=count.dropped + (count.round is None)) for count in data.runs[0].counts]
    assert failed(with_run(data, 0, counts=tuple(leak))) == {"outside bursts", "totals"}


def test_an_unfinished_round_called_ok_is_found() -> None:
    assert "rounds complete" in failed(change_row(faithful_run(), 2, delivered=200))
    assert "rounds complete" not in failed(change_row(faithful_run(), 2, delivered=200, outcome="censored"))


def test_replicas_that_differ_are_found() -> None:
    data = faithful_run()
    epochs = [replace(row, replica_divergence=1e-7 if row.epoch == 1 else 0.0) for row in data.runs[0].epochs]
    assert failed(with_run(data, 0, epochs=tuple(epochs))) == {"replicas"}
    assert failed(with_run(data, 0, epochs=tuple(epochs), reliable_broadcast=False)) == set()


def test_one_packet_off_the_mask_is_found() -> None:
    row = next(r for r in faithful_run().runs[0].rows if (r.round, r.worker, r.direction) == (4, 1, "up"))
    assert row.packets_at_need is not None
    assert failed(change_row(faithful_run(), 4, packets_at_need=row.packets_at_need + 1)) == {"mask"}
    assert failed(with_run(faithful_run(), 0, mask_seed=SEED + 1)) == {"mask"}


def test_passes_far_from_the_oracle_are_found() -> None:
    data = faithful_run()
    rows = [replace(r, passes=r.passes + 6) if r.burst and r.passes else r for r in data.runs[0].rows]
    assert failed(with_run(data, 0, rows=tuple(rows), order=None)) == {"passes"}


def test_latency_statistics() -> None:
    found = latency([float(n) for n in range(1, 201)])
    assert found is not None
    assert (found.count, found.mean, found.p50, found.max) == (200, 100.5, 100.5, 200.0)
    assert found.worst_1pct_mean == 199.5
    assert found.p99 == pytest.approx(198.01)
    assert latency([]) is None


def cost_rows(a: float, b: float, c: float) -> list[RoundRow]:
    row = faithful_run().runs[0].rows[0]
    random = np.random.default_rng(1)
    rows = []
    bursts = [("dblp", 9, 2900), ("mlt", 46, 4900), ("dblp", 9, 2950), ("mlt", 44, 5000), ("dblp", 8, 3100)]
    for name, passes, packets in [("dblp", 1, 500)] * 20 + bursts:
        latency_s = (a + b * passes + c * packets) * (1 + 0.01 * random.standard_normal())
        rows.append(replace(row, transport=name, passes=passes, packets_at_need=packets, latency_s=latency_s))
    return rows


@pytest.mark.parametrize(
    ("b", "c", "regime"), [(0.11, 1e-6, "passes"), (1e-4, 1e-5, "packets"), (0.0, 1e-5, "packets")]
)
def test_the_cost_model_says_which_regime(b: float, c: float, regime: str) -> None:
    found = cost_model(cost_rows(0.001, b, c))
    assert found is not None
    assert found.regime == regime
    assert found.r_squared > 0.99
    assert min(found.a_s, found.b_s_per_pass, found.c_s_per_packet) >= 0
    assert found.b_s_per_pass == pytest.approx(b, rel=0.2, abs=5e-5)
    assert found.passes_share["mlt"] >= found.passes_share["dblp"]


def test_passes_and_packets_in_proportion_cannot_be_told_apart() -> None:
    rows = [replace(row, packets_at_need=500 * (row.passes or 0)) for row in cost_rows(0.001, 0.1, 0.0)]
    found = cost_model(rows)
    assert found is not None
    assert (found.regime, found.passes_share) == ("undetermined", {})
    assert cost_model([]) is None


def test_the_summary_is_json_and_holds_the_ratios() -> None:
    data = faithful_run("dblp.burst_latency.max < mlt.burst_latency.max", "mlt.accuracy > 99%")
    found = summarise(data)
    json.dumps(found, allow_nan=False)
    dblp, mlt = found["transports"]["dblp"], found["transports"]["mlt"]
    assert found["ratios"]["mlt/dblp"]["burst_max"] == mlt["burst_latency_s"]["max"] / dblp["burst_latency_s"]["max"]
    assert dblp["accuracy"] == pytest.approx(0.97)
    assert dblp["latency_s"]["count"] == 45
    assert dblp["burst_latency_s"]["count"] == 6
    assert [b["iteration"] for b in dblp["burst_rounds"]] == [4, 9]
    assert dblp["by_loss"][0]["requested"] == 0.9
    assert dblp["by_loss"][0]["passes"] == dblp["passes"]
    assert dblp["overshoot_packets"] == {"mean": 5.0, "max": 5}
    assert dblp["passes"]["oracle"] == pytest.approx(9.0, abs=0.1)
    assert found["fidelity"]["verdict"] == "faithful"
    assert [one["held"] for one in found["expectations"]] == [True, False]
    assert not expectations_held(found)


def test_ratios_divide_by_the_adaptive_transport_whatever_the_order() -> None:
    data = faithful_run()
    assert list(summarise(replace(data, runs=data.runs[::-1]))["ratios"]) == ["mlt/dblp"]


def test_a_run_without_rows_is_summarised() -> None:
    data = faithful_run("dblp.accuracy > 90%")
    for index in (0, 1):
        data = with_run(data, index, rows=(), epochs=(), counts=(), total_s=None)
    found = summarise(data)
    assert found["transports"]["dblp"]["latency_s"] is None
    assert found["expectations"][0]["held"] is None
    assert "no value" in rendered(data)


def rendered(data: RunData) -> str:
    out = StringIO()
    render(summarise(data), Console(file=out, width=100))
    return out.getvalue()


def test_the_table_fits_100_columns_and_says_what_counts() -> None:
    text = rendered(faithful_run("dblp.burst_latency.max < mlt.burst_latency.max", bursts=(FakeBurst(4, 0.9),)))
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "…" not in text
    for words in (
        "mlt/dblp",
        "burst latency, max",
        "passes / oracle",
        "loss 90 %",
        "97.00 %",
        "faithful",
        "0 missed",
        "held",
    ):
        assert words in text


def test_three_transports_and_two_losses_fit_as_well() -> None:
    bursts = (FakeBurst(4, 0.6), FakeBurst(9, 0.9))
    data = faithful_run(bursts=bursts, chunks=3000)
    third = replace(data.runs[1], name="tcp", kind="tcp")
    text = rendered(replace(data, runs=(*data.runs, third)))
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "…" not in text
    for words in ("tcp/dblp", "loss 60 %", "loss 90 %"):
        assert words in text


def test_without_bursts_nothing_is_said_of_passes() -> None:
    data = faithful_run()
    assert "Passes, packets" in rendered(data)
    calm = replace(data, plan=replace(data.plan, bursts=()))
    for index, run in enumerate(data.runs):
        calm = with_run(calm, index, rows=tuple(replace(row, burst=False) for row in run.rows))
    assert "Passes, packets" not in rendered(calm)


def test_passes_of_pipelined_probing_have_no_oracle_beside() -> None:
    data = faithful_run()
    for index in (0, 1):
        data = with_run(data, index, facts={"profile": {"probing": "pipelined"}})
    text = rendered(data)
    line = next(line for line in text.splitlines() if "passes" in line)
    assert "passes (pipelined)" in line
    assert "/" not in line
    assert "packets / oracle" in text


def test_the_links_part_of_a_loss_is_named() -> None:
    data = faithful_run(bursts=(FakeBurst(4, 0.6),))
    assert "burst + links" not in rendered(data)
    base = {(worker, "up"): 0.001 for worker in (1, 2, 3)}
    for index, run in enumerate(data.runs):
        rows = [
            replace(row, loss_requested=1 - (1 - row.loss_requested) * (1 - base.get((row.worker, row.direction), 0.0)))
            for row in run.rows
            if row.loss_requested is not None
        ]
        data = with_run(data, index, rows=tuple(rows))
    text = rendered(replace(data, plan=replace(data.plan, base_loss=base)))
    assert "loss 60.04 %" in text
    assert "(60 % burst + links)" in text


def test_in_a_file_no_cell_of_the_table_is_cut() -> None:
    summary = summarise(faithful_run())
    narrow, wide = StringIO(), StringIO()
    render(summary, Console(file=narrow, width=40))
    render(summary, Console(file=wide, width=200))
    assert "…" not in narrow.getvalue()
    assert [line.rstrip() for line in wide.getvalue().splitlines() if "burst latency" in line] == [
        line.rstrip() for line in narrow.getvalue().splitlines() if "burst latency" in line
    ]


def test_a_cost_model_that_explains_nothing_is_not_shown() -> None:
    summary = summarise(faithful_run())
    out = StringIO()
    for r_squared in (0.9, 0.49, None):
        summary["cost_model"]["r_squared"] = r_squared or 0.0
        render(summary, Console(file=out, width=100))
    assert out.getvalue().count("cost: ") == 1


def test_the_table_names_what_was_not_faithful() -> None:
    text = rendered(change_count(faithful_run(), 3, dropped=1))
    assert "NOT FAITHFUL" in text
    assert "iteration 3, worker 1 up" in text.replace("\n", " ")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0.0, "0.00 us"), (0.00000213, "2.13 us"), (0.0123, "12.3 ms"),
        (0.123, "123 ms"), (1.5, "1.50 s"), (0.99999, "1.00 s"), (72.34, "72.3 s"),
    ],
)  # fmt: skip
def test_times_are_readable(value: float | None, text: str) -> None:
    assert seconds(value) == text

"""Losses in a row: what a chain makes in the mean, what captures show of it, and the verdict."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from netem.analysis import burst_lengths as lengths
from netem.analysis import oracle
from netem.analysis.burst_lengths import Lengths, burst_lengths, continuation, expected_shares
from netem.analysis.fates import Fate, Fates, Flow
from netem.analysis.fidelity import fidelity
from netem.analysis.records import RoundRow
from netem.analysis.run import RunData
from netem.analysis.summary import summarise
from netem.analysis.table import table
from netem.spec.loss import BurstyLoss
from tests.unit.analysis_data import FakeBurst, faithful_run, plan, with_run

FIVES = BurstyLoss.of_bursts(0.3, 5)
BOTH_STATES = BurstyLoss(0.1, 0.2, 0.1, 0.99)


def row(round_: int, loss: float, worker: int = 1) -> RoundRow:
    (first,) = [r for r in faithful_run().runs[0].rows if (r.round, r.worker, r.direction) == (0, 1, "up")]
    return replace(first, round=round_, iteration=round_, worker=worker, loss_requested=loss, burst=1)


def fates_of(seed: int, loss: float, rounds: int = 20, chunks: int = 2000, asked: float | None = None) -> Any:
    """Rows and captures of rounds in which links lost by `loss`: all chunks in a first pass, the lost in a second."""
    flows, rows = {}, []
    for round_ in range(rounds):
        drop = oracle.mask_drop(seed, "up", 1, round_, loss)
        first = np.arange(chunks)
        lost = drop(first, 0)
        second = first[lost]
        keys = np.concatenate([first << 16, second << 16 | 1]).astype(np.uint64)
        order = np.argsort(keys)
        arrived = np.concatenate([~lost, ~drop(second, 1)])
        flows[Flow("up", 1, round_)] = Fate(keys[order], arrived[order])
        rows.append(row(round_, loss if asked is None else asked))
    return rows, Fates(flows)


def test_the_mean_of_a_chain() -> None:
    assert 1 / (1 - continuation(FIVES)) == pytest.approx(5)
    assert continuation(BurstyLoss(0.05, 0.5, 0.2)) == pytest.approx(0.5 * 0.8), "bad, and lost there"
    assert continuation(BurstyLoss(0.3, 0.7)) == pytest.approx(0.3), "independent losses"


@pytest.mark.parametrize("loss", [FIVES, BOTH_STATES, BurstyLoss(0.05, 0.5, 0.2)])
def test_shares_of_the_lengths_are_those_of_a_long_walk(loss: BurstyLoss) -> None:
    rows, fates = fates_of(3, loss, rounds=20, chunks=4000)
    (found,) = burst_lengths(rows, fates, plan(), keyed=True)
    shares, count = expected_shares(loss), sum(found.rows.values())
    assert sum(shares) == pytest.approx(1.0)
    for length in (1, 2, 3, 5):
        deviation = (count * shares[length - 1] * (1 - shares[length - 1])) ** 0.5
        assert abs(found.rows[length] - count * shares[length - 1]) < 5 * deviation
    assert found.achieved == pytest.approx(1 / (1 - continuation(loss)), rel=0.05)


def test_bursts_of_a_few_packets() -> None:
    arrived = np.array([1, 0, 0, 1, 0, 1, 0, 0, 0], bool)
    keys = (np.array([1, 2, 3, 4, 5, 6, 7, 8, 9]) << 16).astype(np.uint64)
    fates = Fates({Flow("up", 1, 0): Fate(keys, arrived)})
    (found,) = burst_lengths([row(0, FIVES)], fates, plan(), keyed=True)
    assert (found.trials, found.continued) == (5, 3), "the last loss has no successor"
    assert found.rows == {1: 1, 2: 1}, "nobody knows how long the last row would have been"


def test_neighbours_are_sent_in_one_pass() -> None:
    keys = np.array([1 << 16, 2 << 16 | 1, 3 << 16 | 1, 5 << 16 | 1], np.uint64)
    fates = Fates({Flow("up", 1, 0): Fate(keys, np.zeros(4, bool))})
    (found,) = burst_lengths([row(0, FIVES)], fates, plan(), keyed=True)
    assert (found.trials, found.continued) == (1, 1)
    assert found.rows == {}


def test_faithful_chains_pass_and_others_do_not() -> None:
    run = faithful_run()
    for seed in range(8):
        for loss in (FIVES, BOTH_STATES):
            rows, fates = fates_of(seed, loss, rounds=3)
            found = burst_lengths(rows, fates, plan(), keyed=True)
            assert fidelity(with_run(run, 0, burst_lengths=found)).faithful, (seed, loss)
        for wrong in (0.3, BurstyLoss.of_bursts(0.3, 3), BurstyLoss.of_bursts(0.3, 8)):
            rows, fates = fates_of(seed, wrong, rounds=8, asked=FIVES)
            verdict = fidelity(with_run(run, 0, burst_lengths=burst_lengths(rows, fates, plan(), keyed=True)))
            assert [check.name for check in verdict.failed] == ["burst length"], (seed, wrong)
            assert verdict.failed[0].requested == pytest.approx(5)


@pytest.mark.parametrize(
    ("fates", "changes", "keyed", "doubt"),
    [
        (None, {}, True, "needs capture"),
        (Fates({}), {}, True, "needs capture"),
        (Fates({}, missed=3), {}, True, "missed 3 packets"),
        (None, {}, False, "TCP segment"),
        (None, {"base_loss": {(1, "up"): FIVES}}, True, "own chain"),
    ],
)
def test_what_is_not_measured_is_said(fates: Fates | None, changes: Any, keyed: bool, doubt: str) -> None:
    (found,) = burst_lengths([row(0, FIVES)], fates, replace(plan(), **changes), keyed=keyed)
    assert doubt in found.doubt
    verdict = fidelity(with_run(faithful_run(), 0, burst_lengths=(found,)))
    (check,) = [check for check in verdict.checks if check.name == "burst length"]
    assert check.ok
    assert "requested 5.00, not measured: " in check.detail


def test_other_losses_have_no_lengths() -> None:
    assert burst_lengths([row(0, 0.9)], None, plan(), keyed=True) == ()


def test_histogram_in_the_summary() -> None:
    found = Lengths(1, "up", FIVES, 100, 79, {1: 4, 3: 5, lengths.LONGEST + 9: 1})
    entry = summarise(with_run(faithful_run(), 0, burst_lengths=(found,)))["transports"]["dblp"]["burst_lengths"][0]
    assert entry["requested_mean"] == pytest.approx(5)
    assert entry["achieved_mean"] == pytest.approx(100 / 21)
    assert entry["histogram"] == [4, 0, 5, *[0] * (lengths.LONGEST - 3), 1]
    assert entry["expected"][:2] == [2.0, 1.6], "geometric"
    assert entry["bursts"] == 10


def shown(data: RunData) -> list[list[str]]:
    """The words of the rows of bursts."""
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(table(summarise(data)))
    return [line.split() for line in console.export_text().splitlines() if "mean burst" in line]


def test_the_mean_is_in_the_table_where_bursts_were_asked_for() -> None:
    data = faithful_run(bursts=(FakeBurst(4, FIVES),))
    measured = Lengths(1, "up", FIVES, 100, 79, {1: 4})
    data = with_run(
        with_run(data, 0, burst_lengths=(measured,)), 1, burst_lengths=(Lengths(1, "up", FIVES, doubt="x"),)
    )
    assert shown(data) == [["mean", "burst", "/", "asked", "4.76", "/", "5.00", "not", "measured"]]
    assert shown(faithful_run()) == []

"""The main job on the netem backend: a replay run with delay and one burst, `dblp-netem run` in the machine."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from netem.analysis.intervals import clopper_pearson

pytestmark = [pytest.mark.timeout(1300), pytest.mark.check("burst_run")]
BURST = 2
REQUESTED = 0.9
FALSE_ALARM = 1e-5
ROUND_TRIP_S = 0.010


@pytest.fixture
def folder(measured: dict[str, Any]) -> Path:
    assert measured["status"] == 0, measured["output"]
    assert len(measured["folders"]) == 1
    return Path(measured["folders"][0])


@pytest.fixture
def rows(folder: Path) -> Iterator[list[dict[str, str]]]:
    with (folder / "rounds.csv").open(newline="") as file:
        yield [row for row in csv.DictReader(file) if row["direction"] == "up"]


def test_backend(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    assert "netem" in json.dumps(manifest)
    assert manifest["exit_status"] == 0


def test_loss_hits_exactly_the_burst(rows: list[dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    burst = [row for row in rows if int(row["iteration"]) == BURST]
    others = [row for row in rows if int(row["iteration"]) != BURST]
    assert {row["burst"] for row in burst} == {"1"}
    assert {row["burst"] for row in others} == {"0"}
    assert sum(int(row["dropped_link"] or 0) for row in others) == 0
    sent = sum(int(row["packets_sent"]) for row in burst)
    dropped = sum(int(row["dropped_link"]) for row in burst)
    interval = clopper_pearson(dropped, sent, FALSE_ALARM)
    with capsys.disabled():
        print(
            f"\n  vm: burst run: requested {REQUESTED:.1%}, achieved {dropped / sent:.2%} of {sent} packets,"
            f" interval {interval.low:.2%} to {interval.high:.2%}", end=" ",
        )  # fmt: skip
    assert REQUESTED in interval


def test_rounds_end_well_and_feel_the_delay(rows: list[dict[str, str]]) -> None:
    assert {row["outcome"] for row in rows} == {"ok"}
    assert min(float(row["latency_s"]) for row in rows) >= ROUND_TRIP_S
    for row in rows:
        burst = int(row["iteration"]) == BURST
        assert int(row["passes"]) > 10 if burst else int(row["passes"]) == 1


@pytest.mark.check("rootless_run")
def test_without_root(measured: dict[str, Any]) -> None:
    """The same run by a user who is not root: faithful (status 0), and all that is left belongs to that user."""
    assert measured["status"] == 0, measured["output"]
    assert measured["owners"] == [65534]

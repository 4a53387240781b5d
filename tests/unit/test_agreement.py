"""Two runs of a scenario whose losses are drawn anew: what differs by chance, and what differs."""

from __future__ import annotations

import csv
import random
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from netem.analysis import oracle
from netem.analysis.agreement import Round, compare, read_rounds

CHUNKS, NEEDED, ROUNDS = 400, 240, 6
Kept = dict[str, tuple[float, bool]]


def made(loss: float, seed: int, loses: float | None = None) -> list[Round]:
    """Rounds under stop-and-wait: the scenario asks for `loss`, the links do `loses`."""
    draw = np.random.default_rng(seed)
    found = []
    for number in range(ROUNDS):
        prediction = oracle.predict(
            np.arange(CHUNKS), NEEDED, CHUNKS, lambda sequence, _: draw.random(len(sequence)) < (loses or loss)
        )
        sent = prediction.packets_at_need
        row = Round("mlt", 0, number, 1, "up", CHUNKS, NEEDED, loss, sent, sent, prediction.passes, sent - NEEDED)
        found.append(row)
    return found


@pytest.mark.parametrize("loss", [0.1, 0.6, 0.9])
def test_what_chance_makes_agrees(loss: float) -> None:
    wrong = 0
    for seed in range(60):
        found = compare(made(loss, 2 * seed), made(loss, 2 * seed + 1), passes=True)
        assert [each.what for each in found] == ["loss", "packets", "passes"]
        wrong += sum(not each.agrees for each in found)
    assert wrong == 0, "0.1 % of pairs may"


@pytest.mark.parametrize("side", [0, 1])
def test_another_loss_does_not(side: int) -> None:
    runs = [made(0.9, 1), made(0.9, 2, loses=0.87)]
    found = {each.what: each for each in compare(runs[side], runs[1 - side], passes=True)}
    assert not found["loss"].agrees
    assert not found["packets"].agrees
    assert found["loss"].difference == pytest.approx(0.03 if side == 0 else -0.03, abs=0.01)


def test_more_passes_do_not() -> None:
    rows = made(0.6, 1)
    slow = [replace(row, passes=row.passes + 3) for row in rows]
    assert [each.what for each in compare(rows, slow, passes=True) if not each.agrees] == ["passes"]
    assert all(each.agrees for each in compare(rows, slow, passes=False)), "pipelined, passes mean something else"


def test_only_rounds_alike_are_compared() -> None:
    rows = made(0.6, 1)
    others = [replace(rows[0], delivered=200), replace(rows[1], loss_requested=0.5), *rows[2:4]]
    assert {each.rounds for each in compare(rows, others, passes=True)} == {2}
    assert compare(rows, [], passes=True) == []
    untold = [replace(row, dropped_link=None) for row in rows]
    assert [each.what for each in compare(rows, untold, passes=True)] == ["packets", "passes"]


def test_rounds_csv(tmp_path: Path) -> None:
    rows = made(0.6, 1)
    lines = [{**asdict(row), "outcome": "ok", "oracle_packets": "600.0"} for row in rows]
    lines[0]["outcome"], lines[1]["loss_requested"], lines[2]["oracle_packets"] = "deadline", 0.0, ""
    random.Random(1).shuffle(lines)
    with (tmp_path / "rounds.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    assert sorted(read_rounds(tmp_path), key=lambda row: row.round) == rows[3:]
    assert read_rounds(tmp_path / "none") == []

"""How benchmarks are judged: verdicts, turns, exit status, agreement of two runs. Nothing is measured here."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from benchmarks.harness import Context, Line, Spread, alternate, disagreements, ratio, rounded, run, status


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        (Line("a", 2.0, 2.0, "at least"), "pass"),
        (Line("a", 1.999, 2.0, "at least"), "fail"),
        (Line("a", 1.25, 1.25), "pass"),
        (Line("a", 1.2501, 1.25), "fail"),
        (Line("a", 7.0), ""),
        (Line("a", None, 2.0), "error"),
        (Line("a", float("nan"), 2.0), "error"),
        (Line.absent("a", "iperf3 is not installed", 2.0, "at least"), "missing"),
        (Line("a", 3.0, 2.0, "at least", missing="half of it"), "missing"),
    ],
)
def test_verdict(line: Line, verdict: str) -> None:
    assert line.verdict == verdict


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([Line("a", 1.0, 2.0), Line("b", 1.0)], 0),
        ([Line("a", 3.0, 2.0), Line.absent("b", "x")], 1),
        ([Line("a", None, 2.0)], 1),
        ([Line("a", 1.0, 2.0), Line.absent("b", "x")], 3),
    ],
)
def test_exit_status_of_a_run(lines: list[Line], expected: int) -> None:
    assert status({"flow": lines}) == expected


def test_contestants_take_turns_in_changing_order() -> None:
    order: list[str] = []

    def contestant(name: str) -> Any:
        return lambda: order.append(name) or len(order)

    samples = alternate({"a": contestant("a"), "b": contestant("b")}, 3)
    assert "".join(order) == "abbaab"
    assert samples == {"a": [1, 4, 5], "b": [2, 3, 6]}


def test_medians_are_judged() -> None:
    assert ratio([1.0, 4.0, 100.0], [2.0, 2.0, 0.1]) == 2.0
    spread = Spread.of([3.0, 1.0, 2.0])
    assert (spread.median, spread.low, spread.high, spread.count) == (2.0, 1.0, 3.0, 3)
    with pytest.raises(ValueError, match="no samples"):
        Spread.of([])
    assert [rounded(value) for value in (1234567.0, 0.012345, 4.0)] == ["1,230,000", "0.0123", "4"]


def test_a_benchmark_that_breaks_is_an_error_and_the_others_still_run(tmp_path: Path) -> None:
    def module(title: str, measure: Any) -> ModuleType:
        made = ModuleType(title)
        made.TITLE, made.measure = title, measure  # type: ignore[attr-defined]
        return made

    def breaks(_: Context) -> list[Line]:
        raise RuntimeError("no lab")

    context = Context(tmp_path, console=Console(file=io.StringIO()))
    lines = run({"x": module("(x)", breaks), "y": module("(y)", lambda _: [Line("fine", 1.0, 2.0)])}, context)
    assert [line.verdict for line in lines["x"] + lines["y"]] == ["error", "pass"]
    written = json.loads((tmp_path / "bench.json").read_text())
    assert [(line["benchmark"], line["verdict"]) for line in written["lines"]] == [("x", "error"), ("y", "pass")]
    assert "no lab" in written["lines"][0]["detail"]


def test_two_runs_agree_on_verdicts_not_on_values(tmp_path: Path) -> None:
    def written(name: str, *lines: tuple[str, str]) -> Path:
        path = tmp_path / name
        content = [
            {"benchmark": "flow", "name": line, "verdict": verdict, "value": len(name)} for line, verdict in lines
        ]
        path.write_text(json.dumps({"lines": content}))
        return path

    first = written("a.json", ("tcp", "pass"), ("udp", "fail"))
    assert disagreements(first, written("bb.json", ("tcp", "pass"), ("udp", "fail"))) == []
    differing = disagreements(first, written("c.json", ("tcp", "fail"), ("plain", "pass")))
    assert len(differing) == 3
    assert any("tcp" in each for each in differing)

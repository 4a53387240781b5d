"""What a run's probes say of real netem delays: as asked, with a link that lies, with jitter, and in an event."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(1300)


def shown(measured: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        for one in measured["delays"]:
            asked, got = ([1e3 * one[key][name] for name in ("p50", "p95")] for key in ("requested_s", "achieved_s"))
            print(
                f"\n  vm: {one['path']}, {one['when']}: median {got[0]:.2f} ms of {asked[0]:.2f}, "
                f"p95 {got[1]:.2f} of {asked[1]:.2f} ({one['arrived']} probes)", end=" ",
            )  # fmt: skip


def test_delays_as_asked(measured: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert measured["status"] == 0, measured["output"]
    shown(measured, capsys)
    assert [one["when"] for one in measured["delays"]] == ["before the first round"] * 2 + ["after the last round"] * 2
    for one in measured["delays"]:
        assert one["judged"]
        assert one["arrived"] == one["probes"] >= 25
        assert one["achieved_s"]["p50"] >= 0.00499, "netem never sends early"


def test_delays_of_a_liar(measured: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """8 ms where 5 were asked for: the run says so, and ends with status 5."""
    assert measured["status"] == 5, measured["output"]
    shown(measured, capsys)
    assert set(measured["failed"]) == {"delay"}
    assert "requested 5 ms and 5 ms, achieved" in measured["output"]
    assert min(one["achieved_s"]["p50"] for one in measured["delays"]) >= 0.00799


def test_delays_with_jitter(measured: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert measured["status"] == 0, measured["output"]
    shown(measured, capsys)
    assert {round(one["requested_s"]["p95"], 4) for one in measured["delays"]} == {0.0133}


def test_delays_in_an_event(measured: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert measured["status"] == 0, measured["output"]
    shown(measured, capsys)
    beside = [one for one in measured["delays"] if one["when"] == "during the run" and one["judged"]]
    assert {round(one["requested_s"]["p50"], 6) for one in beside} == {0.005, 0.012}
    for one in beside:
        assert one["achieved_s"]["p50"] >= one["requested_s"]["p50"] - 1e-5

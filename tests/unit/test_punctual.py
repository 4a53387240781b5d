"""Whether impairments by time were in force for as long as the file says."""

from __future__ import annotations

import pytest

from netem.analysis.punctual import Moment, asked_and_achieved_s, check


def bursts(late_s: list[tuple[float, float]]) -> list[Moment]:
    """Of 10 ms, every 200 ms; how late each begins and ends."""
    return [
        moment
        for number, (begin, end) in enumerate(late_s)
        for moment in (
            Moment(0.2 * number, 0.2 * number + begin, True),
            Moment(0.2 * number + 0.01, 0.2 * number + 0.01 + end, False),
        )
    ]


def test_late_at_both_ends_keeps_the_length() -> None:
    asked, achieved = asked_and_achieved_s(bursts([(0.004, 0.004)] * 5))
    assert (asked, achieved) == (pytest.approx(0.05), pytest.approx(0.05))
    assert check(bursts([(0.004, 0.005)] * 5)) is not None
    ok, detail = check(bursts([(0.004, 0.005)] * 5)) or (False, "")
    assert ok
    assert "in force for 0.055 s instead of 0.05 s" in detail
    assert "late by 5.00 ms, at most 5.00 ms" in detail


@pytest.mark.parametrize("late", [(0.002, 0.040), (0.009, 0.0)])
def test_much_too_long_or_too_short(late: tuple[float, float]) -> None:
    ok, _ = check(bursts([late] * 5)) or (True, "")
    assert not ok


def test_nothing_by_time_and_no_end() -> None:
    assert check([]) is None
    assert check([Moment(0.0, 0.0, False)]) is None
    assert check([Moment(0.5, 0.6, True)]) is None, "it lasts until the job ends"

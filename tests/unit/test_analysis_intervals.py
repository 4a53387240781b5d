"""Exact binomial intervals against published values, and against their definition."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netem.analysis import intervals, oracle


@pytest.mark.parametrize(
    ("dropped", "seen", "low", "high"),
    [
        (0, 10, 0.0, 0.3085),  # Clopper and Pearson; also R's binom.test
        (1, 10, 0.0025, 0.4450),
        (5, 10, 0.1871, 0.8129),
        (10, 10, 0.6915, 1.0),
        (15, 100, 0.0865, 0.2353),
    ],
)
def test_published_intervals(dropped: int, seen: int, low: float, high: float) -> None:
    found = intervals.clopper_pearson(dropped, seen, 0.05)
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.floats(0, 1), st.sampled_from([0.05, 1e-3, 1e-6]))
def test_bounds_are_where_the_tails_reach_half_the_rate(seen: int, share: float, rate: float) -> None:
    dropped = round(share * seen)
    found = intervals.clopper_pearson(dropped, seen, rate)
    assert dropped / seen in found
    if dropped > 0:
        assert 1 - oracle.binom_cdf(dropped - 1, seen, found.low) == pytest.approx(rate / 2, rel=1e-3, abs=1e-11)
    if dropped < seen:
        assert oracle.binom_cdf(dropped, seen, found.high) == pytest.approx(rate / 2, rel=1e-3, abs=1e-11)


def test_large_counts_converge() -> None:
    found = intervals.clopper_pearson(900_000, 1_000_000, 1e-5)
    assert 0.8985 < found.low < 0.9 < found.high < 0.9015


def test_no_packets_say_nothing_and_nonsense_is_refused() -> None:
    assert intervals.clopper_pearson(0, 0, 0.01) == intervals.Interval(0.0, 1.0)
    for dropped, seen, rate in [(2, 1, 0.1), (-1, 1, 0.1), (0, 1, 0.0), (0, 1, 1.0)]:
        with pytest.raises(ValueError, match=r"dropped|rate"):
            intervals.clopper_pearson(dropped, seen, rate)


def test_the_budget_is_split_over_all_checks() -> None:
    assert intervals.false_alarm_each(0) == intervals.FALSE_ALARM_RUN
    assert intervals.false_alarm_each(20) * 20 == pytest.approx(0.001)

"""Exact binomial intervals (Clopper and Pearson, Biometrika 26, 1934) and how a run's false alarms are
budgeted.

A run makes many statistical checks. Their false-alarm rates together stay under FALSE_ALARM_RUN: each of m
checks gets FALSE_ALARM_RUN / m (Bonferroni: holds whatever the dependence, and transports that share a loss
mask are dependent).

A round under loss stops when enough has arrived, so the number of packets is not fixed beforehand as the
binomial assumes. For "packets until the need-th success" the tail probabilities differ by one trial only:
P(packets > n) is P(Binomial(n, 1 - loss) < need).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FALSE_ALARM_RUN = 0.001
"""Share of faithful runs that may be called unfaithful, all checks of the run together."""


def false_alarm_each(checks: int) -> float:
    """The false-alarm rate of one of `checks` statistical checks."""
    return FALSE_ALARM_RUN / max(1, checks)


@dataclass(frozen=True)
class Interval:
    """A closed interval of ratios."""

    low: float
    high: float

    def __contains__(self, ratio: float) -> bool:
        return self.low <= ratio <= self.high


def clopper_pearson(dropped: int, seen: int, false_alarm: float) -> Interval:
    """The ratios that `dropped` of `seen` packets do not refute at the given false-alarm rate (two-sided,
    exact).

    No packets: 0..1. Raises ValueError for impossible counts.
    """
    if not 0 <= dropped <= seen:
        raise ValueError(f"{dropped} dropped of {seen} seen packets")
    if not 0.0 < false_alarm < 1.0:
        raise ValueError(f"false-alarm rate {false_alarm}: expected 0 < rate < 1")
    if seen == 0:
        return Interval(0.0, 1.0)
    half = false_alarm / 2
    low = 0.0 if dropped == 0 else _beta_quantile(half, dropped, seen - dropped + 1)
    high = 1.0 if dropped == seen else _beta_quantile(1.0 - half, dropped + 1, seen - dropped)
    return Interval(low, high)


def _beta_quantile(probability: float, a: float, b: float) -> float:
    """x with I_x(a, b) = probability, by bisection (monotone, and 60 halvings are exact enough)."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if beta_cdf(middle, a, b) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), a, b > 0."""
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    if x > (a + 1.0) / (a + b + 2.0):  # the fraction converges fast on one side only; I_x(a,b) = 1 - I_1-x(b,a)
        return 1.0 - math.exp(log_front) * _beta_fraction(1.0 - x, b, a) / b
    return math.exp(log_front) * _beta_fraction(x, a, b) / a


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Continued fraction of the incomplete beta function (DLMF 8.17.22), evaluated by Lentz's method."""
    tiny = 1e-300
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1.0)
    d = 1.0 / (d if abs(d) > tiny else tiny)
    result = d
    for m in range(1, 200_000):  # about sqrt(max(a, b)) terms are needed
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 + numerator * d
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = 1.0 + numerator / (c if abs(c) > tiny else tiny)
            result *= c * d
        if abs(c * d - 1.0) < 1e-14:
            return result
    raise ArithmeticError(f"no convergence of the incomplete beta function at a={a}, b={b}, x={x}")

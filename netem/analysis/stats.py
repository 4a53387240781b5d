"""Latency statistics, and the cost model that says whether passes or packets make a round slow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from netem.analysis.oracle import BoolArray, FloatArray
from netem.analysis.records import RoundRow

LATENCY_FIELDS = ("count", "mean", "p50", "p95", "p99", "p99_9", "max", "worst_1pct_mean")


@dataclass(frozen=True)
class Latency:
    """Of one set of rounds, in seconds; percentiles by linear interpolation.

    `worst_1pct_mean` is the mean of the slowest ceil(n / 100): two bursts in 930 rounds never reach p99.
    """

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    p99_9: float
    max: float
    worst_1pct_mean: float


def latency(values_s: Iterable[float]) -> Latency | None:
    """None where there are no values."""
    values = np.sort(np.fromiter(values_s, np.float64))
    if not len(values):
        return None
    p50, p95, p99, p99_9 = (float(p) for p in np.percentile(values, [50, 95, 99, 99.9]))
    worst = values[-math.ceil(len(values) / 100) :]
    return Latency(len(values), float(values.mean()), p50, p95, p99, p99_9, float(values[-1]), float(worst.mean()))


def slowest_by_iteration(rows: Iterable[RoundRow]) -> dict[tuple[int, int], float]:
    """(repeat, iteration) -> latency of its slowest worker; buckets of one iteration are added up for each
    worker.
    """
    sums: dict[tuple[int, int, int], float] = {}
    for row in rows:
        if row.latency_s is not None:
            key = (row.repeat, row.iteration, row.worker)
            sums[key] = sums.get(key, 0.0) + row.latency_s
    slowest: dict[tuple[int, int], float] = {}
    for (repeat, iteration, _), value in sums.items():
        slowest[repeat, iteration] = max(slowest.get((repeat, iteration), 0.0), value)
    return slowest


Regime = Literal["passes", "packets", "undetermined"]
TOLD_APART = 0.02
"""How much of the variance a fit on passes alone, or on packets alone, must fail to explain."""


@dataclass(frozen=True)
class CostModel:
    """latency = a + b * passes + c * packets, all >= 0, by least squares over the single rounds of a whole run.

    One transport's rounds alone cannot tell passes from packets: its bursts have more of both in proportion.
    `passes_share` is, for each transport, b * passes / (b * passes + c * packets) over the rounds that took more than
    one pass (all, where none did). `regime` says which part is larger over all of them; "undetermined" where
    passes alone and packets alone explain the latencies equally well.
    """

    a_s: float
    b_s_per_pass: float
    c_s_per_packet: float
    r_squared: float
    rounds: int
    passes_share: dict[str, float]
    regime: Regime


def cost_model(rows: Sequence[RoundRow]) -> CostModel | None:
    """None with fewer than four usable rounds. Packets are those up to the completing one: the rest costs no time."""
    points = [
        (row.transport, row.passes, packets, row.latency_s)
        for row in rows
        if row.outcome == "ok"
        and row.passes is not None
        and row.latency_s is not None
        and (packets := row.packets_at_need if row.packets_at_need is not None else row.packets_sent) is not None
    ]
    if len(points) < 4:
        return None
    names = np.array([point[0] for point in points])
    passes, packets, seconds = np.array([point[1:] for point in points], dtype=np.float64).T
    factors = np.column_stack([np.ones(len(points)), passes, packets])
    fit, explained = _non_negative(factors, seconds, ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)))
    alone = [_non_negative(factors, seconds, ((0,), (one,), (0, one)))[1] for one in (1, 2)]
    by_pass, by_packet = fit[1] * passes, fit[2] * packets
    counted = passes > 1 if (passes > 1).any() else np.ones(len(points), np.bool_)
    shares = {}
    if explained - min(alone) >= TOLD_APART:
        for name in dict.fromkeys(str(name) for name in names):
            shares[name] = _share(by_pass, by_packet, counted & (names == name))
    regime: Regime = "undetermined"
    if shares:
        regime = "passes" if _share(by_pass, by_packet, counted) > 0.5 else "packets"
    a_s, b_s, c_s = (float(part) for part in fit)
    return CostModel(a_s, b_s, c_s, explained, len(points), shares, regime)


def _share(by_pass: FloatArray, by_packet: FloatArray, where: BoolArray) -> float:
    total = float(by_pass[where].sum() + by_packet[where].sum())
    return float(by_pass[where].sum()) / total if total > 0 else 0.0


def _non_negative(
    factors: FloatArray, values: FloatArray, subsets: Sequence[tuple[int, ...]]
) -> tuple[FloatArray, float]:
    """Least squares with coefficients >= 0, and the share of the variance that it explains.

    The best of the fits on subsets of the columns that come out >= 0: with three columns that is exact and needs no
    iterative solver (Lawson and Hanson, "Solving Least Squares Problems").
    """
    scale = factors.max(axis=0).clip(1e-12)
    best, best_error = np.zeros(factors.shape[1]), float((values**2).sum())
    for subset in subsets:
        chosen = list(subset)
        found = np.linalg.lstsq(factors[:, chosen] / scale[chosen], values, rcond=None)[0] / scale[chosen]
        error = float(((values - factors[:, chosen] @ found) ** 2).sum())
        if (found >= 0).all() and error < best_error * (1 - 1e-12):
            best, best_error = np.zeros(factors.shape[1]), error
            best[chosen] = found
    spread = float(((values - values.mean()) ** 2).sum())
    return best, 1.0 - best_error / spread if spread > 0 else 1.0

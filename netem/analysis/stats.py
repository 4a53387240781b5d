"""Latency statistics, and the cost model that says whether passes or packets make a round slow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from netem.analysis.oracle import FloatArray
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


@dataclass(frozen=True)
class CostModel:
    """latency = a + b * passes + c * packets, all >= 0, by least squares over single rounds.

    `passes_share` is b * passes / (b * passes + c * packets) over the rounds that took more than one pass,
    or over all where none did. `regime` says which part is larger; "undetermined" where the rounds cannot
    tell them apart.
    """

    a_s: float
    b_s_per_pass: float
    c_s_per_packet: float
    r_squared: float
    rounds: int
    passes_share: float | None
    regime: Regime


def cost_model(rows: Sequence[RoundRow]) -> CostModel | None:
    """None with fewer than four usable rounds. Packets are those up to the completing one: what follows
    costs no time.
    """
    points = [
        (row.passes, packets, row.latency_s)
        for row in rows
        if row.outcome == "ok"
        and row.passes is not None
        and row.latency_s is not None
        and (packets := row.packets_at_need if row.packets_at_need is not None else row.packets_sent) is not None
    ]
    if len(points) < 4:
        return None
    data = np.array(points, dtype=np.float64)
    passes, packets, seconds = data.T
    factors = np.column_stack([np.ones(len(data)), passes, packets])
    a, b, c = _non_negative(factors, seconds)
    left = float(((seconds - factors @ np.array([a, b, c])) ** 2).sum())
    total = float(((seconds - seconds.mean()) ** 2).sum())
    many = passes > 1
    chosen = many if many.any() else np.ones(len(data), np.bool_)
    by_pass, by_packet = b * float(passes[chosen].sum()), c * float(packets[chosen].sum())
    told_apart = np.linalg.matrix_rank(factors / factors.max(axis=0).clip(1e-12), tol=1e-6) == 3
    share = by_pass / (by_pass + by_packet) if told_apart and by_pass + by_packet > 0 else None
    regime: Regime = "undetermined" if share is None else "passes" if share > 0.5 else "packets"
    fit = 1.0 - left / total if total > 0 else 1.0
    return CostModel(a, b, c, fit, len(data), share, regime)


def _non_negative(factors: FloatArray, values: FloatArray) -> tuple[float, float, float]:
    """Least squares with coefficients >= 0: the best of the fits on subsets of the three columns that are
    >= 0.

    With three columns that is exact and needs no iterative solver (Lawson and Hanson, "Solving Least
    Squares Problems").
    """
    scale = factors.max(axis=0).clip(1e-12)
    best, best_error = np.zeros(3), float((values**2).sum())
    for size in (1, 2, 3):
        for columns in combinations(range(3), size):
            chosen = list(columns)
            found = np.linalg.lstsq(factors[:, chosen] / scale[chosen], values, rcond=None)[0] / scale[chosen]
            error = float(((values - factors[:, chosen] @ found) ** 2).sum())
            if (found >= 0).all() and error < best_error * (1 - 1e-12):
                best, best_error = np.zeros(3), error
                best[chosen] = found
    return float(best[0]), float(best[1]), float(best[2])

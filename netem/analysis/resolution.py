"""Which differences a machine can resolve, from the rounds of an idle run. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MEAN_OF = 30
RESAMPLES = 4000
LEVEL = 0.95


def single(latencies_s: Sequence[float]) -> float:
    """Two idle rounds differ by less than this in 95 % of all pairs."""
    values = np.asarray(latencies_s, dtype=float)
    first, second = np.triu_indices(len(values), k=1)
    return float(np.quantile(np.abs(values[first] - values[second]), LEVEL))


def mean(latencies_s: Sequence[float], rounds: int = MEAN_OF, seed: int = 0) -> float:
    """The means of two sets of so many idle rounds differ by less than this in 95 % of resamples (bootstrap)."""
    values = np.asarray(latencies_s, dtype=float)
    draws = np.random.default_rng(seed).choice(values, (2, RESAMPLES, rounds)).mean(axis=2)
    return float(np.quantile(np.abs(draws[0] - draws[1]), LEVEL))

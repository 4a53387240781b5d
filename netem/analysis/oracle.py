"""What theory says a round costs: passes and packets under independent loss of every packet.

N chunks, `need` of them must arrive, every transmission is lost with probability `loss_ratio`,
independently, for the whole round. A pass sends all chunks that are still missing.

Passes: a chunk is missing after k passes with probability loss**k, so P(K <= k) = BinomCDF(N - need; N,
loss**k). Exact. Packets: as long as no chunk is sent again that has arrived (stop and wait), every
transmission is a fresh trial, and the round completes with the need-th success. So the packets up to the
completing chunk are negative binomial: exact, mean need / (1 - loss). Nothing that sends uncoded chunks
over that channel can need fewer, so for pipelined probing, which may repeat a chunk that is on its way, it
is a lower bound. What is in flight when the round completes is not counted here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from netem.links import chain, mask
from netem.spec.loss import BurstyLoss

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
DropFn = Callable[[IntArray, int], BoolArray]
"""(sequence numbers, pass number as on the wire) -> which of them the link drops."""

MAX_PASSES = 65_535
"""The pass field of the wire is 16 bits wide."""
TAIL = 1e-12
"""Distributions are cut where this much probability is left."""


def need(chunks: int, tolerance: float) -> int:
    """How many chunks must arrive so that the missing share is at most `tolerance`: N - floor(pN + 1e-9)."""
    if chunks < 1 or not 0.0 <= tolerance <= 1.0:
        raise ValueError(f"chunks {chunks}, tolerance {tolerance}: expected chunks >= 1 and tolerance in 0..1")
    return chunks - min(chunks, math.floor(tolerance * chunks + 1e-9))


def binom_cdf(k: int, n: int, p: float) -> float:
    """P(X <= k) for X ~ Binomial(n, p), summed over the shorter tail in logarithms."""
    if k < 0:
        return 0.0
    if k >= n or p <= 0.0:
        return 1.0
    if p >= 1.0:
        return 0.0
    if k > n * p:  # the upper tail is the smaller one: better precision near 1
        return 1.0 - binom_cdf(n - k - 1, n, 1.0 - p)
    x = np.arange(k + 1)
    factorials = _log_factorials(n)
    log_pmf = factorials[n] - factorials[x] - factorials[n - x] + x * math.log(p) + (n - x) * math.log1p(-p)
    return float(min(1.0, np.exp(log_pmf).sum()))


@lru_cache(maxsize=8)
def _log_factorials(n: int) -> FloatArray:
    table: FloatArray = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1, dtype=np.float64)))])
    return table


@dataclass(frozen=True)
class Passes:
    """Distribution of the number of passes: `pmf[k]` = P(K = k), k = 0..len-1."""

    pmf: FloatArray

    @property
    def mean(self) -> float:
        return float(np.arange(len(self.pmf)) @ self.pmf)

    @property
    def std(self) -> float:
        k = np.arange(len(self.pmf))
        return math.sqrt(max(0.0, float((k - self.mean) ** 2 @ self.pmf)))

    def interval(self, confidence: float = 0.95) -> tuple[int, int]:
        """The smallest and largest count that are not in a tail of less than (1 - confidence) / 2."""
        return pmf_interval(self.pmf, confidence)


def pmf_interval(pmf: FloatArray, confidence: float) -> tuple[int, int]:
    """Two-sided: outside of it lies at most (1 - confidence) / 2 on each side."""
    tail = (1.0 - confidence) / 2
    below = np.cumsum(pmf)
    low = int(np.searchsorted(below, tail, side="right"))
    high = int(np.searchsorted(below, 1.0 - tail, side="left"))
    return low, min(high, len(pmf) - 1)


@lru_cache(maxsize=256)
def passes(chunks: int, needed: int, loss_ratio: float) -> Passes | None:
    """Distribution of the passes of one round; None where it never ends (all packets are lost).

    `chunks` N >= 1, `needed` 0..N, `loss_ratio` 0..1.
    """
    if not 0 <= needed <= chunks or not 0.0 <= loss_ratio <= 1.0:
        raise ValueError(f"needed {needed} of {chunks} chunks at loss {loss_ratio}")
    if needed == 0:
        return Passes(np.array([1.0]))
    if loss_ratio >= 1.0:
        return None
    cdf = [0.0]
    while cdf[-1] < 1.0 - TAIL and len(cdf) <= MAX_PASSES:
        cdf.append(binom_cdf(chunks - needed, chunks, loss_ratio ** len(cdf)))
    pmf = np.diff(np.array(cdf), prepend=0.0)
    return Passes(pmf / pmf.sum())


def mean_passes_interval(rounds: Sequence[Passes], confidence: float) -> tuple[float, float]:
    """Interval of the mean over independent rounds, from the exact distribution of their sum."""
    total = np.array([1.0])
    for one in rounds:
        total = np.convolve(total, one.pmf)
    low, high = pmf_interval(total / total.sum(), confidence)
    return low / len(rounds), high / len(rounds)


@dataclass(frozen=True)
class Packets:
    """Packets up to and including the one that completes the round: negative binomial(needed, 1 - loss)."""

    needed: int
    loss_ratio: float

    @property
    def mean(self) -> float:
        return self.needed / (1.0 - self.loss_ratio) if self.loss_ratio < 1.0 else math.inf

    @property
    def std(self) -> float:
        return math.sqrt(self.needed * self.loss_ratio) / (1.0 - self.loss_ratio) if self.loss_ratio < 1.0 else math.inf

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Normal approximation of the negative binomial; good from some hundred chunks on."""
        if self.loss_ratio >= 1.0:
            return math.inf, math.inf
        z = NormalDist().inv_cdf((1.0 + confidence) / 2)
        return max(float(self.needed), self.mean - z * self.std), self.mean + z * self.std


@dataclass(frozen=True)
class Prediction:
    """What a given loss mask makes of one round under stop and wait.

    `completing` is (sequence, pass as on the wire) of the chunk that completed the round; None where
    nothing was needed. `delivered` is a mask of shape (chunks,).
    """

    passes: int
    packets_at_need: int
    delivered: BoolArray
    completing: tuple[int, int] | None


class NeverEnds(ValueError):
    """The mask lets too few packets through for the round to complete."""


def predict(
    order: IntArray,
    needed: int,
    chunks: int,
    drop: DropFn,
    *,
    first_pass: int = 0,
    max_passes: int = MAX_PASSES,
) -> Prediction:
    """The exact course of one round: every pass sends the still missing chunks in `order`, the receiver
    freezes at `needed`.

    `order` is a permutation of 0..chunks-1; `first_pass` is the pass number of the first transmission on
    the wire. Raises NeverEnds after `max_passes`.
    """
    delivered: BoolArray = np.zeros(chunks, np.bool_)
    missing, sent, have = np.asarray(order, np.int64), 0, 0
    if needed == 0:
        return Prediction(0, 0, delivered, None)
    for number in range(max_passes):
        arrives = ~drop(missing, first_pass + number)
        hits = np.flatnonzero(arrives)
        if have + len(hits) >= needed:
            hits = hits[: needed - have]
            delivered[missing[hits]] = True
            last = int(hits[-1])
            return Prediction(number + 1, sent + last + 1, delivered, (int(missing[last]), first_pass + number))
        delivered[missing[hits]] = True
        sent, have = sent + len(missing), have + len(hits)
        missing = missing[~arrives]
    raise NeverEnds(f"{have} of {needed} chunks after {max_passes} passes")


def mask_drop(seed: int, direction: str, rank: int, round_: int, loss_ratio: float) -> DropFn:
    """The repeatable loss mask of one flow in one round, for DBLP's key (round, sequence, pass).

    With a `netem.spec.loss.BurstyLoss` its chain runs along the sequence numbers of each pass.
    """
    state, limit = mask.port_state(seed, direction, rank), mask.threshold(loss_ratio)
    if isinstance(loss_ratio, BurstyLoss):
        bounds = chain.limits(chain.GilbertElliott(*loss_ratio.parameters))
        return lambda sequence, number: chain.lost(
            chain.key_base(state, (round_, number << 16)), int(np.max(sequence, initial=-1)) + 1, bounds
        )[sequence]
    return lambda sequence, number: mask.drops(state, (round_, sequence, number << 16), limit)

"""Models of random loss as sch_netem has them: independent, Gilbert-Elliott, and four states (TCA_NETEM_LOSS)."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

from netem.kernel import rtnetlink as rt

U32_MAX = 2**32 - 1
LOSS_GI, LOSS_GE = 1, 2  # NETEM_LOSS_*
_GE, _GI = struct.Struct("=4I"), struct.Struct("=5I")
_LAGS = 20_000
_NEGLIGIBLE = 1e-12


def probability(ratio: float) -> int:
    """0..1 as netem takes it. Its random number must be <= it: 0 is never, U32_MAX always; no small one becomes 0."""
    return max(round(ratio * U32_MAX), int(ratio > 0))


def ratio_of(probability_u32: int) -> float:
    """The inverse of `probability`."""
    return probability_u32 / U32_MAX


@dataclass(frozen=True)
class GilbertElliott:
    """Two states. p: good to bad, r: bad to good; h, k: share of packets that pass in the bad and the good state.

    Gilbert's model has h = 0 and k = 1. `tc` is given 1-h and 1-k; the kernel takes h and 1-k (loss_gilb_ell).
    """

    p: float
    r: float
    h: float = 0.0
    k: float = 1.0

    def __post_init__(self) -> None:
        check_ratios(self, "p", "r", "h", "k")
        if self.p + self.r == 0:
            raise ValueError("Gilbert-Elliott with p and r of 0 never leaves the state it begins in")

    @classmethod
    def of_bursts(cls, loss_ratio: float, burst_packets: float) -> GilbertElliott:
        """By mean loss and mean length of a burst of losses: r = 1/burst, p = r * loss / (1 - loss)."""
        if not 0.0 < loss_ratio < 1.0 or burst_packets < 1.0:
            raise ValueError(
                f"loss {loss_ratio}, burst {burst_packets}: expected 0 < loss < 1 and a burst of 1 or more"
            )
        r = 1.0 / burst_packets
        p = r * loss_ratio / (1.0 - loss_ratio)
        if p > 1.0:
            least = loss_ratio / (1.0 - loss_ratio)
            raise ValueError(f"a loss of {loss_ratio} needs bursts of {least:.3g} packets or more, not {burst_packets}")
        return cls(p, r)

    @property
    def mean_ratio(self) -> float:
        bad = self.p / (self.p + self.r)
        return bad * (1.0 - self.h) + (1.0 - bad) * (1.0 - self.k)

    @property
    def clustering(self) -> float:
        """Variance of the number of losses over that of independent ones, for many packets."""
        mean, bad = self.mean_ratio, self.p / (self.p + self.r)
        apart = (1.0 - self.h) - (1.0 - self.k)
        memory = 1.0 - self.p - self.r
        if not 0.0 < mean < 1.0:
            return 1.0
        covariance = bad * (1.0 - bad) * apart**2 * memory / (1.0 - memory)
        return max(1.0, 1.0 + 2.0 * covariance / (mean * (1.0 - mean)))

    def with_loss(self, ratio: float) -> GilbertElliott:
        """With an independent loss on top: of what passes in either state, this share is lost as well."""
        return replace(self, h=self.h * (1.0 - ratio), k=self.k * (1.0 - ratio))

    def encode(self) -> dict[int, rt.Value]:
        return {LOSS_GE: _GE.pack(*(probability(x) for x in (self.p, self.r, self.h, 1.0 - self.k)))}


@dataclass(frozen=True)
class FourState:
    """Four states: 1 received, 2 received within a burst, 3 lost within a burst, 4 lost alone (Salsano et al.).

    p13 is the probability of going from 1 to 3, and so on; from 4 it always goes back to 1.
    """

    p13: float
    p31: float
    p32: float = 0.0
    p23: float = 1.0
    p14: float = 0.0

    def __post_init__(self) -> None:
        check_ratios(self, "p13", "p31", "p32", "p23", "p14")
        if self.p13 + self.p14 > 1.0 or self.p31 + self.p32 > 1.0:
            raise ValueError("four states: p13 + p14 and p31 + p32 are 1 at most")  # else the kernel's sum wraps
        if self.p13 > 0 and (self.p31 == 0 or (self.p32 > 0 and self.p23 == 0)):
            raise ValueError("four states: a burst that cannot end (p31, or p23 beside p32, is 0)")

    @property
    def mean_ratio(self) -> float:
        lost_in_burst = self.p13 / self.p31 if self.p13 else 0.0
        passed_in_burst = lost_in_burst * self.p32 / self.p23 if lost_in_burst and self.p32 else 0.0
        return (lost_in_burst + self.p14) / (1.0 + self.p14 + lost_in_burst + passed_in_burst)

    @property
    def clustering(self) -> float:
        """Variance of the number of losses over that of independent ones: the sum of all autocorrelations."""
        mean = self.mean_ratio
        if not 0.0 < mean < 1.0:
            return 1.0
        # Share of packets that are in each state and were preceded, `lag` packets before, by a lost one.
        states = self._step(self._lost())
        total = 1.0
        for _ in range(_LAGS):
            correlation = ((states[2] + states[3]) / mean - mean) / (1.0 - mean)
            total += 2.0 * correlation
            if abs(correlation) < _NEGLIGIBLE:
                break
            states = self._step(states)
        return max(1.0, total)

    def _lost(self) -> tuple[float, float, float, float]:
        """The stationary shares of the two states in which a packet is lost."""
        burst = self.p13 / self.p31 if self.p13 else 0.0
        scale = self.mean_ratio / (burst + self.p14)
        return 0.0, 0.0, burst * scale, self.p14 * scale

    def _step(self, at: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
        one, two, three, four = at
        return (
            one * (1.0 - self.p13 - self.p14) + three * self.p31 + four,
            two * (1.0 - self.p23) + three * self.p32,
            one * self.p13 + two * self.p23 + three * (1.0 - self.p31 - self.p32),
            one * self.p14,
        )

    def encode(self) -> dict[int, rt.Value]:
        order = (self.p13, self.p31, self.p32, self.p14, self.p23)  # of struct tc_netem_gimodel
        return {LOSS_GI: _GI.pack(*(probability(x) for x in order))}


Loss = float | GilbertElliott | FourState


def decode_loss(nested: bytes | None, independent: int) -> Loss:
    """TCA_NETEM_LOSS, or without it the probability of independent loss."""
    if nested is None:
        return ratio_of(independent)
    models = rt.attributes(nested)
    if LOSS_GE in models:
        p, r, h, not_k = _GE.unpack(models[LOSS_GE])
        return GilbertElliott(ratio_of(p), ratio_of(r), ratio_of(h), ratio_of(U32_MAX - not_k))
    p13, p31, p32, p14, p23 = (ratio_of(x) for x in _GI.unpack(models[LOSS_GI]))
    return FourState(p13, p31, p32, p23, p14)


def check_ratios(value: object, *names: str) -> None:
    """ValueError unless these fields are in 0..1."""
    for name in names:
        if not 0.0 <= getattr(value, name) <= 1.0:
            raise ValueError(f"{type(value).__name__} {name} {getattr(value, name)}: expected 0..1")

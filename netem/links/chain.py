"""Gilbert-Elliott loss as a pure function of a packet's place: the kernel, a simulator and an analysis decide alike.

The chain of Gilbert (1960) and Elliott (1963): a good and a bad state, good turns bad with probability p, bad turns
good with r, a packet is lost with probability 1 - k in the good and 1 - h in the bad state (tc-netem(8), `gemodel`).

Place n of a chain draws one number: `mix(base ^ n)`, u its upper and v its lower 32 bits, both as fractions.

    state(n) = bad            if u < min(p, 1 - r)        whatever the state before was
               good           if u >= max(p, 1 - r)       whatever the state before was
               state(n - 1)   between these, if p + r <= 1 (the opposite of state(n - 1), if p + r > 1)
    lost(n)  = v < 1 - h in the bad state, v < 1 - k in the good one

which has the transition probabilities asked for. A state is thus known from the last place that decides by itself, a
few places back. The kernel looks back no further than to the start of the block of `BLOCK` places before that of n (or
to place 0), which is bad if u < p / (p + r), the share of bad places in the long run. A chain so much longer in memory
that this would show is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from netem.links import mask

BLOCK = 256
"""How far the kernel looks back at least; at most twice as far."""
MEMORY_MAX = 100
"""Longer memories would shorten the mean burst by more than 3 % (see `memory_packets`)."""

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class GilbertElliott:
    """p: good to bad, r: bad to good; h, k: share of packets that pass in the bad and in the good state."""

    p: float
    r: float
    h: float = 0.0
    k: float = 1.0

    def __post_init__(self) -> None:
        for name in ("p", "r", "h", "k"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"Gilbert-Elliott {name} {value}: expected 0..1")
        if self.p + self.r <= 0.0:
            raise ValueError("Gilbert-Elliott with p and r of 0 never leaves the state it begins in")

    @classmethod
    def of_bursts(cls, loss_ratio: float, burst_packets: float) -> GilbertElliott:
        """Gilbert's model by mean loss (above 0, below 1) and mean number of packets lost in a row (1 or more).

        Raises ValueError where no chain has both: a loss of 90 % has bursts of 9 packets at least.
        """
        if not 0.0 < loss_ratio < 1.0 or not burst_packets >= 1.0:
            raise ValueError(
                f"loss {loss_ratio}, burst {burst_packets}: expected 0 < loss < 1 and a burst of 1 or more"
            )
        r = 1.0 / burst_packets
        p = r * loss_ratio / (1.0 - loss_ratio)
        if p > 1.0 + 1e-9:
            least = loss_ratio / (1.0 - loss_ratio)
            raise ValueError(
                f"a loss of {loss_ratio:.4g} needs bursts of {least:.4g} packets or more, not {burst_packets:g}"
            )
        return cls(min(p, 1.0), r)

    @property
    def mean_ratio(self) -> float:
        """Share of packets lost in the long run."""
        bad = bad_share(self)
        return bad * (1.0 - self.h) + (1.0 - bad) * (1.0 - self.k)


def bad_share(model: GilbertElliott) -> float:
    """Share of the places in the bad state, in the long run."""
    return model.p / (model.p + model.r)


def memory_packets(model: GilbertElliott) -> float:
    """How many packets back the state is decided, on average. Infinite for p = r = 1, which alternates."""
    decisive = min(model.p + model.r, 2.0 - model.p - model.r)
    return 1.0 / decisive if decisive > 0.0 else float("inf")


@dataclass(frozen=True)
class Limits:
    """The chain in numbers of 0..2**32, as the kernel compares them."""

    low: int
    high: int
    first: int
    bad_loss: int
    good_loss: int
    flips: bool


def limits(model: GilbertElliott) -> Limits:
    """Raises ValueError where the chain remembers more packets than the kernel looks back (`MEMORY_MAX`)."""
    if memory_packets(model) > MEMORY_MAX:
        raise ValueError(
            f"Gilbert-Elliott with p {model.p:.4g} and r {model.r:.4g} remembers {memory_packets(model):.4g} packets; "
            f"at most {MEMORY_MAX} are exact"
        )
    low, high = sorted((mask.threshold(model.p), mask.FULL - mask.threshold(model.r)))
    return Limits(
        low,
        high,
        mask.threshold(bad_share(model)),
        mask.threshold(1.0 - model.h),
        mask.threshold(1.0 - model.k),
        flips=model.p + model.r > 1.0,
    )


def lost_scalar(base: int, place: int, bounds: Limits) -> bool:
    """Whether this place is lost, in plain integers. The reference."""
    start = max(0, place // BLOCK * BLOCK - BLOCK)
    flipped = False
    for n in range(place, start - 1, -1):
        u = mask.mix(base ^ n) >> 32
        if n == start:
            bad = (u < bounds.first) ^ flipped
        elif u < bounds.low or u >= bounds.high:
            bad = (u < bounds.low) ^ flipped
        else:
            flipped ^= bounds.flips
            continue
        break
    return mask.mix(base ^ place) & mask.U32 < (bounds.bad_loss if bad else bounds.good_loss)


def lost(base: int, places: int, bounds: Limits) -> BoolArray:
    """Which of the places 0..places-1 are lost, over arrays."""
    n = np.arange(places)
    draws = mask.mix_array(np.uint64(base) ^ n.astype(np.uint64))
    u, v = (draws >> np.uint64(32)).astype(np.int64), (draws & np.uint64(mask.U32)).astype(np.int64)
    start = np.maximum(0, n // BLOCK * BLOCK - BLOCK)
    decides = (u < bounds.low) | (u >= bounds.high)
    last = np.maximum.accumulate(np.where(decides, n, 0))
    by_itself = last > start
    origin = np.where(by_itself, last, start)
    bad = u[origin] < np.where(by_itself, bounds.low, bounds.first)
    if bounds.flips:
        bad ^= (n - origin) % 2 == 1
    return np.asarray(v < np.where(bad, bounds.bad_loss, bounds.good_loss), np.bool_)


def key_base(state: int, words: Sequence[int]) -> int:
    """The base of the chain along one number of the key: `words` are the key's other words, in order."""
    for word in words:
        state = mask.mix(state ^ word)
    return state


def arrival_base(state: int, index: int) -> int:
    """The base of the chain along the packets of one sender with one index, in order of arrival at the port."""
    return mask.mix(state ^ index)

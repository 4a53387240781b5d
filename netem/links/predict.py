"""What a rule or a port's chain does to numbered packets, worked out beside the kernel: the same pure functions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from netem.links import chain, mask
from netem.links.base import LossRule
from netem.links.chain import BoolArray, GilbertElliott


@dataclass(frozen=True)
class Fates:
    """Of packets 0..n-1: lost; of those that are not, twice and damaged. Each (n,)."""

    lost: BoolArray
    twice: BoolArray
    damaged: BoolArray

    @property
    def copies(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """How often each is to arrive: a damaged one does not, its copy does. (n,)."""
        intact = np.where(self.damaged, 0, 1) + self.twice
        return np.where(self.lost, 0, intact).astype(np.int64)


def by_rule(rule: LossRule, index: int, packets: int) -> Fates:
    """First transmissions (pass 0) of the places 0..packets-1 of a round, for a key of (index, place, pass)."""
    words = (index, np.arange(packets), 0)
    if rule.chain is None:
        lost = mask.drops(rule.state, words, mask.threshold(rule.loss_ratio))
    else:
        lost = chain.lost(chain.key_base(rule.state, (index, 0)), packets, chain.limits(rule.chain))
    twice = mask.duplicates(rule.state, words, mask.threshold(rule.duplicate_ratio))
    return Fates(lost, twice, mask.corrupts(rule.state, words, mask.threshold(rule.corrupt_ratio)))


def by_port(model: GilbertElliott, state: int, packets: int) -> Fates:
    """The first packets that come by a port whose own loss is a chain."""
    none = np.zeros(packets, np.bool_)
    return Fates(chain.lost(state, packets, chain.limits(model)), none, none)

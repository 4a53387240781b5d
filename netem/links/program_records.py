"""What the loss program's maps hold, as the kernel sees it."""

from __future__ import annotations

import ctypes
from ctypes import c_uint32, c_uint64

import numpy as np

from netem.links import mask
from netem.links import program_layout as layout
from netem.links.base import LinkError
from netem.links.chain import GilbertElliott, limits

COUNTER = np.dtype(
    [
        *(("source", ">u4"), ("index", "u4"), ("kind", "u4")),
        *((name, "u8") for name in ("seen", "dropped", "bytes", "place", "duplicated", "corrupted")),
    ]
)


class Rule(ctypes.Structure):
    _fields_ = (
        ("state", c_uint64), ("threshold", c_uint64), ("first", c_uint32), ("last", c_uint32),
        ("flags", c_uint32), ("unused", c_uint32), ("low", c_uint64), ("high", c_uint64), ("start", c_uint64),
        ("bad_loss", c_uint64), ("good_loss", c_uint64), ("flips", c_uint64), ("twice_below", c_uint64),
        ("corrupt_below", c_uint64),
    )  # fmt: skip

    @classmethod
    def of(
        cls, state: int, ratio: float, chain: GilbertElliott | None, window: tuple[int, int] = (0, mask.U32),
        flags: int = 0, twice: float = 0.0, corrupt: float = 0.0,
    ) -> Rule:  # fmt: skip
        """LinkError for a chain that cannot be exact."""
        rule = cls(state, mask.threshold(ratio), *window, flags)
        rule.twice_below, rule.corrupt_below = mask.threshold(twice), mask.threshold(corrupt)
        if chain is not None:
            try:
                bounds = limits(chain)
            except ValueError as error:
                raise LinkError(str(error)) from error
            rule.threshold, rule.flags = mask.threshold(chain.mean_ratio), flags | layout.CHAIN
            rule.low, rule.high, rule.start, rule.flips = bounds.low, bounds.high, bounds.first, bounds.flips
            rule.bad_loss, rule.good_loss = bounds.bad_loss, bounds.good_loss
        return rule


class Control(ctypes.Structure):
    _fields_ = (("bank", c_uint64), ("label", c_uint64), ("base", Rule))

"""Were impairments by time in force for as long as the file says? Pure.

A change is late by what the testbed needs for it. Where that is about the same at the start and at the end of a burst,
the burst has its length, somewhat later; where a machine is too slow for its changes, a burst of 10 ms lasts 50 and
the next one begins before it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_SHARE = 0.5
"""Of the time that was asked for."""


@dataclass(frozen=True)
class Moment:
    """A change by time, in seconds since the first round was let go. active: impairments by time are in force then."""

    planned_s: float
    actual_s: float
    active: bool


def asked_and_achieved_s(moments: Sequence[Moment]) -> tuple[float, float]:
    """How long impairments by time were to be in force, up to the last change, and how long they were."""
    stretches = [(one, other) for one, other in pairwise(moments) if one.active]
    asked = sum(other.planned_s - one.planned_s for one, other in stretches)
    return asked, sum(other.actual_s - one.actual_s for one, other in stretches)


def check(moments: Sequence[Moment]) -> tuple[bool, str] | None:
    """(whether it is right, in words); None where nothing began and ended by time."""
    asked, achieved = asked_and_achieved_s(moments)
    if not asked:
        return None
    late_ms = sorted(1e3 * (each.actual_s - each.planned_s) for each in moments)
    detail = (
        f"in force for {achieved:.4g} s instead of {asked:.4g} s (allowed {MAX_SHARE:.0%} more or less); "
        f"changes late by {late_ms[len(late_ms) // 2]:.2f} ms, at most {late_ms[-1]:.2f} ms"
    )
    return abs(achieved - asked) <= MAX_SHARE * asked, detail

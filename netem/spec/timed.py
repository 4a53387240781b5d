"""When events by time begin and end in a job of programs, which has no rounds. A pure function of the scenario."""

from __future__ import annotations

import math
from dataclasses import dataclass

from netem.spec.scenario import Burst, Scenario
from netem.spec.timeline import bounded_spans


@dataclass(frozen=True)
class TimedStep:
    """What is in force from `at_s` on, seconds since the programs run; the whole state, but for bursts by iteration."""

    at_s: float
    bursts: tuple[Burst, ...]


def timed_steps(spec: Scenario) -> tuple[TimedStep, ...]:
    """In order, one for each moment at which something begins or ends."""
    spans = list(bounded_spans(spec))
    moments = sorted({moment for each in spans for moment in (each.start_s, each.end_s) if not math.isinf(moment)})
    return tuple(
        TimedStep(moment, tuple(b for s in spans if s.start_s <= moment < s.end_s for b in s.effect.bursts))
        for moment in moments
    )

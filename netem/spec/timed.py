"""What is in force at which moment, where no rounds are counted. A pure function of the scenario."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from netem.spec.effects import Effect
from netem.spec.scenario import Scenario
from netem.spec.timeline import spans


@dataclass(frozen=True)
class TimedStep:
    """What events by time have in force from `at_s` on, seconds since the programs run; the whole state."""

    at_s: float
    effects: tuple[Effect, ...]


def timed_steps(spec: Scenario, seed: int) -> Iterator[TimedStep]:
    """In order, one for each moment at which something begins or ends; endless where an event is."""
    coming = spans(spec, seed)
    following = next(coming, None)
    active: list[tuple[float, int, Effect]] = []  # a heap by the end
    numbers = itertools.count()
    while True:
        starts = math.inf if following is None else following.start_s
        at_s = min(starts, active[0][0] if active else math.inf)
        if at_s == math.inf:
            return
        while active and active[0][0] <= at_s:
            heapq.heappop(active)
        while following is not None and following.start_s <= at_s:
            heapq.heappush(active, (following.end_s, next(numbers), following.effect))
            following = next(coming, None)
        yield TimedStep(at_s, tuple(effect for _, _, effect in active))

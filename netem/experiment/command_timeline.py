"""The impairments of a job whose programs need not count rounds: by time since they run, and by gate where they do."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable

from netem.analysis.command import Impairment
from netem.experiment.executor import shift_facts
from netem.experiment.hub import Event
from netem.experiment.open_fabric import OpenFabric
from netem.spec import Scenario, Window, iterations_total, windows
from netem.spec.effects import Effect
from netem.spec.timed import timed_steps
from netem.spec.timeline import LAST, Active, bounded_spans, in_force
from netem.spec.units import format_time


class CommandTimeline:
    """Call `start` when the programs run, `open_gate` when all have asked, and `ring` when the clock shows `next_s`."""

    def __init__(self, spec: Scenario, seed: int, fabric: OpenFabric, record: Callable[[Event], None]) -> None:
        self._spec, self._seed, self._fabric, self._record = spec, seed, fabric, record
        self._windows = windows(spec, seed)
        self._coming = timed_steps(spec, seed)
        self._next = next(self._coming, None)
        self._of_time: tuple[Effect, ...] = ()
        self._of_round: list[Window] = []
        self._ends: list[tuple[float, int, Window]] = []
        self._numbers = itertools.count()
        self._zero: float | None = None
        self._round = 0
        self._reached: set[int] = set()
        self.impairments: list[Impairment] = []

    @property
    def gates(self) -> tuple[int, ...]:
        """Rounds before which the programs ask: those in which something changes."""
        found = {at for each in self._windows for at in (each.first, each.last + 1)}
        found |= {r for each in self._windows if each.for_s is not None for r in range(each.first, each.last + 1)}
        return tuple(sorted(at for at in found if at < iterations_total(self._spec)))

    def start(self, now: float) -> None:
        """Times count from here."""
        self._zero = now

    @property
    def next_s(self) -> float | None:
        """When to ring, by the clock; None: at no time that is known."""
        due = [self._ends[0][0]] if self._ends else []
        if self._next is not None and self._zero is not None:
            due.append(self._zero + self._next.at_s)
        return min(due, default=None)

    def ring(self) -> None:
        """Do what is due."""
        while (due := self.next_s) is not None and due <= time.monotonic():
            began = time.monotonic()
            if self._ends and self._ends[0][0] <= due:
                _, _, ended = heapq.heappop(self._ends)
                self._of_round = [each for each in self._of_round if each is not ended]
                self._change(began, iteration=self._round)
                continue
            assert self._next is not None
            step, self._next = self._next, next(self._coming, None)
            self._of_time = step.effects
            self._change(began, planned_s=step.at_s)

    def open_gate(self, round_: int) -> None:
        """Every program has ended the round before."""
        began = time.monotonic()
        self._round, self._ends = round_, []
        self._reached.add(round_)
        before = self._of_round
        self._of_round = [each for each in self._windows if each.first <= round_ <= each.last]
        if self._of_round != before or any(each.for_s is not None for each in self._of_round):
            self._change(began, iteration=round_)
        for each in self._of_round:
            if each.for_s is not None:
                heapq.heappush(self._ends, (time.monotonic() + each.for_s, next(self._numbers), each))

    def _change(self, began: float, planned_s: float | None = None, iteration: int | None = None) -> None:
        active: list[Active] = [(each.effect, self._round, self._round) for each in self._of_round]
        active += [(effect, 0, LAST) for effect in self._of_time]
        step = in_force(active, self._round, self._seed)
        self._fabric.apply(step)
        now = time.monotonic()
        took_s, t_s = round(now - began, 6), round(now - (self._zero or began), 6)
        bursts = tuple(burst.model_dump(exclude={"iteration", "for_s"}) for burst in step.bursts)
        window = len(self._fabric.windows) - 1
        self.impairments.append(Impairment(bursts, planned_s, iteration, t_s, took_s, window))
        late = {} if planned_s is None else {"lateness_s": round(t_s - planned_s, 6)}
        self._record(
            {
                "event": "impairment",
                "action": step.action,
                "planned_round": iteration,
                "planned_s": planned_s,
                **late,
                "bursts": list(bursts),
                "shifts": [shift_facts(shift) for shift in step.shifts],
                "t_s": t_s,
                "took_s": took_s,
            }
        )

    def unreached(self, wall_s: float | None) -> list[str]:
        """What never came: the job ended before."""
        done = {one.planned_s for one in self.impairments}
        late = sorted({span.start_s for span in bounded_spans(self._spec, self._seed)} - done)
        how = "the job failed" if wall_s is None else f"the job ended after {format_time(round(wall_s, 3))}"
        found = [f"the event at {format_time(at)} did not come: {how}" for at in late]
        rounds = sorted({each.first for each in self._windows} - self._reached)
        return found + [f"nobody asked at the gate of iteration {round_}" for round_ in rounds]

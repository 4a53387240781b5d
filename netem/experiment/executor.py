"""Acts on a scenario's timeline while a job runs, and writes down planned and actual time of every change.

Changes of rounds are made between two rounds: every worker waits at the gate until they are read back. Changes by time
are made when the hub's alarm rings, with what is to be written prepared beforehand. Times are seconds since the first
round was let go.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from netem.analysis.punctual import Moment
from netem.analysis.timed import Change, History, Stretch
from netem.experiment.fabric import Prepared
from netem.spec import Burst, Scenario, Span, Step, Window, phase_effects, spans, windows
from netem.spec.effects import Effect, end_name, flows
from netem.spec.timeline import LAST, bounded_spans, in_force

MISSED_MAX = 100
"""How many changes that never came are written down one by one."""
BEHIND_S = 0.25
"""Who is so late leaves out what is over by now: else a machine that is too slow for its changes does nothing else."""


class Links(Protocol):
    """The part of the fabric that is needed here."""

    def label(self, round_: int) -> None: ...
    def prepare(self, step: Step) -> Prepared: ...
    def put(self, prepared: Prepared) -> None: ...


@dataclass(frozen=True)
class _InForce:
    effect: Effect
    first: int
    last: int
    kind: Literal["window", "phase", "span"]


@dataclass(frozen=True)
class _Due:
    """`ending`: numbers of what is in force; `begun`: what begins, and its planned end; `over`: what has ended before
    it began.
    """

    ending: frozenset[int]
    begun: tuple[tuple[_InForce, float], ...]
    over: tuple[Span, ...] = ()


class Executor:
    """One job's timeline. The conductor calls `open_gate` at every gate, and `ring` at the moment `next_s` says."""

    def __init__(
        self,
        spec: Scenario,
        seed: int,
        links: Links,
        record: Callable[[dict[str, Any]], None],
        clock: Callable[[], float],
        *,
        first_phase: str = "normal",
    ) -> None:
        self.spec, self.seed = spec, seed
        self._links, self._record, self._clock = links, record, clock
        self._coming: list[Window] = list(reversed(windows(spec, seed)))
        self._phases, self._phase, self._reported = phase_effects(spec), first_phase, dict[int, str]()
        self._spans: Iterator[Span] = spans(spec, seed)
        self._peeked: deque[Span] = deque()
        self._active: dict[int, _InForce] = {}
        self._ends: list[tuple[float, int]] = []  # a heap of (planned end, number of what is in force)
        self._numbers = itertools.count()
        self._origin: float | None = None
        self._step = Step(0, "clear", (), seed)
        self._ready: Prepared | None = None
        self._round = 0
        self.history = History()

    def phase(self, round_: int, phase: str) -> None:
        """The workload has said which phase holds from this round on."""
        self._reported[round_] = phase

    def open_gate(self, round_: int) -> None:
        """Every worker has ended the round before: put in place what this round asks for, and nothing else."""
        began = self._clock()
        first = self._origin is None
        if self._origin is None:
            self._origin = began
        self._links.label(round_)
        self._round = round_
        limited = self._enter(round_)
        if first:
            self._commit(self._due(0.0))
        self._change(self._links.prepare(self._state(self._active.values())), began, None)
        if first:
            self._begin_clock()
        now = self._now()
        for number, for_s in limited:
            heapq.heappush(self._ends, (now + for_s, number))
        self.history.rounds.append(Stretch(round_, began - self._origin, now))
        self._make_ready()

    def _begin_clock(self) -> None:
        """The first round is let go now: what was done for it was done before."""
        passed = self._now()
        self._origin = self._clock()
        self.history.changes = [
            Change(each.began_s - passed, min(0.0, each.ended_s - passed), each.bursts) for each in self.history.changes
        ]

    @property
    def next_s(self) -> float | None:
        """When to ring, by the clock; None: at no time that is known."""
        planned = self._planned()
        return None if planned is None or self._origin is None else self._origin + planned

    def ring(self) -> None:
        """Does what is due."""
        while (planned := self._planned()) is not None and self._clock() >= (self._origin or 0.0) + planned:
            began = self._clock()
            behind = self._now() - planned > BEHIND_S
            due = self._due(self._now() if behind else planned)
            ready = None if behind else self._ready
            prepared = ready or self._links.prepare(self._state(self._after(due)))
            self._commit(due)
            for span in due.over:
                self._missed(span)
                now = self._now()
                self.history.moments += [Moment(span.start_s, now, True), Moment(span.end_s, now, False)]
            self._change(prepared, began, planned)
            self._make_ready()

    def finish(self) -> None:
        """The job has ended: what was planned for later and did not come is written down."""
        if self._origin is None:
            return
        ended = self._now()
        for span in bounded_spans(self.spec, self.seed):
            if span.start_s > ended:
                self._missed(span, ended_s=round(ended, 6))

    def _missed(self, span: Span, **more: float) -> None:
        self.history.missed += 1
        if self.history.missed <= MISSED_MAX:
            planned, place = span.start_s, ".".join(str(key) for key in span.effect.at)
            self._record({"event": "missed", "planned_s": planned, **more, "at": place})

    # What is in force

    def _enter(self, round_: int) -> list[tuple[int, float]]:
        """Ends what was for earlier rounds and begins what is for this one. (number, length) of what ends within it."""
        for reported in sorted(self._reported):
            if reported <= round_:
                self._phase = self._reported.pop(reported)
        held = [effect for phase, effect in self._phases if phase == self._phase]
        self._drop(lambda each: each.effect not in held if each.kind == "phase" else each.last < round_)
        limited = []
        while self._coming and self._coming[-1].first <= round_:
            window = self._coming.pop()
            number = self._add(_InForce(window.effect, window.first, window.last, "window"))
            if window.for_s is not None:
                limited.append((number, window.for_s))
        for effect in held:
            if all(each.effect != effect for each in self._active.values()):
                self._add(_InForce(effect, round_, LAST, "phase"))
        return limited

    def _add(self, each: _InForce) -> int:
        number = next(self._numbers)
        self._active[number] = each
        return number

    def _planned(self) -> float | None:
        """The next moment of a change."""
        moments = [self._ends[0][0]] if self._ends else []
        if self._peek():
            moments.append(self._peeked[0].start_s)
        return min(moments, default=None)

    def _peek(self, count: int = 1) -> bool:
        """Whether there are so many spans to come; then they are in `_peeked`."""
        while len(self._peeked) < count and (span := next(self._spans, None)) is not None:
            self._peeked.append(span)
        return len(self._peeked) >= count

    def _due(self, planned: float) -> _Due:
        """What ends and what begins at this moment (or should have before): one change."""
        count = 0
        while self._peek(count + 1) and self._peeked[count].start_s <= planned:
            count += 1
        ending = frozenset(number for at, number in self._ends if at <= planned)
        spans = list(itertools.islice(self._peeked, count))
        begun = tuple(
            (_InForce(span.effect, self._round, LAST, "span"), span.end_s) for span in spans if span.end_s > planned
        )
        return _Due(ending, begun, tuple(span for span in spans if span.end_s <= planned))

    def _after(self, due: _Due) -> list[_InForce]:
        kept = [each for number, each in self._active.items() if number not in due.ending]
        return [*kept, *(each for each, _ in due.begun)]

    def _commit(self, due: _Due) -> None:
        for _ in (*due.begun, *due.over):
            self._peeked.popleft()
        self._drop_numbers(due.ending)
        for each, end_s in due.begun:
            number = self._add(each)
            if not math.isinf(end_s):
                heapq.heappush(self._ends, (end_s, number))

    def _drop(self, over: Callable[[_InForce], bool]) -> None:
        self._drop_numbers(frozenset(number for number, each in self._active.items() if over(each)))

    def _drop_numbers(self, numbers: frozenset[int]) -> None:
        for number in numbers:
            del self._active[number]
        self._ends = [entry for entry in self._ends if entry[1] not in numbers]
        heapq.heapify(self._ends)

    def _state(self, active: Iterable[_InForce]) -> Step:
        return in_force(((each.effect, each.first, each.last) for each in active), self._round, self.seed)

    # Changes

    def _make_ready(self) -> None:
        """Prepares the next change by time, as far as nothing else comes before it."""
        planned = self._planned()
        self._ready = None
        if planned is not None:
            self._ready = self._links.prepare(self._state(self._after(self._due(planned))))

    def _change(self, prepared: Prepared, began: float, planned_s: float | None) -> None:
        """Puts a state in place and writes it down; a state that is there already is no change."""
        step = prepared.step
        same = (step.bursts, step.shifts, step.windows) == (self._step.bursts, self._step.shifts, self._step.windows)
        if same and not prepared.losses and not prepared.shapes:
            return
        self._links.put(prepared)
        ended = self._clock()
        self._step = step
        origin = began if self._origin is None else self._origin
        spans_now = [each.effect for each in self._active.values() if each.kind == "span"]
        self.history.changes.append(Change(began - origin, ended - origin, self._losses(spans_now)))
        event = {
            "event": "impairment",
            "action": step.action,
            "planned_round": step.round if planned_s is None else None,
            "planned_s": None if planned_s is None else round(planned_s, 6),
            "actual_s": round(ended - origin, 6) if self.history.rounds else 0.0,
            "round": self._round,
            "bursts": [burst.model_dump() for burst in step.bursts],
            "shifts": [shift_facts(shift) for shift in step.shifts],
            "took_s": round(ended - began, 6),
        }
        if planned_s is not None:
            event["lateness_s"] = round(ended - origin - planned_s, 6)
            self.history.lateness_s.append(ended - origin - planned_s)
        if planned_s is not None or not self.history.rounds:
            actual_s = ended - origin if self.history.rounds else 0.0
            self.history.moments.append(Moment(planned_s or 0.0, actual_s, bool(spans_now)))
        self._record(event)

    def _losses(self, effects: list[Effect]) -> tuple[Burst, ...]:
        """The losses of these effects, and one of 0 for whom a changed link concerns."""
        return tuple(burst for each in effects for burst in (*each.bursts, *touched(each, self.spec)))

    def _now(self) -> float:
        return self._clock() - (self._origin or 0.0)


def touched(effect: Effect, spec: Scenario) -> tuple[Burst, ...]:
    """Bursts of loss 0 for the workers whose data passes the link directions that an effect changes."""
    whose = flows(((shift.host, shift.way) for shift in effect.shifts), spec.topology)
    return tuple(
        Burst(iteration=0, loss=0.0, direction=way, workers=workers) for way, workers in whose.items() if workers
    )


def shift_facts(shift: Any) -> dict[str, Any]:
    """For events.jsonl."""
    queue = shift.queue.model_dump() if shift.queue is not None else None
    return {
        "link": end_name(shift.host, shift.way),
        "rate_bps": shift.rate_bps,
        "delay_s": shift.delay_s,
        "queue": queue,
    }

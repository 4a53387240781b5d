"""The timeline of a scenario: what is in force from which round on, or from which moment. A pure function.

Rounds are exact: the testbed changes the links before it lets a round go. Moments are seconds since the first round
was let go; which rounds they fall into shows when the job runs, and so does the phase of a round. So there are three
lists: windows of rounds, spans of time (an iterator: some go on as long as the job does), effects of phases. `steps`
joins what is known beforehand, `in_force` all of it at one moment.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from netem.spec.command import Command
from netem.spec.effects import Effect, Shift, effect
from netem.spec.events import Event, Phase
from netem.spec.scenario import Burst, Scenario, iterations_per_epoch, iterations_total

LAST = 2**32 - 1
"""A round that no run reaches: rounds have 32 bits."""


@dataclass(frozen=True)
class Window:
    """An effect in rounds first..last, or (`for_s`) from the start of each for so long."""

    first: int
    last: int
    effect: Effect
    for_s: float | None = None


@dataclass(frozen=True)
class Span:
    """An effect from start_s until end_s (may be infinite), in seconds since the first round was let go."""

    start_s: float
    end_s: float
    effect: Effect


@dataclass(frozen=True)
class Step:
    """What has to be in place before the first packet of `round`; the whole state, not a change.

    `apply`: exactly `bursts` and `shifts` are in force, and no others; `clear`: none. `seed` selects the loss mask.
    `windows`: of each burst the rounds that it is for, inclusive; none: `round` alone.
    """

    round: int
    action: Literal["apply", "clear"]
    bursts: tuple[Burst, ...]
    seed: int
    shifts: tuple[Shift, ...] = ()
    windows: tuple[tuple[int, int], ...] = ()

    def window(self, index: int) -> tuple[int, int]:
        return self.windows[index] if self.windows else (self.round, self.round)


Active = tuple[Effect, int, int]
"""An effect in force, and the rounds that it is for."""


def in_force(active: Iterable[Active], round_: int, seed: int) -> Step:
    """The whole state while these effects are in force, in the order of the file.

    Of several losses of the same packets the link takes the highest; of several rates, delays or queues of the same
    link direction the one that is later in the file holds (`bursts` come before `events`).
    """
    once: dict[Effect, tuple[int, int]] = {}
    for each, first, last in active:
        known = once.get(each, (first, last))
        once[each] = (min(first, known[0]), max(last, known[1]))
    ordered = sorted(once, key=_order)
    pairs = [(burst, once[each]) for each in ordered for burst in each.bursts]
    shifts: dict[tuple[str, str], Shift] = {}
    for each in ordered:
        for shift in each.shifts:
            shifts[shift.host, shift.way] = _over(shifts.get((shift.host, shift.way)), shift)
    bursts = tuple(burst for burst, _ in pairs)
    windows = tuple(window for _, window in pairs)
    if all(window == (round_, round_) for window in windows):
        windows = ()
    return Step(round_, "apply" if ordered else "clear", bursts, seed, tuple(shifts.values()), windows)


def _order(each: Effect) -> tuple[str, int]:
    return str(each.at[0]), int(each.at[1])  # "bursts" < "events"


def _over(below: Shift | None, above: Shift) -> Shift:
    if below is None:
        return above
    rate = below.rate_bps if above.rate_bps is None else above.rate_bps
    delay_s = below.delay_s if above.delay_s is None else above.delay_s
    return Shift(above.host, above.way, rate, delay_s, above.queue or below.queue)


def timeline(spec: Scenario, seed: int | None = None) -> tuple[Step, ...]:
    """What is known before the job: steps in the order of their rounds, at most one per round.

    `seed` defaults to the scenario's. Something at iteration N gives an `apply` at N and, unless something else
    follows at once, a `clear` at N + 1. After the last iteration the clear's round never starts: it is due when the
    transport has finished. Events by time and phase are not here: `spans`, `phase_effects`.
    """
    seed = spec.seed if seed is None else seed
    coming = list(reversed(windows(spec, seed)))
    edges = sorted({at for each in coming for at in (each.first, each.last + 1)})
    active: list[Window] = []
    steps = []
    for round_ in edges:
        active = [each for each in active if each.last >= round_]
        while coming and coming[-1].first <= round_:
            active.append(coming.pop())
        steps.append(in_force([(each.effect, each.first, each.last) for each in active], round_, seed))
    return tuple(steps)


def gates(spec: Scenario, seed: int | None = None) -> tuple[int, ...]:
    """Rounds before which every rank asks the testbed, sorted: those of a window, the one after it, and what traffic
    needs.

    All of them where events by time or phase may change something in any. Within a window nothing changes; but what
    was counted between two gates belongs to a round, also where packets do not say theirs.
    """
    total = iterations_total(spec)
    if is_dynamic(spec) and not isinstance(spec.workload, Command):
        return tuple(range(total))
    asked = {at for each in windows(spec, seed) for at in range(each.first, each.last + 2)}
    return tuple(sorted({at for at in asked if at < total} | traffic_gates(spec)))


def is_dynamic(spec: Scenario) -> bool:
    """Whether something happens in rounds that are not known before the job."""
    return any(event.dynamic for event in spec.events)


def has_times(spec: Scenario) -> bool:
    """Whether something is to happen at a moment, not between rounds."""
    return any(event.by_time or event.length is not None for event in spec.events) or any(
        burst.for_s is not None for burst in spec.bursts
    )


def windows(spec: Scenario, seed: int | None = None) -> tuple[Window, ...]:
    """Bursts, and events by iteration and epoch, sorted by their first rounds."""
    seed = spec.seed if seed is None else seed
    found = [
        Window(b.iteration, b.iteration, Effect(("bursts", index), (_resolved(b, spec),)), b.for_s)
        for index, b in enumerate(spec.bursts)
    ]
    for index, event in enumerate(spec.events):
        found += _event_windows(event, index, spec, seed)
    return tuple(sorted(found, key=lambda each: (each.first, each.last, _order(each.effect))))


def traffic_gates(spec: Scenario) -> set[int]:
    """The rounds that microbursts are released with; the first one, where something counts its time from there."""
    rounds = {burst.iteration for burst in spec.microbursts if burst.iteration is not None}
    timed = any(burst.at_s is not None for burst in spec.microbursts)
    return rounds | ({0} if timed or spec.background or spec.queues.during == "run" else set())


def _resolved(burst: Burst, spec: Scenario) -> Burst:
    """With the names of its workers, as loading gives it: a scenario made in Python may still say `all`."""
    return burst.model_copy(update={"workers": spec.topology.workers}) if burst.workers == "all" else burst


def _event_windows(event: Event, index: int, spec: Scenario, seed: int) -> Iterator[Window]:
    total = iterations_total(spec)
    ranges = _ranges(event, index, spec, seed)
    rounds = [round_ for first, last in ranges for round_ in range(first, min(last, total - 1) + 1)]
    if event.ramp is not None:
        for step, round_ in enumerate(rounds):
            value = {event.ramp.what: event.ramp.value(step, len(rounds))}
            yield Window(round_, round_, effect(event, index, spec, **value))
    elif event.length is not None:
        lengths = _random(seed, "length", index)
        for round_ in rounds:
            yield Window(round_, round_, effect(event, index, spec), event.length.at(lengths.random()))
    else:
        same = effect(event, index, spec)
        for first, last in ranges:
            yield Window(first, min(last, total - 1), same)


def _ranges(event: Event, index: int, spec: Scenario, seed: int) -> list[tuple[int, int]]:
    if event.iteration is not None:
        return list(event.iteration)
    if event.epoch is not None:
        each = iterations_per_epoch(spec)
        return [(first * each, (last + 1) * each - 1) for first, last in event.epoch]
    if event.random is not None and event.random.per_iteration is not None:
        source = _random(seed, "arrivals", index)
        chance = -math.expm1(-event.random.per_iteration)  # at least one arrival of the Poisson process
        hit = [round_ for round_ in range(iterations_total(spec)) if source.random() < chance]
        return _joined(hit)
    return []


def _joined(rounds: list[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for round_ in rounds:
        if found and found[-1][1] == round_ - 1:
            found[-1] = (found[-1][0], round_)
        else:
            found.append((round_, round_))
    return found


def _random(seed: int, what: str, index: int) -> random.Random:
    """A stream of its own for each event: one more event does not move the others. Mersenne Twister, `random()` only,
    whose numbers Python keeps from version to version."""
    return random.Random(f"{seed}/{what}/{index}")


def spans(spec: Scenario, seed: int | None = None) -> Iterator[Span]:
    """Events by time in the order of their starts; endless where one of them is."""
    seed = spec.seed if seed is None else seed
    each = [_event_spans(event, index, spec, seed) for index, event in enumerate(spec.events) if event.by_time]
    return heapq.merge(*each, key=lambda span: span.start_s)


def _event_spans(event: Event, index: int, spec: Scenario, seed: int) -> Iterator[Span]:
    if event.at_s is not None:
        return _once(event, index, spec, seed)
    if event.trace is not None:
        return _trace(event, index, spec)
    return _again_and_again(event, index, spec, seed)


def _once(event: Event, index: int, spec: Scenario, seed: int) -> Iterator[Span]:
    start = event.at_s or 0.0
    length = math.inf if event.length is None else event.length.at(_random(seed, "length", index).random())
    ramp = event.ramp
    if ramp is None:
        yield Span(start, start + length, effect(event, index, spec))
        return
    over = ramp.over_s or 0.0
    end = start + (over if event.length is None else length)
    for step in range(ramp.steps):
        began = start + over * step / ramp.steps
        ends = end if step == ramp.steps - 1 else min(end, start + over * (step + 1) / ramp.steps)
        if began < ends:
            yield Span(began, ends, effect(event, index, spec, **{ramp.what: ramp.value(step, ramp.steps)}))


def _trace(event: Event, index: int, spec: Scenario) -> Iterator[Span]:
    rows = event.trace or ()
    for row, following in zip(rows, (*rows[1:], None), strict=True):
        values: dict[str, float | None] = {"rate": row.rate_bps, "delay": row.delay_s, "loss": row.loss}
        if any(value is not None for value in values.values()):
            end = math.inf if following is None else following.at_s
            yield Span(row.at_s, end, effect(event, index, spec, **values))


def _again_and_again(event: Event, index: int, spec: Scenario, seed: int) -> Iterator[Span]:
    """`every` and `random`. Spans may overlap: what they do lasts until the last of them is over."""
    assert event.length is not None
    until = math.inf if event.until_s is None else event.until_s
    lengths = _random(seed, "length", index)
    same = effect(event, index, spec)
    for start in _starts(event, index, seed):
        if start >= until:
            break
        yield Span(start, min(until, start + event.length.at(lengths.random())), same)


def _starts(event: Event, index: int, seed: int) -> Iterator[float]:
    start = event.from_s or 0.0
    if event.every_s is not None:
        for number in itertools.count():
            yield start + number * event.every_s
    elif event.random is not None and event.random.per_second is not None:
        source, rate = _random(seed, "arrivals", index), event.random.per_second
        while True:
            start += -math.log1p(-source.random()) / rate
            yield start


def phase_effects(spec: Scenario) -> tuple[tuple[Phase, Effect], ...]:
    """What is in force in every round of a phase."""
    return tuple((e.phase, effect(e, index, spec)) for index, e in enumerate(spec.events) if e.phase is not None)


def bounded_spans(spec: Scenario, seed: int | None = None) -> Iterator[Span]:
    """Spans of events with a time of their own (`at`, `trace`): the job is expected to reach them."""
    seed = spec.seed if seed is None else seed
    for index, event in enumerate(spec.events):
        if event.at_s is not None or event.trace is not None:
            yield from _event_spans(event, index, spec, seed)


def known_rounds(spec: Scenario, seed: int | None = None) -> tuple[int, ...]:
    """Rounds that begin and end with a gate: what is counted between two gates belongs to them."""
    total, asked = iterations_total(spec), gates(spec, seed)
    known = set(asked)
    return tuple(round_ for round_ in asked if round_ + 1 in known or round_ + 1 == total)

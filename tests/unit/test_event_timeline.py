"""The timeline of events: a pure function of scenario and seed; spans in order, of positive length, and disjoint."""

from __future__ import annotations

import math
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netem.spec import Event, Scenario, gates, is_dynamic, phase_effects, spans, star, timeline, windows
from netem.spec.events import Arrivals, Length, Ramp, TraceRow
from netem.spec.scenario import Burst, Replay, TransportSpec
from netem.spec.timeline import LAST, Span, has_times, in_force, known_rounds

WORKERS = ("worker1", "worker2")
SEEDS = st.integers(0, 2**63 - 1)
TIMES = st.floats(1e-3, 5.0)
LENGTHS = st.builds(
    Length,
    kind=st.sampled_from(["fixed", "exponential", "uniform", "pareto"]),
    mean_s=st.floats(1e-3, 1.0),
    shape=st.floats(1.05, 5.0),
)
ARRIVALS = st.builds(
    Event, random=st.builds(Arrivals, per_second=st.floats(0.1, 50.0)), length=LENGTHS, loss=st.just(0.5), from_s=TIMES
)
PERIODIC = st.builds(Event, every_s=TIMES, length=LENGTHS, loss=st.just(0.5), until_s=st.just(20.0))
RAMPS = st.builds(
    Event,
    at_s=TIMES,
    ramp=st.builds(
        Ramp,
        what=st.just("loss"),
        start=st.floats(0, 1),
        stop=st.floats(0, 1),
        over_s=TIMES,
        steps=st.integers(2, 30),
    ),
)


def scenario(*events: Event, iterations: int = 60, bursts: tuple[Burst, ...] = ()) -> Scenario:
    return Scenario(
        name="t", seed=3, topology=star(2),
        workload=Replay(kind="replay", chunks=9, iterations=iterations, iterations_per_epoch=15),
        transports={"mlt": TransportSpec(kind="mlt", fixed=0.0)}, events=events, bursts=bursts,
    )  # fmt: skip


def first(event: Event, count: int = 40, seed: int = 3) -> list[Span]:
    return list(islice(spans(scenario(event), seed), count))


def losses(found: list[Span]) -> list[float]:
    return [span.effect.bursts[0].loss for span in found]


@settings(deadline=None, max_examples=60)  # machines that are busy
@given(event=ARRIVALS | PERIODIC | RAMPS, seed=SEEDS)
def test_spans_of_one_event_are_in_order_and_have_a_length(event: Event, seed: int) -> None:
    found = first(event, seed=seed)
    assert found
    assert all(0.0 <= span.start_s < span.end_s for span in found)
    assert all(before.start_s <= after.start_s for before, after in pairwise(found))
    if event.until_s is not None:
        assert all(span.end_s <= event.until_s for span in found)
    if event.ramp is not None:
        assert all(before.end_s == after.start_s for before, after in pairwise(found)), "no moment without a value"


@settings(deadline=None, max_examples=60)  # machines that are busy
@given(events=st.lists(ARRIVALS | PERIODIC | RAMPS, min_size=1, max_size=4), seed=SEEDS)
def test_the_same_seed_gives_the_same_spans_and_all_events_are_merged_in_order(events: list[Event], seed: int) -> None:
    spec = scenario(*events)
    found = list(islice(spans(spec, seed), 60))
    assert found == list(islice(spans(spec, seed), 60))
    assert [span.start_s for span in found] == sorted(span.start_s for span in found)


@settings(deadline=None, max_examples=60)  # machines that are busy
@given(event=ARRIVALS, other=PERIODIC, seed=SEEDS)
def test_an_event_does_not_move_when_another_one_is_added_behind_it(event: Event, other: Event, seed: int) -> None:
    alone = first(event, 5, seed)
    found = [span for span in islice(spans(scenario(event, other), seed), 200) if span.effect.at == ("events", 0)]
    assert found[: len(alone)] == alone[: len(found)]


def test_another_seed_gives_other_times() -> None:
    event = Event(random=Arrivals(per_second=5.0), length=Length(kind="exponential", mean_s=0.01), loss=0.5)
    assert first(event, seed=1) != first(event, seed=2)


def test_arrivals_have_the_rate_and_the_mean_length_that_were_asked_for() -> None:
    """10,000 arrivals: means within 4 standard errors (for pareto with shape 2.5, whose variance is finite)."""
    for kind, spread in (("exponential", 1.0), ("uniform", 0.577), ("pareto", 0.894), ("fixed", 0.0)):
        length = Length(kind=kind, mean_s=1e-5, shape=2.5)
        event = Event(random=Arrivals(per_second=2.0), length=length, loss=0.5)
        found = first(event, 10_000)
        gaps = [after.start_s - before.start_s for before, after in pairwise(found)]
        assert sum(gaps) / len(gaps) == pytest.approx(0.5, rel=0.04)
        mean = sum(span.end_s - span.start_s for span in found) / len(found)
        assert mean == pytest.approx(1e-5, rel=4 * spread / 100 + 0.07), kind  # lengths are at least 1 us


def test_an_event_that_is_in_force_twice_is_in_force() -> None:
    """Bursts that begin before the last one is over: one loss, from the first of their rounds on."""
    busy = Event(random=Arrivals(per_second=50.0), length=Length(mean_s=10.0), loss=0.5)
    one, other = first(busy, 2)
    assert other.start_s < one.end_s
    step = in_force([(one.effect, 3, LAST), (other.effect, 5, LAST)], 5, 0)
    assert [burst.loss for burst in step.bursts] == [0.5]
    assert step.window(0) == (3, LAST)


def test_periodic() -> None:
    found = first(Event(every_s=0.5, length=Length(mean_s=0.01), from_s=1.0, until_s=2.505, loss=0.5))
    assert [(span.start_s, round(span.end_s, 9)) for span in found] == [
        (1.0, 1.01), (1.5, 1.51), (2.0, 2.01), (2.5, 2.505),
    ]  # fmt: skip


def test_a_ramp_by_time_begins_and_ends_with_its_values_and_holds_the_last_one() -> None:
    ramp = Ramp(what="loss", start=0.0, stop=0.9, over_s=2.0, steps=4)
    found = first(Event(at_s=1.0, ramp=ramp))
    assert [(s.start_s, s.end_s) for s in found] == [(1.0, 1.5), (1.5, 2.0), (2.0, 2.5), (2.5, 3.0)]
    assert losses(found) == pytest.approx([0.0, 0.3, 0.6, 0.9])
    longer = first(Event(at_s=1.0, ramp=ramp, length=Length(mean_s=5.0)))
    assert (longer[-1].start_s, longer[-1].end_s) == (2.5, 6.0)


def test_a_ramp_by_iteration_has_a_step_in_each() -> None:
    event = Event(iteration=((4, 5), (8, 8)), ramp=Ramp(what="rate", start=1e9, stop=5e8))
    found = windows(scenario(event))
    rates = {w.first: w.effect.shifts[0].rate_bps for w in found}
    assert rates == {4: 10**9, 5: 750_000_000, 8: 5 * 10**8}
    assert gates(scenario(event)) == (4, 5, 6, 8, 9)


def test_one_time_and_a_trace() -> None:
    assert [(s.start_s, s.end_s) for s in first(Event(at_s=2.0, loss=0.5))] == [(2.0, math.inf)]
    rows = (TraceRow(at_s=0.0, loss=0.1), TraceRow(at_s=1.0), TraceRow(at_s=3.0, rate_bps=10**6))
    found = first(Event(trace=rows))
    assert [(s.start_s, s.end_s, len(s.effect.bursts), len(s.effect.shifts)) for s in found] == [
        (0.0, 1.0, 1, 0), (3.0, math.inf, 0, 2),
    ]  # fmt: skip


def test_iterations_and_epochs_are_windows_with_gates_at_their_edges() -> None:
    spec = scenario(Event(iteration=((4, 6),), loss=0.5), Event(epoch=((1, 1),), loss=0.1, on=("worker2.down",)))
    steps = timeline(spec)
    assert [(s.round, s.action, [b.loss for b in s.bursts]) for s in steps] == [
        (4, "apply", [0.5]), (7, "clear", []), (15, "apply", [0.1]), (30, "clear", []),
    ]  # fmt: skip
    assert steps[0].window(0) == (4, 6)
    assert (steps[2].bursts[0].direction, steps[2].bursts[0].workers) == ("down", ("worker2",))
    assert gates(spec) == (4, 5, 6, 7, *range(15, 31))
    assert known_rounds(spec) == (4, 5, 6, *range(15, 30))
    assert known_rounds(scenario(Event(iteration=((4, 4), (59, 59)), loss=0.5))) == (4, 59)


def test_arrivals_per_iteration_depend_on_the_seed_alone() -> None:
    event = Event(random=Arrivals(per_iteration=0.2), loss=0.5)
    spec = scenario(event, iterations=5000)
    found = windows(spec, 1)
    hit = sum(w.last - w.first + 1 for w in found)
    assert hit / 5000 == pytest.approx(-math.expm1(-0.2), rel=0.15)
    assert found == windows(spec, 1) != windows(spec, 2)
    assert all(before.last + 1 < after.first for before, after in pairwise(found)), "neighbours are one window"


def test_events_that_are_not_known_before_the_job_ask_before_every_round() -> None:
    timed, phased = Event(at_s=1.0, loss=0.5), Event(phase="critical", loss=0.5)
    for event, moments in ((timed, True), (phased, False)):
        spec = scenario(event)
        assert is_dynamic(spec)
        assert gates(spec) == tuple(range(60))
        assert has_times(spec) is moments
        assert timeline(spec) == ()
    assert [phase for phase, _ in phase_effects(scenario(timed, phased))] == ["critical"]
    assert not is_dynamic(scenario(Event(iteration=((3, 3),), length=Length(mean_s=0.01), loss=0.5)))
    assert has_times(scenario(Event(iteration=((3, 3),), length=Length(mean_s=0.01), loss=0.5)))


def test_of_several_in_force_the_later_one_in_the_file_sets_rate_and_delay() -> None:
    spec = scenario(
        Event(iteration=((4, 4),), rate_bps=10**9, delay_s=0.01, on=("server.down",)),
        Event(iteration=((4, 4),), rate_bps=10**6, loss=0.2, on=("server.down",)),
        bursts=(Burst(iteration=4, loss=0.9),),
    )
    step = timeline(spec)[0]
    (shift,) = step.shifts
    assert (shift.host, shift.way, shift.rate_bps, shift.delay_s) == ("server", "down", 10**6, 0.01)
    assert [b.loss for b in step.bursts] == [0.9, 0.2], "bursts come first; the link takes the highest"
    reverse = [(w.effect, w.first, w.last) for w in reversed(windows(spec))]
    assert in_force(reverse, 4, 3) == step, "the file decides, not the order in which they began"


@settings(deadline=None, max_examples=60)  # machines that are busy
@given(
    ranges=st.lists(st.tuples(st.integers(0, 59), st.integers(0, 59)), min_size=1, max_size=6), seed=st.integers(0, 9)
)
def test_steps_are_whole_states(ranges: list[tuple[int, int]], seed: int) -> None:
    """At every round exactly the events that cover it are in force."""
    events = [Event(iteration=((min(pair), max(pair)),), loss=number / 10) for number, pair in enumerate(ranges, 1)]
    spec = scenario(*events)
    steps, asked = {step.round: step for step in timeline(spec, seed)}, set(gates(spec))
    now: list[float] = []
    for round_ in range(60):
        if round_ in steps:
            now = [burst.loss for burst in steps[round_].bursts]
            assert (steps[round_].action == "apply") == bool(now)
        covering = [e.loss for e in events if any(a <= round_ <= b for a, b in e.iteration or ())]
        assert now == covering
        assert round_ in asked or round_ not in steps


def test_a_round_number_that_no_run_reaches_fits_the_links() -> None:
    assert LAST == 2**32 - 1

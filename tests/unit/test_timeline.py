"""The timeline: exactly the rounds of the bursts, as whole states."""

from __future__ import annotations

import pytest

from netem.spec import Burst, Scenario, gates, load_scenario_text, star, timeline
from netem.spec.scenario import Replay, TransportSpec

WORKERS = ("worker1", "worker2")


def scenario(*bursts: Burst, iterations: int = 12) -> Scenario:
    return Scenario(
        name="t", seed=3, topology=star(2), workload=Replay(kind="replay", chunks=9, iterations=iterations),
        transports={"mlt": TransportSpec(kind="mlt", fixed=0.0)}, bursts=bursts,
    )  # fmt: skip


def burst(iteration: int, **more: object) -> Burst:
    return Burst(iteration=iteration, loss=0.9, **{"workers": WORKERS, **more})  # type: ignore[arg-type]


def test_no_bursts_no_steps() -> None:
    assert timeline(scenario()) == ()
    assert gates(scenario()) == ()


def test_a_burst_covers_exactly_its_round() -> None:
    steps = timeline(scenario(burst(4)))
    assert [(s.round, s.action, s.bursts) for s in steps] == [(4, "apply", (burst(4),)), (5, "clear", ())]
    assert gates(scenario(burst(4))) == (4, 5)


def test_adjacent_bursts_replace_each_other_without_a_clear() -> None:
    steps = timeline(scenario(burst(5), burst(4)))
    assert [(s.round, s.action, s.bursts) for s in steps] == [
        (4, "apply", (burst(4),)),
        (5, "apply", (burst(5),)),
        (6, "clear", ()),
    ]
    assert gates(scenario(burst(5), burst(4))) == (4, 5, 6)


def test_bursts_of_one_round_are_one_step() -> None:
    both = (burst(4), burst(4, direction="down"))
    assert [s.bursts for s in timeline(scenario(*both))] == [both, ()]


def test_after_the_last_iteration_there_is_a_clear_but_no_gate() -> None:
    spec = scenario(burst(11))
    assert [(s.round, s.action) for s in timeline(spec)] == [(11, "apply"), (12, "clear")]
    assert gates(spec) == (11,)


def test_workers_are_named_even_where_the_scenario_says_all() -> None:
    (step, _) = timeline(scenario(burst(4, workers="all")))
    assert step.bursts[0].workers == WORKERS


@pytest.mark.parametrize(("seed", "expected"), [(None, 3), (0, 0), (8, 8)])
def test_the_seed_selects_the_mask(seed: int | None, expected: int) -> None:
    spec = scenario(burst(4))
    assert {step.seed for step in timeline(spec, seed)} == {expected}
    assert timeline(spec, seed) == timeline(spec, seed)


def test_of_a_loaded_scenario() -> None:
    spec = load_scenario_text(
        "topology: star3\nworkload: {kind: replay, chunks: 5, iterations: 9}\ntransports: {tcp: {}}\n"
        "bursts: [{iteration: 2, loss: 10%, for: 5 ms}, {iteration: 7, loss: 20%}]\n"
    ).spec
    steps = timeline(spec)
    assert [(s.round, s.action) for s in steps] == [(2, "apply"), (3, "clear"), (7, "apply"), (8, "clear")]
    assert steps[0].bursts[0].for_s == 0.005
    assert gates(spec) == (2, 3, 7, 8)

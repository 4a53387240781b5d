"""The executor of a timeline: what is in force when, with links in memory and a clock that the test turns."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import pytest
from rich.console import Console

from netem.analysis import punctual
from netem.analysis.timed import timed_loss, timing
from netem.experiment.asked import loss_plan
from netem.experiment.executor import Executor
from netem.experiment.fabric import Prepared, rules_for
from netem.experiment.progress import Display
from netem.links.base import Flow, LossRule, Shape
from netem.links.fake import FakePort
from netem.spec import Scenario, Step, load_scenario_text

BASE = """\
topology: {star: {workers: 2}}
workload: {kind: replay, chunks: 9, iterations: 20, iterations_per_epoch: 5}
transports: {mlt: {fixed: 0%}}
"""
ADDRESS = {1: "10.0.0.2", 2: "10.0.0.3"}
NAMES = {1: "worker1", 2: "worker2"}
WRITE_S = 0.001


@dataclass
class FakeLinks:
    """The port that faces the server. A write takes 1 ms of the fake clock."""

    now: float = 100.0
    port: FakePort = field(default_factory=lambda: FakePort("server"))
    steps: list[Step] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    rules: tuple[LossRule, ...] = ()

    def __post_init__(self) -> None:
        self.port.install(Shape(), Flow("udp", dst_ports=(5, 9)), None, list(ADDRESS.values()))

    def clock(self) -> float:
        return self.now

    def label(self, round_: int) -> None:
        self.labels.append(round_)

    def prepare(self, step: Step) -> Prepared:
        rules = rules_for(step, "up", list(ADDRESS), ADDRESS, NAMES, 3)
        return Prepared(step, (("server", rules),) if rules != self.rules else (), ())

    def put(self, prepared: Prepared) -> None:
        self.now += WRITE_S
        self.steps.append(prepared.step)
        for _, rules in prepared.losses:
            self.port.set_loss(rules)
            self.rules = rules

    def losses(self) -> dict[str, float]:
        return {rule.source: rule.loss_ratio for rule in self.rules}


@dataclass
class Job:
    """An executor, its links, and what it wrote down."""

    spec: Scenario
    links: FakeLinks = field(default_factory=FakeLinks)
    log: list[dict[str, Any]] = field(default_factory=list)
    phase: str = "normal"

    def __post_init__(self) -> None:
        self.executor = Executor(self.spec, 3, self.links, self.log.append, self.links.clock, first_phase=self.phase)

    def until(self, moment_s: float) -> None:
        """Lets the time pass, seconds since the first round was let go, ringing when it is due."""
        while (due := self.executor.next_s) is not None and due <= self.origin + moment_s:
            self.links.now = max(self.links.now, due)
            self.executor.ring()
        self.links.now = max(self.links.now, self.origin + moment_s)

    def start(self) -> None:
        self.executor.open_gate(0)
        self.origin = self.links.now

    @property
    def changes(self) -> list[tuple[str, float | None, list[float]]]:
        return [
            (e["action"], e["planned_s"], [b["loss"] for b in e["bursts"]])
            for e in self.log
            if e["event"] == "impairment"
        ]


def job(events: str, phase: str = "normal") -> Job:
    return Job(load_scenario_text(BASE + events).spec, phase=phase)


def test_an_event_by_time_begins_and_ends_by_the_clock() -> None:
    run = job("events: [{at: 300 ms, for: 100 ms, loss: 50%}]")
    run.start()
    assert run.executor.next_s == pytest.approx(run.origin + 0.3)
    run.until(0.35)
    assert run.links.losses() == {"10.0.0.2": 0.5, "10.0.0.3": 0.5}
    assert run.executor.next_s == pytest.approx(run.origin + 0.4)
    run.until(0.5)
    assert run.links.losses() == {}
    assert run.executor.next_s is None
    assert run.changes == [("apply", 0.3, [0.5]), ("clear", 0.4, [])]
    for entry in run.log:
        assert entry["lateness_s"] == pytest.approx(WRITE_S, abs=1e-5)
        assert entry["actual_s"] == pytest.approx(entry["planned_s"] + WRITE_S, abs=1e-5)
        assert entry["took_s"] == pytest.approx(WRITE_S, abs=1e-5)
    assert timing(run.executor.history)["by_time"]["late_max_s"] == pytest.approx(WRITE_S, abs=1e-5)


def test_what_is_due_at_the_start_is_in_place_before_the_first_round() -> None:
    run = job("events: [{at: 0 s, for: 100 ms, loss: 50%}]")
    run.start()
    assert run.links.losses() == {"10.0.0.2": 0.5, "10.0.0.3": 0.5}
    assert (run.log[0]["planned_round"], run.log[0]["actual_s"]) == (0, 0.0)
    run.executor.open_gate(1)
    assert timed_loss(run.executor.history, run.spec.topology.ranks)[0, 1, "up"] == {0.5}, "all of round 0"
    run.until(0.2)
    assert run.changes[-1] == ("clear", 0.1, [])


def test_the_rules_of_an_event_by_time_spare_what_is_late_of_earlier_rounds() -> None:
    run = job("events: [{at: 300 ms, for: 100 ms, loss: 50%}]")
    run.start()
    run.executor.open_gate(1)
    run.executor.open_gate(2)
    run.until(0.35)
    assert {(rule.first, rule.last) for rule in run.links.rules} == {(2, 2**32 - 1)}
    run.executor.open_gate(3)
    assert {(rule.first, rule.last) for rule in run.links.rules} == {(2, 2**32 - 1)}, "nothing has changed"
    assert len(run.links.steps) == 1


def test_rounds_and_times_together() -> None:
    """A burst within an event by time, and one that ends within its round: the highest loss holds at each moment."""
    run = job(
        "bursts: [{iteration: 2, loss: 90%, for: 50 ms, workers: worker1}]\n"
        "events: [{at: 100 ms, for: 1 s, loss: 50%}, {iteration: 3, loss: 20%}]"
    )
    run.start()
    run.until(0.2)
    run.executor.open_gate(1)
    run.executor.open_gate(2)
    assert run.links.losses() == {"10.0.0.2": 0.9, "10.0.0.3": 0.5}
    run.until(run.links.now - run.origin + 0.06)
    assert run.links.losses() == {"10.0.0.2": 0.5, "10.0.0.3": 0.5}
    run.executor.open_gate(3)
    assert run.links.losses() == {"10.0.0.2": 0.5, "10.0.0.3": 0.5}
    run.until(2.0)
    assert run.links.losses() == {"10.0.0.2": 0.2, "10.0.0.3": 0.2}
    run.executor.open_gate(4)
    assert run.links.losses() == {}


def test_phases_hold_from_the_round_that_was_reported() -> None:
    run = job("events: [{while: critical, loss: 5%}, {while: normal, loss: 1%, on: worker1.up}]", phase="critical")
    run.start()
    assert run.links.losses() == {"10.0.0.2": 0.05, "10.0.0.3": 0.05}
    run.executor.open_gate(1)
    run.executor.phase(3, "normal")
    run.executor.open_gate(2)
    assert run.links.losses() == {"10.0.0.2": 0.05, "10.0.0.3": 0.05}
    run.executor.open_gate(3)
    assert run.links.losses() == {"10.0.0.2": 0.01}
    assert [entry["planned_round"] for entry in run.log] == [0, 3]


def test_steps_that_follow_each_other_are_one_change_each() -> None:
    run = job("events: [{at: 1 s, ramp: {from: 10%, to: 40%, over: 400 ms, steps: 4}}]")
    run.start()
    run.until(2.0)
    found = run.changes
    assert [(a, pytest.approx(p)) for a, p, _ in found] == [
        ("apply", 1.0), ("apply", 1.1), ("apply", 1.2), ("apply", 1.3), ("clear", 1.4),
    ]  # fmt: skip
    assert [losses for *_, losses in found[:4]] == [[pytest.approx(x)] for x in (0.1, 0.2, 0.3, 0.4)]


def test_a_ring_that_comes_late_does_everything_that_is_due_in_order() -> None:
    run = job("events: [{every: 100 ms, for: 10 ms, from: 100 ms, loss: 50%}]")
    run.start()
    run.links.now = run.origin + 0.25
    run.executor.ring()
    assert [(a, pytest.approx(p)) for a, p, _ in run.changes] == [
        ("apply", 0.1), ("clear", 0.11), ("apply", 0.2), ("clear", 0.21),
    ]  # fmt: skip
    assert run.log[0]["lateness_s"] > 0.15


def test_who_is_far_behind_leaves_out_what_is_over() -> None:
    """A machine that needs 80 ms for a change of a burst of 10 ms every 100 ms would never do anything else."""
    run = job("events: [{every: 100 ms, for: 10 ms, from: 100 ms, loss: 50%}]")
    run.start()
    run.links.now = run.origin + 0.605
    run.executor.ring()
    assert run.changes == [("apply", pytest.approx(0.1), [0.5])], "the burst that begins at 0.6 s"
    assert run.executor.next_s == pytest.approx(run.origin + 0.61)
    missed = [entry["planned_s"] for entry in run.log if entry["event"] == "missed"]
    assert missed == [pytest.approx(at) for at in (0.1, 0.2, 0.3, 0.4, 0.5)]
    assert run.executor.history.missed == 5
    run.until(0.65)
    assert run.links.losses() == {}
    ok, detail = punctual.check(run.executor.history.moments) or (True, "")
    assert not ok, detail
    shown = io.StringIO()
    display = Display(Console(file=shown), 20)
    for entry in run.log:
        display.event(entry)
    assert "the job ended" not in shown.getvalue()


def test_what_the_job_did_not_reach_is_written_down() -> None:
    run = job("events: [{at: 50 s, loss: 5%}, {at: 100 ms, for: 5 ms, loss: 5%}, {every: 30 s, for: 1 s, loss: 5%}]")
    run.start()
    run.until(2.0)
    run.executor.finish()
    missed = [entry for entry in run.log if entry["event"] == "missed"]
    assert [(entry["at"], entry["planned_s"]) for entry in missed] == [("events.0", 50.0)]
    assert run.executor.history.missed == 1


def test_which_rounds_an_event_by_time_touched() -> None:
    """Wholly inside: its loss is known. The change falls into it: not. Neighbours: untouched."""
    run = job("events: [{at: 250 ms, for: 300 ms, loss: 50%, on: worker1.up}]")
    run.start()
    for round_ in range(1, 8):
        run.until(round_ / 10)
        run.executor.open_gate(round_)
    ranks = run.spec.topology.ranks
    touched = timed_loss(run.executor.history, ranks)
    half = frozenset({0.5})
    assert touched == {
        (2, 1, "up"): frozenset({0.0, 0.5}),
        (3, 1, "up"): half,
        (4, 1, "up"): half,
        (5, 1, "up"): frozenset({0.0, 0.5}),
    }
    plan = loss_plan(run.spec, 3)
    assert plan.requested(4, 1, "up", "normal", touched[4, 1, "up"])[0] == 0.5
    assert plan.requested(5, 1, "up", "normal", touched[5, 1, "up"])[0] is None
    assert plan.requested(6, 1, "up", "normal") == (0.0, False)


def test_the_last_round_lasts_until_the_job_ends() -> None:
    run = job("events: [{at: 250 ms, loss: 50%}]")
    run.start()
    run.until(0.3)
    assert timed_loss(run.executor.history, run.spec.topology.ranks) == {
        (0, worker, "up"): frozenset({0.0, 0.5}) for worker in (1, 2)
    }


def test_links_that_change_touch_those_whose_data_passes_them() -> None:
    run = job("events: [{at: 0 s, rate: 1 Mbit, on: server.down}, {iteration: 3, rate: 1 Mbit, on: worker2.down}]")
    run.start()
    assert run.log[0]["shifts"] == [{"link": "server.down", "rate_bps": 10**6, "delay_s": None, "queue": None}]
    touched = timed_loss(run.executor.history, run.spec.topology.ranks)
    assert touched == {(0, worker, "up"): frozenset({0.0}) for worker in (1, 2)}
    plan = loss_plan(run.spec, 3)
    assert plan.requested(3, 2, "down") == (0.0, True)
    assert plan.requested(3, 1, "down") == (0.0, False)

"""Events in a scenario: how they are written, what is refused and where, and that the resolved form is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from netem.spec import (
    Event,
    Scenario,
    SpecError,
    load_scenario,
    load_scenario_text,
    needs_delay,
    resolved_yaml,
    schema,
    shapes_uplinks,
    shifted_ends,
)
from netem.spec.events import Arrivals, Length, Ramp
from netem.spec.words import event_words, timeline_lines
from tests.unit.test_spec_shipped import accepts, read

BASE = """\
topology: star3
workload: {kind: replay, chunks: 9, iterations: 60, iterations_per_epoch: 15}
transports: {mlt: {fixed: 0%}}
events:
"""
GOOD = [
    "{iteration: 4, loss: 90%}",
    '{iteration: [6..8, 10], loss: 50%, on: [worker1.up, "worker[23]"]}',
    "{iteration: 3..5, for: 5 ms, loss: 90%, match: all, on: worker1.down}",
    "{epoch: 1, rate: 1 Gbit, queue: 64 KiB, on: server.down}",
    "{while: critical, delay: 5 ms, on: worker2}",
    "{at: 2.5 s, for: 20 ms, loss: 90%}",
    "{at: 0 s, for: 20 ms, down: true}",
    "{at: 1 s, rate: 10 Mbit}",
    "{every: 500 ms, for: {uniform: 10 ms}, from: 1 s, until: 20 s, loss: 90%}",
    "{at: 1 s, ramp: {from: 0%, to: 90%, over: 2 s, steps: 4}}",
    "{iteration: 20..29, ramp: {from: 1 Gbit, to: 100 Mbit}}",
    "{random: {per_second: 2}, for: {pareto: 10 ms, shape: 1.2}, loss: 60%}",
    "{random: {per_iteration: 0.1}, loss: 60%}",
    "{trace: [{at: 0 s, rate: 1 Gbit}, {at: 1 s, loss: 5%}, {at: 2 s}]}",
]
TEXT = BASE + "".join(f"  - {each}\n" for each in GOOD)


def one(event: str) -> Event:
    (found,) = load_scenario_text(f"{BASE}  - {event}\n").spec.events
    return found


def refused(event: str, more: str = "") -> SpecError:
    with pytest.raises(SpecError) as caught:
        load_scenario_text(f"{BASE}  - {event}\n{more}", file="s.yaml")
    return caught.value


def test_the_resolved_form_is_the_same_scenario() -> None:
    spec = load_scenario_text(TEXT).spec
    assert len(spec.events) == len(GOOD)
    assert load_scenario_text(resolved_yaml(spec)).spec == spec


def test_the_schema_accepts_events_and_their_resolved_form() -> None:
    form = schema("scenario")
    assert accepts(form, read(TEXT), form)
    assert accepts(form, read(resolved_yaml(load_scenario_text(TEXT).spec)), form)
    for bad in (
        "{iteration: -1, loss: 9%}",
        "{at: 5, loss: 9%}",
        "{att: 5 s, loss: 9%}",
        "{at: 1 s, ramp: {from: 0%}}",
    ):
        assert not accepts(form, read(f"{BASE}  - {bad}\n"), form), bad


def test_values() -> None:
    assert one("{iteration: [10, 3..5], loss: 9%}").iteration == ((3, 5), (10, 10))
    assert one("{every: 1 s, for: {pareto: 10 ms, shape: 2}, loss: 9%}").length == Length(
        kind="pareto", mean_s=0.01, shape=2.0
    )
    ramp = one("{at: 1 s, ramp: {from: 1 Gbit, to: 10 Mbit, over: 2 s, steps: 4}}").ramp
    assert ramp == Ramp(what="rate", start=1e9, stop=1e7, over_s=2.0, steps=4)
    assert one("{random: {per_second: 2}, for: 1 ms, down: true}").random == Arrivals(per_second=2.0)


@pytest.mark.parametrize(
    ("on", "links"),
    [
        ("", ["worker1.up", "worker2.up", "worker3.up"]),
        (", on: worker2", ["worker2.up", "worker2.down"]),
        (', on: ["worker*.down"]', ["worker1.down", "worker2.down", "worker3.down"]),
        (", on: [server.down, worker3.up]", ["server.down", "worker3.up"]),
    ],
)
def test_links(on: str, links: list[str]) -> None:
    assert list(one(f"{{at: 1 s, loss: 9%{on}}}").on) == links


def test_what_follows_for_the_lab() -> None:
    def spec(event: str) -> Scenario:
        return load_scenario_text(f"{BASE}  - {event}\n").spec

    loss, rate = spec("{at: 1 s, loss: 9%}"), spec("{at: 1 s, rate: 1 Mbit, on: server.down}")
    up, delay = spec("{at: 1 s, rate: 1 Mbit}"), spec("{iteration: 4..5, ramp: {from: 0 ms, to: 5 ms}}")
    assert [needs_delay(each) for each in (loss, rate, up, delay)] == [False, False, False, True]
    assert [shapes_uplinks(each) for each in (loss, rate, up, delay)] == [False, False, True, True]
    assert shifted_ends(rate) == {("server", "down")}
    assert shifted_ends(loss) == frozenset()


@pytest.mark.parametrize(
    ("event", "key", "words"),
    [
        ("{loss: 9%}", "events.0", "does not say when; give one of iteration, epoch"),
        ("{at: 1 s}", "events.0", "does not say what happens; give at least one of loss"),
        ("{at: 0 s, iteration: 3, loss: 9%}", "events.0.at", "iteration and at exclude each other"),
        ("{iteration: 60, loss: 9%}", "events.0.iteration", "60 ends after the last iteration, 59"),
        ("{iteration: [1, 58..61], loss: 9%}", "events.0.iteration", "58..61 ends after the last iteration, 59"),
        ("{iteration: 5..3, loss: 9%}", "events.0.iteration", "first iteration of a range is not after the last"),
        ("{iteration: [], loss: 9%}", "events.0.iteration", "names no iteration"),
        ("{epoch: 4, loss: 9%}", "events.0.epoch", "4 ends after the last epoch, 3"),
        ("{epoch: 1, for: 5 ms, loss: 9%}", "events.0.for", "it lasts whole epochs"),
        ("{while: critical, until: 5 s, loss: 9%}", "events.0.until", "does not go with `while`"),
        ("{while: criticl, loss: 9%}", "events.0.while", "did you mean 'critical'?"),
        ("{every: 1 s, loss: 9%}", "events.0.for", "is required with `every`"),
        ("{every: 10 ms, for: 10 ms, loss: 9%}", "events.0.for", "it never ends before the next one"),
        ("{every: 1 s, for: 1 ms, from: 5 s, until: 5 s, loss: 9%}", "events.0.until", "end before it begins"),
        ("{random: {}, for: 1 ms, loss: 9%}", "events.0.random", "either per_second or per_iteration"),
        ("{random: {per_iteration: 1}, from: 1 s, loss: 9%}", "events.0.from", "arrivals per iteration"),
        ("{random: {per_second: 2}, loss: 9%}", "events.0.for", "is required with `random`"),
        ("{at: 1 s, for: {gamma: 1 ms}, loss: 9%}", "events.0.for.gamma", "unknown key 'gamma'"),
        ("{at: 1 s, for: {exponential: 1 ms, shape: 2}, loss: 9%}", "events.0.for.shape", "only a pareto"),
        ("{at: 1 s, for: {pareto: 1 ms, shape: 1}, loss: 9%}", "events.0.for.shape", "a shape above 1"),
        ("{at: 1 s, for: 0 s, loss: 9%}", "events.0.for", "is no length"),
        ("{at: 1 s, ramp: {from: 0%, to: 9%}}", "events.0.ramp.over", "how long the ramp takes"),
        ("{at: 1 s, ramp: {from: 0%, to: 1 Gbit, over: 1 s}}", "events.0.ramp.to", "is no loss like 0%"),
        ("{iteration: 3..9, ramp: {from: 0%, to: 9%, over: 1 s}}", "events.0.ramp.over", "each iteration is a step"),
        ("{at: 1 s, for: 1 s, ramp: {from: 0%, to: 9%, over: 2 s}}", "events.0.for", "end before its ramp does"),
        ("{at: 1 s, loss: 9%, ramp: {from: 0%, to: 9%, over: 1 s}}", "events.0.ramp", "`loss` sets as well"),
        ("{every: 1 s, for: 5 ms, ramp: {from: 0%, to: 9%, over: 1 s}}", "events.0.ramp", "not with `every`"),
        ("{at: 1 s, loss: 9%, down: true}", "events.0.down", "loses everything"),
        ("{at: 1 s, rate: 1 Mbit, match: all}", "events.0.match", "loses none"),
        ("{at: 1 s, loss: 9%, queue: 64 KiB}", "events.0.queue", "has no rate"),
        ("{at: 1 s, loss: 9%, on: worker9}", "events.0.on", "is not a host"),
        ("{at: 1 s, loss: 9%, on: worker1.upp}", "events.0.on", "did you mean 'up'?"),
        ("{at: 1 s, loss: 9%, on: [worker1, worker1.up]}", "events.0.on", "is named 2 times"),
        ("{replay: nowhere.csv}", "events.0.replay", "nowhere.csv: no such file"),
        ("{trace: nowhere.csv}", "events.0.trace", "nowhere.csv: cannot be read"),
        ("{trace: [{at: 1 s, loss: 1%}, {at: 1 s}]}", "events.0.trace.1", "rise from row to row"),
        ("{trace: [{at: 1 s, loss: 1%}], loss: 9%}", "events.0.loss", "does not go with `trace`"),
    ],
)
def test_refused(event: str, key: str, words: str) -> None:
    error = refused(event)
    assert words in error.message
    assert (error.file, error.line, error.key) == ("s.yaml", 5, key)


def test_two_matches_on_the_same_packets_are_refused_where_they_may_meet() -> None:
    error = refused("{iteration: 4..6, loss: 9%}", "  - {iteration: 6, loss: 90%, match: all}\n")
    assert (error.line, error.key) == (6, "events.1.match")
    assert "may meet the one in line 5" in error.message
    assert refused("{at: 1 s, for: 1 s, loss: 9%}", "  - {iteration: 6, loss: 90%, match: all}\n").line == 6
    for fine in (
        "{iteration: 7, loss: 90%, match: all}",
        "{iteration: 6, loss: 90%, match: all, on: worker1.down}",
        "{iteration: 6, down: true}",
    ):
        load_scenario_text(f"{BASE}  - {{iteration: 4..6, loss: 9%}}\n  - {fine}\n")
    load_scenario_text(f"{BASE}  - {{while: normal, loss: 9%}}\n  - {{while: critical, loss: 9%, match: all}}\n")


def test_a_recorded_mask_needs_packets_with_names(tmp_path: Path) -> None:
    (tmp_path / "lost.csv").write_text("direction,worker,round,sequence,pass\nup,1,3,5,0\n")
    text = BASE.replace("mlt: {fixed: 0%}", "tcp: {}") + "  - {replay: lost.csv}\n"
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(SpecError, match="tcp") as caught:
        load_scenario(tmp_path / "s.yaml")
    assert caught.value.key == "events.0.replay"
    (tmp_path / "s.yaml").write_text(text.replace("tcp: {}", "mlt: {fixed: 0%}"))
    (event,) = load_scenario(tmp_path / "s.yaml").spec.events
    assert event.replay is not None
    assert event.replay.path == str(tmp_path / "lost.csv"), "whatever the working directory is later"


def test_set_names_files_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "lost.csv").write_text("direction,worker,round,sequence,pass\nup,1,3,5,0\n")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "s.yaml").write_text(BASE.replace("events:\n", ""))
    monkeypatch.chdir(tmp_path)
    spec = load_scenario("files/s.yaml", ["events=[{replay: runs/lost.csv}]"]).spec
    assert spec.events[0].replay is not None
    assert spec.events[0].replay.path == str(tmp_path / "runs" / "lost.csv")


def test_a_trace_lies_beside_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("time_s,loss,rate_bps,delay_s\n0,0.1,1e9,\n1.5,,,0.002\n2,,,\n")
    (tmp_path / "s.yaml").write_text(BASE + "  - {trace: t.csv, on: server.down}\n")
    (event,) = load_scenario(tmp_path / "s.yaml").spec.events
    rows = [(row.at_s, row.rate_bps, row.delay_s, row.loss) for row in event.trace or ()]
    assert rows == [(0.0, 10**9, None, 0.1), (1.5, None, 0.002, None), (2.0, None, None, None)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0\n5\n9\n", "looks like a packet delivery trace"),
        ("time_s,lose\n0,1\n", "unknown column 'lose'; did you mean 'loss'?"),
        ("loss\n0\n", "expected the column time_s"),
        ("time_s,loss\n", "has no rows"),
        ("time_s,loss\n0,0.5\n1,5\n", "t.csv:3: loss '5': expected a number from 0 to 1"),
        ("time_s,rate_bps\n0,0\n", "a rate is above 0"),
        ("time_s,rate_bps\n,5\n", "t.csv:2: time_s is missing"),
    ],
)
def test_a_trace_that_is_none(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    (tmp_path / "s.yaml").write_text(BASE + "  - {trace: t.csv}\n")
    with pytest.raises(SpecError) as caught:
        load_scenario(tmp_path / "s.yaml")
    assert words in caught.value.message
    assert (caught.value.line, caught.value.key) == (5, "events.0.trace")


def test_words() -> None:
    spec = load_scenario_text(TEXT).spec
    said = [event_words(event, spec.topology) for event in spec.events]
    assert said[1] == "iterations 6..8, 10: 50% of data packets lost, worker2 both ways, worker3 both ways, worker1.up"
    assert said[5] == "at 2.5 s for 20 ms: 90% of data packets lost, all workers to server"
    assert said[6] == "at 0 s for 20 ms: cut, all workers to server"
    assert said[11] == (
        "at random, 2 times a second for a mean of 10 ms (pareto): 60% of data packets lost, all workers to server"
    )
    lines = timeline_lines(spec, 0)
    assert "before round 15: 1 Gbit, queue 64 KiB at server.down" in lines
    assert any(line.startswith("in rounds that are critical: 5 ms delay at worker2.up, worker2.down") for line in lines)
    assert any(line.startswith("from 0 s to 0.02 s: 100% up, all, worker1, worker2, worker3") for line in lines)

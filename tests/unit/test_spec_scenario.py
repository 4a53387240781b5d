"""Scenarios: defaults, and semantic checks with file and line."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from netem.spec import (
    Burst,
    Scenario,
    TransportSpec,
    epoch_of,
    iterations_per_epoch,
    iterations_total,
    load_scenario_text,
    profile_options,
    resolved_yaml,
    star,
)
from netem.spec.scenario import Replay, Train, train_iterations_per_epoch
from tests.unit.spec_texts import FULL, REPLAY, refused


def detector(text: str) -> dict[str, object]:
    changed = FULL.replace("{schedule: {critical: 0..14}}", text)
    found = load_scenario_text(changed).spec.transports["dblp"].detector
    assert found is not None
    return found.config()


def test_every_default_is_filled_in() -> None:
    spec = load_scenario_text(FULL).spec
    first, second = spec.bursts
    assert first == Burst(iteration=40, loss=0.9, workers=("worker1", "worker2", "worker3"))
    assert (first.direction, first.match, first.for_s) == ("up", "data", None)
    assert (second.workers, second.for_s) == (("worker1", "worker3"), 0.005)
    assert {name: transport.kind for name, transport in spec.transports.items()} == {
        "dblp": "dblp", "mlt": "mlt", "tcp": "tcp",
    }  # fmt: skip
    assert isinstance(spec.workload, Train)
    assert (spec.workload.learning_rate, spec.workload.momentum) == (0.05, 0.9)
    assert (spec.link.backend, spec.link.loss_engine, spec.link.loss_at) == ("auto", "auto", "before_rate")
    assert (spec.deadlines.connect_s, spec.deadlines.round_s, spec.repeats) == (60.0, 30.0, 1)
    assert (spec.capture.at, spec.capture.snap_bytes, spec.capture.enabled) == (("server",), 96, True)
    assert spec.profile == "recommended"


def test_the_shortest_scenario() -> None:
    spec = load_scenario_text(REPLAY).spec
    assert (spec.name, spec.seed, spec.bursts, spec.expect, spec.capture.enabled) == ("scenario", 0, (), (), False)
    assert spec.topology == star(2)


@pytest.mark.parametrize(
    ("samples", "workers", "batch_size", "iterations"),
    [(1437, 3, 32, 15), (1437, 1, 32, 45), (1437, 64, 32, 1), (1437, 8, 32, 6), (96, 3, 32, 1), (99, 3, 32, 2)],
)
def test_iterations_of_an_epoch(samples: int, workers: int, batch_size: int, iterations: int) -> None:
    assert train_iterations_per_epoch(samples, workers, batch_size) == iterations


def test_iterations_of_both_workloads() -> None:
    train = load_scenario_text(FULL).spec
    assert (iterations_per_epoch(train), iterations_total(train)) == (15, 120)
    assert [epoch_of(train, iteration) for iteration in (0, 14, 15, 119)] == [0, 0, 1, 7]
    replay = load_scenario_text(REPLAY).spec
    assert (iterations_per_epoch(replay), iterations_total(replay)) == (12, 12)
    epochs = load_scenario_text(REPLAY, ["workload.iterations_per_epoch=5"]).spec
    assert [epoch_of(epochs, iteration) for iteration in (4, 5, 11)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("{schedule: {critical: 0..14}}", {"kind": "schedule", "critical": [[0, 14]]}),
        ("{schedule: {critical: 7}}", {"kind": "schedule", "critical": [[7, 7]]}),
        ("{schedule: {critical: [30, 0..14]}}", {"kind": "schedule", "critical": [[0, 14], [30, 30]]}),
        ("{schedule: {critical: []}}", {"kind": "schedule", "critical": []}),
        ("paper", {"kind": "paper", "eta": 0.5}),
        ("{paper: {eta: 0.3}}", {"kind": "paper", "eta": 0.3}),
        ("every-n-rounds", {"kind": "every-n-rounds", "n": 10, "eta": 0.5}),
        ("{every-n-rounds: {n: 4}}", {"kind": "every-n-rounds", "n": 4, "eta": 0.5}),
        ("never", {"kind": "never"}),
        ("always", {"kind": "always"}),
    ],
)
def test_detectors(text: str, config: dict[str, object]) -> None:
    assert detector(text) == config


def test_the_default_detector() -> None:
    spec = load_scenario_text(FULL.replace(", detector: {schedule: {critical: 0..14}}", "")).spec
    found = spec.transports["dblp"].detector
    assert found is not None
    assert found.config() == {"kind": "every-n-rounds", "n": 10, "eta": 0.5}


@pytest.mark.parametrize(
    ("new", "key", "words"),
    [
        ("schedul", "detector.schedul", "did you mean 'schedule'?"),
        ("schedule", "detector.schedule.critical", "is required"),
        ("{schedule: {critical: 14..0}}", "detector.schedule.critical", "first iteration of a range"),
        ("{schedule: {critical: -3}}", "detector.schedule.critical", "is not a range of iterations"),
        ("{schedule: {critical: [0..14, 10..20]}}", "detector.schedule.critical", "0..14 and 10..20 overlap"),
        ("{schedule: {critical: 200..300}}", "detector.schedule.critical", "after the last iteration, 119"),
        ("{schedule: {critical: [3, 100..120]}}", "detector.schedule.critical", "after the last iteration, 119"),
        ("{schedule: {critcal: 0}}", "detector.schedule.critcal", "did you mean 'critical'?"),
        ("{paper: {eta: 0}}", "detector.paper.eta", "above 0"),
        ("{every-n-rounds: {n: 0}}", "detector.every-n-rounds.n", "1 or more"),
        ("{every-n-rounds: 10}", "detector.every-n-rounds", "expected a mapping of options (n, eta)"),
        ("{paper: {}, never: {}}", "detector", "expected one detector"),
    ],
)
def test_detectors_refused(new: str, key: str, words: str) -> None:
    error = refused(FULL.replace("{schedule: {critical: 0..14}}", new))
    assert words in error.message
    assert (error.line, error.key) == (6, f"transports.dblp.{key}")


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "words"),
    [
        ("seed: 7", "sede: 7", 2, "sede", "did you mean 'seed'?"),
        ("seed: 7", "seed: -1", 2, "seed", "allowed: 0 or more"),
        ("seed: 7", f"seed: {2**63}", 2, "seed", f"allowed: less than {2**63}"),
        ("epochs: 8", "epochs: 8, momentum: 1", 4, "workload.momentum", "1 is out of range; allowed: less than 1"),
        ("epochs: 8", "epochs: 8, momentum: .inf", 4, "workload.momentum", "expected a finite number, got inf"),
        ("fixed: 0.8%", "fixed: 100%", 7, "transports.mlt.fixed", "allowed: 0% to less than 100%"),
        ("seed: 7", "seed: 1.5", 2, "seed", "expected a whole number"),
        ("topology: star3", "topology: star33", 3, "topology", "did you mean 'star3'?"),
        ("topology: star3", "topology: {star: {workers: 200}}", 3, "topology.star.workers", "allowed: 1 to 64"),
        ("topology: star3", "topology: ./nowhere.yaml", 3, "topology", "no such file"),
        ("topology: star3", "topology: 3", 3, "topology", "expected a mapping"),
        ("topology: star3\n", "", 1, "topology", "is required"),
        ("kind: train", "kind: trian", 4, "workload", "kind 'trian' is not allowed; allowed: train, replay"),
        ("kind: train, ", "", 4, "workload", "kind is required; allowed: train, replay"),
        ("epochs: 8", "epochs: 0", 4, "workload.epochs", "allowed: 1 or more"),
        ("epochs: 8, ", "", 4, "workload.epochs", "is required"),
        ("epochs: 8", "epochs: 8, model: resnet", 4, "workload.model", "allowed: digits-cnn"),
        ("fixed: 0.8%", "fixed: 0.8", 7, "transports.mlt.fixed", "0.8 has no unit; allowed: %"),
        ("{fixed: 0.8%}", "{}", 7, "transports.mlt.fixed", "is required for a transport of kind mlt"),
        ("{fixed: 0.8%}", "{fixed: 0.8%, low: 1%}", 7, "transports.mlt.low", "(allowed: fixed, wire_dtype)"),
        ("low: 0.8%", "low: 50%", 6, "transports.dblp.low", "above that of normal phases"),
        ("low: 0.8%, ", "", 6, "transports.dblp.low", "is required for a transport of kind dblp"),
        ("tcp: {}", "tcp: {fixed: 1%}", 8, "transports.tcp.fixed", "(allowed: wire_dtype)"),
        ("tcp: {}", "tcp: {wire_dtype: bf16}", 8, "transports.tcp.wire_dtype", "allowed: float32, float16, bfloat16"),
        ("tcp: {}", "tcp:", 8, "transports.tcp", "expected a mapping, got nothing"),
        ("tcp: {}", "a/b: {fixed: 1%}", 8, "transports.a/b", "not a valid transport name"),
        ("iteration: 40", "iteration: 120", 10, "bursts.0.iteration", "120 is after the last iteration, 119"),
        ("iteration: 40", "iteration: -1", 10, "bursts.0.iteration", "-1 is out of range; allowed: 0 or more"),
        ("loss: 90%", "loss: 150%", 10, "bursts.0.loss", "150% is out of range; allowed: 0% to 100%"),
        ("loss: 90%", "loss: 0.9", 10, "bursts.0.loss", "0.9 has no unit"),
        (", loss: 90%", "", 10, "bursts.0.loss", "is required"),
        ("direction: down", "direction: dwon", 11, "bursts.1.direction", "did you mean 'down'?"),
        ("for: 5 ms", "for: 5", 11, "bursts.1.for", "5 has no unit"),
        ("for: 5 ms", "for: 0 ms", 11, "bursts.1.for", "out of range"),
        ("[worker3, worker1]", "[worker3, worker9]", 11, "bursts.1.workers.1", "'worker9' is not a worker"),
        ("[worker3, worker1]", "server", 11, "bursts.1.workers", "'server' is not a worker"),
        ("[worker3, worker1]", "[worker3, 'w*3']", 11, "bursts.1.workers", "'worker3' is named 2 times"),
        ("[worker3, worker1]", "[]", 11, "bursts.1.workers", "is empty"),
        ("[worker3, worker1]", "{a: 1}", 11, "bursts.1.workers", "expected a list, got a mapping"),
        ("at: [server]", "at: [srever]", 12, "capture.at.0", "did you mean 'server'?"),
        ("at: [server], ", "", 12, "capture.at", "names no host"),
        ("snap: 96 B", "snap: 20 B", 12, "capture.snap", "allowed: 40 B to 65535 B"),
        ("rounds: bursts", "rounds: some", 12, "capture.rounds", "allowed: all, bursts, none"),
        ("rounds: bursts", "rounds: bursts, both: 1", 12, "capture.both", "expected true or false, got 1"),
        ("  - dblp.accuracy >= 95%", "  - 3", 14, "expect.0", "expected text, got 3"),
        ("\n  - dblp.accuracy >= 95%", " x > 1", 13, "expect", "expected a list"),
        ("name: full", "name: full\ndeadlines: {round: 30}", 2, "deadlines.round", "30 has no unit"),
        ("name: full", "name: full\nlink: {backend: bfp}", 2, "link.backend", "did you mean 'bpf'?"),
        ("name: full", "name: full\nprofile: {base: 3}", 2, "profile.base", "expected the name of a profile"),
        ("name: full", "name: full\nprofile: {pass_overhead: 110}", 2, "profile.pass_overhead", "110 has no unit"),
        ("name: full", "name: full\nprofile: {pass_overhead_s: 1}", 2, "profile.pass_overhead_s", "write pass_over"),
        ("name: full", "name: full\nprofile: {pace: 500}", 2, "profile.pace", "500 has no unit"),
        ("name: full", "name: full\nprofile: {pace_bps: 1}", 2, "profile.pace_bps", "write pace: 500 Mbit"),
        ("name: full", "name: full\nprofile: [paper]", 2, "profile", "expected"),
        ("name: full", "name: full\nrepeats: 0", 2, "repeats", "allowed: 1 or more"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(old: str, new: str, line: int, key: str, words: str) -> None:
    assert old in FULL
    error = refused(FULL.replace(old, new, 1))
    assert words in error.message
    assert (error.file, error.line, error.key) == ("s.yaml", line, key)


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        ("chunks: 100, ", "workload", "either `chunks` or `shapes`"),
        ("chunks: 100", "workload", "either `chunks` or `shapes`"),
        ("chunks: 0", "workload.chunks", "allowed: 1 or more"),
        ("shapes: []", "workload.shapes", "at least one shape"),
        ("shapes: [[]]", "workload.shapes", "at least one"),
        ("shapes: [[3, 0]]", "workload.shapes.0.1", "allowed: 1 or more"),
        ("chunks: 1, compute: 5", "workload.compute", "5 has no unit"),
        ("chunks: 1, iterations_per_epoch: 13", "workload.iterations_per_epoch", "more than all 12 iterations"),
    ],
)
def test_replays_refused(change: str, key: str, words: str) -> None:
    new = {"chunks: 100, ": "", "chunks: 100": "chunks: 1, shapes: [[1]], "}.get(change, change + ", ")
    error = refused(REPLAY.replace("chunks: 100, ", new))
    assert words in error.message
    assert (error.line, error.key) == (2, key)


def test_shapes_of_a_replay() -> None:
    work = load_scenario_text(REPLAY.replace("chunks: 100", "shapes: [[3, 3], [7]]")).spec.workload
    assert isinstance(work, Replay)
    assert (work.shapes, work.chunks, work.iterations_per_epoch) == (((3, 3), (7,)), None, 12)


@pytest.mark.parametrize(
    ("second", "overlaps"),
    [
        ("iteration: 40, loss: 5%", True),
        ("iteration: 40, loss: 5%, direction: both", True),
        ("iteration: 40, loss: 5%, match: all", True),
        ("iteration: 40, loss: 5%, workers: worker2", True),
        ("iteration: 40, loss: 5%, for: 1 ms", True),
        ("iteration: 40, loss: 5%, direction: down", False),
        ("iteration: 41, loss: 5%", False),
    ],
)
def test_overlapping_bursts(second: str, overlaps: bool) -> None:
    text = FULL.replace("capture:", f"  - {{{second}}}\ncapture:")
    if not overlaps:
        assert len(load_scenario_text(text).spec.bursts) == 3
        return
    error = refused(text)
    assert (error.line, error.key) == (12, "bursts.2")
    assert "overlaps with the burst in line 10" in error.message


def test_bursts_on_other_workers_do_not_overlap() -> None:
    text = FULL.replace("loss: 90%", "loss: 90%, workers: worker1").replace(
        "capture:", "  - {iteration: 40, loss: 5%, workers: ['worker[23]']}\ncapture:"
    )
    assert load_scenario_text(text).spec.bursts[2].workers == ("worker2", "worker3")


@pytest.mark.parametrize("detector_text", ["{schedule: {critical: [0..14, 30]}}", "{paper: {eta: 0.3}}", "never"])
@pytest.mark.parametrize(
    "overrides", [[], ["topology.workers=3"], ["profile.pass_overhead=110 ms"], ["capture=null"], ["bursts=[]"]]
)
def test_resolved_loads_back_equal(detector_text: str, overrides: list[str]) -> None:
    spec = load_scenario_text(FULL.replace("{schedule: {critical: 0..14}}", detector_text), overrides).spec
    text = resolved_yaml(spec)
    again = load_scenario_text(text).spec
    assert again == spec
    assert list(again.transports) == list(spec.transports)
    assert resolved_yaml(again) == text


def test_resolved_names_what_was_not_written() -> None:
    text = resolved_yaml(load_scenario_text(REPLAY).spec)
    for line in ("seed: 0", "profile: recommended", "  iterations_per_epoch: 12", "  round: 30 s", "    mtu: 1500"):
        assert f"\n{line}\n" in text


def test_from_python_quantities_are_numbers() -> None:
    spec = Scenario(
        name="made", topology=star(2), workload=Replay(kind="replay", chunks=9, iterations=3),
        transports={"mlt": TransportSpec(kind="mlt", fixed=0.008)}, bursts=(Burst(iteration=1, loss=0.5),),
    )  # fmt: skip
    assert spec.bursts[0].loss == 0.5
    with pytest.raises(ValidationError):
        Burst(iteration=1, loss=1.5)
    with pytest.raises(ValidationError):
        Burst(iteration=1, loss=0.5, iterations=3)  # type: ignore[call-arg]


def test_profiles() -> None:
    assert profile_options(load_scenario_text(FULL).spec) == {"base": "recommended"}
    spec = load_scenario_text(FULL + "profile: {base: paper, pass_overhead: 110 ms, hints: true, pace: 1 Gbit}\n").spec
    assert profile_options(spec) == {"base": "paper", "hints": True, "pass_overhead_s": 0.11, "pace_bps": 10**9}

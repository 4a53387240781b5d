"""Scenarios from files: overrides, bases, and finding files by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from netem.spec import (
    Scenario,
    SpecError,
    available,
    iterations_total,
    load_scenario,
    load_scenario_text,
    star,
)
from netem.spec.scenario import Replay
from tests.unit.spec_texts import FULL, REPLAY, refused


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("seed=11", lambda s: s.seed == 11),
        ("bursts.1.loss=80%", lambda s: [b.loss for b in s.bursts] == [0.9, 0.8]),
        ("topology.workers=2", lambda s: len(s.topology.workers) == 2),
        ("topology={star: {workers: 3}}", lambda s: s.topology == star(3)),
        ("topology.hosts.worker2=null", lambda s: s.topology.workers == ("worker1", "worker3")),
        ("transports.tcp=null", lambda s: list(s.transports) == ["dblp", "mlt"]),
        ("transports.dblp.detector=never", lambda s: s.transports["dblp"].detector.kind == "never"),
        ("profile.pass_overhead=5 ms", lambda s: s.profile == {"base": "recommended", "pass_overhead": "5 ms"}),
        ("expect=[]", lambda s: s.expect == ()),
        ("deadlines.round=5 s", lambda s: (s.deadlines.round_s, s.deadlines.connect_s) == (5.0, 60.0)),
        ("capture=null", lambda s: not s.capture.enabled),
    ],
)
def test_overrides(override: str, read: Callable[[Scenario], bool]) -> None:
    text = FULL.replace("worker3, ", "") + "profile: recommended\n"
    assert read(load_scenario_text(text, [override]).spec)


def test_later_overrides_see_earlier_ones() -> None:
    spec = load_scenario_text(FULL, ["bursts=[{iteration: 1, loss: 1%}]", "bursts.0.iteration=2"]).spec
    assert [burst.iteration for burst in spec.bursts] == [2]


@pytest.mark.parametrize("bursts", ["", "bursts: []\n", "bursts:\n"])
def test_an_override_of_a_burst_that_is_not_there(bursts: str) -> None:
    text = f"topology: star3\nworkload: {{kind: replay, chunks: 1, iterations: 9}}\ntransports: {{tcp: {{}}}}\n{bursts}"
    assert refused(text, "bursts.0.loss=80%").message == "there is no bursts.0: the file has no bursts"


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("bursts.0.loss=150%", "bursts.0.loss", "150% is out of range"),
        ("bursts.2.loss=1%", "bursts.2.loss", "its entries are 0 to 1"),
        ("bursts.first.loss=1%", "bursts.first.loss", "is a list"),
        ("sede=3", "sede", "did you mean 'seed'?"),
        ("foo=null", "foo", "unknown key 'foo'"),
        ("seed.x=3", "seed.x", "seed is 7 and has no key 'x'"),
        ("seed=[1", "seed", "not valid YAML"),
        ("seed", "", "expected key=value"),
        ("=3", "", "expected key=value"),
        ("a..b=3", "", "expected key=value"),
        ("topology.workers=200", "topology.workers", "200 workers"),
        ("workload.epochs=1", "bursts.0.iteration", ""),
    ],
)
def test_a_wrong_override_is_named(override: str, key: str, words: str) -> None:
    error = refused(FULL, override)
    assert words in error.message
    if override == "workload.epochs=1":  # what no longer fits is in the file
        assert (error.file, error.line) == ("s.yaml", 10)
        return
    assert (error.file, error.line, error.key) == (f"--set {override}", None, key)


def test_extends_merges_replaces_and_removes(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(FULL)
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "extends: base.yaml\nname: mine\ntransports: {tcp: null, dblp: {detector: paper}}\nbursts: []\n"
        "workload: {kind: replay, chunks: 5, iterations: 20}\n"
    )
    spec = load_scenario(mine).spec
    assert (spec.name, spec.seed, spec.bursts) == ("mine", 7, ())
    assert list(spec.transports) == ["dblp", "mlt"]
    assert spec.transports["dblp"].high == 0.408
    assert spec.transports["dblp"].detector is not None
    assert spec.transports["dblp"].detector.kind == "paper"
    assert isinstance(spec.workload, Replay)


def test_an_error_in_a_base_names_the_base(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(FULL.replace("loss: 90%", "loss: 150%"))
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: base.yaml\nname: mine\n")
    with pytest.raises(SpecError) as caught:
        load_scenario(mine)
    assert (Path(caught.value.file).name, caught.value.line) == ("base.yaml", 10)


def test_names_are_found_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_scenario("burst90").spec.name == "burst90"  # shipped
    folder = tmp_path / "scenarios" / "deep"
    folder.mkdir(parents=True)
    (folder / "burst90.yaml").write_text(REPLAY)
    assert iterations_total(load_scenario("burst90").spec) == 12  # ./scenarios wins
    (tmp_path / "burst90").write_text(REPLAY.replace("iterations: 12", "iterations: 3"))
    assert iterations_total(load_scenario("burst90").spec) == 3  # a file of that very name wins
    (tmp_path / "burst90").unlink()
    (tmp_path / "burst90").mkdir()
    assert iterations_total(load_scenario("burst90").spec) == 12  # a folder is not a scenario


def test_without_a_name_the_file_gives_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(REPLAY)
    assert load_scenario(path).spec.name == "mine"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("brust90", "no scenario 'brust90'; did you mean 'burst90'? (known: adaptive, burst60"),
        ("scenarios/brust90.yaml", "scenarios/brust90.yaml: no such file; did you mean 'burst90'?"),
        ("./somewhere/", "no such file"),
    ],
)
def test_missing_files(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        load_scenario(name)
    assert words in str(caught.value)
    assert (caught.value.file, caught.value.line, caught.value.exit_status) == (name, None, 2)


def test_the_source_finds_lines_for_later_checks() -> None:
    loaded = load_scenario_text(FULL, ["transports.mlt.fixed=1%"], file="s.yaml")
    assert loaded.source.line(("bursts", 1, "loss")) == 11
    assert str(loaded.source.error(("expect", 0), "no such metric")) == "s.yaml:14: expect.0: no such metric"
    assert loaded.source.error(("transports", "mlt", "fixed"), "x").file == "--set transports.mlt.fixed=1%"


def test_available_lists_bare_names() -> None:
    assert set(available("topology")) >= {"star", "star3"}

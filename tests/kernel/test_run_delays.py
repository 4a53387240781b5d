"""Probes of a run's paths on real links: through a rate that stands by, without any, and past a link that lies."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from netem.analysis import delays
from netem.experiment.delays import DelayProbes
from netem.kernel import qdisc
from netem.kernel.netns import open_rtnetlink
from netem.lab import Lab
from netem.spec import load_scenario_text
from tests.kernel.run_helpers import run, scenario, summary

RATED = "{star: {workers: 2}, links: [{between: [server, sw], down: {rate: 500 Mbit}}, {between: ['worker*', sw]}]}"


def test_through_a_rate_that_nothing_uses_there_is_no_delay(tmp_path: Path) -> None:
    path = scenario(tmp_path, workers=2, transports="{mlt: {fixed: 0.8%}}", bursts="  - {iteration: 3, loss: 50%}")
    path.write_text(path.read_text().replace("{star: {workers: 2}}", RATED))
    found = summary(run(path, tmp_path / "runs"))
    reports = found["transports"]["mlt"]["delays"]
    assert [(one["path"], one["when"]) for one in reports] == [
        (f"worker{number} to server", when)
        for when in ("before the first round", "after the last round")
        for number in (1, 2)
    ]
    for one in reports:
        assert one["arrived"] == one["probes"] == 150
        assert one["requested_s"] == {"p50": 0.0, "p95": 0.0}
        assert one["achieved_s"]["p50"] < delays.ALLOWED_S
    assert [check["ok"] for check in found["fidelity"]["checks"] if check["name"] == "delay"] == [True] * 4


def test_without_delay_and_rate_nothing_is_probed(tmp_path: Path) -> None:
    found = summary(run(scenario(tmp_path, workers=1, transports="{mlt: {fixed: 0.8%}}"), tmp_path / "runs"))
    assert found["transports"]["mlt"]["delays"] == []


def test_a_queue_that_holds_probes_back_is_not_faithful(tmp_path: Path, state_dir: Path) -> None:
    """150 kbit a second are less than the probes themselves need: they wait, which nobody asked for."""
    text = scenario(tmp_path, workers=2).read_text().replace("{star: {workers: 2}}", RATED)
    spec = load_scenario_text(text).spec
    with Lab.build(spec.topology, name="liar", state_dir=state_dir) as lab:
        probes = DelayProbes(lab, spec)
        before = probes.probe("before the first round", {})
        place = lab.port_of("server")
        with closing(open_rtnetlink(place.netns)) as netlink:
            slow = qdisc.Tbf(qdisc.handle(1), qdisc.ROOT, 150_000, 1600, 1 << 20)
            qdisc.execute(netlink, netlink.find(place.ifname).index, [qdisc.Command("add", slow)])
        after = probes.probe("after the last round", {})
    assert [delays.ok(report, 1e-4) for report in before] == [True, True]
    assert [delays.ok(report, 1e-4) for report in after] == [False, False]
    assert min(report.achieved(0.5) or 0.0 for report in after) > 0.01


def test_the_base_is_taken_off(tmp_path: Path, state_dir: Path) -> None:
    spec = load_scenario_text(scenario(tmp_path, workers=2).read_text().replace("{star: {workers: 2}}", RATED)).spec
    with Lab.build(spec.topology, name="base", state_dir=state_dir) as lab:
        probes = DelayProbes(lab, spec)
        (report, _) = probes.probe("before the first round", {})
    assert 0.0 < probes.base_s["worker1 to server"] < 0.001
    assert report.base_s == probes.base_s["worker1 to server"]
    assert report.achieved(0.5) == pytest.approx(0.0, abs=delays.ALLOWED_S)

"""Delays as probes find them: requested quantiles, the verdict, which paths are probed, and probes beside events."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from netem.analysis import delays
from netem.analysis.delays import DelayReport, Jitter, Requested
from netem.analysis.fidelity import fidelity
from netem.analysis.summary import summarise
from netem.analysis.table import delay_cell
from netem.experiment.delays import FEWEST_PROBES, PROBES, by_request, pace, probed_paths, states_of
from netem.kernel import distributions
from netem.spec import Link, Topology, load_topology, load_topology_text
from netem.spec.effects import end_name, trunk_ends
from tests.unit.analysis_data import faithful_run, with_run

FALSE_ALARM = 1e-4
FIVE = Requested(0.005)
NORMAL = distributions.table("normal")
LINKS = """
name: t
hosts: {server: {role: server}, worker1: {role: worker}, worker2: {role: worker}}
switches: [sw]
links:
  - {between: [server, sw], down: {delay: 3 ms}}
  - {between: [worker1, sw], up: {delay: 2 ms}}
  - {between: [worker2, sw], up: {delay: 2 ms, jitter: 1 ms, rate: 1 Gbit}}
"""


def report(found: list[float], asked: Requested = FIVE, **changes: Any) -> DelayReport:
    values: dict[str, Any] = {
        "path": "worker1 to server", "when": "before the first round", "requested": asked, "sent": len(found),
        "delays_s": tuple(found), "base_s": 6e-6, "late_s": (8e-5,) * 20, **changes,
    }  # fmt: skip
    return DelayReport(**values)


def test_a_constant_delay_is_judged_by_its_median() -> None:
    assert delays.ok(report([0.00507] * 100), FALSE_ALARM)
    assert delays.ok(report([0.00507] * 70 + [0.009] * 30), FALSE_ALARM), "a busy moment"
    for wrong_s in (0.008, 0.00531, 0.00469, 0.0):
        assert not delays.ok(report([wrong_s] * 100), FALSE_ALARM), wrong_s
    assert "requested 5 ms and 5 ms, achieved 8 ms and 8 ms" in delays.detail(report([0.008] * 100))


def test_the_allowance_is_a_time_and_a_share_and_what_timers_are_late_beyond_it() -> None:
    assert report([]).allowed_s(0.5) == pytest.approx(0.0003)
    assert report([], Requested(0.1)).allowed_s(0.5) == pytest.approx(0.0022)
    assert report([]).latest_s(0.95) == 0.005
    assert report([], late_s=(0.002,) * 20).latest_s(0.5) == pytest.approx(0.005 + 0.0018)
    now_and_then = (0.0001,) * 14 + (0.004,) * 6
    assert report([], late_s=now_and_then).latest_s(0.5) == 0.005
    assert report([], late_s=now_and_then).latest_s(0.95) == pytest.approx(0.005 + 0.0038)
    assert "up to 2 ms late" in delays.detail(report([0.005] * 100, late_s=(0.002,) * 20))
    assert delays.ok(report([0.0071] * 100, late_s=(0.002,) * 20), FALSE_ALARM)
    assert not delays.ok(report([0.0075] * 100, late_s=(0.002,) * 20), FALSE_ALARM)
    assert not delays.ok(report([0.0045] * 100, late_s=(0.002,) * 20), FALSE_ALARM), "timers are never early"


def test_lost_probes_are_no_agreement() -> None:
    assert not delays.ok(report([0.005] * 9, sent=100), FALSE_ALARM)
    assert "only 9 of 100 probes arrived" in delays.detail(report([0.005] * 9, sent=100))


def test_behind_data_a_probe_may_be_late_but_not_early() -> None:
    late = {"when": "during the run", "queued": True}
    assert delays.ok(report([0.009] * 100, **late), FALSE_ALARM)
    assert not delays.ok(report([0.001] * 100, **late), FALSE_ALARM)
    assert not delays.ok(report([0.009] * 100, when="during the run"), FALSE_ALARM)
    assert delays.ok(report([0.009] * 80 + [0.00505] * 20, when="during the run"), FALSE_ALARM)


def test_in_doubt_nothing_is_judged() -> None:
    assert delays.ok(report([0.1] * 100, doubt="a link reorders packets"), FALSE_ALARM)
    assert "not judged: a link reorders packets" in delays.detail(report([0.1] * 100, doubt="a link reorders packets"))


def test_jitter_is_judged_by_its_distribution() -> None:
    asked = Requested(0.001, (Jitter(0.01, 0.002, NORMAL),))
    assert asked.quantile(0.5) == pytest.approx(0.011, abs=1e-5)
    assert asked.quantile(0.95) == pytest.approx(0.011 + 1.645 * 0.002, abs=2e-5)
    alarms = 0
    for seed in range(60):
        random = np.random.default_rng(seed)
        as_asked = random.normal(0.011, 0.002, 100)
        alarms += not delays.ok(report(as_asked.tolist(), asked), FALSE_ALARM)
        assert not delays.ok(report(random.normal(0.011, 0.006, 100).tolist(), asked), FALSE_ALARM)
        assert not delays.ok(report([0.011] * 100, asked), FALSE_ALARM), "no jitter at all"
        assert not delays.ok(report((as_asked + 0.003).tolist(), asked), FALSE_ALARM)
    assert alarms == 0


def test_an_even_jitter_and_delays_below_nothing() -> None:
    assert Jitter(0.01, 0.004).spread()[[0, -1]] == pytest.approx([0.006, 0.014], abs=1e-4)
    early = Requested(0.0, (Jitter(0.001, 0.004),))
    assert early.quantile(0.1) == 0.0
    assert early.longest_s == pytest.approx(0.005, abs=1e-4)


def test_jitter_of_two_links_adds_up() -> None:
    both = Requested(0.0, (Jitter(0.01, 0.003, NORMAL), Jitter(0.02, 0.004, NORMAL)))
    assert both.quantile(0.5) == pytest.approx(0.03, abs=1e-4)
    assert both.quantile(0.95) == pytest.approx(0.03 + 1.645 * 0.005, abs=2e-4)


def topology(text: str = LINKS) -> Topology:
    return load_topology_text(text)


def test_paths_that_hold_packets_back_are_probed() -> None:
    paths = probed_paths(topology(), ())
    assert [path.name for path in paths] == ["worker1 to server", "worker2 to server"]
    assert paths[0].requested({}) == Requested(0.005)
    assert paths[1].requested({}) == Requested(0.003, (Jitter(0.002, 0.001),))
    assert [path.queued for path in paths] == [False, True]
    assert probed_paths(topology(LINKS.replace("delay", "loss").replace("ms", "%").split("  - {between: [worker2")[0] +
                        "  - {between: [worker2, sw]}\n"), ()) == ()  # fmt: skip


def test_an_event_puts_its_delay_in_place_of_the_links() -> None:
    (down,) = [path for path in probed_paths(topology(), {("worker1", "down")}) if path.source == "server"]
    assert down.changes
    assert down.requested({}) == Requested(0.0)
    assert down.requested({("worker1", "down"): 0.007}) == Requested(0.007)


def test_a_link_between_switches_may_change_too() -> None:
    two_sites = load_topology("two-site")
    end = ("site2", "to site1")
    assert end in trunk_ends(two_sites)
    far = [path for path in probed_paths(two_sites, {end}) if path.changes]
    assert [path.name for path in far] == [f"worker{number} to server" for number in (2, 3, 4)]
    shift = {"link": end_name(*end), "rate_bps": None, "delay_s": 0.025, "queue": None}
    states = states_of([{"event": "impairment", "t": 1.0, "took_s": 0.1, "shifts": [shift]}])
    assert [far[0].requested(state.delays).constant_s for state in states] == [0.0, 0.025]


def test_without_ranks_paths_go_to_the_first_host_and_back() -> None:
    text = LINKS.replace("role: server", "role: host").replace("role: worker", "role: host")
    assert [path.name for path in probed_paths(topology(text), ())] == [
        "worker1 to server", "server to worker1", "worker2 to server", "server to worker2",
    ][0:3:2]  # fmt: skip


def test_probes_through_jitter_that_keeps_the_order_are_far_apart() -> None:
    plain, jittered = probed_paths(topology(), ())
    assert pace([plain]) == (PROBES, 0.0015)
    count, interval_s = pace([plain, jittered])
    assert interval_s == pytest.approx(2 * 4 * 0.001)
    assert FEWEST_PROBES <= count <= PROBES


@pytest.mark.parametrize(
    ("down", "doubt"),
    [
        ({"slot": {"min": 0.001, "max": 0.002}}, "slots"),
        ({"reorder": {"ratio": 0.1}}, "reorders"),
        ({"duplicate": 0.1, "jitter": 0.001}, "copy"),
    ],
)
def test_what_probes_cannot_tell(down: dict[str, Any], doubt: str) -> None:
    links = [link.model_dump(by_alias=True) for link in topology().links]
    links[0]["down"] |= down
    changed = topology().model_copy(update={"links": tuple(Link(**link) for link in links)})
    assert doubt in probed_paths(changed, ())[0].doubt


def test_probes_beside_events_belong_to_what_held_all_their_way() -> None:
    (path,) = [path for path in probed_paths(topology(), {("server", "down")}) if path.source == "worker1"]
    shift = {"link": "server.down", "rate_bps": None, "delay_s": 0.010, "queue": None}
    states = states_of(
        [
            {"event": "round", "t": 0.5},
            {"event": "impairment", "t": 1.0, "took_s": 0.1, "shifts": [shift]},
            {"event": "impairment", "t": 2.0, "took_s": 0.1, "shifts": []},
        ]
    )
    assert [(state.since_s, state.until_s) for state in states] == [(-math.inf, 0.9), (1.0, 1.9), (2.0, math.inf)]
    sent = [0.5, 0.895, 0.95, 1.0, 1.5, 1.89, 1.95, 2.5]
    found = by_request(path, states, [(at, at / 100) for at in sent])
    assert found == {Requested(0.005): [0.005, 0.025], Requested(0.012): [0.01, 0.015]}


def test_a_run_whose_delay_is_another_is_not_faithful() -> None:
    data = faithful_run()
    good, bad = report([0.00505] * 100), report([0.008] * 100)
    unknown = report([], doubt="a link sends in slots")
    verdict = fidelity(with_run(data, 0, delays=(good, unknown)))
    assert verdict.faithful
    assert [check.ok for check in verdict.checks if check.name == "delay"] == [True, True]
    verdict = fidelity(with_run(data, 1, delays=(good, bad)))
    assert [(check.name, check.transport) for check in verdict.failed] == [("delay", "mlt")]
    assert verdict.failed[0].requested == pytest.approx(0.005)
    assert verdict.failed[0].achieved == pytest.approx(0.008)


def test_summary_and_table_show_the_path_that_is_furthest_off() -> None:
    summary = summarise(with_run(faithful_run(), 0, delays=(report([0.00505] * 100), report([0.006] * 50))))
    assert [one["achieved_s"]["p50"] for one in summary["transports"]["dblp"]["delays"]] == [0.00505, 0.006]
    assert delay_cell(summary["transports"]["dblp"]) == "6.00 ms / 5.00 ms"
    assert summary["transports"]["mlt"]["delays"] == []

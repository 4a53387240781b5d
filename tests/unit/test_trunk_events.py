"""Events on links between switches: how they are named, whose gradients they hit, what changes where."""

from __future__ import annotations

from pathlib import Path

import pytest

from netem.spec import Scenario, SpecError, load_scenario, load_scenario_text, resolved_yaml, shifted_ends
from netem.spec.effects import effect, flows, shape_at, trunk_ends
from netem.spec.words import event_words, timeline_lines

BASE = """\
topology: {topology}
workload: {{kind: replay, chunks: 9, iterations: 9}}
transports: {{mlt: {{fixed: 0%}}}}
events: [{event}]
"""
PROGRAM = """\
topology: dumbbell
workload: {{kind: command, run: {{worker1: [echo]}}}}
events: [{event}]
"""


def loaded(event: str, topology: str = "two-site") -> Scenario:
    return load_scenario_text(BASE.format(topology=topology, event=event)).spec


def test_names_wildcards_and_the_resolved_form(tmp_path: Path) -> None:
    spec = loaded('{iteration: 3, rate: 1 Mbit, on: ["site* to site2", worker1.up]}')
    assert spec.events[0].on == ("worker1.up", "site1 to site2")
    assert shifted_ends(spec) == {("worker1", "up"), ("site1", "to site2")}
    (tmp_path / "again.yaml").write_text(resolved_yaml(spec))
    assert load_scenario(tmp_path / "again.yaml").spec.events == spec.events
    assert "site1 to site2" in event_words(spec.events[0], spec.topology)
    assert "1 Mbit at worker1.up, site1 to site2" in "\n".join(timeline_lines(spec, 1))


def test_loss_hits_whose_way_leads_there() -> None:
    """server and worker1 are at site1; worker2 to worker4 at site2."""
    far = ("worker2", "worker3", "worker4")
    up = effect(loaded("{iteration: 3, loss: 50%, on: site2 to site1}").events[0], 0, loaded("{at: 1 s, down: true}"))
    assert [(b.direction, b.workers, b.match) for b in up.bursts] == [("up", far, "data")]
    spec = loaded('{iteration: 3, down: true, on: "site* to site*"}')
    assert [(b.direction, b.workers, b.match) for b in effect(spec.events[0], 0, spec).bursts] == [("both", far, "all")]


def test_every_worker_has_one_way_through_a_leaf_spine() -> None:
    topology = loaded("{at: 1 s, down: true}", "leaf-spine").topology
    seen = [worker for end in trunk_ends(topology) if end[1] == "to leaf1" for worker in flows([end], topology)["up"]]
    assert len(seen) == len(set(seen))
    beside = {link.host for link in topology.host_links if link.switch == "leaf1"}
    assert set(seen) == set(topology.workers) - beside, "all that are not at the server's leaf, each over one spine"


def test_what_the_topology_says_of_it() -> None:
    topology = loaded("{at: 1 s, down: true}", "dumbbell").topology
    assert shape_at(topology, ("left", "to right")).rate_bps == 2_000_000_000
    assert shape_at(topology, ("left", "to right")).queue_bytes == 64 << 20
    assert shape_at(topology, ("right", "to left")).queue_bytes is None
    with pytest.raises(KeyError):
        shape_at(topology, ("right", "to right"))


def test_refused() -> None:
    with pytest.raises(
        SpecError, match=r"'site1 to side2' is no link between switches \(site1 to site2, site2 to site1"
    ):
        loaded("{iteration: 3, loss: 50%, on: site1 to side2}")
    with pytest.raises(SpecError, match="this topology has none"):
        loaded('{iteration: 3, loss: 50%, on: "* to *"}', "star3")
    with pytest.raises(SpecError, match="is named 2 times"):
        loaded('{iteration: 3, loss: 50%, on: [site1 to site2, "* to site2"]}')
    with pytest.raises(SpecError, match=r"for loss name the links of the hosts, such as worker1\.up"):
        load_scenario_text(PROGRAM.format(event="{at: 1 s, loss: 50%, on: left to right}"))
    spec = load_scenario_text(PROGRAM.format(event="{at: 1 s, rate: 1 Mbit, on: left to right}")).spec
    assert shifted_ends(spec) == {("left", "to right")}

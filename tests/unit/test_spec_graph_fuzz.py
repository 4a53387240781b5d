"""Whatever stands in a topology of several switches, the answer is a topology that can be built, or a SpecError."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from netem.commands.describe import topology_lines
from netem.commands.svg import picture
from netem.lab.plan import make_plan
from netem.spec import SpecError, load_topology_text, resolved_yaml
from tests.unit.test_spec_fuzz import places, reloads, written

GRAPH: dict[str, Any] = {
    "name": "g",
    "hosts": {"server": {"role": "server"}, "w1": {}, "sink": {"role": "host"}},
    "switches": ["s1", "s2", "s3"],
    "defaults": {"queue": "64 KiB", "up": {"rate": "1 Gbit"}},
    "links": [
        {"between": ["server", "s1"]},
        {"between": ["w*", "s2"], "loss": "1%"},
        {"between": ["s3", "sink"]},
        {"between": ["s*", "s2"], "mtu": 9000},
    ],
}
FORMS: list[dict[str, Any]] = [
    {"dumbbell": {"left": 2, "right": {"server": 1, "hosts": 1}}, "links": [{"between": ["left", "right"]}]},
    {"leaf_spine": {"leaves": 2, "spines": 2, "hosts_per_leaf": 2}, "links": [{"between": ["leaf*", "spine1"]}]},
    {"two_site": {"site1": 1, "site2": 1}, "defaults": {"delay": "5 ms"}},
    {"fat_tree": {"k": 2, "hosts_per_edge": {"workers": 1}}},
]
KEYS = st.sampled_from(
    ["extends", "star", "dumbbell", "leaf_spine", "fat_tree", "hosts", "switches", "links", "defaults", "up", "role"]
)
WORDS = ["", "*", "s*", "s1", "s2", "w1", "server", "sink", "left", "leaf1", "spine*", "worker", "host", "9 packets"]
SCALARS = st.none() | st.booleans() | st.integers(-2, 9) | st.sampled_from(WORDS)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)


def changed(base: dict[str, Any], place: tuple[Any, ...], value: Any, add: str | None) -> dict[str, Any]:
    result = copy.deepcopy(base)
    target: Any = result
    for key in place[:-1]:
        target = target[key]
    if add is not None and isinstance(target, dict):
        target[add] = value
    else:
        target[place[-1]] = value
    return result


@settings(max_examples=150, deadline=None)
@given(st.data(), VALUES, st.none() | KEYS)
def test_a_changed_graph(data: st.DataObject, value: Any, add: str | None) -> None:
    base = data.draw(st.sampled_from([GRAPH, *FORMS]))
    place = data.draw(st.sampled_from([place for place in places(base) if place]))
    with suppress(SpecError):
        topology = load_topology_text(written(changed(base, place, value, add)))
        assert reloads(load_topology_text, resolved_yaml(topology)) == topology
        make_plan(topology, "dn0000")
        assert topology_lines(topology)
        assert picture(topology).endswith("</svg>\n")


def test_the_starting_points_are_valid() -> None:
    for base in (*FORMS, {**GRAPH, "links": [*GRAPH["links"][:3], {"between": ["s[13]", "s2"]}]}):
        assert load_topology_text(written(base)).hosts

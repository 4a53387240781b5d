"""Ways through a graph of switches: they arrive, they are short, they do not loop, and they are spread."""

from __future__ import annotations

import itertools
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.lab.plan import make_plan, routes_of
from netem.routing import PlanError, routes
from netem.spec import Topology, load_topology, load_topology_text

Graph = tuple[list[str], list[str], list[tuple[str, str]]]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Connected: a random tree of switches, more links between them, and hosts anywhere."""
    count = draw(st.integers(1, 12))
    switches = [f"s{n}" for n in range(count)]
    pairs = {(draw(st.integers(0, n - 1)), n) for n in range(1, count)}
    pairs |= {(min(a, b), max(a, b)) for a, b in draw(st.sets(st.tuples(*[st.integers(0, count - 1)] * 2))) if a != b}
    places = draw(st.lists(st.sampled_from(switches), min_size=2, max_size=12))
    hosts = [f"h{n}" for n in range(len(places))]
    trunks = [(switches[a], switches[b]) for a, b in sorted(pairs)]
    return hosts, switches, [*zip(hosts, places, strict=True), *trunks]


def distance(links: list[tuple[str, str]], start: str, end: str) -> int:
    """Breadth first, written apart from the code under test."""
    far = {start: 0}
    queue = deque([start])
    while queue:
        here = queue.popleft()
        for pair in links:
            if here in pair:
                other = pair[0] if pair[1] == here else pair[1]
                if other not in far:
                    far[other] = far[here] + 1
                    queue.append(other)
    return far[end]


@given(graphs())
def test_every_host_reaches_every_other_on_a_shortest_way_without_a_loop(graph: Graph) -> None:
    hosts, switches, links = graph
    ways = routes(hosts, switches, links)
    joined = {frozenset(pair) for pair in links}
    for source in hosts:
        for target in hosts:
            path = ways.path(source, target)
            assert (path[0], path[-1]) == (source, target)
            assert len(set(path)) == len(path)
            assert len(path) - 1 == distance(links, source, target)
            assert all(frozenset(pair) in joined for pair in itertools.pairwise(path))


@given(graphs())
def test_a_destination_has_one_next_hop_at_every_switch(graph: Graph) -> None:
    """A tree: whoever passes a switch goes on from there in the same way."""
    hosts, switches, links = graph
    ways = routes(hosts, switches, links)
    for target in hosts:
        assert set(ways.next_hop[target]) == set(switches)
        onward: dict[str, str] = {}
        for source in hosts:
            path = ways.path(source, target)
            for here, there in itertools.pairwise(path):
                if here in switches:
                    assert onward.setdefault(here, there) == there


def walk(topology: Topology) -> None:
    """Follow the plan's forwarding entries from port to port, as packets do."""
    plan = make_plan(topology, "dn0000")
    entries = {(entry.netns, entry.mac): entry.ifname for entry in plan.forwarding}
    assert len(entries) == len(plan.forwarding) == len(plan.hosts) * len(plan.switches)
    behind = {}
    for cable in plan.cables:
        behind[cable.near.netns, cable.near.ifname] = cable.far.netns
        behind[cable.far.netns, cable.far.ifname] = cable.near.netns
    for source in plan.hosts:
        for target in plan.hosts:
            if source != target:
                here, steps = behind[source.netns, "eth0"], 0
                while here != target.netns:
                    here = behind[here, entries[here, target.mac]]
                    steps += 1
                    assert steps <= len(plan.switches)


@pytest.mark.parametrize("name", ["star3", "dumbbell", "leaf-spine", "two-site", "fat-tree4", "graph"])
def test_the_forwarding_entries_of_every_shipped_topology_lead_everywhere(name: str) -> None:
    walk(load_topology(name))


def test_the_hosts_of_a_leaf_are_reached_through_all_spines() -> None:
    topology = load_topology_text("leaf_spine: {leaves: 3, spines: 4, hosts_per_leaf: 4}")
    ways = routes_of(topology)
    near = [host for host, switch in ways.switch_of.items() if switch == "leaf2"]
    passed = Counter(ways.path("worker11", host)[2] for host in near)
    assert passed == {f"spine{n}": 1 for n in range(1, 5)}


def test_the_hosts_of_a_pod_are_reached_through_all_core_switches() -> None:
    topology = load_topology("fat-tree4")
    ways = routes_of(topology)
    pod = [host for host, switch in ways.switch_of.items() if switch in ("edge1", "edge2")]
    passed = Counter(ways.path("worker15", host)[3] for host in pod)
    assert passed == {f"core{n}": 1 for n in range(1, 5)}
    inside = Counter(ways.path("worker2", host)[2] for host in ("server", "worker1"))
    assert inside == {"agg1": 1, "agg2": 1}


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ([("a", "s"), ("b", "t")], "no way from switch t to host a"),
        ([("a", "s"), ("b", "t"), ("s", "t"), ("t", "s")], "two links between the same pair, t and s"),
        ([("a", "s"), ("b", "s"), ("a", "t"), ("s", "t")], "host a has more than one link"),
        ([("a", "s"), ("b", "x")], "link b - x: expected a switch and a host"),
        ([("a", "s"), ("s", "t")], "no link to b"),
        ([("a", "s"), ("b", "t"), ("s", "s")], "link s - s"),
    ],
)
def test_what_is_no_graph_in_one_piece(links: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        routes(["a", "b"], ["s", "t"], links)

"""Which links a gradient passes, what it loses there, and how several links' counts become one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.experiment.passages import base_loss, passages, routing_facts
from netem.experiment.tally import Tally, by_known_rounds
from netem.spec import load_topology, load_topology_text, star

CHAIN = """\
name: chain
hosts: {server: {role: server}, near: {}, far: {}, sink: {role: host}}
switches: [a, b, c]
links:
  - {between: [server, a], up: {loss: 1%}, down: {loss: 10%}}
  - {between: [near, a]}
  - {between: [far, c], up: {loss: 20%}}
  - {between: [sink, c], loss: 90%}
  - {between: [a, b], up: {loss: 5%}}
  - {between: [b, c], down: {loss: 30%}}
"""


def test_the_ways_of_a_chain() -> None:
    found = passages(load_topology_text(CHAIN))
    ways = {flow: [passage.name for passage in way] for flow, way in found.of_flow.items()}
    assert ways == {
        ("up", 1): ["near to a"],
        ("down", 1): ["server to a"],
        ("up", 2): ["far to c", "c to b", "b to a"],
        ("down", 2): ["server to a", "a to b", "b to c"],
    }
    directions = {passage.name: passage.direction for passage in found.all}
    assert directions == {
        "server to a": "down", "near to a": "up", "far to c": "up", "sink to c": None,
        "a to b": "down", "b to a": "up", "b to c": "down", "c to b": "up",
    }  # fmt: skip


def test_the_steady_loss_of_a_way_is_that_of_all_its_links() -> None:
    assert base_loss(load_topology_text(CHAIN)) == pytest.approx(
        {
            (1, "up"): 0.1,
            (1, "down"): 0.01,
            (2, "up"): 1 - 0.8 * 0.7 * 0.9,
            (2, "down"): 1 - 0.99 * 0.95,
        }
    )
    assert base_loss(star(3)) == {}


@pytest.mark.parametrize("name", ["leaf-spine", "fat-tree4", "graph", "two-site", "dumbbell"])
def test_no_link_carries_gradients_both_up_and_down(name: str) -> None:
    found = passages(load_topology(name))
    used: dict[str, set[str]] = {}
    for (direction, _), way in found.of_flow.items():
        for passage in way:
            used.setdefault(passage.name, set()).add(direction)
            assert passage.direction == direction
    assert all(len(directions) == 1 for directions in used.values())


def test_the_manifest_names_the_nodes_of_every_way() -> None:
    facts = routing_facts(load_topology_text(CHAIN))
    assert facts["up"] == {"near": ["near", "a", "server"], "far": ["far", "c", "b", "a", "server"]}


@given(st.integers(1, 10**5), st.lists(st.floats(0, 0.9), min_size=1, max_size=4))
def test_links_in_a_row_add_up_where_nothing_else_drops(sent: int, ratios: list[float]) -> None:
    entered, places = sent, []
    for ratio in ratios:
        places.append((entered, round(entered * ratio)))
        entered -= places[-1][1]
    tally = Tally()
    for seen, dropped in reversed(places):
        tally = tally.behind(seen, dropped, 0)
    assert tally[:2] == (sent, sent - entered)
    assert tally[3:5] == tally[:2]


def test_a_queue_between_two_lossy_links_does_not_hide_their_loss() -> None:
    """1,000 sent, 100 lost; a queue takes 800; of the 100 left 50 are lost: 1 - 0.9 x 0.5."""
    tally = Tally.of(100, 50, 0).behind(1000, 100, 1)
    assert (tally.seen, tally.dropped, tally.bytes_seen) == (1000, 150, 1)
    assert tally.hits / tally.trials == pytest.approx(0.55, abs=0.01)


def test_a_link_that_loses_everything() -> None:
    assert Tally().behind(100, 100, 0) == Tally(100, 100, 0, 100, 100)


def test_rounds_that_the_link_behind_does_not_know_are_one() -> None:
    counted = {1: (10, 1, 100), 2: (20, 2, 200), 3: (30, 3, 300)}
    assert by_known_rounds(counted, {1, 2, 3}) == counted
    assert by_known_rounds(counted, set()) == counted
    assert by_known_rounds(counted, {2, None}) == {None: (40, 4, 400), 2: (20, 2, 200)}

"""The plan of a lab: names, addresses, forwarding, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.lab.plan import Plan, PlanError, make_plan
from netem.spec.topology import star


@dataclass(frozen=True)
class Link:
    between: tuple[str, str]
    mtu: int = 1500


@dataclass(frozen=True)
class Role:
    role: str


@dataclass(frozen=True)
class Tree:
    name: str
    hosts: dict[str, Role]
    switches: tuple[str, ...]
    links: tuple[Link, ...]


def tree(hosts: str, switches: str, links: str) -> Tree:
    """E.g. tree("server w", "sw", "server-sw w-sw")."""
    roles = {name: Role("server" if name == "server" else "worker") for name in hosts.split()}
    pairs = (tuple(link.split("-")) for link in links.split())
    return Tree("t", roles, tuple(switches.split()), tuple(Link((a, b)) for a, b in pairs))


def test_a_star() -> None:
    plan = make_plan(star(3, mtu=9000), "dn1a2b")
    assert plan.namespaces == ("dn1a2b-sw", "dn1a2b-server", "dn1a2b-worker1", "dn1a2b-worker2", "dn1a2b-worker3")
    server, worker = plan.hosts[0], plan.hosts[2]
    assert (server.rank, server.address, server.mtu) == (0, "10.77.0.1", 9000)
    assert (worker.rank, worker.address, worker.prefix_length) == (2, "10.77.0.3", 16)
    assert [(c.near.ifname, c.far.ifname, c.host) for c in plan.cables][:2] == [
        ("p0", "eth0", "server"),
        ("p1", "eth0", "worker1"),
    ]
    assert {(f.ifname, f.mac) for f in plan.forwarding} == {(f"p{h.rank}", h.mac) for h in plan.hosts}


@given(workers=st.integers(1, 64))
def test_names_are_short_and_everything_is_unique(workers: int) -> None:
    plan = make_plan(star(workers), "dn0000")
    assert all(len(name) <= 15 and name.startswith("dn0000-") for name in plan.namespaces)
    for values in (plan.namespaces, [h.address for h in plan.hosts], [h.mac for h in plan.hosts]):
        assert len(set(values)) == len(values)
    macs = [end.mac for cable in plan.cables for end in (cable.near, cable.far)]
    assert len(set(macs)) == len(macs)


def test_long_and_strange_names_get_numbers_that_collide_with_nobody() -> None:
    plan = make_plan(
        tree("server n2 a_very_long_name n3 über", "sw", "server-sw n2-sw a_very_long_name-sw n3-sw über-sw"), "dn0000"
    )
    spaces = [name.partition("-")[2] for name in plan.namespaces]
    assert len(set(spaces)) == 6
    assert {"server", "n2", "n3", "sw"} < set(spaces)
    assert all(len(name) <= 15 and name.isascii() for name in plan.namespaces)


def test_the_server_is_rank_0_wherever_it_stands() -> None:
    plan = make_plan(tree("b server a", "sw", "b-sw server-sw a-sw"), "dn0000")
    assert [host.name for host in plan.hosts] == ["server", "b", "a"]


def test_forwarding_through_a_tree() -> None:
    plan = make_plan(tree("server w v", "s1 s2 s3", "server-s1 w-s2 v-s3 s1-s2 s2-s3"), "dn0000")
    entries = {(f.netns[-2:], f.ifname) for f in plan.forwarding if f.mac == plan.hosts[0].mac}
    assert entries == {("s1", "p0"), ("s2", "x3b"), ("s3", "x4b")}
    assert len(plan.forwarding) == 9


def test_a_plan_survives_its_state_file() -> None:
    plan = make_plan(star(5), "dn00ff")
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (tree("server w", "sw", "server-sw"), "no link to w"),
        (tree("server w", "sw", "server-sw w-sw w-sw"), "more than one link"),
        (tree("server w", "sw", "server-sw w-server"), "expected a switch and a host"),
        (tree("server w", "sw", "server-sw w-xx"), "expected a switch and a host"),
        (tree("server w", "s1 s2", "server-s1 w-s2"), "no way from switch s2"),
        (tree("server w", "s1 s2", "server-s1 w-s2 s1-s2 s2-s1"), "same pair"),
        (tree("server w", "s1 s2 s3 s4", "server-s1 w-s1 s2-s3 s3-s4 s4-s2"), "no way from switch s2"),
    ],
)
def test_what_is_not_one_graph_is_refused(topology: Tree, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(topology, "dn0000")


def test_a_network_that_is_too_small() -> None:
    with pytest.raises(PlanError, match="do not fit"):
        make_plan(star(10), "dn0000", "10.0.0.0/29")


@pytest.mark.parametrize("lab_id", ["", "dn", "xx0000", "dn00000", "dn000G", "../../"])
def test_a_strange_id(lab_id: str) -> None:
    with pytest.raises(PlanError):
        make_plan(star(1), lab_id)

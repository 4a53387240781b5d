"""Topologies of several switches: short forms, links between switches, roles, and every way of being wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from netem.spec import SpecError, Topology, load_scenario_text, load_topology, load_topology_text, resolved_yaml, schema

GRAPH = """\
name: g
hosts:
  server: {role: server}
  w1: {}
  w2: {}
  sink: {role: host}
switches: [s1, s2, s3]
links:
  - {between: [server, s1]}
  - {between: ["w*", s2], rate: 1 Gbit}
  - {between: [s3, sink]}
  - {between: [s1, s2], rate: 2 Gbit, up: {loss: 1%}}
  - {between: [s3, s2], mtu: 9000}
"""


def refused(text: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        load_topology_text(text, file="t.yaml")
    return caught.value


def pairs(topology: Topology) -> list[tuple[str, str]]:
    return [link.between for link in topology.links]


def test_a_graph() -> None:
    topology = load_topology_text(GRAPH)
    assert pairs(topology) == [("server", "s1"), ("w1", "s2"), ("w2", "s2"), ("sink", "s3"), ("s1", "s2"), ("s3", "s2")]
    assert topology.ranks == {"server": 0, "w1": 1, "w2": 2}
    assert topology.hosts["sink"].role == "host"
    assert [link.between for link in topology.trunks] == [("s1", "s2"), ("s3", "s2")]
    first, second = topology.trunks
    assert (first.up.rate_bps, first.up.loss, first.down.rate_bps, first.down.loss) == (2 * 10**9, 0.01, 2 * 10**9, 0)
    assert (second.mtu, topology.mtu) == (9000, 1500)
    assert load_topology_text(resolved_yaml(topology)) == topology


def test_defaults_hold_where_a_link_says_nothing() -> None:
    text = GRAPH + "defaults: {rate: 10 Gbit, down: {queue: 9 packets}, mtu: 1400}\n"
    links = {link.between: link for link in load_topology_text(text).links}
    assert links["server", "s1"].up.rate_bps == links["server", "s1"].down.rate_bps == 10**10
    assert links["w1", "s2"].down.rate_bps == 10**9
    assert (links["w1", "s2"].up.queue, links["w1", "s2"].down.queue_packets) == (None, 9)
    assert (links["server", "s1"].mtu, links["s3", "s2"].mtu) == (1400, 9000)


def test_what_a_link_says_of_both_directions_beats_what_the_defaults_say_of_one() -> None:
    text = GRAPH + "defaults: {up: {rate: 10 Gbit}}\n"
    links = {link.between: link for link in load_topology_text(text).links}
    assert links["w1", "s2"].up.rate_bps == 10**9
    assert (links["server", "s1"].up.rate_bps, links["server", "s1"].down.rate_bps) == (10**10, None)


def test_a_wildcard_means_switches_where_it_means_no_host() -> None:
    mesh = GRAPH.replace(
        "  - {between: [s1, s2], rate: 2 Gbit, up: {loss: 1%}}\n  - {between: [s3, s2], mtu: 9000}\n", ""
    )
    mesh += "  - {between: ['s[0-9]', 's[0-9]'], delay: 1 ms}\n  - {between: [s3, s1], delay: 9 ms}\n"
    topology = load_topology_text(mesh)
    assert [(link.between, link.up.delay_s) for link in topology.trunks] == [
        (("s1", "s2"), 0.001), (("s3", "s1"), 0.009), (("s2", "s3"), 0.001),
    ]  # fmt: skip


def test_dumbbell() -> None:
    text = "dumbbell: {left: 2, right: {workers: 1, hosts: 2}}\nlinks: [{between: [right, left], up: {rate: 1 Gbit}}]"
    topology = load_topology_text(text)
    assert (topology.name, topology.switches) == ("dumbbell", ("left", "right"))
    assert topology.ranks == {"server": 0, "worker1": 1, "worker2": 2}
    assert pairs(topology) == [
        ("server", "left"), ("worker1", "left"), ("worker2", "right"), ("host1", "right"), ("host2", "right"),
        ("right", "left"),
    ]  # fmt: skip
    assert (topology.trunks[0].up.rate_bps, topology.trunks[0].down.rate_bps) == (10**9, None)


def test_leaf_spine() -> None:
    topology = load_topology("leaf-spine")
    assert (len(topology.hosts), topology.server, len(topology.workers)) == (16, "server", 15)
    assert len(topology.trunks) == 8
    text = 'links: [{between: ["leaf*", "spine*"], rate: 1 Gbit}, {between: [leaf2, spine1], rate: 2 Gbit}]\n'
    other = load_topology_text(f"extends: leaf-spine\nleaf_spine: {{hosts_per_leaf: 1}}\n{text}")
    assert len(other.hosts) == 4
    assert {link.between: link.up.rate_bps for link in other.trunks}["leaf2", "spine1"] == 2 * 10**9
    assert sum(link.up.rate_bps == 10**9 for link in other.trunks) == 7


def test_two_site() -> None:
    topology = load_topology("two-site")
    assert [topology.link_of(host).switch for host in topology.hosts] == ["site1", "site1", "site2", "site2", "site2"]
    assert topology.server == "server"


@pytest.mark.parametrize(("k", "hosts", "switches", "trunks"), [(2, 2, 5, 4), (4, 16, 20, 32), (6, 54, 45, 108)])
def test_fat_tree(k: int, hosts: int, switches: int, trunks: int) -> None:
    topology = load_topology_text(f"fat_tree: {{k: {k}}}")
    assert (len(topology.hosts), len(topology.switches), len(topology.trunks)) == (hosts, switches, trunks)
    ports = [end for link in topology.links for end in link.between if end in topology.switches]
    assert {ports.count(switch) for switch in topology.switches} == {k}


def test_a_star_with_hosts_that_have_no_rank() -> None:
    topology = load_topology_text("star: {workers: 2, hosts: 2}")
    assert list(topology.hosts) == ["server", "worker1", "worker2", "host1", "host2"]
    assert list(topology.ranks) == ["server", "worker1", "worker2"]


def test_nobody_has_to_have_a_rank_but_a_training_needs_a_server() -> None:
    text = "dumbbell: {left: {hosts: 2}, right: {hosts: 2}}"
    assert load_topology_text(text).ranks == {}
    scenario = f"workload: {{kind: replay, chunks: 9, iterations: 3}}\ntransports: {{tcp: {{}}}}\ntopology: {{{text}}}"
    with pytest.raises(SpecError, match="no host has a rank"):
        load_scenario_text(scenario)


def test_the_base_of_a_short_form_may_be_extended(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "extends: two-site\nname: far\nlinks: [{between: [site1, site2], rate: 5 Mbit}]\n"
    )
    topology = load_topology(tmp_path / "mine.yaml")
    assert topology.trunks[0].up.rate_bps == 5_000_000
    assert topology.trunks[0].up.queue is None


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "words"),
    [
        ("[s1, s2], rate", "[s1, s1], rate", 12, "links.3.between", "'s1' is linked to itself"),
        ("[s3, s2]", "[s2, s1]", 13, "links.4", "switches 's2' and 's1' are linked twice, already in t.yaml line 12"),
        ("[s3, s2]", "[sink, s2]", 13, "links.4", "host 'sink' is linked twice, already in t.yaml line 11"),
        ("[s3, s2]", "[w1, sink]", 13, "links.4.between", "neither 'w1' nor 'sink' is a switch"),
        ("[s3, s2]", '["w*", "s*"]', 13, "links.4.between", "neither 'w1' nor 'server' is a switch"),
        ('["w*", s2]', '["w*", "s[12]"]', 10, "links.1", "host 'w1' would have two links, to s1 and s2"),
        ("  - {between: [s3, s2], mtu: 9000}\n", "", 6, "hosts.sink", "no way from host 'sink' to host 'server'"),
        ("[s3, sink]", "[s1, sink]", None, "", ""),
        ("s3]\n", "s3, s4]\n", 7, "switches.3", "switch 's4' is linked to nothing"),
        ("sink: {role: host}", "sink: {role: server}", 6, "hosts.sink", "more than one server"),
        ("server: {role: server}", "server: {role: worker}", 2, "hosts", "no host has the role server"),
        ("name: g", "name: g\ndefaults: 3", 2, "defaults", "expected a mapping"),
        ("name: g", "name: g\ndefaults: {between: [a, b]}", 2, "defaults.between", "stand in `links`"),
        ("name: g", "name: g\ndefaults: {rat: 1 Gbit}", 2, "defaults.rat", "unknown key 'rat'; did you mean 'rate'?"),
        ("name: g", "name: g\ndefaults: {rate: 1}", 2, "defaults.rate", "has no unit"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(old: str, new: str, line: int | None, key: str, words: str) -> None:
    assert old in GRAPH
    text = GRAPH.replace(old, new, 1)
    if line is None:
        assert load_topology_text(text)
        return
    error = refused(text)
    assert words in error.message
    assert (error.file, error.line, error.key) == ("t.yaml", line, key)


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("dumbbell: {left: 3}", "dumbbell.right", "is required"),
        ("dumbbell: 3", "dumbbell", "expected a mapping such as {left: 4, right: 1}"),
        ("dumbbell: {left: 3, rigt: 1}", "dumbbell.rigt", "did you mean 'right'?"),
        ("dumbbell: {left: {server: 1}, right: {server: 1, workers: 1}}", "dumbbell", "2 servers"),
        ("dumbbell: {left: {wrkers: 1}, right: 1}", "dumbbell.left.wrkers", "did you mean 'workers'?"),
        ("dumbbell: {left: 70, right: 1}", "dumbbell", "70 workers; allowed: up to 64. Others may be `hosts`"),
        ("dumbbell: {left: 0, right: 0}", "dumbbell", "0 hosts; allowed: 1 to 128"),
        ("dumbbell: {left: 1, right: 1}\nstar: {workers: 1}", "dumbbell", "`dumbbell` and `star` exclude each other"),
        ("dumbbell: {left: 1, right: 1}\nswitches: [a]", "switches", "`switches` and `dumbbell` exclude each other"),
        ("leaf_spine: {leaves: 64, spines: 64, hosts_per_leaf: 1}", "leaf_spine", "4160 links; allowed: up to 1000"),
        ("fat_tree: {k: 3}", "fat_tree.k", "3 is odd"),
        ("fat_tree: {k: 8}", "fat_tree.k", "allowed: 2 to 6"),
        ("leaf_spine: {leaves: 2, spines: 0, hosts_per_leaf: 1}", "leaf_spine.spines", "allowed: 1 to 128"),
        ("leaf_spine: {leaves: 2, spines: 1, hosts_per_leaf: {server: 1}}", "leaf_spine", "at every switch"),
        ("two_site: {site1: 1, site2: 1}\nlinks: [{between: [worker1, site1]}]", "links.0.between", "has no link"),
        ("two_site: {site1: 2, site2: 1}\nlinks: [{between: ['w*', site1]}, {between: [worker1, 'site*']}]", "links.1",
         "the link between 'worker1' and 'site1' is described twice"),
        ("extends: leaf-spine\nworkers: 3", "workers", "give `leaf_spine` itself"),
    ],
)  # fmt: skip
def test_short_forms_refused(text: str, key: str, words: str) -> None:
    error = refused(text)
    assert words in error.message
    assert error.key == key


def test_the_schema_has_every_short_form() -> None:
    form = schema("topology")
    assert {"star", "dumbbell", "leaf_spine", "two_site", "fat_tree", "defaults"} <= set(form["properties"])

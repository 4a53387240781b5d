"""Drawings of topologies: levels, groups, links in words, and the picture."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from netem.cli import main
from netem.commands.describe import link_words, topology_lines
from netem.commands.layout import levels, rows, several, upper_ends
from netem.commands.svg import picture
from netem.spec import Topology, load_topology, load_topology_text

SHIPPED = ["star3", "star", "dumbbell", "leaf-spine", "two-site", "fat-tree4", "graph"]
SVG = "{http://www.w3.org/2000/svg}"
RING = """\
name: ring
hosts: {server: {}, w1: {}, w2: {}}
switches: [a, b, c]
links:
  - {between: [server, a]}
  - {between: [w1, b]}
  - {between: [w2, c]}
  - {between: [a, b]}
  - {between: [b, c]}
  - {between: [c, a], rate: 1 Gbit, down: {rate: 5 Mbit}}
"""


def texts(topology: Topology) -> list[str]:
    root = ElementTree.fromstring(picture(topology))
    return [node.text or "" for node in root.iter(f"{SVG}text")]


def test_levels_begin_where_the_hosts_are() -> None:
    assert [len(level) for level in levels(load_topology("fat-tree4"))] == [8, 8, 4]
    assert levels(load_topology("leaf-spine"))[1] == ["spine1", "spine2"]
    assert levels(load_topology("dumbbell")) == [["left", "right"]]


def test_every_link_between_switches_is_told_once() -> None:
    for name in SHIPPED:
        topology = load_topology(name)
        told = sorted(frozenset((low, high)) for low, found in upper_ends(topology).items() for high in found)
        assert len(told) == len(set(told)) == len(topology.trunks)


def test_many_equal_hosts_share_a_row() -> None:
    topology = load_topology_text("star: {workers: 20, hosts: 2}\nlinks: [{between: [worker7, sw], rate: 1 Gbit}]")
    (group,) = rows(topology, link_words).values()
    assert [(row.name, row.words) for row in group] == [
        ("server", "rank 0"),
        ("worker1 … worker6", "ranks 1 to 6"),
        ("worker7", "rank 7"),
        ("worker8 … worker20", "ranks 8 to 20"),
        ("host1 … host2", "2 hosts without a rank"),
    ]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a"], "a"),
        (["a", "b"], "a, b"),
        (["w1", "w2", "w3", "w4", "w5"], "w1 … w5"),
        (["s", "w1", "w2", "w3", "w5"], "s, w1 … w3, w5"),
        (["a", "b", "c", "d", "e"], "a … e"),
    ],
)
def test_several(names: list[str], text: str) -> None:
    assert several(names) == text


def test_the_text_of_a_ring() -> None:
    assert topology_lines(load_topology_text(RING)) == [
        "a  b  c",
        "",
        "a ── b",
        "  └─ server   rank 0",
        "b ── c",
        "  └─ w1   rank 1",
        "c ── a",
        "  └─ w2   rank 2",
        "",
        "ways: static forwarding entries on shortest paths (fewest links), spread by",
        "  destination",
        "to the server:",
        "  b, a: w1",
        "  c, a: w2",
        "from the server:",
        "  a, b: w1",
        "  a, c: w2",
        "",
        "links of all hosts: as fast as the machine, MTU 1500",
        "links a–b, b–c: as fast as the machine, MTU 1500",
        "link c–a: up 1 Gbit; down 5 Mbit, MTU 1500",
        "up: to the switch; between switches from the first named to the second",
    ]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_picture_shows_every_host_and_every_switch_inside_its_frame(name: str) -> None:
    topology = load_topology(name)
    root = ElementTree.fromstring(picture(topology))
    shown = " ".join(texts(topology))
    for node in (*topology.hosts, *topology.switches):
        assert re.search(rf"(^|\s){node}(\s|$)", shown), node
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    boxes = [{key: float(box.attrib[key]) for key in ("x", "y", "width", "height")} for box in root.iter(f"{SVG}rect")
             if not box.attrib["width"].endswith("%")]  # fmt: skip
    assert all(b["x"] >= 0 and b["y"] >= 0 for b in boxes)
    assert all(b["x"] + b["width"] <= width and b["y"] + b["height"] <= height for b in boxes)
    wide = [b for b in boxes if b["height"] == 26]
    assert len(wide) == len(topology.hosts) + len(topology.switches)
    for n, one in enumerate(wide):
        for other in wide[n + 1 :]:
            apart = one["x"] + one["width"] <= other["x"] or other["x"] + other["width"] <= one["x"]
            assert apart or abs(one["y"] - other["y"]) >= 26
    lines = [path for path in root.iter(f"{SVG}path") if " h32" not in path.attrib["d"]]
    assert len(lines) == len(topology.links)


def test_few_links_between_switches_have_their_words_beside_them() -> None:
    assert {"→ 5 Mbit", "← 1 Gbit"} <= set(texts(load_topology_text(RING)))
    dumbbell = texts(load_topology("dumbbell"))
    assert "→ 2 Gbit, queue 64 MiB" in dumbbell
    assert "all hosts: as fast as the machine, MTU 1500" in dumbbell


def test_few_links_between_switches_without_words() -> None:
    topology = load_topology_text("dumbbell: {left: 1, right: 1}")
    assert "all links: as fast as the machine, MTU 1500" in texts(topology)


def test_the_picture_of_the_documentation_is_what_show_draws() -> None:
    path = Path(__file__).resolve().parents[2] / "docs" / "leaf-spine.svg"
    assert path.read_text(encoding="utf-8") == picture(load_topology("leaf-spine"))


def test_show_writes_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.svg"
    assert main(["show", "burst90-replay", "--svg", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == picture(load_topology("star3"))
    assert "topology star3" in capsys.readouterr().out
    assert main(["show", "star3", "--svg", str(tmp_path / "no" / "x.svg")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err

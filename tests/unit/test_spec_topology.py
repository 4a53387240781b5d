"""Topologies: shorthands, directions, and every way of being wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from netem.spec import LinkShape, SpecError, load_topology, load_topology_text, resolved_yaml, star

FULL = """\
name: t
hosts:
  server: {role: server}
  worker1: {role: worker}
  worker2: {role: worker}
switches: [sw]
links:
  - {between: [server, sw]}
  - {between: [sw, "worker*"], delay: 5 ms}
"""


def refused(text: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        load_topology_text(text, file="t.yaml")
    return caught.value


def test_one_link_per_host_in_the_hosts_order_and_the_host_first() -> None:
    topology = load_topology_text(FULL)
    assert [link.between for link in topology.links] == [("server", "sw"), ("worker1", "sw"), ("worker2", "sw")]
    assert [link.up.delay_s for link in topology.links] == [0.0, 0.005, 0.005]
    assert topology.ranks == {"server": 0, "worker1": 1, "worker2": 2}
    assert topology.needs_delay


def test_ranks_put_the_server_first_wherever_it_stands_in_the_file() -> None:
    text = FULL.replace("  server: {role: server}\n", "").replace("switches", "  boss: {role: server}\nswitches")
    assert load_topology_text(text.replace("[server, sw]", "[boss, sw]")).ranks == {
        "boss": 0, "worker1": 1, "worker2": 2,
    }  # fmt: skip


def test_properties_of_both_directions_and_of_one() -> None:
    link = load_topology_text(
        FULL.replace(
            "delay: 5 ms", "rate: 1 Gbit, delay: 5 ms, mtu: 9000, up: {rate: 10 Mbit, loss: 1%}, down: {queue: 64 KiB}"
        )
    ).link_of("worker2")
    assert (link.up.rate_bps, link.down.rate_bps) == (10_000_000, 10**9)
    assert (link.up.delay_s, link.down.delay_s) == (0.005, 0.005)
    assert (link.up.loss, link.down.loss) == (0.01, 0.0)
    assert (link.up.queue_bytes, link.down.queue_bytes) == (None, 65_536)
    assert link.mtu == 9000


def test_queue_in_packets() -> None:
    shape = load_topology_text(FULL.replace("delay: 5 ms", "queue: 1000 packets")).link_of("worker1").up
    assert (shape.queue_packets, shape.queue_bytes) == (1000, None)


def test_an_exact_name_wins_over_a_wildcard() -> None:
    topology = load_topology_text(FULL + "  - {between: [worker2, sw], delay: 50 ms}\n")
    assert topology.link_of("worker1").up.delay_s == 0.005
    assert topology.link_of("worker2").up.delay_s == 0.05
    assert len(topology.links) == 3


def test_the_smallest_mtu_counts() -> None:
    assert load_topology_text(FULL.replace("delay: 5 ms", "mtu: 900")).mtu == 900


@pytest.mark.parametrize("workers", [1, 3, 64])
def test_a_star_of_any_size(workers: int) -> None:
    topology = load_topology_text(f"star: {{workers: {workers}}}")
    assert topology == star(workers)
    assert topology.workers == tuple(f"worker{rank}" for rank in range(1, workers + 1))
    assert topology.server == "server"


def test_a_star_with_links_of_its_own() -> None:
    text = "star: {workers: 2}\nlinks:\n  - {between: ['*', sw], delay: 5 ms}\n"
    assert load_topology_text(text) == star(2, up=LinkShape(delay_s=0.005), down=LinkShape(delay_s=0.005))


@pytest.mark.parametrize("base", ["star3", "star"])
def test_another_number_of_workers(base: str) -> None:
    topology = load_topology_text(f"name: big\nextends: {base}\nworkers: 8\n")
    assert topology == star(8, name="big")


def test_extending_a_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(FULL)
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\nhosts: {worker3: {role: worker}, worker1: null}\n")
    assert load_topology(tmp_path / "mine.yaml").workers == ("worker2", "worker3")


@pytest.mark.parametrize("text", [FULL, FULL.replace("delay: 5 ms", "jitter: 1 ms, reorder: allow, queue: 9 packets")])
def test_resolved_loads_back_equal(text: str) -> None:
    topology = load_topology_text(text)
    assert load_topology_text(resolved_yaml(topology)) == topology


def test_from_python_quantities_are_numbers_in_the_fields_unit() -> None:
    assert LinkShape(delay_s=0.005, rate_bps=10**6, loss=0.1).delay_us == 5000
    with pytest.raises(ValidationError):
        LinkShape(loss=1.5)
    with pytest.raises(ValidationError):
        star(2).name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "words"),
    [
        ("worker2: {", "worker1: {", 5, "hosts.worker1", "duplicate key 'worker1', already given in line 4"),
        ("worker2: {role: worker}", "worker2: {role: server}", 5, "hosts.worker2", "more than one server"),
        ("{role: server}", "{role: worker}", 2, "hosts", "no host has the role server"),
        ("{role: server}", "{role: boss}", 3, "hosts.server.role", "allowed: server, worker, host"),
        ("{role: server}", "{rolle: server}", 3, "hosts.server.rolle", "did you mean 'role'?"),
        ("[server, sw]", "[serve, sw]", 8, "links.0.between.0", "'serve' is not a host, nor a switch; did you mean"),
        ("[server, sw]", "[server, sw2]", 8, "links.0.between.1", "'sw2' is not a host, nor a switch"),
        ("[server, sw]", "[sw, sw]", 8, "links.0.between", "'sw' is linked to itself"),
        ("[server, sw]", "[server, worker1]", 8, "links.0.between", "neither 'server' nor 'worker1' is a switch"),
        ("[server, sw]", "[server]", 8, "links.0.between", "expected two names"),
        ("worker*", "wroker*", 9, "links.1.between.1", "'wroker*' matches no host and no switch"),
        ("worker*", "worker1", 5, "hosts.worker2", "'worker2' is linked to nothing"),
        ("[sw]", "[sw, sw2]", 6, "switches.1", "switch 'sw2' is linked to nothing"),
        ("[sw]", "[sw, sw]", 6, "switches.1", "'sw' is named twice"),
        ("[sw]", "[]", 8, "links.0.between.1", "'sw' is not a host, nor a switch"),
        ("delay: 5 ms", "delay: 5", 9, "links.1.delay", "5 has no unit; allowed: ns, us"),
        ("delay: 5 ms", "delay: 2 min", 9, "links.1.delay", "allowed: 0 s to 60 s"),
        ("delay: 5 ms", "loss: 150%", 9, "links.1.loss", "150% is out of range"),
        ("delay: 5 ms", "latency: 5 ms", 9, "links.1.latency", "unknown key 'latency'"),
        ("delay: 5 ms", "delya: 5 ms", 9, "links.1.delya", "did you mean 'delay'?"),
        ("delay: 5 ms", "delay_s: 0.005", 9, "links.1.delay_s", "unknown key 'delay_s'"),
        ("delay: 5 ms", "up: {mtu: 900}", 9, "links.1.up.mtu", "unknown key 'mtu'"),
        ("delay: 5 ms", "up: 5 ms", 9, "links.1.up", "expected a mapping"),
        ("delay: 5 ms", "mtu: 60", 9, "links.1.mtu", "allowed: 576 or more"),
        ("delay: 5 ms", "queue: 7", 9, "links.1.queue", "`packets`"),
        ("delay: 5 ms", "queue: 0 packets", 9, "links.1.queue", "out of range"),
        ("delay: 5 ms", "jitter: 1 ms", 9, "links.1.jitter", "write reorder: allow"),
        ("name: t", "name: a/b", 1, "name", "not a valid name"),
        ("name: t", "name: 7", 1, "name", "expected text, got 7 (write it in quotes)"),
        ("worker1: {", "sw: {", 6, "switches.0", "the name of a host too"),
        ("worker1: {", "all: {", 4, "hosts.all", "not a valid host name"),
        ("worker1: {", "a/b: {", 4, "hosts.a/b", "not a valid host name"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(old: str, new: str, line: int, key: str, words: str) -> None:
    assert old in FULL
    error = refused(FULL.replace(old, new, 1))
    assert words in error.message
    assert (error.file, error.line, error.key) == ("t.yaml", line, key)


def test_a_host_linked_twice() -> None:
    error = refused(FULL + "  - {between: ['w*', sw]}\n")
    assert (error.line, error.key) == (10, "links.2")
    assert error.message == "host 'worker1' is linked twice, already in t.yaml line 9"


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("star: {workers: 200}", "star.workers", "200 workers are out of range; allowed: 1 to 64"),
        ("star: {workers: 0}", "star.workers", "allowed: 1 to 64"),
        ("star: {workers: many}", "star.workers", "expected a number of workers"),
        ("star: {workers: true}", "star.workers", "expected a number of workers"),
        ("star: {worker: 2}", "star.worker", "did you mean 'workers'?"),
        ("star: {}", "star.workers", "is required"),
        ("star: 3", "star", "expected a mapping such as {workers: 3}"),
        ("star: {workers: 2}\nhosts: {}", "hosts", "exclude each other"),
        ("extends: star3\nworkers: 200", "workers", "200 workers"),
        ("workers: 3", "workers", "works with `extends` only"),
        ("extends: sta3", "extends", "did you mean 'star3'?"),
        ("extends: [star3]", "extends", "expected the name or path"),
        ("name: t\nhosts: [server]\nswitches: [sw]\nlinks: []", "hosts", "expected a mapping, got a list"),
        ("name: t", "hosts", "is required"),
    ],
)
def test_shorthands_refused(text: str, key: str, words: str) -> None:
    error = refused(text)
    assert words in error.message
    assert error.key == key


def test_more_than_64_workers_in_full_form() -> None:
    hosts = "".join(f"  w{i}: {{role: worker}}\n" for i in range(65))
    error = refused(f"name: t\nhosts:\n  s: {{role: server}}\n{hosts}switches: [sw]\nlinks: [{{between: ['*', sw]}}]\n")
    assert error.message == "65 workers are out of range; allowed: 1 to 64"


def test_files_that_extend_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("name: b\nextends: a.yaml\n")
    with pytest.raises(SpecError, match="extend each other") as caught:
        load_topology(tmp_path / "a.yaml")
    assert (Path(caught.value.file).name, caught.value.line) == ("b.yaml", 2)

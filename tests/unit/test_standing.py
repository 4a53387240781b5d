"""What the links of a standing lab do: recorded in its state file, changed in the terms of a topology file."""

from __future__ import annotations

import json

import pytest

from netem.lab.standing import Standing, built, changed, with_shapes, words
from netem.links.choose import BackendChoice
from netem.spec import LinkShape, SpecError, load_topology_text

TOPOLOGY = load_topology_text("{star: {workers: 2}, links: [{between: ['*', sw], up: {rate: 1 Gbit, queue: 64 KiB}}]}")
CHOICE = BackendChoice("bpf", "bpf", "asked for")


def test_it_reads_back_from_the_state_file() -> None:
    standing = built(TOPOLOGY, CHOICE)
    assert standing.placed == {f"{host}.{way}" for host in ("server", "worker1", "worker2") for way in ("up", "down")}
    assert Standing.from_json(json.loads(json.dumps(standing.to_json()))) == standing
    plain = built(TOPOLOGY, None)
    assert Standing.from_json(json.loads(json.dumps(plain.to_json()))) == plain
    assert plain.placed == frozenset()


@pytest.mark.parametrize("raw", [{}, {"built": 3}, {"built": {}, "now": {}, "choice": None, "placed": [], "lost": {}}])
def test_what_is_not_a_record_is_refused(raw: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Standing.from_json(raw)


def test_a_change_leaves_what_it_does_not_name() -> None:
    shape = changed(TOPOLOGY.link_of("worker1").up, {"loss": "30%", "rate": "100Mbit"}, "impair")
    assert (shape.loss, shape.rate_bps, shape.queue_bytes) == (0.3, 100_000_000, 65_536)
    assert words(shape) == "rate 100 Mbit, loss 30%, queue 64 KiB"
    shape = changed(shape, {"rate": None, "loss": "0%"}, "impair")
    assert (shape.rate_bps, shape.queue_bytes) == (None, 65_536)
    assert words(LinkShape()) == "as fast as the machine"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "30"}, "impair: loss: 30 has no unit"),
        ({"loss": "300%"}, "out of range"),
        ({"rate": "5 apples"}, "impair: rate: unknown unit 'apples'"),
        ({"losss": "3%"}, "did you mean 'loss'?"),
    ],
)
def test_mistakes_name_the_key(changes: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        changed(LinkShape(), changes, "impair")


def test_the_rules_of_a_topology_hold() -> None:
    shape = changed(LinkShape(), {"jitter": "1 ms"}, "impair")
    with pytest.raises(SpecError, match="jitter without a rate reorders packets"):
        with_shapes(TOPOLOGY, {("worker1", "down"): shape}, "impair")
    new = with_shapes(TOPOLOGY, {("worker1", "down"): changed(shape, {"rate": "1 Gbit"}, "impair")}, "impair")
    assert new.link_of("worker1").down.jitter_s == 0.001
    assert new.link_of("worker2") == TOPOLOGY.link_of("worker2")

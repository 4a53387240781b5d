"""Loss in bursts by the kernel: packet by packet what the simulator predicts, for every seed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from netem.kernel import netns
from netem.links import chain, mask
from netem.links.base import Flow, Key, LinkError, LossRule, Match, Shape
from netem.links.chain import BLOCK, GilbertElliott
from netem.links.fake import FakePort
from netem.links.loss_filter import LossFilter
from tests.kernel.frames import FLOW, HOST, OTHER_HOST, TCP, chunk, frame, run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: run with sudo")

KEY = Key(((4, 14),), (4, 8), (8, 12))
TCP_FLOW = Flow("tcp", dst_ports=(29501, 29501))
FIVES = GilbertElliott.of_bursts(0.3, 5)
CHAINS = (
    FIVES,
    GilbertElliott.of_bursts(0.9, 12),
    GilbertElliott.of_bursts(0.6, 2),  # flips
    GilbertElliott.of_bursts(0.1, 100),
    GilbertElliott(0.02, 0.1, 0.2, 0.95),
)


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    name = f"bc{os.getpid()}"
    netns.create(name)
    yield name
    netns.remove(name)


@pytest.fixture(scope="module")
def module_loss(namespace: str) -> Iterator[LossFilter]:
    made = LossFilter(namespace, "lo")
    made.install(FLOW, KEY, [HOST, OTHER_HOST])
    yield made
    made.close()


@pytest.fixture
def loss(module_loss: LossFilter) -> LossFilter:
    module_loss.set_loss(())
    return module_loss


def predicted(state: int, round_: int, pass_: int, places: int, one: GilbertElliott) -> np.ndarray:
    return chain.lost(chain.key_base(state, (round_, pass_ << 16)), places, chain.limits(one))


@pytest.mark.parametrize("seed", range(20))
def test_equals_the_prediction(loss: LossFilter, seed: int) -> None:
    """In any order of arrival, with repeats, for chains of every kind."""
    one, rng = CHAINS[seed % len(CHAINS)], np.random.default_rng(seed)
    state, round_, pass_ = mask.port_state(seed, "up", 1), int(rng.integers(2**32)), int(rng.integers(2**16))
    loss.set_loss([LossRule(HOST, state, one.mean_ratio, chain=one)])
    sequences = rng.integers(0, 5 * BLOCK, 600)
    fates = run(loss, *(frame(chunk(round_, n, pass_)) for n in sequences.tolist()))
    assert fates == (~predicted(state, round_, pass_, 5 * BLOCK, one))[sequences].tolist()


def test_far_along(loss: LossFilter) -> None:
    """The last places that a sequence number can name; the simulator's reference knows them one by one."""
    loss.set_loss([LossRule(HOST, 1, 0.3, chain=FIVES)])
    places = range(2**32 - 40, 2**32)
    expected = [chain.lost_scalar(chain.key_base(1, (3, 1 << 16)), n, chain.limits(FIVES)) for n in places]
    assert run(loss, *(frame(chunk(3, n)) for n in places)) == [not lost for lost in expected]


def test_mean_burst_length_over_100_000_packets(loss: LossFilter) -> None:
    n = 100_000
    loss.set_loss([LossRule(HOST, mask.port_state(3, "up", 1), 0.3, chain=FIVES)])
    lost = ~np.array(run(loss, *(frame(chunk(8, k)) for k in range(n))))
    edges = np.flatnonzero(np.diff(np.concatenate(([0], lost.astype(np.int8), [0]))))
    assert (edges[1::2] - edges[::2]).mean() == pytest.approx(5, rel=0.05)
    assert lost.mean() == pytest.approx(0.3, abs=0.015)
    (counter,) = [c for c in loss.counters() if c.index == 8]
    assert (counter.seen, counter.dropped) == (n, lost.sum())


def test_rounds_passes_and_senders_have_chains_of_their_own(loss: LossFilter) -> None:
    states = {HOST: mask.port_state(1, "up", 1), OTHER_HOST: mask.port_state(1, "up", 2)}
    loss.set_loss([LossRule(source, state, 0.3, chain=FIVES) for source, state in states.items()])
    seen = set()
    for source, state in states.items():
        for round_, pass_ in ((1, 0), (1, 1), (2, 0)):
            fates = run(loss, *(frame(chunk(round_, n, pass_), source=source) for n in range(200)))
            assert fates == (~predicted(state, round_, pass_, 200, FIVES)).tolist()
            seen.add(tuple(fates))
    assert len(seen) == 6


def test_bernoulli_and_chain_side_by_side(loss: LossFilter) -> None:
    """One sender each; and a rule without a chain after one with a chain decides as before."""
    for rules in ((FIVES, None), (None, FIVES)):
        both = zip((HOST, OTHER_HOST), rules, strict=True)
        loss.set_loss([LossRule(source, 5, 0.3, chain=one) for source, one in both])
        for source, one in zip((HOST, OTHER_HOST), rules, strict=True):
            fates = run(loss, *(frame(chunk(1, n), source=source) for n in range(300)))
            independent = mask.drops(5, [1, np.arange(300), 1 << 16], mask.threshold(0.3))
            assert fates == (~(predicted(5, 1, 1, 300, one) if one else independent)).tolist()


def test_a_chain_may_begin_while_counters_go_on(namespace: str) -> None:
    """The first chain loads another program over the same maps."""
    fresh = LossFilter(namespace, "lo")
    fresh.install(FLOW, KEY, [HOST])
    assert run(fresh, frame(chunk(1, 0))) == [True]
    fresh.set_loss([LossRule(HOST, 1, 0.3, chain=FIVES)])
    run(fresh, *(frame(chunk(1, n)) for n in range(9)))
    (counter,) = fresh.counters()
    assert (counter.seen, counter.dropped) == (10, predicted(1, 1, 1, 9, FIVES).sum())
    fresh.close()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_without_a_key_by_order_of_arrival(namespace: str, seed: int) -> None:
    """A TCP segment does not say what it is: the n-th of a round at the port has the n-th fate."""
    tcp = LossFilter(namespace, "lo")
    tcp.install(TCP_FLOW, None, [HOST, OTHER_HOST])
    state = mask.port_state(seed, "up", 1)
    tcp.set_loss([LossRule(HOST, state, 0.3, chain=FIVES)])
    for round_ in (4, 9):
        tcp.set_label(round_)
        fates = []
        for _ in range(300):
            fates += run(tcp, frame(b"x", proto=TCP, dport=29501))
            assert run(tcp, frame(b"", proto=TCP), frame(b"x", source=OTHER_HOST)) == [True, True]
        expected = chain.lost(chain.arrival_base(state, round_), 300, chain.limits(FIVES))
        assert fates == (~expected).tolist()
    tcp.close()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_base_loss_of_a_link_in_bursts(namespace: str, seed: int) -> None:
    """One chain for the whole port, whoever sends; a packet that a rule has lost does not advance it."""
    state = mask.port_state(seed, "down", 0)
    port = LossFilter(namespace, "lo")
    port.install(FLOW, KEY, [HOST, OTHER_HOST], chain=FIVES, chain_state=state)
    expected = ~chain.lost(state, 600, chain.limits(FIVES))
    mixed = (frame(chunk(1, n), source=(HOST, OTHER_HOST)[n % 2]) for n in range(300))
    assert run(port, *mixed) == expected[:300].tolist()
    port.set_loss([LossRule(HOST, 1, 1.0)])
    assert run(port, *(frame(chunk(1)) for _ in range(10))) == [False] * 10
    port.set_loss(())
    assert run(port, *(frame(b"", proto=TCP) for _ in range(300))) == expected[300:].tolist()
    port.close()


def test_a_rule_with_a_chain_over_a_base_loss_with_one(namespace: str) -> None:
    port = LossFilter(namespace, "lo")
    port.install(FLOW, KEY, [HOST], chain=FIVES, chain_state=77)
    port.set_loss([LossRule(HOST, 1, 0.3, chain=FIVES, first=2, last=2)])
    rule = predicted(1, 2, 1, 400, FIVES)
    base = iter(chain.lost(77, 400, chain.limits(FIVES)))
    expected = [bool(lost or next(base)) for lost in rule]
    assert run(port, *(frame(chunk(2, n)) for n in range(400))) == [not lost for lost in expected]
    port.close()


def test_other_packets_are_lost_at_the_mean(loss: LossFilter) -> None:
    n = 20_000
    loss.set_label(21)
    loss.set_loss([LossRule(HOST, 1, 0.3, match="all", chain=FIVES)])
    loss.program.test_run(frame(b"", proto=TCP), repeat=n)
    (counter,) = [c for c in loss.counters() if (c.kind, c.index) == ("other", 21)]
    assert abs(counter.dropped - 0.3 * n) < 5 * (0.3 * 0.7 * n) ** 0.5


def test_a_chain_that_cannot_be_exact_is_refused(loss: LossFilter) -> None:
    with pytest.raises(LinkError, match="remembers 900 packets"):
        loss.set_loss([LossRule(HOST, 1, 0.1, chain=GilbertElliott.of_bursts(0.1, 1000))])


def test_agrees_with_the_port_in_memory(namespace: str) -> None:
    """Chains, windows and base loss together, packets of every kind."""
    shape = Shape(chain=GilbertElliott.of_bursts(0.05, 3), chain_state=123)
    fake, port = FakePort("p"), LossFilter(namespace, "lo")
    fake.install(shape, FLOW, KEY, [HOST, OTHER_HOST])
    port.install(FLOW, KEY, [HOST, OTHER_HOST], chain=shape.chain, chain_state=shape.chain_state)
    rules = [
        LossRule(HOST, 1, 0.3, first=2, last=3, chain=FIVES),
        LossRule(HOST, 1, 0.9, first=5, last=5),
        LossRule(OTHER_HOST, 2, 0.4, first=1, last=6, chain=CHAINS[4]),
    ]
    fake.set_loss(rules)
    port.set_loss(rules)
    rng = np.random.default_rng(8)
    for n in range(2000):
        source, payload = (HOST, OTHER_HOST)[rng.integers(2)], chunk(int(rng.integers(8)), n // 7)
        assert run(port, frame(payload, source=source)) == [fake.offer(source, payload)]
    kernel = [(c.source, c.index, c.seen, c.dropped, c.kind) for c in port.counters()]
    assert kernel == [(c.source, c.index, c.seen, c.dropped, c.kind) for c in fake.counters()]
    port.close()


def test_a_rule_for_each_of_many_rounds(loss: LossFilter) -> None:
    """All loaded at once; a change replaces them all, also by a single one."""
    rounds = {round_: 0.1 * (round_ % 10) for round_ in range(10, 400, 3)}
    for shift in (0, 1):
        loss.set_loss([LossRule(HOST, 9, ratio, first=r + shift, last=r + shift) for r, ratio in rounds.items()])
        for round_ in range(5, 405):
            ratio = rounds.get(round_ - shift, 0.0)
            expected = mask.drops(9, [round_, np.arange(5), 1 << 16], mask.threshold(ratio))
            assert run(loss, *(frame(chunk(round_, n)) for n in range(5))) == (~expected).tolist()
    loss.set_loss([LossRule(HOST, 9, 1.0, first=5, last=5)])
    assert run(loss, frame(chunk(5)), frame(chunk(19)), frame(chunk(11))) == [False, True, True]
    assert run(loss, frame(chunk(5), source=OTHER_HOST)) == [True]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([(1, 4, "data"), (4, 9, "data")], "both for round 4"),
        ([(1, 1, "data"), (1, 1, "data")], "both for round 1"),
        ([(1, 1, "data"), (2, 2, "all")], "only rules for data packets of different rounds"),
        ([(0, 2**32 - 2, "data"), (2**32 - 1, 2**32 - 1, "data")], "more than 16384 rounds"),
    ],
)
def test_rules_that_would_collide(loss: LossFilter, rules: list[tuple[int, int, Match]], message: str) -> None:
    fake = FakePort("p")
    fake.install(Shape(), FLOW, KEY, [HOST])
    for port in (loss, fake):
        with pytest.raises(LinkError, match=message):
            port.set_loss([LossRule(HOST, 1, 0.5, match, first, last) for first, last, match in rules])

"""The loss program run by the kernel on single frames (BPF_PROG_TEST_RUN): every path through it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from netem.kernel import bpf, bpf_asm, netns
from netem.kernel.errors import KernelError
from netem.links import mask
from netem.links.base import Counter, Flow, Key, LinkError, LossRule, Shape
from netem.links.fake import FakePort
from netem.links.loss_filter import LossFilter
from tests.kernel.frames import (
    FLOW,
    HOST,
    ICMP,
    KEY,
    OTHER_HOST,
    STRANGER,
    TCP,
    chunk,
    frame,
    run,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: run with sudo")


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    name = f"bt{os.getpid()}"
    netns.create(name)
    yield name
    netns.remove(name)


@pytest.fixture
def loss(namespace: str) -> Iterator[LossFilter]:
    made = LossFilter(namespace, "lo")
    made.install(FLOW, KEY, [HOST, OTHER_HOST])
    yield made
    made.close()


@pytest.mark.parametrize("ratio", [0.0, 1e-3, 0.5, 0.9, 1.0])
def test_equals_the_mask(loss: LossFilter, ratio: float) -> None:
    rng = np.random.default_rng(5)
    rounds, sequences, passes = (rng.integers(0, high, 300) for high in (2**32, 2**32, 2**16))
    state = mask.port_state(11, "down", 3)
    loss.set_loss([LossRule(HOST, state, ratio)])
    keys = zip(rounds.tolist(), sequences.tolist(), passes.tolist(), strict=True)
    fates = run(loss, *(frame(chunk(*key)) for key in keys))
    expected = mask.drops(state, [rounds, sequences, passes << 16], mask.threshold(ratio))
    assert fates == (~expected).tolist()
    counters = loss.counters()
    assert [c.index for c in counters] == sorted(rounds.tolist())
    assert sum(c.dropped for c in counters) == expected.sum()


@pytest.mark.parametrize("ranges", [((4, 14),), ((3, 8), (20, 21)), ((1, 2),), ((0, 1), (9, 12), (5, 8))])
def test_any_byte_ranges(namespace: str, ranges: tuple[tuple[int, int], ...]) -> None:
    """Unaligned ranges too, and without an index field: the label takes its place."""
    rng = np.random.default_rng(6)
    loss = LossFilter(namespace, "lo")
    loss.install(FLOW, Key(ranges), [HOST])
    loss.set_label(17)
    loss.set_loss([LossRule(HOST, 99, 0.5, first=1, last=2)])
    payloads = [rng.bytes(24) for _ in range(200)]
    words = [mask.key_words(payload, ranges) or () for payload in payloads]
    expected = [mask.drops_scalar(99, each, mask.threshold(0.5)) for each in words]
    assert run(loss, *map(frame, payloads)) == [not lost for lost in expected]
    assert 60 < sum(expected) < 140
    assert loss.counters() == [Counter(HOST, 17, 200, sum(expected), 200 * (14 + 20 + 8 + 24))]
    loss.close()


def test_window_is_inclusive(loss: LossFilter) -> None:
    loss.set_loss([LossRule(HOST, 1, 1.0, first=40, last=41)])
    assert run(loss, *(frame(chunk(n)) for n in (0, 39, 40, 41, 42, 2**32 - 1))) == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    loss.set_loss([LossRule(HOST, 1, 1.0, first=2**32 - 1)])
    assert run(loss, frame(chunk(2**32 - 2)), frame(chunk(2**32 - 1))) == [True, False]


OTHERS = {
    "port below": frame(chunk(1), dport=29599),
    "port above": frame(chunk(1), dport=29700),
    "tcp on the same port": frame(b"", proto=TCP),
    "icmp": frame(bytes(8), proto=ICMP),
    "no transport header at all": frame(b"", proto=ICMP)[:34],
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_other_packets_are_lost_under_match_all_alone(loss: LossFilter, other: bytes) -> None:
    loss.set_label(3)
    loss.set_loss([LossRule(HOST, 1, 1.0)])
    assert run(loss, other) == [True]
    loss.set_loss([LossRule(HOST, 1, 1.0, match="all", first=100, last=100)])
    assert run(loss, other, frame(chunk(7))) == [False, False]
    others = [c for c in loss.counters() if c.kind == "other"]
    assert others == [Counter(HOST, 3, 2, 1, 2 * len(other), "other")]


def test_foreign_packets_pass_uncounted(loss: LossFilter) -> None:
    loss.set_loss([LossRule(HOST, 1, 1.0, match="all")])
    frames = frame(chunk(1), source=STRANGER), frame(chunk(1), ethertype=0x86DD), frame(chunk(1), ethertype=0x0806)
    assert run(loss, *frames) == [True] * 3
    assert loss.counters() == []
    assert run(loss, frame(chunk(1), source=OTHER_HOST)) == [True]
    assert [c.source for c in loss.counters()] == [OTHER_HOST]


def test_fragments_pass_and_are_reported(loss: LossFilter) -> None:
    loss.set_loss([LossRule(HOST, 1, 1.0, match="all")])
    more_fragments, later, do_not_fragment = 0x2000, 100, 0x4000
    assert run(loss, frame(chunk(1), fragment=more_fragments), frame(chunk(1), fragment=later)) == [True, True]
    assert loss.events()["fragments"] == 2
    assert run(loss, frame(chunk(1), fragment=do_not_fragment)) == [False]


def test_ip_options_move_the_payload(loss: LossFilter) -> None:
    state = mask.port_state(1, "up", 1)
    loss.set_loss([LossRule(HOST, state, 0.5)])
    for options in (bytes([1] * 4), bytes([1] * 40)):
        fates = run(loss, *(frame(chunk(4, n), options=options) for n in range(100)))
        assert fates == (~mask.drops(state, [4, np.arange(100), 1 << 16], mask.threshold(0.5))).tolist()


def test_payload_too_short_for_the_key(loss: LossFilter) -> None:
    """Neither a short frame nor one that padding makes long enough is decided by bytes that are not there."""
    loss.set_loss([LossRule(HOST, 1, 1.0)])
    short, padded = frame(chunk(1)[:13]), frame(chunk(1), udp_bytes=8 + 13)
    assert run(loss, short, padded, frame(chunk(1)[:14])) == [True, True, False]
    assert loss.events()["short"] == 2
    assert {c.kind: c.seen for c in loss.counters()} == {"data": 1, "other": 2}


def test_source_port_window(namespace: str) -> None:
    loss = LossFilter(namespace, "lo")
    loss.install(Flow("tcp", src_ports=(29501, 29501)), None, [HOST])
    loss.set_label(5)
    loss.set_loss([LossRule(HOST, 0, 1.0)])
    frames = (frame(b"x", proto=TCP, sport=port) for port in (29500, 29501, 29502))
    assert run(loss, *frames) == [True, False, True]
    assert {(c.kind, c.index, c.seen, c.dropped) for c in loss.counters()} == {("data", 5, 1, 1), ("other", 5, 2, 0)}
    loss.close()


def test_random_loss_without_a_key_is_binomial(namespace: str) -> None:
    loss = LossFilter(namespace, "lo")
    loss.install(Flow("tcp", dst_ports=(29501, 29501)), None, [HOST])
    n = 20_000
    for ratio in (0.02, 0.9):
        loss.set_label(round(ratio * 100))
        loss.set_loss([LossRule(HOST, 0, ratio)])
        loss.program.test_run(frame(b"x", proto=TCP, dport=29501), repeat=n)
        (counter,) = [c for c in loss.counters() if c.index == round(ratio * 100)]
        assert counter.seen == n
        assert abs(counter.dropped - n * ratio) < 5 * (n * ratio * (1 - ratio)) ** 0.5
    loss.close()


def test_base_loss_hits_everything_of_known_senders(namespace: str) -> None:
    loss = LossFilter(namespace, "lo")
    loss.install(FLOW, KEY, [HOST], base_ratio=1.0)
    frames = frame(chunk(1)), frame(b"", proto=TCP), frame(chunk(1), source=STRANGER)
    assert run(loss, *frames) == [False, False, True]
    loss.set_loss([LossRule(HOST, 1, 0.0, first=5, last=5)])
    assert run(loss, *frames) == [False, False, True]
    loss.close()


def test_full_counter_map_is_reported(namespace: str) -> None:
    """Decisions go on, packets are counted as overflow: the totals still close."""
    loss = LossFilter(namespace, "lo", counter_entries=16)
    loss.install(FLOW, KEY, [HOST])
    state, limit, n = 3, mask.threshold(0.5), 200
    loss.set_loss([LossRule(HOST, state, 0.5)])
    expected = mask.drops(state, [np.arange(n), 0, 1 << 16], limit)
    assert run(loss, *(frame(chunk(k)) for k in range(n))) == (~expected).tolist()
    events, counters = loss.events(), loss.counters()
    assert 0 < len(counters) <= 16
    assert events["overflow_seen"] + sum(c.seen for c in counters) == n
    assert events["overflow_dropped"] + sum(c.dropped for c in counters) == expected.sum()
    loss.close()


def test_agrees_with_the_port_in_memory(loss: LossFilter) -> None:
    fake = FakePort("p")
    fake.install(Shape(), FLOW, KEY, [HOST, OTHER_HOST])
    rules = [LossRule(HOST, 1, 0.7, first=2, last=4), LossRule(OTHER_HOST, 2, 0.4, match="all")]
    for port in (fake, loss):
        port.set_loss(rules)
    rng = np.random.default_rng(8)
    for _ in range(400):
        source, payload = (HOST, OTHER_HOST)[rng.integers(2)], chunk(int(rng.integers(7)), int(rng.integers(50)))
        assert run(loss, frame(payload, source=source)) == [fake.offer(source, payload)]
    kernel = [(c.source, c.index, c.seen, c.dropped, c.kind) for c in loss.counters()]
    assert kernel == [(c.source, c.index, c.seen, c.dropped, c.kind) for c in fake.counters()]


def test_rules_switch_together_and_are_read_back(loss: LossFilter, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a write does not stick, the rules in force are still the old ones, all of them."""
    loss.set_loss([LossRule(HOST, 1, 1.0)])
    lookup = bpf.Map.lookup
    monkeypatch.setattr(bpf.Map, "lookup", lambda self, key: bytes(self.value_bytes))
    with pytest.raises(LinkError, match=r"wrote .*, the kernel holds"):
        loss.set_loss([LossRule(OTHER_HOST, 1, 1.0)])
    monkeypatch.setattr(bpf.Map, "lookup", lookup)
    assert run(loss, frame(chunk(1)), frame(chunk(1), source=OTHER_HOST)) == [False, True]
    loss.set_loss([LossRule(OTHER_HOST, 1, 1.0)])
    assert run(loss, frame(chunk(1)), frame(chunk(1), source=OTHER_HOST)) == [True, False]


def test_no_packet_sees_half_a_change(loss: LossFilter) -> None:
    """Rules for 0..9 and for 20..29 alternate under traffic of 15: a mixture (0..29) would drop it."""
    changes = 0
    done = threading.Event()

    def change() -> None:
        nonlocal changes
        while not done.is_set():
            first = 20 * (changes % 2)
            loss.set_loss([LossRule(source, 1, 1.0, first=first, last=first + 9) for source in (HOST, OTHER_HOST)])
            changes += 1

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(10):
            loss.program.test_run(frame(chunk(15)), repeat=50_000)
    finally:
        done.set()
        thread.join(10)
    assert changes > 10
    assert [(c.seen, c.dropped) for c in loss.counters()] == [(500_000, 0)]


def test_what_cannot_be_is_refused(loss: LossFilter) -> None:
    with pytest.raises(LinkError, match="no such sender"):
        loss.set_loss([LossRule(STRANGER, 1, 0.5)])
    with pytest.raises(LinkError, match="two rules"):
        loss.set_loss([LossRule(HOST, 1, 0.5), LossRule(HOST, 2, 0.5)])
    with pytest.raises(ValueError, match="label"):
        loss.set_label(2**32)
    with pytest.raises(LinkError, match="nothing is installed"):
        LossFilter("none", "lo").set_loss(())
    with pytest.raises(LinkError, match="attach"):
        LossFilter("does-not-exist", "lo").install(FLOW, KEY, [HOST])


def test_map_basics() -> None:
    with bpf.Map("test", bpf.HASH, 4, 8, 10_000, bpf.NO_PREALLOC) as table:
        assert table.lookup(bytes(4)) is None
        expected = {n.to_bytes(4, "big"): n.to_bytes(8, "big") for n in range(9000)}
        for key, value in expected.items():
            table.update(key, value)
        assert dict(table.items()) == expected
        assert dict(table._one_by_one()) == expected
        with pytest.raises(bpf.BpfError, match="File exists"):
            table.update((1).to_bytes(4, "big"), bytes(8), bpf.NOEXIST)
        with pytest.raises(ValueError, match="expected 4"):
            table.lookup(bytes(5))
    with pytest.raises(KernelError) as caught:
        bpf.Map("test", bpf.HASH, 4, 8, 0)
    assert caught.value.code == errno.EINVAL


def test_verifier_speaks_when_a_program_is_refused() -> None:
    text = bpf_asm.Assembler()
    text.load(8, bpf_asm.R0, bpf_asm.R3, 0)  # R3 was never set
    text.exit()
    with pytest.raises(bpf.BpfError, match="R3 !read_ok"):
        bpf.Program("bad", text.assemble())


def test_told_apart_by_destination(namespace: str) -> None:
    """All frames here go to 10.77.0.1: that is whose counters and rules they meet, whoever sent them."""
    loss = LossFilter(namespace, "lo", by="destination")
    loss.install(FLOW, KEY, ["10.77.0.1", HOST])
    loss.set_loss([LossRule("10.77.0.1", 1, 1.0, first=3, last=3), LossRule(HOST, 1, 1.0)])
    frames = [frame(chunk(n), source=source) for n in (2, 3) for source in (HOST, OTHER_HOST, STRANGER)]
    assert run(loss, *frames) == [True] * 3 + [False] * 3
    assert [(c.source, c.index, c.seen, c.dropped) for c in loss.counters()] == [
        ("10.77.0.1", 2, 3, 0),
        ("10.77.0.1", 3, 3, 3),
    ]
    loss.close()

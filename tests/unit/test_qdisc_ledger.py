"""Accounts: counters of bands become counters of senders, injected loss is told from overflow."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.kernel.qdisc import Stats
from netem.links.base import Counter
from netem.links.ledger import Ledger, Part, Reading, Stretch, share, split_drops

SENDER, OTHER = "10.77.0.2", "10.77.0.3"
CLEAN = Stretch(0.0)
BURST = Stretch(0.9, (Part(SENDER, 40),))


def read(seen: int, dropped: int = 0, hits: dict[Part, int] | None = None, band: int = 1) -> Reading:
    """One band, frames of 100 bytes."""
    labelled = {(band, part): count for part, count in (hits or {}).items()}
    return Reading({band: Stats(seen, dropped, 0, 100 * (seen - dropped))}, labelled)


def test_drops_without_loss_are_overflow() -> None:
    assert split_drops(1000, 7, 0.0) == (0, 7)


def test_drops_of_a_total_loss_are_injected() -> None:
    assert split_drops(1000, 1000, 1.0) == (1000, 0)


@pytest.mark.parametrize("ratio", [0.001, 0.02, 0.5, 0.9])
def test_faithful_loss_shows_no_overflow(ratio: float) -> None:
    draw = random.Random(7)
    for _ in range(200):
        dropped = sum(draw.random() < ratio for _ in range(2000))
        assert split_drops(2000, dropped, ratio) == (dropped, 0)


def test_drops_far_above_the_loss_are_overflow() -> None:
    assert split_drops(10_000, 5_900, 0.5, clustering=9.0) == (5_900, 0), "bursts of losses vary more"
    injected, overflow = split_drops(10_000, 9_500, 0.5)
    assert injected + overflow == 9_500
    assert 4_000 < overflow <= 4_500


@given(st.integers(0, 10**6), st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_shares_add_up(total: int, weights: list[int]) -> None:
    parts = share(total, weights)
    if sum(weights):
        assert sum(parts) == total
        assert all(abs(p - total * w / sum(weights)) <= 1 for p, w in zip(parts, weights, strict=True))
    else:
        assert set(parts) == {0}


def test_a_burst_is_the_senders() -> None:
    ledger = Ledger()
    ledger.start(1, CLEAN, read(0), read(0))
    ledger.start(1, BURST, read(0), read(0))
    assert ledger.counters(read(1000, 900)) == [Counter(SENDER, 40, 1000, 900, 100_000)]
    ledger.start(1, CLEAN, read(1000, 900), read(1010, 909))
    assert ledger.counters(read(1010, 909)) == [Counter(SENDER, 40, 1010, 909, 101_000)]
    assert ledger.queue_dropped(read(1010, 909)) == 0


def test_drops_while_the_loss_begins_are_not_overflow() -> None:
    ledger = Ledger()
    ledger.start(1, CLEAN, read(0), read(0))
    ledger.start(1, BURST, read(0), read(20, 18))
    assert ledger.queue_dropped(read(20, 18)) == 0
    assert ledger.counters(read(20, 18)) == [Counter(SENDER, 40, 20, 18, 2_000)]


def test_the_same_state_again_keeps_the_account() -> None:
    ledger = Ledger()
    ledger.start(1, BURST, read(0), read(0))
    ledger.start(1, BURST, read(50, 45), read(50, 45))
    assert ledger.counters(read(100, 90)) == [Counter(SENDER, 40, 100, 90, 10_000)]


def test_the_next_burst_is_counted_apart() -> None:
    ledger = Ledger()
    ledger.start(1, BURST, read(0), read(0))
    ledger.start(1, Stretch(0.9, (Part(SENDER, 90),)), read(100, 90), read(100, 90))
    found = ledger.counters(read(150, 133))
    assert [(c.index, c.seen, c.dropped) for c in found] == [(40, 100, 90), (90, 50, 43)]


def test_overflow_is_not_the_links_loss() -> None:
    ledger = Ledger()
    ledger.start(0, Stretch(0.0, (), "other"), read(0, band=0), read(0, band=0))
    now = read(300, 200, band=0)
    assert ledger.counters(now) == [Counter("*", None, 300, 0, 30_000, "other")]
    assert ledger.queue_dropped(now) == 200


def test_filters_tell_the_senders_of_one_band_apart() -> None:
    parts = (Part(SENDER), Part(OTHER))
    ledger = Ledger()
    start = read(50, 0, {parts[0]: 20, parts[1]: 30}, band=0)
    ledger.start(0, Stretch(0.1, parts, "other"), start, start)
    now = read(1050, 100, {parts[0]: 620, parts[1]: 330}, band=0)
    found = ledger.counters(now)
    assert [(c.source, c.kind, c.seen, c.dropped) for c in found] == [
        ("*", "other", 100, 10),
        (SENDER, "data", 600, 60),
        (OTHER, "data", 300, 30),
    ]


def test_without_hits_a_shared_bands_packets_are_nobodys() -> None:
    parts = (Part(SENDER), Part(OTHER))
    ledger = Ledger()
    ledger.start(1, Stretch(0.5, parts), read(0), read(0))
    assert [(c.source, c.seen, c.dropped) for c in ledger.counters(read(100, 50))] == [("*", 100, 50)]


def test_nothing_seen_is_no_counter() -> None:
    ledger = Ledger()
    ledger.start(1, BURST, read(0), read(0))
    assert ledger.counters(read(0)) == []


def test_bytes_of_a_total_loss_are_unknown() -> None:
    ledger = Ledger()
    ledger.start(1, Stretch(1.0, (Part(SENDER),)), read(0), read(0))
    assert ledger.counters(read(10, 10)) == [Counter(SENDER, None, 10, 10, 0)]


def test_a_packet_that_a_rate_limiter_holds_is_counted_once() -> None:
    """netem counts it as passed and as waiting, see `Stretch.held`; the hits of the filters say how many there were."""
    part = Part(SENDER)
    burst = Stretch(0.5, (part,), held=True)
    ledger = Ledger()
    ledger.start(1, CLEAN, read(0), read(0))
    ledger.start(1, burst, read(0), read(0, 0, {part: 0}))
    ledger.start(1, CLEAN, read(101, 40, {part: 100}), read(101, 40))
    ended = ledger.counters(read(100, 40))
    assert ended == [Counter(SENDER, None, 100, 40, 10_000)], "nor does its leaving count as packets of nobody"
    ledger.start(1, burst, read(101, 40), read(101, 40, {part: 0}))
    assert ledger.counters(read(150, 60, {part: 50})) == [Counter(SENDER, None, 150, 60, 15_000)]


def test_without_a_rate_nothing_is_held() -> None:
    part = Part(SENDER)
    ledger = Ledger()
    ledger.start(1, Stretch(0.5, (part,)), read(0), read(0, 0, {part: 0}))
    assert ledger.counters(read(101, 40, {part: 100}))[0].seen == 101

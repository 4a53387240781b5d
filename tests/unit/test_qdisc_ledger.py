"""Accounts: counters of bands become counters of senders, injected loss is told from overflow."""

from __future__ import annotations

import random

import pytest

from netem.kernel.qdisc import Stats
from netem.links.base import Counter
from netem.links.ledger import Ledger, Stretch, split_drops

SENDER = "10.77.0.2"
CLEAN = Stretch(None, "data", 0.0)
BURST = Stretch(SENDER, "data", 0.9)


def stats(seen: int, dropped: int = 0, byte_count: int | None = None) -> Stats:
    return Stats(seen, dropped, 0, 100 * (seen - dropped) if byte_count is None else byte_count)


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
    injected, overflow = split_drops(10_000, 9_500, 0.5)
    assert injected + overflow == 9_500
    assert 4_000 < overflow <= 4_500


def test_a_burst_is_the_senders() -> None:
    ledger = Ledger()
    ledger.start(1, CLEAN, stats(0), stats(0))
    ledger.start(1, BURST, stats(0), stats(0))
    assert ledger.counters({1: stats(1000, 900)}) == [Counter(SENDER, None, 1000, 900, 100_000)]
    ledger.start(1, CLEAN, stats(1000, 900), stats(1010, 909))
    assert ledger.counters({1: stats(1010, 909)}) == [Counter(SENDER, None, 1010, 909, 101_000)]
    assert ledger.queue_dropped({1: stats(1010, 909)}) == 0


def test_drops_while_the_loss_begins_are_not_overflow() -> None:
    ledger = Ledger()
    ledger.start(1, CLEAN, stats(0), stats(0))
    ledger.start(1, BURST, stats(0), stats(20, 18))
    assert ledger.queue_dropped({1: stats(20, 18)}) == 0
    assert ledger.counters({1: stats(20, 18)}) == [Counter(SENDER, None, 20, 18, 2_000)]


def test_the_same_state_again_keeps_the_account() -> None:
    ledger = Ledger()
    ledger.start(1, BURST, stats(0), stats(0))
    ledger.start(1, BURST, stats(50, 45), stats(50, 45))
    assert ledger.counters({1: stats(100, 90)}) == [Counter(SENDER, None, 100, 90, 10_000)]


def test_overflow_is_not_the_links_loss() -> None:
    ledger = Ledger()
    ledger.start(0, Stretch("*", "other", 0.0), stats(0), stats(0))
    now = {0: stats(300, 200)}
    assert ledger.counters(now) == [Counter("*", None, 300, 0, 30_000, "other")]
    assert ledger.queue_dropped(now) == 200


def test_senders_are_kept_apart_and_sorted() -> None:
    ledger = Ledger()
    ledger.start(2, Stretch("10.77.0.3", "data", 0.5), stats(0), stats(0))
    ledger.start(1, BURST, stats(0), stats(0))
    found = ledger.counters({1: stats(10, 9), 2: stats(20, 10)})
    assert [(c.source, c.seen, c.dropped) for c in found] == [(SENDER, 10, 9), ("10.77.0.3", 20, 10)]


def test_nothing_seen_is_no_counter() -> None:
    ledger = Ledger()
    ledger.start(1, BURST, stats(0), stats(0))
    assert ledger.counters({1: stats(0)}) == []


def test_bytes_of_a_total_loss_are_unknown() -> None:
    ledger = Ledger()
    ledger.start(1, Stretch(SENDER, "data", 1.0), stats(0), stats(0))
    assert ledger.counters({1: stats(10, 10, 0)}) == [Counter(SENDER, None, 10, 10, 0)]

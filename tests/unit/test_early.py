"""How much may be repeated that may still be under way, and what an answer then tells about the path."""

from __future__ import annotations

import numpy as np
import pytest

from dblp.early import lacking, silent


def ones(count: int) -> np.ndarray:
    return np.ones(count, np.int64)


def test_so_many_more_that_few_enough_stay_missing() -> None:
    """100 chunks, one copy each, half of all lost: 50 stay missing; 10 may, or 7.2 with the care that is taken.

    Two more copies of each leave 12.5, and a third copy of 85 chunks 7.2.
    """
    more = lacking(ones(100), 90, 0.5, 1000)
    assert more == pytest.approx(285, abs=3)
    assert lacking(np.full(100, 4), 90, 0.5, 1000) == 0  # 6.25 stay missing


def test_the_last_chunk_is_likely_to_come() -> None:
    more = lacking(ones(1), 1, 0.9, 1000)
    assert 0.01 < 0.9 ** (1 + more) < 0.1


@pytest.mark.parametrize(
    ("loss", "missing", "to_go"),
    [(0.6, 200, 120), (0.6, 300, 300), (0.6, 1500, 900), (0.9, 300, 300), (0.9, 1500, 200)],
)
def test_what_it_asks_for_ends_the_round_in_nine_of_ten(loss: float, missing: int, to_go: int) -> None:
    random = np.random.default_rng(5)
    more = lacking(ones(missing), to_go, loss, 10**6)
    copies = np.bincount(np.arange(missing + more) % missing, minlength=missing)
    ended = np.mean([(random.random(missing) >= loss**copies).sum() >= to_go for _ in range(400)])
    assert 0.85 <= ended <= 0.97


def test_never_more_than_a_round_trip_holds() -> None:
    assert lacking(ones(100), 90, 0.9, 150) == 150


def test_not_where_copies_are_hardly_ever_needed() -> None:
    """Of 900 chunks under way 1 % are lost. To repeat all takes nearly a round trip, and their answers are there."""
    assert lacking(ones(900), 900, 0.01, 1000) == 0
    assert lacking(ones(40), 40, 0.01, 1000) > 0


@pytest.mark.parametrize("loss", [0.0, 1.0])
def test_not_where_nothing_or_everything_is_lost(loss: float) -> None:
    assert lacking(ones(10), 5, loss, 100) == 0


def test_not_where_nothing_is_missing() -> None:
    assert lacking(np.empty(0, np.int64), 1, 0.5, 100) == 0


def test_more_to_go_than_missing_counts_as_all() -> None:
    assert lacking(ones(5), 9, 0.5, 100) == lacking(ones(5), 5, 0.5, 100)


def test_only_single_copies_of_missing_chunks_tell() -> None:
    missing = np.array([True, True, True, False, True])
    received = np.array([True, True, False, True, False])
    # Chunk 0 once, 1 twice, 2 three times, 3 once though it was there.
    assert silent(np.array([0, 1, 1, 2, 2, 2, 3]), missing, received) == (6, 1)
    assert silent(np.empty(0, np.int64), missing, received) == (0, 0)


def test_the_share_of_what_tells_is_not_biased() -> None:
    random, chunks, loss = np.random.default_rng(7), 1000, 0.7
    missing, sent, left_out, came, not_counted = np.ones(chunks, np.bool_), 0, 0, 0, 0
    for _ in range(30):
        answered = random.choice(np.flatnonzero(missing) if missing.any() else np.arange(chunks), 300)
        arrived = answered[random.random(300) >= loss]
        received = ~missing
        received[arrived] = True
        datagrams, new = silent(answered, missing, received)
        sent, left_out, not_counted = sent + 300, left_out + datagrams, not_counted + new
        came += int((missing & received).sum())
        missing = ~received
    assert (came - not_counted) / (sent - left_out) == pytest.approx(1 - loss, abs=0.06)
    assert came / sent < 0.2

"""The repeatable loss mask: reference values, agreement of its forms, statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.links import mask

u32 = st.integers(0, mask.U32)
u64 = st.integers(0, mask.U64)

DROPPED_OF_1000 = 902
FIRST_DELIVERED = [1, 3, 5, 13, 20]


def test_mix_is_splitmix64() -> None:
    # The first outputs of splitmix64 seeded with 1234567, as published with the generator's reference code.
    state, out = 1234567, []
    for _ in range(3):
        out.append(mask.mix(state))
        state = (state + mask.GAMMA) & mask.U64
    assert out == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_constants_of_the_mask_do_not_change() -> None:
    """Results of earlier runs stay comparable only as long as these hold."""
    assert mask.port_state(7, "up", 1) == mask.mix(mask.mix(7) ^ 1)
    assert mask.port_state(7, "down", 3) == mask.mix(mask.mix(7) ^ (1 << 32 | 3))
    state = mask.port_state(7, "up", 2)
    dropped = mask.drops(state, [40, np.arange(1000), 1 << 16], mask.threshold(0.9))
    assert int(dropped.sum()) == DROPPED_OF_1000
    assert [int(n) for n in np.flatnonzero(~dropped)[:5]] == FIRST_DELIVERED


@given(u64, st.lists(u32, min_size=1, max_size=4), st.floats(0, 1))
def test_vectorised_equals_scalar(state: int, words: list[int], ratio: float) -> None:
    limit = mask.threshold(ratio)
    expected = mask.drops_scalar(state, words, limit)
    assert mask.drops(state, words, limit).item() is expected
    arrays = [np.array([word, word ^ 1], dtype=np.uint32) for word in words]
    both = mask.drops(state, arrays, limit)
    assert both.tolist() == [expected, mask.drops_scalar(state, [word ^ 1 for word in words], limit)]


def test_words_broadcast_and_may_be_signed_arrays() -> None:
    rounds, sequences = np.arange(3, dtype=np.int64)[:, None], np.arange(5, dtype=np.int32)[None, :]
    grid = mask.drops(9, [rounds, sequences, 0], mask.threshold(0.5))
    assert grid.shape == (3, 5)
    assert grid[2, 4] == mask.drops_scalar(9, [2, 4, 0], mask.threshold(0.5))


def test_threshold_bounds() -> None:
    assert mask.threshold(0.0) == 0
    assert mask.threshold(1.0) == mask.FULL == 2**32
    assert mask.threshold(0.5) == 2**31
    assert not mask.drops(1, [np.arange(10_000)], 0).any()
    assert mask.drops(1, [np.arange(10_000)], mask.FULL).all()
    for wrong in (-0.1, 1.01, math.nan):
        with pytest.raises(ValueError, match=r"expected 0\.\.1"):
            mask.threshold(wrong)


def test_port_state_refuses_what_it_cannot_hash() -> None:
    for seed, direction, rank in ((-1, "up", 1), (2**64, "up", 1), (1, "both", 1), (1, "up", -1), (1, "up", 2**32)):
        with pytest.raises(ValueError, match="expected"):
            mask.port_state(seed, direction, rank)


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        (((4, 14),), (0x04050607, 0x08090A0B, 0x0C0D0000)),
        (((0, 4),), (0x00010203,)),
        (((3, 5), (8, 9)), (0x03040800,)),
        (((12, 16),), (0x0C0D0E0F,)),
        (((12, 17),), None),
    ],
)
def test_key_words(ranges: tuple[tuple[int, int], ...], expected: tuple[int, ...] | None) -> None:
    assert mask.key_words(bytes(range(16)), ranges) == expected
    assert mask.key_words(memoryview(bytes(range(16))), ranges) == expected


def _dropped(seed: int, direction: str, rank: int, round_: int, n: int = 20_000) -> np.ndarray:
    state = mask.port_state(seed, direction, rank)
    return mask.drops(state, [round_, np.arange(n), 0], mask.threshold(0.6))


def test_rate_is_binomial_for_many_flows_and_rounds() -> None:
    """z of 2,000 (seed, direction, rank, round) is standard normal: mean, spread and no outlier."""
    n, ratio = 3000, 0.9
    z = []
    for seed in range(10):
        for direction in mask.DIRECTIONS:
            for rank in range(1, 11):
                state = mask.port_state(seed, direction, rank)
                rounds = np.arange(10)[:, None]
                dropped = mask.drops(state, [rounds, np.arange(n), 0], mask.threshold(ratio)).sum(axis=1)
                z.extend((dropped - n * ratio) / math.sqrt(n * ratio * (1 - ratio)))
    assert len(z) == 2000
    assert abs(np.mean(z)) < 4 / math.sqrt(len(z))
    assert abs(np.std(z) - 1) < 4 / math.sqrt(2 * len(z))
    assert np.abs(z).max() < 5.5


OTHERS = {
    "seed": (8, "up", 1, 40),
    "direction": (7, "down", 1, 40),
    "rank": (7, "up", 2, 40),
    "round": (7, "up", 1, 41),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_masks_of_different_flows_are_uncorrelated(other: tuple[int, str, int, int]) -> None:
    first, second = _dropped(7, "up", 1, 40), _dropped(*other)
    correlation = np.corrcoef(first, second)[0, 1]
    assert abs(correlation) < 5 / math.sqrt(len(first))


def test_neighbours_and_passes_are_uncorrelated() -> None:
    state, limit, sequence = mask.port_state(7, "up", 1), mask.threshold(0.6), np.arange(20_000)
    first = mask.drops(state, [3, sequence, 0], limit)
    for lag in (1, 2, 4, 8, 64):
        assert abs(np.corrcoef(first[:-lag], first[lag:])[0, 1]) < 5 / math.sqrt(len(first))
    again = mask.drops(state, [3, sequence, 1 << 16], limit)
    assert abs(np.corrcoef(first, again)[0, 1]) < 5 / math.sqrt(len(first))


def test_hash_is_uniform() -> None:
    """chi-squared over 256 bins of the compared bits, by way of thresholds."""
    state, sequence = mask.port_state(3, "up", 5), np.arange(65_536)
    edges = [int(mask.drops(state, [1, sequence, 0], bound << 24).sum()) for bound in range(257)]
    counts = np.diff(edges)
    chi2 = float(((counts - 256) ** 2 / 256).sum())
    assert counts.sum() == 65_536
    assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255)


def test_lower_loss_is_a_subset_of_higher_loss() -> None:
    state, sequence = mask.port_state(1, "up", 1), np.arange(5000)
    low = mask.drops(state, [0, sequence, 0], mask.threshold(0.3))
    high = mask.drops(state, [0, sequence, 0], mask.threshold(0.7))
    assert not (low & ~high).any()

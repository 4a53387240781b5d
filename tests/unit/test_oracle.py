"""The oracle against the table of the paper's cases, brute force and the mask."""

from __future__ import annotations

import math
from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netem.analysis import oracle


def exact_cdf(k: int, n: int, p: Fraction) -> float:
    return float(sum(comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1)))


@pytest.mark.parametrize(("k", "n", "p"), [(0, 10, 0.5), (3, 10, 0.25), (9, 10, 0.9), (200, 400, 0.5), (5, 1000, 0.01)])
def test_binom_cdf_equals_exact_sums(k: int, n: int, p: float) -> None:
    assert oracle.binom_cdf(k, n, p) == pytest.approx(exact_cdf(k, n, Fraction(p)), rel=1e-10)


def test_binom_cdf_at_its_ends() -> None:
    assert oracle.binom_cdf(-1, 5, 0.5) == 0.0
    assert oracle.binom_cdf(5, 5, 0.5) == 1.0
    assert oracle.binom_cdf(3, 5, 0.0) == 1.0
    assert oracle.binom_cdf(3, 5, 1.0) == 0.0


@pytest.mark.parametrize(
    ("tolerance", "loss", "passes"),
    [
        (0.008, 0.6, 10), (0.008, 0.7, 14), (0.008, 0.8, 22), (0.008, 0.9, 46), (0.024, 0.7, 11),
        (0.408, 0.6, 2), (0.408, 0.7, 3), (0.408, 0.9, 9), (0.424, 0.7, 3),
    ],
)  # fmt: skip
def test_mean_passes_of_the_paper_s_cases(tolerance: float, loss: float, passes: int) -> None:
    """11,000 chunks; the formula ceil(ln p / ln loss) is what the paper's ratios come from."""
    found = oracle.passes(11_000, oracle.need(11_000, tolerance), loss)
    assert found is not None
    assert found.mean == pytest.approx(passes, abs=0.51)
    assert math.ceil(math.log(tolerance) / math.log(loss)) == passes


def test_between_two_passes_the_mean_is_not_the_formula() -> None:
    found = oracle.passes(11_000, oracle.need(11_000, 0.408), 0.8)
    assert found is not None
    assert found.mean == pytest.approx(4.63, abs=0.01)
    assert found.interval() == (4, 5)


def test_passes_without_loss_and_without_hope() -> None:
    clean = oracle.passes(100, 100, 0.0)
    assert clean is not None
    assert (clean.mean, clean.std, clean.interval()) == (1.0, 0.0, (1, 1))
    nothing = oracle.passes(100, 0, 0.5)
    assert nothing is not None
    assert nothing.mean == 0.0
    assert oracle.passes(100, 1, 1.0) is None


def test_packets_ratio_of_the_paper_s_tolerances() -> None:
    mlt, dblp = (oracle.Packets(oracle.need(11_000, p), 0.9) for p in (0.008, 0.408))
    assert mlt.mean == pytest.approx(9.92 * 11_000, rel=1e-3)
    assert mlt.mean / dblp.mean == pytest.approx(1.68, abs=0.01)
    assert oracle.Packets(10, 1.0).mean == math.inf
    low, high = mlt.interval()
    assert low < mlt.mean < high


@given(st.integers(1, 5000), st.floats(0, 1))
def test_need_leaves_at_most_the_tolerance_missing(chunks: int, tolerance: float) -> None:
    needed = oracle.need(chunks, tolerance)
    assert 0 <= needed <= chunks
    assert chunks - needed <= tolerance * chunks + 1e-9
    assert needed == 0 or chunks - needed + 1 > tolerance * chunks


def test_simulated_rounds_follow_both_distributions() -> None:
    """400 rounds of 300 chunks at 70 % loss: means within four standard errors."""
    chunks, needed, rounds = 300, oracle.need(300, 0.1), 400
    random = np.random.default_rng(5)
    went = [
        oracle.predict(np.arange(chunks), needed, chunks, lambda sequence, _: random.random(len(sequence)) < 0.7)
        for _ in range(rounds)
    ]
    expected, packets = oracle.passes(chunks, needed, 0.7), oracle.Packets(needed, 0.7)
    assert expected is not None
    error = expected.std / math.sqrt(rounds)
    assert np.mean([one.passes for one in went]) == pytest.approx(expected.mean, abs=4 * error)
    counts = np.array([one.packets_at_need for one in went])
    assert counts.mean() == pytest.approx(packets.mean, abs=4 * packets.std / math.sqrt(rounds))
    assert counts.std() == pytest.approx(packets.std, rel=0.2)


def test_predict_sends_what_is_missing_in_order_and_freezes_at_need() -> None:
    """Chunk 1 is lost once, chunk 0 twice; the third pass would complete all four, three are needed."""
    lost = {(1, 0), (0, 0), (0, 1)}
    calls: list[tuple[list[int], int]] = []

    def drop(sequence: oracle.IntArray, number: int) -> oracle.BoolArray:
        calls.append((sequence.tolist(), number))
        return np.array([(s, number) in lost for s in sequence.tolist()])

    went = oracle.predict(np.array([2, 1, 0, 3]), 3, 4, drop)
    assert calls == [([2, 1, 0, 3], 0), ([1, 0], 1)]
    assert (went.passes, went.packets_at_need, went.completing) == (2, 5, (1, 1))
    assert went.delivered.tolist() == [False, True, True, True]


def test_predict_gives_up_and_needs_nothing() -> None:
    assert oracle.predict(np.arange(4), 0, 4, lambda s, _: np.ones(len(s), np.bool_)).passes == 0
    with pytest.raises(oracle.NeverEnds, match="0 of 2 chunks"):
        oracle.predict(np.arange(4), 2, 4, lambda s, _: np.ones(len(s), np.bool_), max_passes=10)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.floats(0, 0.9), st.floats(0, 0.9), st.integers(0, 2**32 - 1))
def test_a_mask_s_prediction_delivers_exactly_need(chunks: int, tolerance: float, loss: float, seed: int) -> None:
    needed = oracle.need(chunks, tolerance)
    order = np.random.default_rng(seed).permutation(chunks)
    went = oracle.predict(order, needed, chunks, oracle.mask_drop(seed, "up", 1, 3, loss))
    assert int(went.delivered.sum()) == needed
    assert went.packets_at_need >= needed


def test_the_mean_of_rounds_has_a_narrower_interval() -> None:
    one = oracle.passes(500, 496, 0.9)
    assert one is not None
    low, high = oracle.mean_passes_interval([one] * 6, 0.95)
    assert one.interval()[0] < low < one.mean < high < one.interval()[1]


@pytest.mark.parametrize(("chunks", "tolerance"), [(0, 0.1), (5, -0.1), (5, 1.1), (5, math.nan)])
def test_need_refuses_nonsense(chunks: int, tolerance: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        oracle.need(chunks, tolerance)

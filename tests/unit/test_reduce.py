"""The server's arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.collective.reduce import divergence, mean_into, norm
from dblp.dtypes import BFLOAT16, FLOAT16, WireDtype

QUICK = settings(derandomize=True, deadline=None, max_examples=80)


def case(seed: int, workers: int, chunks: int = 7, values: int = 5) -> tuple[list[np.ndarray], list[np.ndarray]]:
    random = np.random.default_rng(seed)
    delivered = [random.random(chunks) < 0.6 for _ in range(workers)]
    gradients = [
        np.where(got[:, None], random.standard_normal((chunks, values)), 0.0).astype(np.float32) for got in delivered
    ]
    return gradients, delivered


@QUICK
@given(st.integers(0, 1000), st.integers(1, 8), st.sampled_from(["all", "delivered"]))
def test_mean_is_over_all_or_over_those_that_delivered(seed: int, workers: int, mode: str) -> None:
    gradients, delivered = case(seed, workers)
    before = [gradient.copy() for gradient in gradients]
    out = np.full((7, 5), np.nan, np.float32)
    mean_into(out, gradients, delivered, mode)
    for chunk in range(7):
        given_by = [g[chunk].astype(np.float64) for g, d in zip(gradients, delivered, strict=True) if d[chunk]]
        count = workers if mode == "all" else max(1, len(given_by))
        expected = sum(given_by, np.zeros(5)) / count
        assert np.allclose(out[chunk], expected, rtol=1e-5, atol=1e-6)
        assert given_by or not out[chunk].any()
    assert all(np.array_equal(a, b) for a, b in zip(before, gradients, strict=True))


def test_sums_run_in_rank_order_in_float32() -> None:
    """1e8 + 1 - 1e8 is 0 in float32, and 1e8 - 1e8 + 1 is 1: the order decides, so it is fixed."""
    everything = [np.ones(1, np.bool_)] * 3
    values = [np.full((1, 1), value, np.float32) for value in (1e8, 1.0, -1e8)]
    out = np.empty((1, 1), np.float32)
    mean_into(out, values, everything, "all")
    assert out[0, 0] == 0.0
    mean_into(out, [values[0], values[2], values[1]], everything, "delivered")
    assert out[0, 0] == np.float32(1.0) / np.float32(3)


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=lambda dtype: dtype.name)
def test_short_formats_are_added_in_float32_and_the_mean_is_rounded_once(dtype: WireDtype) -> None:
    """512 + 1/4 + 1/4: in 16 bits either sum of two would be 512 again."""
    everything = [np.ones(1, np.bool_)] * 3
    values = [np.zeros((1, 1), np.uint16) for _ in range(3)]
    for value, out in zip((512.0, 0.25, 0.25), values, strict=True):
        dtype.encode(np.full((1, 1), value, np.float32), out)
    mean = np.zeros((1, 1), np.uint16)
    mean_into(mean, values, everything, "all", dtype)
    expected = np.zeros((1, 1), np.uint16)
    dtype.encode(np.full((1, 1), np.float32(512.5) / np.float32(3), np.float32), expected)
    assert mean.tolist() == expected.tolist()
    assert norm(mean, dtype) == pytest.approx(512.5 / 3, rel=2.0**-11 if dtype is FLOAT16 else 2.0**-8)


def test_one_worker_is_its_own_mean() -> None:
    gradients, delivered = case(1, 1)
    out = np.empty((7, 5), np.float32)
    mean_into(out, gradients, delivered, "delivered")
    assert np.array_equal(out, gradients[0])


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, (1 << 20) + 3])
def test_norm(size: int) -> None:
    values = np.random.default_rng(1).standard_normal(size, dtype=np.float32)
    assert norm(values) == pytest.approx(float(np.linalg.norm(values.astype(np.float64))), rel=1e-12)
    assert norm(values) == norm(values.copy())


def test_norm_does_not_overflow_and_tells_trouble() -> None:
    assert norm(np.full((2, 2), 3e38, np.float32)) == pytest.approx(6e38, rel=1e-6)
    assert np.isnan(norm(np.array([1.0, np.nan], np.float32)))
    assert norm(np.array([1.0, np.inf], np.float32)) == np.inf


def test_divergence() -> None:
    same = np.arange(4, dtype=np.float32)
    assert divergence([same, same.copy(), same.copy()]) == 0.0
    assert divergence([np.array([3.0]), np.array([5.0])]) == pytest.approx(0.25)
    assert divergence([np.zeros(2), np.zeros(2)]) == 0.0
    assert divergence([np.array([1.0]), np.array([-1.0])]) == 1.0  # a mean of zero: the distance itself

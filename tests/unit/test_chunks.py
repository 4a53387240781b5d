"""Layout, need, send order and bitmaps."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.chunks import Layout, TensorSpec, need, pack_bits, send_order, unpack_bits
from netem.analysis import oracle

QUICK = settings(derandomize=True, deadline=None, max_examples=200)
CHUNKS = st.integers(1, 20_000)
RATIOS = st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 0.008, 0.024, 0.408, 0.424, 0.5, 1.0]))


@pytest.mark.parametrize(
    ("chunks", "tolerance", "needed"),
    [
        (3000, 0.0, 3000),
        (3000, 0.008, 2976),
        (11_000, 0.008, 10_912),
        (11_000, 0.408, 6512),
        (11_000, 0.424, 6336),
        (1000, 0.024, 976),
        (1, 0.408, 1),
        (1, 1.0, 0),
        (3000, 1.0, 0),
        (10, 0.3, 7),  # 0.3 * 10 is a little less than 3 in floating point: the 1e-9 is for that
        (0, 0.5, 0),
    ],
)
def test_need(chunks: int, tolerance: float, needed: int) -> None:
    assert need(chunks, tolerance) == needed


@QUICK
@given(CHUNKS, RATIOS)
def test_need_is_the_least_that_keeps_the_missing_share_within_p(chunks: int, tolerance: float) -> None:
    for threshold in ("integer", "float"):
        needed = need(chunks, tolerance, threshold)
        assert 0 <= needed <= chunks
        slack = Fraction(1, 10**9) if threshold == "integer" else Fraction(0)
        exact = Fraction(tolerance) * chunks + slack
        if threshold == "integer":
            assert chunks - needed <= exact + Fraction(1, 10**9)
            assert chunks - needed + 1 > exact - Fraction(1, 10**9) or needed == 0
        else:
            assert (chunks - needed) / chunks <= tolerance
            assert needed == 0 or (chunks - needed + 1) / chunks > tolerance
    assert need(chunks, tolerance) == oracle.need(chunks, tolerance)
    assert abs(need(chunks, tolerance) - need(chunks, tolerance, "float")) <= 1


@QUICK
@given(CHUNKS, RATIOS, RATIOS)
def test_more_tolerance_never_needs_more(chunks: int, one: float, other: float) -> None:
    for threshold in ("integer", "float"):
        assert need(chunks, min(one, other), threshold) >= need(chunks, max(one, other), threshold)
        assert (need(chunks, 0.0, threshold), need(chunks, 1.0, threshold)) == (chunks, 0)


@pytest.mark.parametrize("tolerance", [-0.1, 1.1, math.nan])
def test_impossible_tolerance_is_refused(tolerance: float) -> None:
    with pytest.raises(ValueError, match=r"0\.\.1"):
        need(10, tolerance)


@QUICK
@given(
    st.sampled_from(["sequential", "rotate", "shuffle"]),
    st.integers(0, 500),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 64),
    st.integers(0, 1),
)
def test_send_order_is_a_permutation_that_repeats(
    kind: str, chunks: int, seed: int, round_: int, rank: int, direction: int
) -> None:
    order = send_order(kind, chunks, seed=seed, round_=round_, rank=rank, direction=direction)
    assert sorted(order.tolist()) == list(range(chunks))
    assert order.dtype == np.int64
    again = send_order(kind, chunks, seed=seed, round_=round_, rank=rank, direction=direction)
    assert np.array_equal(order, again)
    if kind == "rotate" and chunks:
        assert np.array_equal(np.roll(order, int(order[0])), np.arange(chunks))
    if kind == "sequential":
        assert np.array_equal(order, np.arange(chunks))


def test_workers_rounds_seeds_and_directions_have_orders_of_their_own() -> None:
    base = {"seed": 7, "round_": 3, "rank": 1, "direction": 0}
    for kind in ("rotate", "shuffle"):
        orders = [send_order(kind, 10_000, **base)]
        orders += [send_order(kind, 10_000, **{**base, key: value + 1}) for key, value in base.items()]
        assert len({order.tobytes() for order in orders}) == 5
    with pytest.raises(ValueError, match="unknown send order 'random'"):
        send_order("random", 3, **base)


@QUICK
@given(st.lists(st.booleans(), max_size=70))
def test_bitmap_survives_the_round_trip(received: list[bool]) -> None:
    mask = np.array(received, np.bool_)
    bits = pack_bits(mask)
    assert len(bits) == -(-len(mask) // 8)
    assert np.array_equal(unpack_bits(bits, len(mask)), mask)
    for wrong in (bits + b"\0", bits[:-1] if bits else b"\0\0"):
        with pytest.raises(ValueError, match="bitmap of"):
            unpack_bits(wrong, len(mask))


def test_bitmap_has_chunk_0_in_the_highest_bit() -> None:
    mask = np.zeros(9, np.bool_)
    mask[[0, 8]] = True
    assert pack_bits(mask) == b"\x80\x80"


@QUICK
@given(st.integers(1, 5000), st.integers(1, 400))
def test_layout_covers_every_value_once(values: int, chunk_values: int) -> None:
    layout = Layout(values, chunk_values)
    assert (layout.chunks - 1) * chunk_values + layout.last_values == values
    assert 1 <= layout.last_values <= chunk_values
    matrix = layout.matrix()
    assert matrix.shape == (layout.chunks, chunk_values)
    assert matrix.dtype == np.float32
    assert not matrix.any()


TENSORS = [
    TensorSpec("conv.weight", (10, 10)),
    TensorSpec("conv.bias", (10,)),
    TensorSpec("empty.bias", (0, 3)),
    TensorSpec("fc.weight", (90,)),
    TensorSpec("scale", ()),
]


@pytest.mark.parametrize(
    ("patterns", "chunks"),
    [
        (["*.bias"], [10]),
        (["fc.*"], list(range(11, 20))),
        (["conv.weight"], list(range(10))),
        (["scale"], [20]),
        (["*"], list(range(21))),
        (["conv.bias", "scale"], [10, 20]),
        (["Conv.bias"], None),
        (["empty.bias"], None),
        ([], None),
    ],
)
def test_chunks_of_tensors_that_must_arrive(patterns: list[str], chunks: list[int] | None) -> None:
    layout = Layout(sum(tensor.size for tensor in TENSORS), 10)
    required = layout.required(TENSORS, patterns)
    assert (None if required is None else np.flatnonzero(required).tolist()) == chunks


def test_chunk_that_two_tensors_share_counts_for_both() -> None:
    required = Layout(30, 10).required([TensorSpec("a", (15,)), TensorSpec("b", (15,))], ["b"])
    assert required is not None
    assert required.tolist() == [False, True, True]

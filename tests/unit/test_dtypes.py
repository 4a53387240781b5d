"""Number formats on the wire: every bit pattern, every tie, and what has no place in 16 bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.chunks import Layout
from dblp.dtypes import BFLOAT16, BLOCK_VALUES, DTYPES, FLOAT16, FLOAT32, WireDtype, blocks

QUICK = settings(derandomize=True, deadline=None, max_examples=300)
SHORT = [FLOAT16, BFLOAT16]
PATTERNS = np.arange(1 << 16, dtype=np.uint16)


def encoded(dtype: WireDtype, values: np.ndarray) -> tuple[np.ndarray, int]:
    values = np.asarray(values, np.float32)
    out = np.full(values.shape, 0x5555, dtype.storage)
    return out, dtype.encode(values, out)


def exactly(dtype: WireDtype) -> np.ndarray:
    """float64 values of all finite patterns of the format with sign 0, in order, from its definition alone."""
    exponent_bits, fraction_bits = (5, 10) if dtype is FLOAT16 else (8, 7)
    exponent, fraction = np.divmod(np.arange(((1 << exponent_bits) - 1) << fraction_bits), 1 << fraction_bits)
    bias = (1 << exponent_bits - 1) - 1
    unit = np.ldexp(1.0, np.maximum(exponent, 1) - bias - fraction_bits)
    values: np.ndarray = (fraction + ((exponent > 0) << fraction_bits)) * unit
    return values


def test_the_names_are_those_of_numpy_and_torch_and_of_the_profile() -> None:
    assert list(DTYPES) == ["float32", "float16", "bfloat16"]
    assert [dtype.value_bytes for dtype in DTYPES.values()] == [4, 2, 2]


# value, float16, bfloat16 (bits); computed by hand from the formats' definitions
TABLE = [
    (0.0, 0x0000, 0x0000),
    (-0.0, 0x8000, 0x8000),
    (1.0, 0x3C00, 0x3F80),
    (-2.0, 0xC000, 0xC000),
    (1 + 2**-11, 0x3C00, 0x3F80),  # float16: a tie, to even: down
    (1 + 3 * 2**-11, 0x3C02, 0x3F80),  # a tie, to even: up
    (1 + 2**-11 + 2**-23, 0x3C01, 0x3F80),  # just above the tie
    (1 + 2**-8, 0x3C04, 0x3F80),  # bfloat16: a tie, down
    (1 + 3 * 2**-8, 0x3C0C, 0x3F82),  # a tie, up
    (1 + 2**-8 + 2**-23, 0x3C04, 0x3F81),
    (2 - 2**-23, 0x4000, 0x4000),  # rounds into the next exponent
    (2**-14, 0x0400, 0x3880),  # the least normal float16
    (2**-14 - 2**-25, 0x0400, 0x3880),  # a tie between the largest subnormal and it
    (2**-24, 0x0001, 0x3380),  # the least subnormal float16
    (2**-25, 0x0000, 0x3300),  # a tie between 0 and it
    (2**-25 + 2**-48, 0x0001, 0x3300),
    (-(2**-26), 0x8000, 0xB280),
    (2**-149, 0x0000, 0x0000),  # the least subnormal float32
    (2**-133, 0x0000, 0x0001),  # the least subnormal bfloat16
    (65504.0, 0x7BFF, 0x4780),
    (65519.0, 0x7BFF, 0x4780),
    (np.inf, 0x7C00, 0x7F80),
    (-np.inf, 0xFC00, 0xFF80),
]


@pytest.mark.parametrize(("value", "half", "brain"), TABLE)
def test_known_values(value: float, half: int, brain: int) -> None:
    for dtype, bits in ((FLOAT16, half), (BFLOAT16, brain)):
        out, saturated = encoded(dtype, [value])
        assert hex(out[0]) == hex(bits), dtype.name
        assert saturated == 0


@pytest.mark.parametrize(
    ("dtype", "value", "kept"),
    [
        (FLOAT16, 65520.0, 65504.0),  # IEEE 754 would round it to infinity
        (FLOAT16, -1e30, -65504.0),
        (BFLOAT16, 3.4e38, 3.3895313892515355e38),
    ],
)
def test_finite_numbers_beyond_the_largest_become_it_and_are_counted(
    dtype: WireDtype, value: float, kept: float
) -> None:
    out, saturated = encoded(dtype, [1.0, value, np.inf, value, np.nan])
    assert saturated == 2
    decoded = dtype.decode(out)
    assert decoded[[0, 1, 2, 3]].tolist() == [1.0, np.float32(kept), np.inf, np.float32(kept)]
    assert np.isnan(decoded[4])


@pytest.mark.parametrize("dtype", SHORT, ids=lambda dtype: dtype.name)
def test_every_pattern_has_its_value_and_survives(dtype: WireDtype) -> None:
    values = exactly(dtype)
    decoded = dtype.decode(PATTERNS)
    assert np.array_equal(decoded[: len(values)].astype(np.float64), values)
    assert np.array_equal(decoded[1 << 15 :][: len(values)].astype(np.float64), -values)
    again, saturated = encoded(dtype, decoded)
    nan = np.isnan(decoded)
    assert np.count_nonzero(nan) == 2 * ((1 << (10 if dtype is FLOAT16 else 7)) - 1)
    assert np.array_equal(again[~nan], PATTERNS[~nan])
    assert np.isnan(dtype.decode(again[nan])).all()
    assert saturated == 0


@pytest.mark.parametrize("dtype", SHORT, ids=lambda dtype: dtype.name)
def test_every_tie_goes_to_the_even_neighbour_and_what_is_beside_it_to_the_nearer(dtype: WireDtype) -> None:
    values = exactly(dtype)
    ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    assert np.array_equal(ties.astype(np.float64), (values[1:] + values[:-1]) / 2)  # float32 has all of them
    below, number = np.nextafter(ties, np.float32(0.0)), np.arange(len(ties), dtype=np.uint16)
    above = np.nextafter(ties, np.float32(np.inf))
    for sign, bit in ((1, 0), (-1, 1 << 15)):
        assert np.array_equal(encoded(dtype, sign * ties)[0], (number + (number & 1)) | bit)
        assert np.array_equal(encoded(dtype, sign * below)[0], number | bit)
        assert np.array_equal(encoded(dtype, sign * above)[0], (number + 1) | bit)


def test_nan_whose_upper_half_is_that_of_an_infinity_stays_nan() -> None:
    values = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    for dtype in SHORT:
        assert np.isnan(dtype.decode(encoded(dtype, values)[0])).all(), dtype.name


@QUICK
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
def test_rounding_is_within_half_a_unit_and_odd(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    for dtype, least, digits in ((FLOAT16, 2.0**-24, 11), (BFLOAT16, 2.0**-133, 8)):
        out, saturated = encoded(dtype, values)
        got, true = dtype.decode(out).astype(np.float64), values.astype(np.float64)
        finite = np.isfinite(true)
        inside = finite & (np.abs(true) <= dtype.decode(np.array([0x7BFF if dtype is FLOAT16 else 0x7F7F], np.uint16)))
        error = np.abs(got[inside] - true[inside])
        assert (error <= np.maximum(np.abs(true[inside]) * 2.0**-digits, least / 2)).all()
        assert np.array_equal(got[~finite], true[~finite])
        assert saturated <= np.count_nonzero(finite & ~inside)
        assert np.array_equal(encoded(dtype, -values)[0] ^ 0x8000, out)


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("size", [1, 728, 3 * BLOCK_VALUES + 5])
def test_a_gradient_goes_to_its_chunks_and_back(dtype: WireDtype, size: int) -> None:
    """Also into chunks that do not lie contiguously, as in packets; what lies behind the last value stays zero."""
    flat = np.random.default_rng(size).standard_normal(size, dtype=np.float32)
    flat = dtype.decode(encoded(dtype, flat)[0])  # representable: nothing may be lost
    layout = Layout(size, 728 if dtype.value_bytes == 2 else 364, dtype)
    assert layout.chunk_bytes == 1456
    assert layout.last_bytes == layout.last_values * dtype.value_bytes
    packets = np.zeros((layout.chunks, layout.chunk_values + 8), dtype.storage)
    assert layout.spread(flat, packets[:, 8:]) == 0
    assert not packets[:, :8].any()
    assert not packets[-1, 8 + layout.last_values :].any()
    again = np.full(size, np.nan, np.float32)
    layout.collect(np.ascontiguousarray(packets[:, 8:]), again)
    assert np.array_equal(again, flat)


def test_blocks_cover_every_row_once() -> None:
    for rows, row_values in ((0, 5), (1, 10**6), (100, 364), (3 * BLOCK_VALUES, 1)):
        covered = [row for part in blocks(rows, row_values) for row in range(part.start, part.stop)]
        assert covered == list(range(rows))


def test_float32_is_not_rounded() -> None:
    values = np.array([1e-40, 1 + 2**-23, 3e38, np.inf], np.float32)
    out, saturated = encoded(FLOAT32, values)
    assert np.array_equal(out, values)
    assert saturated == 0

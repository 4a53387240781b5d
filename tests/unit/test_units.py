"""Quantities: text to number, number to text, and what is refused with which sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.spec import units


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_ratio, "90%", 0.9),
        (units.parse_ratio, " 40.8 % ", 0.408),
        (units.parse_ratio, "0%", 0.0),
        (units.parse_ratio, "100%", 1.0),
        (units.parse_time_s, "10 ms", 0.01),
        (units.parse_time_s, "10ms", 0.01),
        (units.parse_time_s, "250 us", 250e-6),
        (units.parse_time_s, "250 \u00b5s", 250e-6),
        (units.parse_time_s, "250 \u03bcs", 250e-6),
        (units.parse_time_s, "5 ns", 5e-9),
        (units.parse_time_s, "1.5 min", 90.0),
        (units.parse_time_s, "1 h", 3600.0),
        (units.parse_rate_bps, "1 Gbit", 10**9),
        (units.parse_rate_bps, "2.5 Gbit/s", 2_500_000_000),
        (units.parse_rate_bps, "100 kbit", 100_000),
        (units.parse_size_bytes, "64 KiB", 65_536),
        (units.parse_size_bytes, "64 kB", 64_000),
        (units.parse_size_bytes, "96 B", 96),
        (units.parse_size_bytes, "0.5 KiB", 512),
    ],
)
def test_quantities_as_people_write_them(parse, text, value) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "value", "words"),
    [
        (units.parse_ratio, 0.9, ["0.9 has no unit", "allowed: %", "90%"]),
        (units.parse_ratio, "90", ["90 has no unit"]),
        (units.parse_ratio, "150%", ["150% is out of range", "0% to 100%"]),
        (units.parse_ratio, "100.001%", ["out of range"]),
        (units.parse_ratio, "-1%", ["-1% is negative"]),
        (units.parse_time_s, 5, ["5 has no unit", "ns, us,", "ms, s, min, h"]),
        (units.parse_time_s, "5 m", ["unknown unit 'm'", "allowed: ns"]),
        (units.parse_time_s, "5 ms ms", ["unknown unit"]),
        (units.parse_time_s, "-5 ms", ["negative"]),
        (units.parse_time_s, "nan s", ["'nan s' is not a time"]),
        (units.parse_time_s, float("inf"), ["not a time"]),
        (units.parse_time_s, True, ["got true"]),
        (units.parse_time_s, None, ["got nothing"]),
        (units.parse_time_s, ["5 ms"], ["got a list"]),
        (units.parse_time_s, "", ["'' is not a time"]),
        (units.parse_ratio, "\u0661%", ["is not a percentage"]),
        (units.parse_rate_bps, "1 GB", ["unknown unit 'GB'", "Gbit"]),
        (units.parse_rate_bps, "0 bit", ["above 0"]),
        (units.parse_rate_bps, "0.5 bit", ["whole number of bits per second"]),
        (units.parse_size_bytes, "64", ["64 has no unit", "KiB"]),
        (units.parse_size_bytes, "0.3 B", ["whole number of bytes"]),
    ],
)
def test_refused_with_what_is_allowed(parse, value, words) -> None:
    with pytest.raises(units.UnitError) as caught:
        parse(value)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (units.format_ratio, 0.408, "40.8%"),
        (units.format_ratio, 0.0, "0%"),
        (units.format_ratio, 1.0, "100%"),
        (units.format_time, 0.0, "0 s"),
        (units.format_time, 0.01, "10 ms"),
        (units.format_time, 90.0, "90 s"),
        (units.format_time, 2.5e-7, "250 ns"),
        (units.format_rate, 10**9, "1 Gbit"),
        (units.format_rate, 1_234_567, "1.234567 Mbit"),
        (units.format_size, 65_536, "64 KiB"),
        (units.format_size, 1500, "1500 B"),
    ],
)
def test_formatted_in_the_unit_a_person_would_choose(form, value, text) -> None:
    assert form(value) == text


@given(st.floats(0, 1, allow_nan=False))
def test_every_ratio_survives_text(ratio: float) -> None:
    assert units.parse_ratio(units.format_ratio(ratio)) == ratio


@given(st.floats(0, 86_400, allow_nan=False))
def test_every_time_survives_text(time_s: float) -> None:
    assert units.parse_time_s(units.format_time(time_s)) == time_s


@given(st.integers(1, 10**13), st.integers(0, 2**40))
def test_every_rate_and_size_survives_text(rate_bps: int, size_bytes: int) -> None:
    assert units.parse_rate_bps(units.format_rate(rate_bps)) == rate_bps
    assert units.parse_size_bytes(units.format_size(size_bytes)) == size_bytes

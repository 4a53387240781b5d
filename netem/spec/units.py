"""Quantities as people write them: `90%`, `10 ms`, `1 Gbit`, `64 KiB`, and back to text without loss.

Every parser takes whatever the file contained and raises UnitError, a sentence that says what is allowed, for a missing
unit, an unknown unit or a value out of range. Arithmetic is decimal, so that "10 ms" is exactly 0.01 and formatting
and parsing again gives the same number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType

_TEXT = re.compile(r"\s*(?P<number>[+-]?(?:\d+\.?\d*|\.\d+))\s*(?P<unit>[^\d\s.].*?)?\s*", re.ASCII)


class UnitError(ValueError):
    """A quantity that cannot be understood or is out of range; the message says what is allowed."""


@dataclass(frozen=True)
class Quantity:
    """One kind of quantity: its units in terms of the base unit, and an example for messages."""

    what: str
    units: Mapping[str, Decimal]
    example: str

    def parse(self, value: object) -> Decimal:
        """The value in the base unit, zero or more. Raises UnitError."""
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise UnitError(f"expected {self.what} such as {self.example}, got {_kind(value)}")
        match = _TEXT.fullmatch(str(value))
        if match is None:
            raise UnitError(f"{str(value)!r} is not {self.what}; write it like {self.example}")
        number, unit = Decimal(match["number"]), match["unit"]
        if unit is None:
            raise UnitError(f"{value} has no unit; allowed: {', '.join(self.units)} (write it like {self.example})")
        if unit not in self.units:
            raise UnitError(f"unknown unit {unit!r} in {value!r}; allowed: {', '.join(self.units)}")
        if number < 0:
            raise UnitError(f"{value} is negative; {self.what} is 0 or more")
        return number * self.units[unit]

    def format(self, value: Decimal, units: tuple[str, ...]) -> str:
        """Text in the first of `units` (large to small) of which there is at least one; exact."""
        for unit in units:
            if value >= self.units[unit]:
                break
        else:
            unit = units[-1] if value else units[0]
        number = value / self.units[unit]
        return f"{_plain(number)} {unit}"


def _units(units: Mapping[str, str]) -> Mapping[str, Decimal]:
    return MappingProxyType({name: Decimal(size) for name, size in units.items()})


TIME = Quantity(
    "a time",
    # Both signs that look like a micro: U+00B5 (keyboards) and U+03BC (Greek letter).
    _units(
        {
            "ns": "1e-9",
            "us": "1e-6",
            "\u00b5s": "1e-6",
            "\u03bcs": "1e-6",
            "ms": "1e-3",
            "s": "1",
            "min": "60",
            "h": "3600",
        }
    ),
    "10 ms",
)
RATE = Quantity(
    "a rate",
    _units(
        {
            f"{prefix}bit{suffix}": size
            for suffix in ("", "/s")
            for prefix, size in (("", "1"), ("k", "1e3"), ("M", "1e6"), ("G", "1e9"), ("T", "1e12"))
        }
    ),
    "1 Gbit",
)
SIZE = Quantity(
    "a size",
    _units({"B": "1", "kB": "1e3", "MB": "1e6", "GB": "1e9", "KiB": "1024", "MiB": "1048576", "GiB": "1073741824"}),
    "64 KiB",
)
RATIO = Quantity("a percentage from 0% to 100%", _units({"%": "0.01"}), "90%")


def parse_ratio(value: object) -> float:
    """`90%` -> 0.9. The result is in 0..1."""
    ratio = RATIO.parse(value)
    if ratio > 1:
        raise UnitError(f"{value} is out of range; allowed: 0% to 100%")
    return float(ratio)


def parse_time_s(value: object) -> float:
    """`10 ms` -> 0.01 seconds."""
    return float(TIME.parse(value))


def parse_rate_bps(value: object) -> int:
    """`1 Gbit` -> 1000000000 bits per second, above 0."""
    rate = _whole(RATE.parse(value), value, "bits per second")
    if rate == 0:
        raise UnitError(f"{value}: a rate is above 0; leave the key out for a link without a limit")
    return rate


def parse_size_bytes(value: object) -> int:
    """`64 KiB` -> 65536 bytes."""
    return _whole(SIZE.parse(value), value, "bytes")


def format_ratio(ratio: float) -> str:
    return f"{_plain(_exact(ratio) * 100)}%"


def format_time(time_s: float) -> str:
    return TIME.format(_exact(time_s), ("s", "ms", "us", "ns"))


def format_rate(rate_bps: int) -> str:
    return RATE.format(Decimal(rate_bps), ("Gbit", "Mbit", "kbit", "bit"))


def format_size(size_bytes: int) -> str:
    """In the largest binary unit that gives a whole number."""
    for unit in ("GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % int(SIZE.units[unit]) == 0:
            return f"{size_bytes // int(SIZE.units[unit])} {unit}"
    return f"{size_bytes} B"


def _whole(amount: Decimal, value: object, unit: str) -> int:
    if amount != amount.to_integral_value():
        raise UnitError(f"{value} is not a whole number of {unit}")
    return int(amount)


def _exact(number: float) -> Decimal:
    """The shortest decimal that reads back as this float."""
    return Decimal(repr(float(number)))


def _plain(number: Decimal) -> str:
    """Without exponent and trailing zeros: 0.8, 40, 1200."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "a mapping" if isinstance(value, Mapping) else "a list"

"""Ranges of iterations or epochs as a file writes them: `7`, `0..14`, or a list of these."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from netem.spec.fields import refuse, shown

Ranges = tuple[tuple[int, int], ...]
"""Inclusive (first, last) pairs, in order and without overlap."""


def read_ranges(value: Any, *path: str, what: str = "iteration") -> Ranges:
    """`0..14`, `7`, or a list of these. Raises an error of a validator, at `path`."""
    entries = value if isinstance(value, list | tuple) else (value,)
    ranges = sorted(_read_range(entry, path, what) for entry in entries)
    for before, after in pairwise(ranges):
        if after[0] <= before[1]:
            raise refuse(f"the ranges {range_text(before)} and {range_text(after)} overlap", *path)
    return tuple(ranges)


def _read_range(entry: Any, path: tuple[str, ...], what: str) -> tuple[int, int]:
    first, dots, last = str(entry).partition("..")
    ends = (first, last if dots else first)
    if isinstance(entry, bool) or not all(end.strip().isascii() and end.strip().isdigit() for end in ends):
        raise refuse(f"{shown(entry)} is not a range of {what}s; write 0..14 (both included), 30, or a list", *path)
    if int(ends[0]) > int(ends[1]):
        raise refuse(f"{entry}: the first {what} of a range is not after the last", *path)
    return int(ends[0]), int(ends[1])


def range_text(ends: tuple[int, int]) -> str:
    """`3..5`, as a file has it; also of a single one, so that it reads back as text."""
    return f"{ends[0]}..{ends[1]}"


def ranges_words(ranges: Ranges) -> str:
    """For people: `3..5, 9`."""
    return ", ".join(range_text(ends) if ends[0] != ends[1] else str(ends[0]) for ends in ranges)

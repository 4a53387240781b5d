"""Trace files: CSV with a header, `time_s` and any of `rate_bps`, `delay_s`, `loss` (a ratio 0..1), a row a change.

A row holds until the next one's time; an empty cell leaves that property as the topology has it.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from netem.spec.fields import did_you_mean
from netem.spec.units import format_rate, format_ratio, format_time

COLUMNS = ("time_s", "rate_bps", "delay_s", "loss")
MAX_ROWS = 10_000


class TraceError(ValueError):
    """A trace file that is not one; the message names its line."""


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The rows as a scenario writes them: `{at: 0.5 s, rate: 1 Gbit}`. Raises TraceError."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise TraceError(f"{path}: cannot be read: {reason}") from error
    if lines and all(line.strip().isdigit() for line in lines[:10] if line.strip()):
        raise TraceError(
            f"{path}: looks like a packet delivery trace (a millisecond a line, as of Mahimahi), which is not "
            f"supported; write a CSV file with the columns time_s and rate_bps"
        )
    _check_header(path, next(csv.reader(lines[:1]), []))
    rows = [(number, row) for number, row in enumerate(csv.DictReader(lines), 2) if any(row.values())]
    if not rows:
        raise TraceError(f"{path}: has no rows")
    if len(rows) > MAX_ROWS:
        raise TraceError(f"{path}: {len(rows)} rows, at most {MAX_ROWS}")
    return [_row(f"{path}:{number}", row) for number, row in rows]


def _check_header(path: Path, header: list[str]) -> None:
    names = [name.strip() for name in header]
    for name in names:
        if name not in COLUMNS:
            guess = did_you_mean(name, COLUMNS)
            raise TraceError(f"{path}:1: unknown column {name!r}{guess} (allowed: {', '.join(COLUMNS)})")
    if "time_s" not in names or len(names) < 2:
        raise TraceError(f"{path}:1: expected the column time_s and at least one of {', '.join(COLUMNS[1:])}")


def _row(place: str, row: dict[str, Any]) -> dict[str, Any]:
    write = {"rate_bps": lambda value: format_rate(round(value)), "delay_s": format_time, "loss": format_ratio}
    numbers = {name.strip(): _number(place, name.strip(), text) for name, text in row.items() if text and name}
    if "time_s" not in numbers:
        raise TraceError(f"{place}: time_s is missing")
    found = {name.partition("_")[0]: write[name](value) for name, value in numbers.items() if name != "time_s"}
    return {"at": format_time(numbers["time_s"]), **found}


def _number(place: str, name: str, text: Any) -> float:
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = math.nan
    high = 1.0 if name == "loss" else math.inf
    if not 0.0 <= value <= high or math.isinf(value):
        raise TraceError(f"{place}: {name} {text!r}: expected a number from 0{' to 1' if name == 'loss' else ' on'}")
    if name == "rate_bps" and round(value) == 0:
        raise TraceError(f"{place}: rate_bps {text!r}: a rate is above 0; a link without any is loss 1")
    return value

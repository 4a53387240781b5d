"""The table for people: a line for each setting, more where several things were measured (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from netem.probing.judges import Measure, Unit
from netem.probing.measure import Row, Table

WIDTHS = (37, 17, 12, 12, 23)
HEAD = ("setting", "measured", "asked", "achieved", "not refuted")
_SCALE: dict[Unit, tuple[float, str]] = {
    "ratio": (100, " %"),
    "packets": (1, ""),
    "s": (1000, " ms"),
    "bps": (1e-6, " Mbit/s"),
}
PREDICTED = "unlike predicted"


def head() -> str:
    return _line(HEAD)


def lines(row: Row) -> Iterator[tuple[str, str]]:
    """(text, verdict in words) of each line; the words are empty but on the first and where a measure failed."""
    if row.verdict == "elsewhere":
        yield row.setting.ljust(WIDTHS[0]), f"only with {', '.join(row.backends)}"
        return
    name = row.setting
    for number, measure in enumerate(shown(row)):
        low, high = (value(each, measure.unit, bare=True) for each in (measure.low, measure.high))
        interval = "exact" if measure.low == measure.high else f"{low} .. {high}"
        cells = (value(measure.requested, measure.unit), value(measure.achieved, measure.unit), interval)
        words = _words(row) if number == 0 else "" if measure.ok else "beside"
        note = f"  {measure.note}" if measure.note else ""
        yield _line((name, measure.what, *cells)), (words + note).strip()
        name = ""


def shown(row: Row) -> list[Measure]:
    """What is not as it should be, and of the rest all but the noughts that are checked beside."""
    return [
        measure
        for number, measure in enumerate(row.measures)
        if number == 0 or not measure.ok or (measure.requested and measure.what != PREDICTED)
    ]


def _words(row: Row) -> str:
    if row.verdict == "held" and any(each.what == PREDICTED for each in row.measures):
        return "ok, every packet as predicted"
    return {"held": "ok", "failed": "FAILED"}.get(row.verdict, row.verdict)


def value(number: float, unit: Unit, *, bare: bool = False) -> str:
    if not math.isfinite(number):
        return "none" if math.isnan(number) else "inf"
    scale, word = _SCALE[unit]
    return f"{scale * number:.4g}{'' if bare else word}"


def _line(cells: tuple[str, ...]) -> str:
    return " ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True))


def summary(table: Table, late_p50_s: float, late_p99_s: float) -> Iterator[str]:
    """What stands below the table."""
    measured = [row for row in table.rows if row.verdict != "elsewhere"]
    held = sum(row.verdict == "held" for row in measured)
    cores = f"{table.cores} core{'s' if table.cores > 1 else ''}"
    yield (
        f"backend {table.backend}, Linux {table.kernel}, {cores}: {held} of {len(measured)} settings as asked, "
        f"{len(table.rows) - len(measured)} not to be had here; {sum(row.packets for row in measured):,} packets in "
        f"{table.took_s:.0f} s"
    )
    yield (
        f"without delay a packet takes {table.base_s * 1e6:.0f} us (95 % below {table.base_p95_s * 1e6:.0f} us); "
        f"a timer of this machine is late by {late_p50_s * 1e6:.0f} us (99 % below {late_p99_s * 1e6:.0f} us)"
    )
    if table.failed:
        yield f"not as asked: {'; '.join(table.failed)}"
    if table.disturbed:
        yield (
            f"not to be told: {'; '.join(table.disturbed)}. The machine lost packets itself, was too slow to send "
            "them, or its timers were late: again on an idle one"
        )

"""The figures of recorded queues: depth, time in the queue and drops, with the microbursts marked.

`python -m netem.analysis.queue_figure FIGURES`, FIGURES a JSON list of `{"csv", "svg", "title", "limit_bytes",
"bursts_s"}`; a run starts it as the user, after the measurements. matplotlib is imported here alone: runs do without.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
SIZE_INCHES = (8.0, 5.0)
COLOURS = {"data": "#1f5fa8", "microburst": "#c8442c", "background": "#8a6d1f", "other": "#777777"}
GAP_S = 0.2
"""Windows that are further apart than this are not drawn in one figure: the one with most drops is."""
GROUP_MS = 20.0
"""Drops that are closer than this are shown together."""


@dataclass(frozen=True)
class Packets:
    """The columns of a recording; times in milliseconds since `origin_s`, all of one length."""

    time_ms: FloatArray
    kind: NDArray[np.str_]
    size: FloatArray
    sojourn_ms: FloatArray
    """nan: dropped."""

    @property
    def dropped(self) -> NDArray[np.bool_]:
        return np.isnan(self.sojourn_ms)


def read(text: str) -> Packets:
    """Of the CSV that `queues.csv_text` wrote, times still in milliseconds since the run began."""
    rows = list(csv.DictReader(text.splitlines()))
    sojourn = [float(row["sojourn_s"]) if row["sojourn_s"] else np.nan for row in rows]
    return Packets(
        1e3 * np.array([float(row["time_s"]) for row in rows], np.float64),
        np.array([row["kind"] for row in rows], np.str_),
        np.array([float(row["bytes"]) for row in rows], np.float64),
        1e3 * np.array(sojourn, np.float64),
    )


def chosen(packets: Packets, bursts_ms: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """(first, last) time to draw: of the recorded stretches with a burst, or else of all, the one with most drops."""
    if not len(packets.time_ms):
        return None
    starts = np.flatnonzero(np.diff(packets.time_ms, prepend=-np.inf) > 1e3 * GAP_S)
    ends = np.append(starts[1:], len(packets.time_ms))
    best, best_key = 0, (False, -1)
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        first, last = packets.time_ms[start], packets.time_ms[end - 1]
        hit = any(first <= begin <= last for begin, _ in bursts_ms)
        key = (hit, int(packets.dropped[start:end].sum()))
        if key > best_key:
            best, best_key = number, key
    return float(packets.time_ms[starts[best]]), float(packets.time_ms[ends[best] - 1])


def steps(packets: Packets, kinds: Sequence[str] | None = None) -> tuple[FloatArray, FloatArray]:
    """(times in ms, depth in KiB) after each arrival and departure; of some kinds alone where they are given."""
    inside = ~packets.dropped if kinds is None else ~packets.dropped & np.isin(packets.kind, list(kinds))
    arrivals, sizes = packets.time_ms[inside], packets.size[inside]
    times = np.concatenate([arrivals, arrivals + packets.sojourn_ms[inside]])
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(np.concatenate([sizes, -sizes])[order]) / 1024


def draw(packets: Packets, about: dict[str, Any], out: Path) -> None:
    """Writes the figure. `about`: title, limit_bytes (or null), bursts_s: [[begin, end], ...] since the run began."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    bursts = [(1e3 * begin, 1e3 * end) for begin, end in about["bursts_s"]]
    span = chosen(packets, bursts)
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasSVG(figure)
    depth, sojourn, drops = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1.5, 1.5))
    figure.suptitle(about["title"])
    if span is not None:
        first, last = limits(packets, span, bursts)
        inside = [(begin, end) for begin, end in bursts if first <= begin <= last]
        origin = inside[0][0] if inside else first
        _draw_depth(depth, packets, about["limit_bytes"], (first, last), origin)
        _draw_packets(sojourn, drops, packets, (first, last), origin)
        for axis in (depth, sojourn, drops):
            for number, (begin, end) in enumerate(inside):
                label = "microburst" if axis is depth and not number else None
                axis.axvspan(begin - origin, end - origin, color="#f3c4b8", alpha=0.6, lw=0, zorder=0, label=label)
        depth.set_xlim(first - origin, last - origin)
        depth.legend(loc="upper right", fontsize="small", framealpha=0.9)
        since = "the microburst began" if inside else f"{first / 1e3:.3f} s"
        drops.set_xlabel(f"ms since {since}")
    figure.savefig(out, format="svg", metadata={"Date": None})


def limits(
    packets: Packets, span: tuple[float, float], bursts_ms: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """(first, last) time to show: around the most drops at a burst, or else anywhere; they are short beside the span.

    Without drops the whole span.
    """
    dropped = np.sort(packets.time_ms[packets.dropped])
    dropped = dropped[(dropped >= span[0]) & (dropped <= span[1])]
    first, last = span
    if len(dropped):
        groups = np.split(dropped, np.flatnonzero(np.diff(dropped) > GROUP_MS) + 1)
        near = [g for g in groups if any(b <= g[-1] and g[0] <= e + GROUP_MS for b, e in bursts_ms)]
        most = max(near or groups, key=len)
        width = max(2.0, float(most[-1] - most[0]))
        first, last = max(first, float(most[0]) - 1.5 * width), min(last, float(most[-1]) + 3 * width)
    return first, max(last, first + 0.1)


def _draw_depth(
    axis: Any, packets: Packets, limit_bytes: int | None, shown: tuple[float, float], origin: float
) -> None:
    times, held = _within(*steps(packets), shown)
    axis.fill_between(times - origin, held, step="post", color="#9dbbdd", lw=0, label="queue depth")
    generated = [kind for kind in ("microburst", "background") if (packets.kind == kind).any()]
    if generated:
        times, held = _within(*steps(packets, generated), shown)
        label = "of it " + " and ".join(generated)
        axis.step(times - origin, held, where="post", color=COLOURS[generated[0]], lw=0.8, label=label)
    if limit_bytes:
        axis.axhline(limit_bytes / 1024, color="black", lw=0.8, ls="--", label="limit")
    axis.set_ylabel("KiB")
    axis.set_ylim(bottom=0)


def _within(times: FloatArray, held: FloatArray, shown: tuple[float, float]) -> tuple[FloatArray, FloatArray]:
    here = (times >= shown[0]) & (times <= shown[1])
    return times[here], held[here]


def _draw_packets(sojourn: Any, drops: Any, packets: Packets, span: tuple[float, float], origin: float) -> None:
    here = (packets.time_ms >= span[0]) & (packets.time_ms <= span[1])
    for kind, colour in COLOURS.items():
        own = here & (packets.kind == kind)
        left = own & ~packets.dropped
        if left.any():
            sojourn.plot(packets.time_ms[left] - origin, packets.sojourn_ms[left], ".", ms=2, color=colour, label=kind)
        lost = np.sort(packets.time_ms[own & packets.dropped])
        if len(lost):
            count = np.arange(1, len(lost) + 1)
            label = f"{kind}: {len(lost)}"
            drops.step(lost - origin, count, where="post", color=colour, label=label)
    sojourn.set_ylabel("ms in the queue")
    drops.set_ylabel("drops so far")
    for axis in (sojourn, drops):
        axis.set_ylim(bottom=0)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="upper right", fontsize="small", framealpha=0.9)


def main(argv: Sequence[str]) -> None:
    for about in json.loads(argv[0]):
        draw(read(Path(about["csv"]).read_text(encoding="utf-8")), about, Path(about["svg"]))


if __name__ == "__main__":
    main(sys.argv[1:])

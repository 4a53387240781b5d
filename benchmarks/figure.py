"""Figures of benchmarks. The only user of matplotlib, so that everything else works without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from benchmarks.bench_bound import Point

COLOURS = ("#0b6e99", "#c2571a")
INK, FAINT = "#222222", "#999999"


def save(figure: Figure, path: Path) -> None:
    """As SVG and PNG."""
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=160)
    plt.close(figure)


def bound_figure(path: Path, points: Sequence[Point], clean_s: float, limit: float) -> None:
    """Latency of rounds over the packets of the oracle; the line is the bound at the clean rate, the band the limit.

    A round was judged by the clean rate of its own turn; it is drawn where it lies on the bound of the whole run.
    """
    figure, axes = plt.subplots(figsize=(7.0, 4.6), layout="constrained")
    axes.set_xscale("log")
    axes.set_yscale("log")
    most = max(point.oracle_packets for point in points) * 1.5
    least = min(point.oracle_packets for point in points) / 1.5
    span = [least, most]
    axes.plot(span, [x * clean_s * 1e3 for x in span], color=INK, linewidth=1.2, zorder=1)
    low, high = ([x * clean_s * 1e3 * factor for x in span] for factor in (1.0, limit))
    axes.fill_between(span, low, high, color=INK, alpha=0.08, linewidth=0, zorder=0)
    for colour, tolerance in zip(COLOURS, sorted({point.tolerance for point in points}), strict=False):
        chosen = [point for point in points if point.tolerance == tolerance]
        _series(axes, chosen, f"p = {tolerance:.1%}", colour, clean_s * 1e3, above=tolerance < 0.1)
    axes.set_xlim(*span)
    ticks = [tick for tick in (5_000, 10_000, 20_000, 50_000, 100_000, 200_000) if least <= tick <= most]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    bottom, top = axes.get_ylim()
    marks = [factor * 10**power for power in range(-1, 6) for factor in (1, 2, 5)]
    axes.set_yticks([mark for mark in marks if bottom <= mark <= top], minor=False)
    axes.set_yticks([], minor=True)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("packets that the round needs at least, N(1 − p) / (1 − loss)")
    axes.set_ylabel("latency of the round, ms")
    text = (
        f"line: the erasure bound at {clean_s * 1e6:.2f} µs a packet (measured)\nband: up to {limit:g} times the bound"
    )
    axes.text(0.98, 0.03, text, transform=axes.transAxes, ha="right", va="bottom", color=INK, fontsize=9)
    axes.legend(loc="upper left", frameon=False, title="bars: quartiles", alignment="left")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def _series(axes: Axes, points: Sequence[Point], label: str, colour: str, clean_ms: float, *, above: bool) -> None:
    """Medians with quartiles. `above` says where the labels go, so that those of two series do not meet."""
    for loss in sorted({point.loss for point in points}):
        chosen = [point for point in points if point.loss == loss]
        x = chosen[0].oracle_packets
        values = [point.ratio * x * clean_ms for point in chosen]
        middle = median(values)
        quarters = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [middle] * 3
        bars = [[middle - quarters[0]], [quarters[2] - middle]]
        axes.errorbar([x], [middle], yerr=bars, fmt="o", color=colour, markersize=5, capsize=3, label=label)
        label = "_"
        axes.annotate(
            f"{loss:.0%}",
            (x, middle),
            xytext=(-6, 7) if above else (7, -12),
            textcoords="offset points",
            ha="right" if above else "left",
            color=colour,
            fontsize=8,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
        )

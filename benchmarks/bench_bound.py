"""(b) Latency of one round over the erasure bound, under loss of every packet: one worker, 16 MB, recommended profile.

Nobody who sends plain chunks over a link that loses the share l can end a round that needs N(1-p) of them with fewer
than N(1-p)/(1-l) packets on average. The bound is that number times the time that a packet takes at the clean rate.

Clean rate: what the same sender path reaches in the same lab without a protocol. The transport's own data socket sends
the same 11,000 datagrams in the same batches and order from the same host, through the same switch port and loss
program (which loses nothing then), to a process that only drains its own data socket; from the first send until the
last has returned, divided by the datagrams (blast.py). Blasts and rounds take turns, and a round is judged by those of
its own turn. So at l = 0 the ratio is what the protocol costs: books, probes and answers, storing what came, the way
of the stop. Under loss it is that, and packets that the oracle would not send. It can be below 1: a lost packet costs
the receiver nothing.

Latency is the worker's clock, from the first send to the read of the stop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from benchmarks.bench_flow import blasts
from benchmarks.harness import Context, Line, Spread, alternate
from benchmarks.testbed import Testbed, replay, standing
from netem.analysis.oracle import Packets, need

TITLE = "(b) round latency over the erasure bound"
CHUNKS = 11_000
LOSSES = (0.0, 0.6, 0.7, 0.8, 0.9)
TOLERANCES = {"low": 0.008, "high": 0.408}
LIMIT, CLEAN_LIMIT = 1.25, 1.15
BLASTS = 5


@dataclass(frozen=True)
class Point:
    """One round: the time of the bound and what it took, in seconds; packets up to the one that completed it."""

    tolerance: float
    loss: float
    latency_s: float
    bound_s: float
    packets: int
    oracle_packets: float

    @property
    def ratio(self) -> float:
        return self.latency_s / self.bound_s


def measure(context: Context) -> list[Line]:
    repeats = context.repeats(3, 1)
    with standing(_scenario(repeats), context.scratch()) as bed:
        contestants: dict[str, Callable[[], list[Any]]] = {}
        for name in TOLERANCES:
            contestants[f"blast before {name}"] = partial(clean_s, bed)
            contestants[name] = partial(_rounds, bed, name, repeats)
        turns = alternate(contestants, context.repeats(5))
    points: list[Point] = []
    blasted: list[float] = []
    for turn in range(len(turns["low"])):
        clean = [each for name in TOLERANCES for each in turns[f"blast before {name}"][turn]]
        blasted += clean
        for name, tolerance in TOLERANCES.items():
            points += [_point(tolerance, each, median(clean)) for each in turns[name][turn]]
    context.record("clean_s_per_packet", blasted)
    context.record("rounds", [{**vars(point), "ratio": point.ratio} for point in points])
    _draw(context, points, median(blasted))
    spread = Spread.of(blasted)
    first = Line("clean rate", 1e-6 / spread.median, unit="Mpkt/s", detail=spread.shown(1e6, "us a packet"))
    return [first, *(_line(points, tolerance, loss) for tolerance in TOLERANCES.values() for loss in LOSSES)]


def _iterations(repeats: int) -> dict[int, float]:
    """The loss of each iteration; the first, 0, is for warming up and not among them."""
    return {1 + number: loss for number, loss in enumerate(LOSSES * repeats)}


def _scenario(repeats: int) -> str:
    iterations = _iterations(repeats)
    bursts = ", ".join(f"{{iteration: {at}, loss: {loss:.0%}}}" for at, loss in iterations.items() if loss)
    transports = ", ".join(f"{name}: {{kind: mlt, fixed: {tolerance:.1%}}}" for name, tolerance in TOLERANCES.items())
    return replay(1, CHUNKS, 1 + len(iterations), f"{{{transports}}}", f"[{bursts}]", name="bound")


def clean_s(bed: Testbed) -> list[float]:
    """Seconds a packet of a few blasts without a protocol; the first warms up."""
    return [seconds / received for received, seconds in blasts(bed, "product", CHUNKS, 1 + BLASTS)[1:]]


def _rounds(bed: Testbed, name: str, repeats: int) -> list[tuple[float, float, int]]:
    """(loss, latency in seconds, packets up to the completing one) of each round of a job."""
    outcome = bed.run(name)
    found = []
    for iteration, loss in _iterations(repeats).items():
        (row,) = outcome.up(iteration)
        if row.latency_s is None or row.packets_at_need is None:
            raise RuntimeError(f"iteration {iteration} was not reported in full: {row}")
        found.append((loss, row.latency_s, row.packets_at_need))
    return found


def _point(tolerance: float, measured: tuple[float, float, int], clean_s: float) -> Point:
    loss, latency_s, packets = measured
    least = Packets(need(CHUNKS, tolerance), loss).mean
    return Point(tolerance, loss, latency_s, least * clean_s, packets, least)


def _line(points: list[Point], tolerance: float, loss: float) -> Line:
    chosen = [point for point in points if (point.tolerance, point.loss) == (tolerance, loss)]
    ratios = Spread.of(point.ratio for point in chosen)
    packets = median(point.packets / point.oracle_packets for point in chosen)
    latency = Spread.of(point.latency_s for point in chosen)
    return Line(
        f"loss {loss:.0%}, p {tolerance:.1%}",
        ratios.median,
        LIMIT if loss else CLEAN_LIMIT,
        detail=f"{ratios.shown()}; packets {packets:.3f}x; {latency.shown(1e3, 'ms')}",
    )


def _draw(context: Context, points: list[Point], clean_s: float) -> None:
    """Measured points on the bound: latency against the least number of packets, both on logarithmic axes."""
    try:
        from benchmarks.figure import bound_figure
    except ImportError as error:
        context.say(f"no figure: {error}")
        return
    bound_figure(context.figure("bound"), points, clean_s, LIMIT)

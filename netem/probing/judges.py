"""What was asked for beside what packets say, pure: each judge makes of samples what it measured and how sure that is.

An interval holds the values that the measurement does not refute: what was asked for has to lie in it. Shares of
packets have the exact binomial interval (Clopper-Pearson), distributions the band of Dvoretzky, Kiefer and Wolfowitz
(with Massart's constant, Ann. Probab. 18, 1990); what the machine's clocks and timers limit has a tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from netem.analysis.intervals import clopper_pearson
from netem.links.predict import Fates
from netem.probing.probe import CE, Samples

Unit = Literal["ratio", "packets", "s", "bps"]

DELAY_TOLERANCE_S, DELAY_TOLERANCE = 0.0002, 0.02
CLOCK_TOLERANCE = 0.001
"""The clock of the time stamps may be slewed (adjtimex(2): by 500 ppm at most), that of the delays is not."""
RATE_TOLERANCE = 0.03
BURST_TOLERANCE = 0.05
LOST_ELSEWHERE = "lost elsewhere"
SHOWN_QUANTILES = (0.05, 0.5, 0.95)
PERCENTILES = tuple(n / 100 for n in range(1, 100))
PACED_MIN = 50
_GRID = 256


@dataclass(frozen=True)
class Measure:
    """`low..high`: which requests the measurement does not refute. `note`: what else is worth knowing."""

    what: str
    unit: Unit
    requested: float
    achieved: float
    low: float
    high: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.low <= self.requested <= self.high


@dataclass(frozen=True)
class Context:
    """false_alarm: of each statistical measure. base_s: how long a packet takes without delay (median).

    late_s: how much later than a fixed delay packets came, right before; of a machine with ideal timers nothing.
    """

    false_alarm: float
    base_s: float = 0.0
    late_s: tuple[float, ...] = field(default=(0.0,), repr=False)


class Judge(Protocol):
    @property
    def statistical(self) -> int:
        """How many of its measures fail by chance, at the rate that the context says."""

    @property
    def timed(self) -> bool:
        """Whether late timers of the machine show in what it measures."""

    def measures(self, samples: Samples, context: Context) -> Iterable[Measure]: ...


def share(what: str, asked: float, hits: int, of: int, context: Context, clustering: float = 1.0) -> Measure:
    """`clustering`: how much more the number of hits scatters than that of independent ones."""
    found = clopper_pearson(round(hits / clustering), round(of / clustering), context.false_alarm)
    return Measure(what, "ratio", asked, hits / max(1, of), found.low, found.high)


def exactly(what: str, asked: int, found: int, slack: int = 0, note: str = "") -> Measure:
    """A count; up to `slack` more than asked for are right as well."""
    return Measure(what, "packets", asked, found, found - slack, found, note)


def within(what: str, asked: float, found: float, tolerance: float, unit: Unit, note: str = "") -> Measure:
    return Measure(what, unit, asked, found, found - tolerance, found + tolerance, note)


def delay_tolerance_s(delay_s: float) -> float:
    """For the timers of a machine that is not a real-time one."""
    return DELAY_TOLERANCE_S + DELAY_TOLERANCE * delay_s


@dataclass(frozen=True)
class Loss:
    """Share of packets that did not arrive."""

    ratio: float
    clustering: float = 1.0
    what: str = "loss"
    statistical: int = 1
    timed: bool = False

    def measures(self, samples: Samples, context: Context) -> Iterable[Measure]:
        lost = int(samples.lost.sum())
        yield share(self.what, self.ratio, lost, samples.sent, context, self.clustering)


@dataclass(frozen=True)
class Bursts:
    """Gilbert's chain. Of the lost packets each ends its burst with probability r, of the others each begins one with
    probability p: two binomials, whatever the lengths. The mean length has to be within 5 % as well.
    """

    p: float
    r: float
    statistical: int = 2
    timed: bool = False

    def measures(self, samples: Samples, context: Context) -> Iterable[Measure]:
        before, after = samples.lost[:-1], samples.lost[1:]
        lost, passed = int(before.sum()), int((~before).sum())
        ends, starts = int((before & ~after).sum()), int((~before & after).sum())
        burst = self._mean("mean burst", 1 / self.r, ends, lost, context)
        yield Measure(
            burst.what,
            burst.unit,
            burst.requested,
            burst.achieved,
            max(burst.low, burst.achieved - BURST_TOLERANCE * burst.requested),
            min(burst.high, burst.achieved + BURST_TOLERANCE * burst.requested),
        )
        yield self._mean("mean gap", 1 / self.p, starts, passed, context)

    @staticmethod
    def _mean(what: str, asked: float, ends: int, packets: int, context: Context) -> Measure:
        found = clopper_pearson(ends, packets, context.false_alarm)
        low, high = (1 / ratio if ratio > 0 else math.inf for ratio in (found.high, found.low))
        return Measure(what, "packets", asked, packets / ends if ends else math.inf, low, high)


@dataclass(frozen=True)
class Predicted:
    """The fate of every packet, where a seed decides it."""

    fates: Fates
    statistical: int = 0
    timed: bool = False

    def measures(self, samples: Samples, context: Context) -> Iterable[Measure]:
        unlike = int((samples.copies != self.fates.copies).sum())
        yield exactly("unlike predicted", 0, unlike)


@dataclass(frozen=True)
class Delay:
    """Median of the way, without what the way takes anyway. Nothing may come before its time."""

    delay_s: float
    statistical: int = 0
    timed: bool = True

    def measures(self, samples: Samples, context: Context) -> Iterable[Measure]:
        median, late = (float(np.quantile(samples.one_way_s, q)) - context.base_s for q in (0.5, 0.95))
        note = f"95 % below {late * 1e3:.2f} ms"
        yield within("median delay", self.delay_s, median, delay_tolerance_s(self.delay_s), "s", note)
        soonest = self.delay_s * (1 - CLOCK_TOLERANCE)
        yield exactly("too early", 0, int((samples.one_way_s < soonest).sum()))


@dataclass(frozen=True)
class Jitter:
    """Quantiles of the delay. delays_s: equally likely delays, sorted, as many as describe the distribution.

    What is asked for is the distribution on top of what timers add to a fixed delay on this machine.
    """

    delays_s: tuple[float, ...] = field(repr=False)
    statistical: int = 1
    timed: bool = True

    def measures(self, samples: Samples, context: Context) -> Iterable[Measure]:
        ways = samples.one_way_s - context.base_s
        middles = (np.arange(_GRID) + 0.5) / _GRID
        asked = np.add.outer(
            np.quantile(np.array(self.delays_s), middles), np.quantile(np.array(context.late_s), middles)
        )
        band = math.sqrt(math.log(2 / context.false_alarm) / (2 * max(1, len(ways))))
        wanted = np.quantile(asked, PERCENTILES)
        found = np.quantile(ways, np.clip(np.add.outer((-band, 0.0, band), PERCENTILES), 0.0, 1.0))
        rows = zip(PERCENTILES, wanted, *found, strict=True)
        measured = {row[0]: self._quantile(*map(float, row)) for row in rows}
        yield from (measured[q] for q in SHOWN_QUANTILES)
        yield exactly("percentiles beside", 0, sum(not each.ok for each in measured.values()))

    @staticmethod
    def _quantile(q: float, asked_s: float, low_s: float, found_s: float, high_s: float) -> Measure:
        tolerance = delay_tolerance_s(asked_s)
        return Measure(f"{q:.0%} below", "s", asked_s, found_s, low_s - tolerance, high_s + tolerance)


@dataclass(frozen=True)
class Speed:
    """Pace of the packets that came after the last one was sent: till then the machine had something else to do.

    Not a number where too few were left by then and none came too fast: the machine cannot send fast enough.
    """

    rate_bps: float
    frame_bytes: int
    statistical: int = 0
    timed: bool = True

    def measures(self, samples: Samples, context: Context) -> Iterable[Measure]:
        arrived = samples.arrived_ns / 1e9
        after = arrived[samples.arrived_ns > samples.sent_ns.max(initial=0)]
        bits = 8 * self.frame_bytes
        if len(after) >= PACED_MIN:
            found = bits / interval_s(after - arrived[0], bits / self.rate_bps)
        else:
            found = bits * (len(arrived) - 1) / max(1e-9, float(np.ptp(arrived))) if len(arrived) > 1 else 0.0
            if found <= (1 + RATE_TOLERANCE) * self.rate_bps:  # nothing held these up but their sender
                found = math.nan
        yield within("rate", self.rate_bps, found, RATE_TOLERANCE * self.rate_bps, "bps")


def interval_s(arrivals_s: NDArray[np.float64], expected_s: float) -> float:
    """Time between two packets, by the one of each half that came with the least delay behind an even pace: a machine
    that stands still makes packets late, and never early.
    """
    late = arrivals_s - arrivals_s[0] - expected_s * np.arange(len(arrivals_s))
    half = len(late) // 2
    first, second = int(late[:half].argmin()), half + int(late[half:].argmin())
    return expected_s + float(late[second] - late[first]) / (second - first)


@dataclass(frozen=True)
class Twice:
    ratio: float
    statistical: int = 1
    timed: bool = False

    def measures(self, samples: Samples, context: Context) -> Iterable[Measure]:
        copies = samples.copies
        yield share("arrived twice", self.ratio, int((copies == 2).sum()), samples.sent, context)
        yield exactly("more often", 0, int((copies > 2).sum()))


@dataclass(frozen=True)
class Marked:
    """Packets with a mark of congestion (RFC 3168) in place of a loss."""

    ratio: float
    statistical: int = 1
    timed: bool = False

    def measures(self, samples: Samples, context: Context) -> Iterable[Measure]:
        marked = int((samples.tos & CE == CE).sum())
        yield share("marked", self.ratio, marked, samples.sent, context)


@dataclass(frozen=True)
class Reordered:
    """Packets that overtook others: of every `gap`-th this share is not delayed (sch_netem.c, netem_enqueue)."""

    ratio: float
    gap: int
    delay_s: float
    statistical: int = 1
    timed: bool = True

    def measures(self, samples: Samples, context: Context) -> Iterable[Measure]:
        early = np.sort(samples.sequence[samples.one_way_s < self.delay_s / 2])
        steps = np.diff(np.concatenate([[-1], early, [samples.sent - 1]]))
        tries = int(np.maximum(steps - (self.gap - 1), 0).sum())
        yield share("not delayed", self.ratio, len(early), tries, context)


@dataclass(frozen=True)
class Ordered:
    """Nobody overtakes."""

    statistical: int = 0
    timed: bool = False

    def measures(self, samples: Samples, context: Context) -> Iterable[Measure]:
        yield exactly("out of order", 0, int((np.diff(samples.sequence) < 0).sum()))


@dataclass(frozen=True)
class Slots:
    """Time between two slots in which packets get through: its lower quartile, for timers are late and never early."""

    slot_s: float
    statistical: int = 0
    timed: bool = True

    def measures(self, samples: Samples, context: Context) -> Iterable[Measure]:
        arrived = np.sort(samples.arrived_ns) / 1e9
        begins = arrived[1:][np.diff(arrived) > self.slot_s / 2]
        found = float(np.quantile(np.diff(begins), 0.25)) if len(begins) > 1 else math.nan
        yield within("between slots", self.slot_s, found, delay_tolerance_s(self.slot_s), "s")


@dataclass(frozen=True)
class Limit:
    """A burst into a full queue: the first ones get through, the others do not. `rate_bps`: what left meanwhile."""

    packets: int
    rate_bps: float = 0.0
    frame_bytes: int = 0
    statistical: int = 0
    timed: bool = False

    def measures(self, samples: Samples, context: Context) -> Iterable[Measure]:
        slack = 0
        if self.rate_bps:
            slack = 2 + math.ceil(samples.took_ns / 1e9 * self.rate_bps / 8 / self.frame_bytes)
        passed = int((~samples.lost).sum())
        yield exactly("got through", self.packets, passed, slack)
        yield exactly("of the first", min(self.packets, samples.sent), int((~samples.lost[: self.packets]).sum()))


@dataclass(frozen=True)
class Accounted:
    """Nothing but the link dropped packets, and it says how many."""

    statistical: int = 0
    timed: bool = False

    def measures(self, samples: Samples, context: Context) -> Iterable[Measure]:
        dropped = samples.dropped or 0
        yield exactly(LOST_ELSEWHERE, 0, int(samples.lost.sum()) - dropped)

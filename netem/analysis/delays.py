"""One-way delays as probe packets found them, beside those that were asked for, and whether they agree. Pure.

A quantile is judged without any assumption about the machine's noise. Of n probes the number below a given delay is
binomial; so the requested q-quantile is refuted where the share of probes that came earlier than it less the allowance
is larger than q, or the share that came until it plus the allowance smaller, beyond what chance allows
(Clopper-Pearson).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from netem.analysis import intervals
from netem.kernel.distributions import SCALE

ALLOWED_S, ALLOWED_SHARE = 0.0002, 0.02
"""By how much a delay may be wrong: the larger part of it for short delays, the share for long ones."""
REPORTED = (0.5, 0.95)
JITTER_QUANTILES = (0.2, 0.5, 0.8, 0.95)
CONSTANT_QUANTILES = (0.5,)
BUSY_QUANTILES = (0.1,)
"""Of probes beside a workload: most of them may wait for a core, or behind data."""
ENOUGH = 10
"""Fewer arrivals say nothing of a quantile."""
_GRID = 512

Delays = NDArray[np.float64]
When = Literal["before the first round", "after the last round", "during the run"]


@dataclass(frozen=True)
class Jitter:
    """Of one link, as sch_netem draws it (`tabledist`): `table` None is an even distribution, +- `jitter_s`."""

    delay_s: float
    jitter_s: float
    table: tuple[int, ...] | None = None

    def spread(self) -> Delays:
        """Equally likely delays, sorted. netem sends no packet before its time has come: none is negative."""
        if self.table is None:
            unit = (2.0 * np.arange(_GRID) + 1.0) / _GRID - 1.0
        else:
            unit = np.sort(np.asarray(self.table, np.float64)) / SCALE
        return np.maximum(0.0, self.delay_s + self.jitter_s * unit)


@dataclass(frozen=True)
class Requested:
    """What a path is to do to a packet: the delays of its links without jitter, and those with it."""

    constant_s: float
    jitters: tuple[Jitter, ...] = ()

    @cached_property
    def spread(self) -> Delays:
        """Equally likely delays, sorted."""
        return self.constant_s + reduce(_sum, (each.spread() for each in self.jitters), np.zeros(1))

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.spread, share)) if self.jitters else self.constant_s

    @property
    def longest_s(self) -> float:
        return self.quantile(1.0)


def _sum(one: Delays, other: Delays) -> Delays:
    """Of two independent delays: equally likely sums, thinned out."""
    sums = np.sort((_thin(one)[:, None] + _thin(other)[None, :]).ravel())
    return _thin(sums)


def _thin(delays: Delays) -> Delays:
    if len(delays) <= _GRID:
        return delays
    return np.quantile(delays, (np.arange(_GRID) + 0.5) / _GRID)


@dataclass(frozen=True)
class DelayReport:
    """Probes of one path at one time.

    delays_s: of the probes that arrived, less `base_s`, the median of the same path without any impairment.
    late_s: by how much this machine's timers were late at that time. What is more than the allowance is no fault of the
        link, and added to the delays that are asked for.
    queued: the workload's own packets may wait in front of a probe (a rate), so that it may be late but not early.
    doubt: why it is not judged; empty where it is.
    """

    path: str
    when: When
    requested: Requested
    sent: int
    delays_s: tuple[float, ...]
    base_s: float
    late_s: tuple[float, ...]
    queued: bool = False
    doubt: str = ""

    @property
    def quantiles(self) -> tuple[float, ...]:
        """Those that are judged."""
        if self.when == "during the run":
            return BUSY_QUANTILES
        return JITTER_QUANTILES if self.requested.jitters else CONSTANT_QUANTILES

    def achieved(self, share: float) -> float | None:
        return _quantile(self.delays_s, share)

    def allowed_s(self, share: float) -> float:
        """Below the requested quantile, and above `latest_s`."""
        return ALLOWED_S + ALLOWED_SHARE * self.requested.quantile(share)

    def latest_s(self, share: float) -> float:
        """The quantile of what was asked for on a machine whose timers are late."""
        beyond = np.maximum(0.0, np.sort(np.asarray(self.late_s, np.float64)) - ALLOWED_S)
        if not beyond.any():
            return self.requested.quantile(share)
        return float(np.quantile(_sum(self.requested.spread, beyond), share))

    def doubted(self, why: str) -> DelayReport:
        return replace(self, doubt=why)

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "when": self.when,
            "probes": self.sent,
            "arrived": len(self.delays_s),
            "base_s": self.base_s,
            "timers_late_s": {_name(share): _quantile(self.late_s, share) for share in REPORTED},
            "requested_s": {_name(share): self.requested.quantile(share) for share in REPORTED},
            "achieved_s": {_name(share): self.achieved(share) for share in REPORTED},
            "allowed_s": self.allowed_s(REPORTED[0]),
            "judged": not self.doubt,
            "doubt": self.doubt or None,
        }


def _quantile(values: Sequence[float], share: float) -> float | None:
    return float(np.quantile(values, share)) if values else None


def _name(share: float) -> str:
    return f"p{round(100 * share)}"


def ok(report: DelayReport, false_alarm: float) -> bool:
    """Whether the probes are compatible with what was asked for. `false_alarm`: of this report, all its quantiles."""
    if report.doubt:
        return True
    if len(report.delays_s) < ENOUGH:
        return False
    each = false_alarm / len(report.quantiles)
    return all(_fits(report, share, each) for share in report.quantiles)


def _fits(report: DelayReport, share: float, false_alarm: float) -> bool:
    allowed, count = report.allowed_s(share), len(report.delays_s)
    first_s, last_s = report.requested.quantile(share) - allowed, report.latest_s(share) + allowed
    early = sum(1 for delay in report.delays_s if delay < first_s)
    in_time = sum(1 for delay in report.delays_s if delay <= last_s)
    if intervals.clopper_pearson(early, count, false_alarm).low > share:
        return False
    return report.queued or intervals.clopper_pearson(in_time, count, false_alarm).high >= share


def detail(report: DelayReport) -> str:
    """A sentence with the numbers."""
    where = f"{report.path}, {report.when}"
    asked = _times(report.requested.quantile(share) for share in REPORTED)
    if report.doubt:
        return f"{where}: requested {asked}; not judged: {report.doubt}"
    if len(report.delays_s) < ENOUGH:
        return f"{where}: requested {asked}; only {len(report.delays_s)} of {report.sent} probes arrived"
    found = _times(report.achieved(share) for share in REPORTED)
    text = f"{where}: median and p95 requested {asked}, achieved {found}"
    if report.when == "during the run":
        text += f"; the fastest tenth within {_ms(report.achieved(BUSY_QUANTILES[0]))}"
    text += f" (allowed {_ms(report.allowed_s(REPORTED[0]))} ms, {len(report.delays_s)} probes"
    if (tail_s := _quantile(report.late_s, REPORTED[1]) or 0.0) > ALLOWED_S:
        text += f"; timers of this machine are up to {_ms(tail_s)} ms late (p95)"
    return text + ")"


def _times(values: Iterable[float | None]) -> str:
    return " and ".join(f"{_ms(value)} ms" for value in values)


def _ms(value: float | None) -> str:
    return "?" if value is None else f"{1e3 * value:.3f}".rstrip("0").rstrip(".") or "0"


class Run(Protocol):
    """What is needed of a run of any workload."""

    @property
    def name(self) -> str: ...
    @property
    def repeat(self) -> int: ...
    @property
    def delays(self) -> tuple[DelayReport, ...]: ...


def summary(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The part of a transport's or a variant's summary, over its repeats."""
    return [{"repeat": run.repeat, **report.to_json()} for run in runs for report in run.delays]


def worst(reports: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Of a summary's reports that have a median the one that is furthest from what was asked for."""
    known = [one for one in reports if one["achieved_s"]["p50"] is not None]
    return max(known, key=lambda one: abs(one["achieved_s"]["p50"] - one["requested_s"]["p50"]), default=None)


def median(delays: Sequence[float]) -> float:
    """NaN of none."""
    return float(np.median(delays)) if len(delays) else math.nan

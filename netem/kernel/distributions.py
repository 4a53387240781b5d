"""Tables of delay distributions as sch_netem draws from them (TCA_NETEM_DELAY_DIST, net/sched/sch_netem.c, tabledist).

A table holds quantiles of a distribution with mean 0 and standard deviation 1, in units of 1/8192, as 16-bit integers.
netem picks an entry at random and delays by `delay + jitter * entry / 8192`: the jitter is the standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean, pstdev

SCALE = 8192  # NETEM_DIST_SCALE
ENTRIES_MAX = 16384  # NETEM_DIST_MAX
_ENTRIES = 4096
_LOW, _HIGH = -(2**15), 2**15 - 1
_PARETO_SHAPE = 3.0  # as in iproute2's table: the variance is finite, the tail heavy
_GRID = 256
_FITTINGS = 40

Table = tuple[int, ...]


def table(name: str) -> Table:
    """The table of a distribution by name. ValueError for a name that is none of `NAMES`."""
    if name not in _QUANTILES:
        raise ValueError(f"distribution {name!r}: expected one of {', '.join(NAMES)}")
    return _fitted(_QUANTILES[name]())


def parse(text: str) -> Table:
    """A table file as iproute2 reads it: whole numbers, `#` begins a comment. ValueError says what is wrong."""
    words = [word for line in text.splitlines() for word in line.partition("#")[0].split()]
    try:
        values = tuple(int(word) for word in words)
    except ValueError as error:
        raise ValueError(f"a table holds whole numbers: {error}") from error
    check(values)
    return values


def check(values: Sequence[int]) -> None:
    """ValueError unless the kernel takes these values."""
    if not 0 < len(values) <= ENTRIES_MAX:
        raise ValueError(f"a table has 1 to {ENTRIES_MAX} values, not {len(values)}")
    wrong = next((value for value in values if not _LOW <= value <= _HIGH), None)
    if wrong is not None:
        raise ValueError(f"{wrong} does not fit a table: expected {_LOW}..{_HIGH}, {SCALE} is one standard deviation")


def _fitted(quantiles: Sequence[float]) -> Table:
    """Mean 0 and standard deviation 1 of what fits 16 bits: a heavy tail is cut at four standard deviations."""
    values = list(quantiles)
    low, high = _LOW / SCALE, _HIGH / SCALE
    for _ in range(_FITTINGS):
        mean, deviation = fmean(values), pstdev(values)
        values = [min(high, max(low, (value - mean) / deviation)) for value in values]
    return tuple(min(_HIGH, max(_LOW, round(value * SCALE))) for value in values)


def _shares(count: int) -> list[float]:
    return [(i + 0.5) / count for i in range(count)]


def _normal(count: int = _ENTRIES) -> list[float]:
    return [NormalDist().inv_cdf(share) for share in _shares(count)]


def _pareto(count: int = _ENTRIES) -> list[float]:
    """Of mean 0 and standard deviation 1."""
    mean = _PARETO_SHAPE / (_PARETO_SHAPE - 1)
    deviation = math.sqrt(mean / ((_PARETO_SHAPE - 1) * (_PARETO_SHAPE - 2)))
    return [((1 - share) ** (-1 / _PARETO_SHAPE) - mean) / deviation for share in _shares(count)]


def _paretonormal() -> list[float]:
    """A quarter normal and three quarters Pareto, summed: quantiles of all sums of two grids of quantiles."""
    sums = sorted(0.25 * x + 0.75 * y for x in _normal(_GRID) for y in _pareto(_GRID))
    step = len(sums) // _ENTRIES
    return sums[step // 2 :: step]


_QUANTILES: dict[str, Callable[[], list[float]]] = {
    "normal": _normal,
    "pareto": _pareto,
    "paretonormal": _paretonormal,
}
NAMES = tuple(_QUANTILES)

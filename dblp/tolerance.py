"""How much loss a round may keep: detectors of critical learning regimes, and policies built on them.

Pure and deterministic: the decision for round k + 1 is a function of the gradient norms of rounds 0..k.

A norm is None where it is not known (the round was skipped). Rules for awkward norms, the same in every
detector:
- None is no evidence: a decision that would need it keeps the phase that holds.
- NaN or infinity means that training is in trouble: the phase becomes critical.
- From zero to zero is no change; from zero to anything else is an infinite change.
- A negative norm is the caller's mistake: LocalProtocolError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from dblp.errors import ConfigError, LocalProtocolError

Phase = Literal["critical", "normal"]
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Verdict:
    """What a detector says of one round."""

    phase: Phase
    reason: str


@dataclass(frozen=True)
class Decision:
    """The tolerance of one round: the share of its chunks that may stay missing, 0 <= tolerance < 1."""

    phase: Phase
    tolerance: float
    reason: str


class Detector(Protocol):
    """Tells critical rounds from normal ones."""

    def first(self) -> Verdict:
        """The verdict for round 0."""
        ...

    def next(self, iteration: int, epoch_start: bool, norm: float | None) -> Verdict:
        """The verdict for round `iteration`, given the norm of the round before it.

        Called once after every round, in order. epoch_start: round `iteration` is the first of an epoch.
        """
        ...


class Policy(Protocol):
    """Decides the tolerance of each round. The same calls as `Detector`."""

    def first(self) -> Decision: ...

    def next(self, iteration: int, epoch_start: bool, norm: float | None) -> Decision: ...


class Fixed:
    """The same tolerance in every round: the baseline. Its phase is "normal": nothing looks for another."""

    def __init__(self, tolerance: float) -> None:
        self._decision = Decision("normal", tolerance, "fixed")

    def first(self) -> Decision:
        return self._decision

    def next(self, iteration: int, epoch_start: bool, norm: float | None) -> Decision:
        return self._decision


class Adaptive:
    """`low` in critical rounds, `high` in normal ones (P_low and P_high of the paper)."""

    def __init__(self, low: float, high: float, detector: Detector) -> None:
        self._low, self._high, self._detector = low, high, detector

    def first(self) -> Decision:
        return self._decide(self._detector.first())

    def next(self, iteration: int, epoch_start: bool, norm: float | None) -> Decision:
        return self._decide(self._detector.next(iteration, epoch_start, norm))

    def _decide(self, verdict: Verdict) -> Decision:
        tolerance = self._low if verdict.phase == "critical" else self._high
        return Decision(verdict.phase, tolerance, verdict.reason)


class Constant:
    """Every round is in the same phase: detectors `never` and `always`."""

    def __init__(self, phase: Phase, reason: str) -> None:
        self._verdict = Verdict(phase, reason)

    def first(self) -> Verdict:
        return self._verdict

    def next(self, iteration: int, epoch_start: bool, norm: float | None) -> Verdict:
        return self._verdict


class Schedule:
    """Critical in the given ranges of iterations (first and last inclusive), normal elsewhere."""

    def __init__(self, critical: Sequence[tuple[int, int]]) -> None:
        self._critical = tuple(critical)

    def first(self) -> Verdict:
        return self._at(0)

    def next(self, iteration: int, epoch_start: bool, norm: float | None) -> Verdict:
        return self._at(iteration)

    def _at(self, iteration: int) -> Verdict:
        for first, last in self._critical:
            if first <= iteration <= last:
                return Verdict("critical", f"schedule: {first}..{last}")
        return Verdict("normal", "schedule: outside the critical ranges")


class PaperEq1:
    """Equation 1 of the paper: critical where |G_prev - G_curr| / G_prev >= eta.

    Decided only at the start of an epoch (Algorithm 3), from the norms of the last two consecutive
    iterations. The first epoch is critical: training starts with P_low.
    """

    def __init__(self, eta: float) -> None:
        self._eta = eta
        self._last: float | None = None
        self._verdict = Verdict("critical", "eq1: first epoch")

    def first(self) -> Verdict:
        return self._verdict

    def next(self, iteration: int, epoch_start: bool, norm: float | None) -> Verdict:
        before, self._last = self._last, _checked(norm)
        if epoch_start:
            self._verdict = _compare("eq1", before, self._last, self._eta, self._verdict)
        return self._verdict


class EveryN:
    """Compare the mean norm of the last n rounds with the mean of the n rounds before them, every n rounds.

    Means, because single norms of small batches differ by half from one iteration to the next all the time.
    The first 2 n rounds are critical: before that there is nothing to compare. Unknown norms are left out of
    a mean.
    """

    def __init__(self, n: int, eta: float) -> None:
        self._n, self._eta = n, eta
        self._window: list[float | None] = []
        self._before: float | None = None
        self._windows = 0
        self._verdict = Verdict("critical", f"every {n} rounds: nothing to compare yet")

    def first(self) -> Verdict:
        return self._verdict

    def next(self, iteration: int, epoch_start: bool, norm: float | None) -> Verdict:
        self._window.append(_checked(norm))
        if len(self._window) < self._n:
            return self._verdict
        mean, self._window, self._windows = _mean(self._window), [], self._windows + 1
        if self._windows > 1:
            self._verdict = _compare(f"every {self._n} rounds", self._before, mean, self._eta, self._verdict)
        self._before = mean
        return self._verdict


def relative_change(before: float, after: float) -> float:
    """|before - after| / before for norms >= 0; 0 from zero to zero, infinity from zero to anything else."""
    if before == 0.0:
        return 0.0 if after == 0.0 else math.inf
    return abs(before - after) / before


def _checked(norm: float | None) -> float | None:
    if norm is not None and norm < 0.0:
        raise LocalProtocolError(f"a gradient norm cannot be negative, got {norm!r}")
    return norm


def _mean(norms: Sequence[float | None]) -> float | None:
    """Mean of the known norms; None where there is none. `fsum` keeps NaN and infinity visible."""
    known = [norm for norm in norms if norm is not None]
    if not known:
        return None
    if not all(map(math.isfinite, known)):
        return math.nan
    return math.fsum(norm / len(known) for norm in known)


def _compare(name: str, before: float | None, after: float | None, eta: float, current: Verdict) -> Verdict:
    """One decision of a detector that compares two norms, by the rules at the top of this file."""
    if any(norm is not None and not math.isfinite(norm) for norm in (before, after)):
        return Verdict("critical", f"{name}: gradient norm is not finite")
    if before is None or after is None:
        return Verdict(current.phase, f"{name}: norm unknown, phase kept")
    change = relative_change(before, after)
    if change >= eta:
        return Verdict("critical", f"{name}: change {change:.3g} >= {eta:g}")
    return Verdict("normal", f"{name}: change {change:.3g} < {eta:g}")


def policy_from(transport: Mapping[str, Any], path: Path = ("transport",)) -> Policy:
    """The policy of a configuration's `transport` mapping: {fixed} or {low, high, detector}.

    A `tcp` transport delivers everything: its policy is a fixed 0. Raises ConfigError with the key path of
    the first value that is missing or not allowed.
    """
    kind = transport.get("kind", "bounded")
    if kind == "tcp":
        _only(transport, {"name", "kind"}, path)
        return Fixed(0.0)
    if kind != "bounded":
        raise ConfigError((*path, "kind"), f"{kind!r} is not one of bounded, tcp")
    if "fixed" in transport:
        _only(transport, {"name", "kind", "fixed"}, path)
        return Fixed(_ratio(transport, "fixed", path))
    _only(transport, {"name", "kind", "low", "high", "detector"}, path)
    low, high = _ratio(transport, "low", path), _ratio(transport, "high", path)
    if low > high:
        raise ConfigError((*path, "low"), f"{low:g} is above high = {high:g}")
    return Adaptive(low, high, detector_from(transport.get("detector"), (*path, "detector")))


def detector_from(raw: Any, path: Path = ("detector",)) -> Detector:
    """The detector of a mapping {kind: schedule | paper | every-n-rounds | never | always, options}."""
    if not isinstance(raw, Mapping):
        raise ConfigError(path, "is required and must be a mapping with a kind")
    kind = raw.get("kind")
    if kind == "schedule":
        _only(raw, {"kind", "critical"}, path)
        return Schedule(_ranges(raw.get("critical"), (*path, "critical")))
    if kind == "paper":
        _only(raw, {"kind", "eta"}, path)
        return PaperEq1(_positive(raw, "eta", 0.5, path))
    if kind == "every-n-rounds":
        _only(raw, {"kind", "n", "eta"}, path)
        n = raw.get("n", 10)
        if not _is_integer(n) or n < 1:
            raise ConfigError((*path, "n"), f"{n!r} is not a number of rounds of at least 1")
        return EveryN(n, _positive(raw, "eta", 0.5, path))
    if kind in ("never", "always"):
        _only(raw, {"kind"}, path)
        return Constant("normal" if kind == "never" else "critical", str(kind))
    raise ConfigError((*path, "kind"), f"{kind!r} is not one of schedule, paper, every-n-rounds, never, always")


def _only(raw: Mapping[str, Any], allowed: set[str], path: Path) -> None:
    for key in raw:
        if key not in allowed:
            raise ConfigError((*path, str(key)), f"is not known here; allowed: {', '.join(sorted(allowed))}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(raw: Mapping[str, Any], key: str, path: Path) -> float:
    value = raw[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError((*path, key), f"{value!r} is not a number")
    return float(value)


def _ratio(raw: Mapping[str, Any], key: str, path: Path) -> float:
    if key not in raw:
        raise ConfigError((*path, key), "is required (a transport has either fixed, or low, high and detector)")
    value = _number(raw, key, path)
    if not 0.0 <= value < 1.0:
        raise ConfigError((*path, key), f"{value:g} is not a share of chunks in 0 <= p < 1")
    return value


def _positive(raw: Mapping[str, Any], key: str, default: float, path: Path) -> float:
    value = _number(raw, key, path) if key in raw else default
    if value <= 0.0:
        raise ConfigError((*path, key), f"{value:g} is not above 0 (for every round critical use always)")
    return value


def _ranges(raw: Any, path: Path) -> list[tuple[int, int]]:
    """Ranges of iterations from [[first, last], ...], first <= last, both inclusive and 0-based."""
    if isinstance(raw, str | bytes) or not isinstance(raw, Sequence):
        raise ConfigError(path, "is required and must be a list of [first, last] iterations")
    ranges = []
    for index, item in enumerate(raw):
        if isinstance(item, str | bytes) or not isinstance(item, Sequence) or len(item) != 2:
            raise ConfigError((*path, index), f"{item!r} is not a pair [first, last]")
        first, last = item
        if not (_is_integer(first) and _is_integer(last) and 0 <= first <= last):
            raise ConfigError((*path, index), f"{item!r} is not 0 <= first <= last")
        ranges.append((first, last))
    return ranges

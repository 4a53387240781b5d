"""One check of a run's fidelity, and the verdict of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One check of one transport's run. The numbers are there where the check compares a ratio with an
    interval.
    """

    name: str
    transport: str
    repeat: int
    ok: bool
    detail: str
    requested: float | None = None
    achieved: float | None = None
    low: float | None = None
    high: float | None = None


Statistical = Callable[[float], Check]
"""False-alarm rate -> check."""


@dataclass(frozen=True)
class Fidelity:
    faithful: bool
    false_alarm: float
    statistical_checks: int
    checks: tuple[Check, ...]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.ok]

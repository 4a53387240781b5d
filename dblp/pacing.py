"""How many datagrams a paced sender sends at once (pure)."""

from __future__ import annotations

PACE_QUANTUM_S, PACE_SLACK_S = 0.001, 0.02
"""A paced sender sends so much at once, and makes up for being late by so much: timers and cores are not exact."""


def paced_batch(pace_hz: float, late_s: float = 0.0) -> int:
    """Datagrams that a paced sender sends at once: a portion, and all those that it is late with, as each batch has
    its cost.
    """
    return max(1, int(pace_hz * PACE_QUANTUM_S)) * (1 + int(late_s / PACE_QUANTUM_S))


def overrun_of(together: int, pace_hz: float | None) -> int:
    """`overrun` of a sender that hands over so many datagrams together: two such portions.

    Those of a slow pace are smaller. Else a path that holds many of them would count as short, and near the end of a
    round every repetition would wait for a round trip.
    """
    return 2 * (together if pace_hz is None else min(together, paced_batch(pace_hz)))

"""Whether to send chunks again that may still be under way: on a long path, near the end of a round.

Without it a sender that has nothing left but chunks under way idles until the next answer, and when fewer chunks are
missing than a round trip holds, every further pass costs a round trip.
"""

from __future__ import annotations

import math

import numpy as np

from dblp.chunks import BoolArray, IntArray

CARE, LEAST = 0.65, 0.01
"""Half of 1.3 standard deviations (in one case of ten the round is not over with what is under way), and the smallest
arc sine that is aimed at."""
WORTH = 0.2
"""A copy must be needed with at least this probability where a copy of each chunk fills a round trip; less where it
takes less, as waiting then costs more and copies cost less."""


def lacking(copies: IntArray, to_go: int, loss: float, in_flight: int) -> int:
    """How many datagrams more make it likely that `to_go` of the missing chunks arrive without another answer.

    Args:
        copies: of each missing chunk, how many are under way.
        loss: share of all datagrams that do not arrive.
        in_flight: datagrams that a round trip holds.

    0 where enough are under way, or where more are not worth it. How many chunks stay missing is binomial: the arc sine
    of the root of their share has a standard deviation of 1 / (2 sqrt(missing)), whatever the share.
    """
    missing = len(copies)
    if not missing or not 0.0 < loss < 1.0:
        return 0
    left = float(np.sum(loss**copies))
    spare = math.asin(math.sqrt((max(0, missing - to_go) + 1) / (missing + 1)))
    may_miss = missing * math.sin(max(spare - CARE / math.sqrt(missing), LEAST)) ** 2
    if left <= may_miss or left / missing < WORTH * missing / in_flight:
        return 0
    # Each sweep over all of them leaves the share `loss` of `left`; the last one is cut short.
    sweeps = math.floor(math.log(may_miss / left) / math.log(loss))
    last = (1 - may_miss / (left * loss**sweeps)) / (1 - loss)
    return min(in_flight, math.ceil(missing * (sweeps + last)))


def silent(answered: IntArray, missing: BoolArray, received: BoolArray) -> tuple[int, int]:
    """(datagrams, chunks) to leave out of the share that arrives: where several copies of one chunk were under way,
    or a copy of one that was there, the answer does not say what became of each.

    Args:
        answered: sequences of the datagrams that this answer covers and the one before did not.
        missing, received: (chunks,) by the answer before, by this one.
    """
    copies = np.bincount(answered, minlength=len(missing))
    telling = int(np.count_nonzero(missing & (copies == 1)))
    return len(answered) - telling, int(np.count_nonzero(missing & received & (copies > 1)))

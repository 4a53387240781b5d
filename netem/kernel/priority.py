"""Real-time priority for whoever has to act at a given moment on a machine whose cores are all busy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def prompt(wanted: bool = True) -> Iterator[bool]:
    """The calling thread runs before all ordinary ones (SCHED_RR, lowest priority); its children do not.

    Gives whether it does: a container may not be allowed to. Wants a thread that mostly sleeps.
    """
    before = os.sched_getscheduler(0)
    try:
        if wanted:
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        got = wanted
    except OSError:
        got = False
    try:
        yield got
    finally:
        if got:
            os.sched_setscheduler(0, before, os.sched_param(0))

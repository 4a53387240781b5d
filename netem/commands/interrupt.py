"""Ctrl-C, SIGTERM and a closed terminal all end a command the same way: with clean-up, and once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE = b"\nstill cleaning up; once more to stop at once (then run: dblp-netem clean)\n"


@contextmanager
def interruptible() -> Generator[None, None, None]:
    """The first signal raises KeyboardInterrupt, the second asks for patience, any later one raises again.

    So an impatient second Ctrl-C does not break off the clean-up that the first one started. A signal that was ignored
    (nohup, a shell's background job) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen == 2:
            os.write(2, _PATIENCE)
            return
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

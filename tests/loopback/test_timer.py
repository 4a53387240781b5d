"""timerfd on this kernel: a moment to select on, finer than epoll's milliseconds."""

from __future__ import annotations

import selectors
import time

from netem.kernel.timer import Timer


def test_a_timer_is_readable_at_its_moment_and_not_before() -> None:
    with Timer() as timer, selectors.DefaultSelector() as selector:
        selector.register(timer, selectors.EVENT_READ)
        assert selector.select(0) == []
        late = []
        for length_s in (0.0201, 0.0203, 0.0207):
            moment = time.monotonic() + length_s
            timer.set(moment)
            assert selector.select(5.0)
            late.append(time.monotonic() - moment)
            timer.clear()
            assert selector.select(0) == []
        assert min(late) >= 0.0
        assert min(late) < 0.05


def test_what_is_over_comes_at_once_and_never_is_never() -> None:
    with Timer() as timer, selectors.DefaultSelector() as selector:
        selector.register(timer, selectors.EVENT_READ)
        timer.set(time.monotonic() - 1.0)
        assert selector.select(5.0)
        timer.clear()
        timer.set(time.monotonic() + 60.0)
        timer.set(None)
        assert selector.select(0.01) == []

"""timerfd(2), which Python wraps from 3.13 on: a moment of CLOCK_MONOTONIC as something to select on.

epoll's own time limit counts milliseconds and is rounded up; this one has the resolution of the kernel's timers.
"""

from __future__ import annotations

import ctypes
import math
import os
from ctypes import c_long

_CLOCK_MONOTONIC = 1
_NONBLOCK, _CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_ABSOLUTE = 1
_NANOSECOND = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", c_long), ("nanoseconds", c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Timer:
    """One moment; readable once it has come. A context manager."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._checked(self._libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK | _CLOEXEC), "timerfd_create")
        self.when_s: float | None = None

    def fileno(self) -> int:
        return self._fd

    def set(self, when_s: float | None) -> None:
        """The moment, as time.monotonic() counts; one that is over comes at once. None: never."""
        if when_s == self.when_s:
            return
        nanoseconds = 0 if when_s is None else max(1, math.ceil(when_s * _NANOSECOND))
        value = _Itimerspec(_Timespec(0, 0), _Timespec(*divmod(nanoseconds, _NANOSECOND)))
        self._checked(self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(value), None), "timerfd_settime")
        self.when_s = when_s

    def clear(self) -> None:
        """Not readable any more, until it is set again."""
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self.when_s = None

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Timer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, result: int, what: str) -> int:
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"{what}: {os.strerror(code)}")
        return int(result)

"""Many datagrams with one system call: recvmmsg(2) through ctypes, with arguments laid out by numpy.

Only for LP64 Linux; `available()` tells, and the caller has a plain path for everything else.
"""

from __future__ import annotations

import ctypes
import os
import sys

import numpy as np
from numpy.typing import NDArray

MSG_DONTWAIT = 0x40
MSG_TRUNC = 0x20

_MMSGHDR = np.dtype(
    {
        "names": ["name", "namelen", "iov", "iovlen", "control", "controllen", "flags", "len"],
        "formats": ["<u8", "<u4", "<u8", "<u8", "<u8", "<u8", "<u4", "<u4"],
        "offsets": [0, 8, 16, 24, 32, 40, 48, 56],
        "itemsize": 64,
    }
)
_IOVEC = np.dtype([("base", "<u8"), ("len", "<u8")])


def available() -> bool:
    lp64 = ctypes.sizeof(ctypes.c_void_p) == 8 and ctypes.sizeof(ctypes.c_long) == 8
    return sys.platform == "linux" and sys.byteorder == "little" and lp64 and hasattr(_libc(), "recvmmsg")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class Receiver:
    """Fills the rows of `buffer` (slots, bytes) with one datagram each. The buffer must outlive this object."""

    def __init__(self, buffer: NDArray[np.uint8]) -> None:
        slots, size = buffer.shape
        if not buffer.flags.c_contiguous:
            raise ValueError("the buffer must be contiguous")
        self._buffer = buffer
        self._iov = np.zeros(slots, _IOVEC)
        self._iov["base"] = buffer.ctypes.data + np.arange(slots, dtype=np.uint64) * np.uint64(size)
        self._iov["len"] = size
        self._headers = np.zeros(slots, _MMSGHDR)
        self._headers["iov"] = self._iov.ctypes.data + np.arange(slots, dtype=np.uint64) * np.uint64(_IOVEC.itemsize)
        self._headers["iovlen"] = 1
        self._call = _libc().recvmmsg
        self._call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p]
        self._call.restype = ctypes.c_int

    def fill(self, fd: int) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        """(lengths, truncated) of the datagrams that were waiting, both (n,); n = 0 when there was none.

        Raises OSError for every error but "nothing there" and an interrupted call.
        """
        slots = len(self._headers)
        count = self._call(fd, self._headers.ctypes.data, slots, MSG_DONTWAIT, None)
        if count < 0:
            number = ctypes.get_errno()
            if number not in (11, 4):  # EAGAIN, EINTR
                raise OSError(number, os.strerror(number))
            count = 0
        return self._headers["len"][:count], (self._headers["flags"][:count] & MSG_TRUNC) != 0

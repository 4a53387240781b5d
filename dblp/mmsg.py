"""Many datagrams with one system call, without a copy in between: sendmsg(2), sendmmsg(2) and recvmmsg(2) through
ctypes, with their arguments laid out by numpy.

Only for LP64 Linux; `available()` tells, and the caller has a plain path for everything else.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

MSG_DONTWAIT = 0x40
_TRUNCATED = np.uint32(0x20)  # MSG_TRUNC; MSG_CTRUNC comes with every coalesced message, as nobody reads its size

_MMSGHDR = np.dtype(
    {
        "names": ["name", "namelen", "iov", "iovlen", "control", "controllen", "flags", "len"],
        "formats": ["<u8", "<u4", "<u8", "<u8", "<u8", "<u8", "<u4", "<u4"],
        "offsets": [0, 8, 16, 24, 32, 40, 48, 56],
        "itemsize": 64,
    }
)
"""struct mmsghdr; its first 56 bytes are a struct msghdr."""
_IOVEC = np.dtype([("base", "<u8"), ("len", "<u8")])


def available() -> bool:
    lp64 = ctypes.sizeof(ctypes.c_void_p) == 8 and ctypes.sizeof(ctypes.c_long) == 8
    if sys.platform != "linux" or sys.byteorder != "little" or not lp64:
        return False
    return all(hasattr(_libc(), name) for name in ("recvmmsg", "sendmmsg"))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> Any:
    function = getattr(_libc(), name)
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function


def _raise(number: int) -> None:
    raise OSError(number, os.strerror(number))


def _messages(buffer: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[Any]]:
    """(iovec, mmsghdr) arrays for one message a row."""
    slots, size = buffer.shape
    if not buffer.flags.c_contiguous:
        raise ValueError("the buffer must be contiguous")
    iov, headers = np.zeros(slots, _IOVEC), np.zeros(slots, _MMSGHDR)
    iov["base"] = buffer.ctypes.data + np.arange(slots, dtype=np.uint64) * np.uint64(size)
    iov["len"] = size
    headers["iov"] = iov.ctypes.data + np.arange(slots, dtype=np.uint64) * np.uint64(_IOVEC.itemsize)
    headers["iovlen"] = 1
    return iov, headers


class Receiver:
    """Fills the rows of `buffer` (slots, bytes) with one datagram each. The buffer must outlive this object."""

    def __init__(self, buffer: NDArray[np.uint8]) -> None:
        self._buffer = buffer
        self._iov, self._headers = _messages(buffer)
        self._at, self._slots = self._headers.ctypes.data, len(buffer)
        self._lengths, self._flags = self._headers["len"], self._headers["flags"]
        self._recvmmsg = _call("recvmmsg", ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p)

    def fill(self, fd: int, most: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """(lengths, truncated: not 0) of at most `most` datagrams that were waiting, both (n,); n = 0: there was none.

        The lengths are a view that the next call changes.

        Raises OSError for every error but "nothing there" and an interrupted call.
        """
        count = self._recvmmsg(fd, self._at, min(most, self._slots), MSG_DONTWAIT, None)
        if count < 0:
            number = ctypes.get_errno()
            if number not in (11, 4):  # EAGAIN, EINTR
                _raise(number)
            count = 0
        return self._lengths[:count], self._flags[:count] & _TRUNCATED


class Sender:
    """Sends the rows of `buffer` (slots, bytes) as one datagram each. The buffer must outlive this object."""

    def __init__(self, buffer: NDArray[np.uint8]) -> None:
        self._buffer = buffer
        self._iov, self._headers = _messages(buffer)
        self._at = self._headers.ctypes.data
        self._bytes = self._iov["len"]
        self._sendmmsg = _call("sendmmsg", ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int)

    def send(self, fd: int, start: int, end: int, last_bytes: int) -> int:
        """Rows start..end-1, of the last one `last_bytes` only; how many were sent, at least 1. Raises OSError."""
        self._bytes[start:end] = self._buffer.shape[1]
        self._bytes[end - 1] = last_bytes
        sent = self._sendmmsg(fd, self._at + start * _MMSGHDR.itemsize, end - start, MSG_DONTWAIT)
        if sent < 0:
            _raise(ctypes.get_errno())
        return int(sent)

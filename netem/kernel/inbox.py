"""Many datagrams of a socket with one system call: recvmmsg(2) through the C library, into memory that is kept.

Python's `recv` takes one datagram and new memory with each call; a change of a netem port has some 40 answers.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import struct
from collections.abc import Iterator

_WAITFORONE = 0x10000  # MSG_WAITFORONE: only the first datagram is waited for
_HEAD_BYTES = 512
"""The beginnings lie side by side, apart from the rests, so that short datagrams take few pages of memory."""
_IOVEC = struct.Struct("@PN")  # where, bytes
_MESSAGE = struct.Struct("@PIPNPNi0PI0P")  # struct mmsghdr: name, iovecs, control (each with its size), flags; length


class Inbox:
    """Room for `slots` datagrams of up to `slot_bytes`."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self._slots, self._slot_bytes, self._rest_bytes = slots, slot_bytes, slot_bytes - _HEAD_BYTES
        self._heads, self._rests = mmap.mmap(-1, slots * _HEAD_BYTES), mmap.mmap(-1, slots * self._rest_bytes)
        head, rest = _address(self._heads), _address(self._rests)
        self._iovecs = bytearray()
        for number in range(slots):
            self._iovecs += _IOVEC.pack(head + number * _HEAD_BYTES, _HEAD_BYTES)
            self._iovecs += _IOVEC.pack(rest + number * self._rest_bytes, self._rest_bytes)
        iovecs = _address(self._iovecs)
        pairs = range(iovecs, iovecs + len(self._iovecs), 2 * _IOVEC.size)
        self._messages = bytearray(b"".join(_MESSAGE.pack(0, 0, pair, 2, 0, 0, 0, 0) for pair in pairs))
        self._at = _address(self._messages)
        self._recvmmsg = ctypes.CDLL(None, use_errno=True).recvmmsg
        self._recvmmsg.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p)

    def receive(self, sock: socket.socket) -> Iterator[bytes]:
        """At least one datagram, and what else has come, in order.

        OSError; EAGAIN when none came for as long as SO_RCVTIMEO says, EMSGSIZE for one that is longer than a slot.
        """
        while (count := self._recvmmsg(sock.fileno(), self._at, self._slots, _WAITFORONE, None)) < 0:
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
        for number in range(count):
            *_, flags, size = _MESSAGE.unpack_from(self._messages, number * _MESSAGE.size)
            if flags & socket.MSG_TRUNC:
                raise OSError(errno.EMSGSIZE, f"a datagram of more than {self._slot_bytes} bytes")
            yield self._datagram(number, size)

    def _datagram(self, number: int, size: int) -> bytes:
        head, rest = number * _HEAD_BYTES, number * self._rest_bytes
        if size <= _HEAD_BYTES:
            return self._heads[head : head + size]
        return self._heads[head : head + _HEAD_BYTES] + self._rests[rest : rest + size - _HEAD_BYTES]


def _address(memory: mmap.mmap | bytearray) -> int:
    """Where it lies, for as long as it lives and keeps its size."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))

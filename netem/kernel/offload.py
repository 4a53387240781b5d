"""Offload settings of an interface (ethtool(8) -k/-K), through the ioctl interface (linux/ethtool.h)."""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
from collections.abc import Mapping

from netem.kernel.errors import KernelError, attempting
from netem.kernel.netns import call_in

# All of TSO: veth hands packets to GRO only if the peer has every one of them off (veth_set_features).
TSO = (
    "tx-tcp-segmentation",
    "tx-tcp-ecn-segmentation",
    "tx-tcp-mangleid-segmentation",
    "tx-tcp6-segmentation",
    "tx-tcp-accecn-segmentation",
)
UDP_SEGMENTATION = "tx-udp-segmentation"
CHECKSUM = "tx-checksum-ip-generic"
GRO = "rx-gro"
GSO = "tx-generic-segmentation"

REPORTED = (*TSO, UDP_SEGMENTATION, CHECKSUM, GRO, GSO)

SIOCETHTOOL = 0x8946  # linux/sockios.h
_GET_NAMES, _COUNT_NAMES, _GET, _SET = 0x1B, 0x37, 0x3A, 0x3B  # ETHTOOL_GSTRINGS, _GSSET_INFO, _GFEATURES, _SFEATURES
_FEATURES, _NAME_BYTES = 4, 32  # ETH_SS_FEATURES, ETH_GSTRING_LEN
_REQUEST = struct.Struct("=16sQ16x") if struct.calcsize("P") == 8 else struct.Struct("=16sI12x")  # struct ifreq


class Features:
    """The features that this kernel knows, by name; the names are read once, from any interface."""

    def __init__(self, sock: socket.socket, ifname: str) -> None:
        """`sock`: any socket of the interface's namespace."""
        with attempting(f"read the names of the offloads of {ifname}"):
            count = ctypes.create_string_buffer(struct.pack("=IIQI", _COUNT_NAMES, 0, 1 << _FEATURES, 0))
            _ioctl(sock, ifname, count)
            (size,) = struct.unpack_from("=I", count, 16)
            head = struct.pack("=III", _GET_NAMES, _FEATURES, size)
            names = ctypes.create_string_buffer(head, len(head) + _NAME_BYTES * size)
            _ioctl(sock, ifname, names)
        raw = names.raw[len(head) :]
        each = (raw[at : at + _NAME_BYTES].rstrip(b"\0").decode() for at in range(0, len(raw), _NAME_BYTES))
        self._bits = {name: bit for bit, name in enumerate(each) if name}
        self._words = (size + 31) // 32

    def read(self, sock: socket.socket, ifname: str) -> dict[str, bool]:
        """The features in REPORTED that this kernel knows."""
        with attempting(f"read offloads of {ifname}"):
            active = self._active(sock, ifname)
        return {name: bool(active >> self._bits[name] & 1) for name in REPORTED if name in self._bits}

    def write(self, sock: socket.socket, ifname: str, wanted: Mapping[str, bool]) -> None:
        """Set features and read them back. One that the kernel does not know counts as off.

        KernelError when one cannot be set.
        """
        what = f"set offloads of {ifname} to {dict(wanted)}"
        valid = sum(1 << self._bits[name] for name in wanted if name in self._bits)
        on = sum(1 << self._bits[name] for name, value in wanted.items() if value and name in self._bits)
        blocks = [(word >> 32 * at) & 0xFFFFFFFF for at in range(self._words) for word in (valid, on)]
        request = ctypes.create_string_buffer(struct.pack(f"=II{len(blocks)}I", _SET, self._words, *blocks))
        with attempting(what):
            _ioctl(sock, ifname, request)
            active = self._active(sock, ifname)
        wrong = sorted(n for n, v in wanted.items() if bool(n in self._bits and active >> self._bits[n] & 1) != v)
        if wrong:
            raise KernelError(what, detail=f"the kernel kept {', '.join(wrong)}")

    def _active(self, sock: socket.socket, ifname: str) -> int:
        """The features in force, as a bit mask. The kernel answers four words for each 32: active is the third."""
        answer = ctypes.create_string_buffer(struct.pack("=II", _GET, self._words), 8 + 16 * self._words)
        _ioctl(sock, ifname, answer)
        words = struct.unpack_from(f"={4 * self._words}I", answer, 8)
        return sum(word << 32 * at for at, word in enumerate(words[2::4]))


def _ioctl(sock: socket.socket, ifname: str, buffer: ctypes.Array[ctypes.c_char]) -> None:
    fcntl.ioctl(sock, SIOCETHTOOL, _REQUEST.pack(ifname.encode(), ctypes.addressof(buffer)))


def read_here(ifname: str) -> dict[str, bool]:
    """The features in REPORTED that this kernel knows; the caller's thread is in the namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return Features(sock, ifname).read(sock, ifname)


def write_here(ifname: str, wanted: Mapping[str, bool]) -> None:
    """Set features and read them back, see `Features.write`; the caller's thread is in the namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        Features(sock, ifname).write(sock, ifname, wanted)


def read(netns: str, ifname: str) -> dict[str, bool]:
    return call_in(netns, lambda: read_here(ifname))


def write(netns: str, ifname: str, wanted: Mapping[str, bool]) -> None:
    call_in(netns, lambda: write_here(ifname, wanted))

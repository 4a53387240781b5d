"""Requests to the kernel's network configuration, many in one system call (netlink(7), rtnetlink(7)).

A lab of 64 hosts takes some 600 requests. pyroute2 needs half a millisecond to write or read one, the kernel a few
microseconds to do it; so the lab's own are written here, and those that change an impairment (`qdisc`, `u32`). A batch
is laid out before it is due (`lay_out`); what is left then is one system call and reading the answers (`run`).
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from netem.kernel.errors import KernelError
from netem.kernel.inbox import Inbox

NEWLINK, DELLINK, GETLINK = 16, 17, 18  # linux/rtnetlink.h
NEWADDR, NEWROUTE, GETROUTE, NEWNEIGH = 20, 24, 26, 28
REQUEST, ACK, ECHO, DUMP = 0x1, 0x4, 0x8, 0x300  # linux/netlink.h
REPLACE, EXCLUSIVE, CREATE = 0x100, 0x200, 0x400
IFLA_ADDRESS, IFLA_IFNAME, IFLA_MTU, IFLA_MASTER = 1, 3, 4, 10  # linux/if_link.h
IFLA_LINKINFO, IFLA_GROUP, IFLA_NET_NS_FD, IFLA_EXT_MASK = 18, 27, 28, 29
IFLA_INFO_KIND, IFLA_INFO_DATA, IFLA_INFO_SLAVE_DATA = 1, 2, 5
_SKIP_STATS = 8  # RTEXT_FILTER_SKIP_STATS
_IFF_UP = 1

_ERROR, _DONE = 2, 3  # NLMSG_ERROR, NLMSG_DONE
_ERROR_TEXT = 1  # NLMSGERR_ATTR_MSG
_WITH_TEXT = 0x200  # NLM_F_ACK_TLVS: attributes follow the error
_SOL_NETLINK, _CAP_ACK, _EXT_ACK = 270, 10, 11
BATCH = 128  # of which each may answer, and all answers must find room in the socket's buffer
_BATCH_BYTES = 1 << 17  # a socket sends some 200 KB at once, unless told otherwise
_BUFFER_BYTES = 1 << 20
_SLOTS, _SLOT_BYTES = 64, 1 << 15  # the kernel makes no part of a dump longer
_LIMIT_S = 60  # the kernel answers before the request returns; a lock that others hold may delay that
_SO_RCVBUFFORCE = 33
_TYPE_MASK = 0x3FFF  # the upper bits of an attribute's type are flags

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_INTEGERS = {1: struct.Struct("=B"), 2: struct.Struct("=H"), 4: struct.Struct("=I")}
_LINK = struct.Struct("=BxHiII")  # family, device type, index, flags, flags to change

Value = bytes | str | int | ipaddress.IPv4Address | Mapping[int, "Value"]


@dataclass(frozen=True)
class Request:
    """One message. `what` is what it attempts, for the error."""

    what: str
    kind: int
    flags: int
    body: bytes


@dataclass(frozen=True)
class Batch:
    """Requests as bytes for one system call, numbered from `first` on. For one use, by the socket that laid it out."""

    requests: tuple[Request, ...]
    first: int
    raw: bytes


class Answer(NamedTuple):
    """What request number `of` of a batch answered, beside its acknowledgement."""

    of: int
    kind: int
    body: bytes


@dataclass(frozen=True)
class Link:
    """An interface as the kernel describes it (RTM_NEWLINK). `attributes`: the raw ones, by IFLA number."""

    index: int
    up: bool
    attributes: Mapping[int, bytes]

    @property
    def name(self) -> str:
        return text(self.attributes[IFLA_IFNAME])

    @property
    def mtu_bytes(self) -> int:
        return number(self.attributes[IFLA_MTU])

    @property
    def mac(self) -> str:
        return self.attributes[IFLA_ADDRESS].hex(":")

    @property
    def master(self) -> int | None:
        """The index of the bridge that it is a port of."""
        return number(self.attributes[IFLA_MASTER]) if IFLA_MASTER in self.attributes else None

    def info(self, part: int) -> dict[int, bytes]:
        """What its driver says (IFLA_INFO_DATA), or its bridge (IFLA_INFO_SLAVE_DATA)."""
        return attributes(attributes(self.attributes.get(IFLA_LINKINFO, b"")).get(part, b""))


def encode(values: Mapping[int, Value]) -> bytes:
    """Attributes by number. Integers have 32 bits unless given as bytes, texts end with a zero, mappings nest."""
    parts = []
    for kind, value in values.items():
        raw = _raw(value)
        parts += [_ATTRIBUTE.pack(_ATTRIBUTE.size + len(raw), kind), raw, bytes(-len(raw) % 4)]
    return b"".join(parts)


def _raw(value: Value) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode() + b"\0"
    if isinstance(value, int):
        return _INTEGERS[4].pack(value)
    if isinstance(value, ipaddress.IPv4Address):
        return value.packed
    return encode(value)


def attributes(raw: bytes, at: int = 0) -> dict[int, bytes]:
    """The attributes in a message's tail, by number; the tail begins at byte `at`."""
    found = {}
    unpack, head = _ATTRIBUTE.unpack_from, _ATTRIBUTE.size  # this is where reading back spends its time
    last = len(raw) - head
    while at <= last:
        length, kind = unpack(raw, at)
        if length < head:
            break
        found[kind & _TYPE_MASK] = raw[at + head : at + length]
        at += (length + 3) & ~3
    return found


def text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def number(raw: bytes) -> int:
    """An unsigned integer of 8, 16 or 32 bits, in the machine's order."""
    return int(_INTEGERS[len(raw)].unpack(raw)[0])


def mac_bytes(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


def link_body(index: int, values: Mapping[int, Value], up: bool = False) -> bytes:
    """struct ifinfomsg and attributes. `up` sets the interface up; without it its state stays."""
    return _LINK.pack(socket.AF_UNSPEC, 0, index, _IFF_UP * up, _IFF_UP * up) + encode(values)


def set_up(what: str, index: int) -> Request:
    return Request(what, NEWLINK, 0, link_body(index, {}, up=True))


def get_link(what: str, index: int) -> Request:
    return Request(what, GETLINK, 0, link_body(index, {IFLA_EXT_MASK: _SKIP_STATS}))


class Rtnetlink:
    """A netlink socket of one namespace, whichever thread uses it (one at a time)."""

    def __init__(self, sock: socket.socket) -> None:
        """`sock` is from `open_socket`, called inside the namespace."""
        self._sock = sock
        self._sequence = 0
        self._inbox = Inbox(_SLOTS, _SLOT_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", _LIMIT_S, 0))
        for option in (_CAP_ACK, _EXT_ACK):  # errors with a text instead of a copy of the request
            sock.setsockopt(_SOL_NETLINK, option, 1)
        with suppress(PermissionError):  # who may only look gets short answers
            sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)

    def close(self) -> None:
        self._sock.close()

    def ask(self, requests: Sequence[Request]) -> list[tuple[int, bytes]]:
        """Have requests done in this order; returns (type, body) of what they answered.

        KernelError for the first that failed; what comes behind it may have been done.
        """
        return [(answer.kind, answer.body) for answer in self.run(self.lay_out(requests))]

    def links(self, what: str) -> list[Link]:
        """All interfaces of the namespace."""
        dump = Request(what, GETLINK, DUMP, link_body(0, {IFLA_EXT_MASK: _SKIP_STATS}))
        return [link_of(body) for kind, body in self.ask([dump]) if kind == NEWLINK]

    def find(self, ifname: str) -> Link:
        """An interface by name. KernelError (ENODEV) when it is missing."""
        body = link_body(0, {IFLA_IFNAME: ifname, IFLA_EXT_MASK: _SKIP_STATS})
        ((_, found),) = self.ask([Request(f"find interface {ifname}", GETLINK, 0, body)])
        return link_of(found)

    def lay_out(self, requests: Sequence[Request]) -> list[Batch]:
        """Requests in this order as batches. A batch has one dump at most, its last: the kernel refuses a second one
        (EBUSY) until the first has been read.
        """
        groups: list[list[Request]] = []
        full, size = True, 0
        for request in requests:
            size += _HEADER.size + len(request.body)
            if full or size > _BATCH_BYTES:
                groups.append([])
                size = _HEADER.size + len(request.body)
            groups[-1].append(request)
            full = len(groups[-1]) == BATCH or request.flags & DUMP == DUMP
        return [self._batch(group) for group in groups]

    def run(self, batches: Sequence[Batch]) -> list[Answer]:
        """Have batches done; their answers in order, numbered through all of them. KernelError as `ask`."""
        answers: list[Answer] = []
        done = 0
        for batch in batches:
            try:
                # The kernel is done with all of it when this returns.
                self._sock.sendto(batch.raw, (0, 0))
                found = self._collect(batch)
            except OSError as error:
                raise KernelError(batch.requests[0].what, error.errno, str(error)) from error
            answers += [Answer(done + of, kind, body) for of, kind, body in found] if done else found
            done += len(batch.requests)
        return answers

    def _batch(self, requests: Sequence[Request]) -> Batch:
        """Errors answer by themselves, the last request in any case."""
        first = self._sequence + 1
        self._sequence += len(requests)
        parts = []
        for sequence, request in enumerate(requests, first):
            last = ACK if sequence == self._sequence and request.flags & DUMP != DUMP else 0
            size = _HEADER.size + len(request.body)
            parts += [_HEADER.pack(size, request.kind, REQUEST | request.flags | last, sequence, 0), request.body]
            parts.append(bytes(-size % 4))
        return Batch(tuple(requests), first, b"".join(parts))

    def _collect(self, batch: Batch) -> list[Answer]:
        answers: list[Answer] = []
        failure: KernelError | None = None
        first, last = batch.first, batch.first + len(batch.requests) - 1
        while True:
            for kind, flags, sequence, body in self._messages():
                if not first <= sequence <= last:
                    continue  # of a batch that was given up
                if kind in (_ERROR, _DONE):
                    failure = failure or _failure(batch.requests[sequence - first].what, flags, body)
                else:
                    answers.append(Answer(sequence - first, kind, body))
                if sequence == last and kind in (_ERROR, _DONE):
                    if failure is not None:
                        raise failure
                    return answers

    def _messages(self) -> Iterator[tuple[int, int, int, bytes]]:
        """(type, flags, sequence, body) of each message that is there, at least one."""
        for raw in self._inbox.receive(self._sock):
            at, last = 0, len(raw) - _HEADER.size
            while at <= last:
                length, kind, flags, sequence, _ = _HEADER.unpack_from(raw, at)
                if length < _HEADER.size:
                    break
                yield kind, flags, sequence, raw[at + _HEADER.size : at + length]
                at += length + -length % 4


def open_socket() -> socket.socket:
    """A netlink socket in the namespace of the calling thread."""
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)


def link_of(body: bytes) -> Link:
    _, _, index, flags, _ = _LINK.unpack_from(body)
    return Link(index, bool(flags & _IFF_UP), attributes(body[_LINK.size :]))


def _failure(what: str, flags: int, body: bytes) -> KernelError | None:
    """What an NLMSG_ERROR or NLMSG_DONE says; None for an acknowledgement and the plain end of a dump."""
    code = -int.from_bytes(body[:4], sys.byteorder, signed=True)
    if code == 0:
        return None
    said = attributes(body[4 + _HEADER.size :]).get(_ERROR_TEXT, b"") if flags & _WITH_TEXT else b""
    reason = f"{errno.errorcode.get(code, code)} ({text(said) or os.strerror(code)})"
    return KernelError(what, code, reason)

"""The wire format, version 1: UDP chunk header and TCP control frames. The only place that knows byte layouts.

Chunk datagram: header of 16 bytes in network byte order, then little-endian values: float32, float16 or bfloat16.

    offset 0   session   u32   random for each run; a datagram of another run is dropped and counted
    offset 4   round     u32   number of the collective operation
    offset 8   sequence  u32   number of the chunk inside the round
    offset 12  pass      u16   how often this chunk was sent before (0 = first transmission)
    offset 14  length    u16   payload bytes

Control frame over TCP: body length u32, version u8, type u8, body. The same frame behind a session u32 is a hint
datagram.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dblp.dtypes import FLOAT32, WireDtype
from dblp.errors import LocalProtocolError, PeerProtocolError

VERSION = 1
HEADER_BYTES = 16
HEADER = np.dtype([("session", ">u4"), ("round", ">u4"), ("sequence", ">u4"), ("pass", ">u2"), ("length", ">u2")])
KEY_RANGE = (4, 14)
"""Bytes of the UDP payload that identify one transmission: round, sequence, pass."""
ROUND_RANGE = (4, 8)
"""Bytes of the UDP payload that hold the round."""
SEQUENCE_RANGE = (8, 12)
"""Bytes of the UDP payload that hold the chunk's number."""
MAX_BODY_BYTES = 1 << 31
IP_UDP_BYTES = {4: 28, 6: 48}
ETHERNET_BYTES = 14

DIRECTIONS = ("up", "down")
"""up: workers to server; down: server to workers. The index is the direction's number on the wire."""


def chunk_values(mtu: int, ip_version: int = 4, dtype: WireDtype = FLOAT32) -> int:
    """Values in a chunk that fills one packet: 364 float32 at MTU 1500 over IPv4, twice as many of 16 bits.

    The payload is a multiple of 4 bytes, the same for every format.
    """
    return (mtu - IP_UDP_BYTES[ip_version] - HEADER_BYTES) // 4 * 4 // dtype.value_bytes


# Ports, as offsets from the control port (MASTER_PORT); `rank` is that of the worker.
TCP_DATA_OFFSET = 1
SERVER_DATA_OFFSET = 100
WORKER_DATA_OFFSET = 200
SERVER_HINT_OFFSET = 300
WORKER_HINT_OFFSET = 400


def server_data_port(base: int, rank: int) -> int:
    return base + SERVER_DATA_OFFSET + rank


def worker_data_port(base: int, rank: int) -> int:
    return base + WORKER_DATA_OFFSET + rank


def server_hint_port(base: int, rank: int) -> int:
    return base + SERVER_HINT_OFFSET + rank


def worker_hint_port(base: int, rank: int) -> int:
    return base + WORKER_HINT_OFFSET + rank


def headers_of(packets: NDArray[np.uint8]) -> NDArray[Any]:
    """View of the headers of packets (n, >= 16) as a structured array (n,); shares memory."""
    return packets[:, :HEADER_BYTES].view(HEADER)[:, 0]


@dataclass(frozen=True)
class Frame:
    """Base of the control frames. `KIND` is the type byte, `LAYOUT` the fixed part of the body, in field order."""

    KIND: ClassVar[int] = 0
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("!")
    TAIL: ClassVar[bool] = False
    """The last field is bytes: the rest of the body."""


@dataclass(frozen=True)
class Hello(Frame):
    """Worker to server, first frame. `metadata` is JSON: chunk count, tensors, dtype, profile, tolerance."""

    KIND, LAYOUT, TAIL = 1, struct.Struct("!16sHH"), True
    token: bytes
    rank: int
    purpose: int
    metadata: bytes


@dataclass(frozen=True)
class Welcome(Frame):
    """Server to worker: the handshake is accepted. `metadata` is JSON: first phase and tolerance, receive windows."""

    KIND, LAYOUT, TAIL = 2, struct.Struct("!I"), True
    session: int
    metadata: bytes


@dataclass(frozen=True)
class Refuse(Frame):
    """Either side: the run cannot go on. `reason` is UTF-8 text for a person."""

    KIND, LAYOUT, TAIL = 3, struct.Struct("!"), True
    reason: bytes


@dataclass(frozen=True)
class Ready(Frame):
    """Worker to server after the handshake: `window` is the number of chunks that its receive buffer holds."""

    KIND, LAYOUT = 4, struct.Struct("!I")
    window: int


@dataclass(frozen=True)
class Start(Frame):
    """Worker to server at the start of a round: `norm` is the L2 norm of its gradient before any loss.

    `epoch_end` = 1: the next round is the first of an epoch.
    """

    KIND, LAYOUT = 5, struct.Struct("!IdB")
    round: int
    norm: float
    epoch_end: int


@dataclass(frozen=True)
class Probe(Frame):
    """Sender to receiver: what has arrived of the `sent` datagrams that left before this frame?"""

    KIND, LAYOUT = 6, struct.Struct("!IBII")
    round: int
    direction: int
    probe: int
    sent: int


@dataclass(frozen=True)
class Bitmap(Frame):
    """Receiver to sender, answer to a probe: `bits` as in chunks.pack_bits, 1 = received."""

    KIND, LAYOUT, TAIL = 7, struct.Struct("!IBII"), True
    round: int
    direction: int
    probe: int
    sent: int
    bits: bytes


@dataclass(frozen=True)
class Stop(Frame):
    """Receiver to sender: the round needs no more. `sequence` and `pass_` name the chunk that completed it.

    `outcome` 0 = complete, 1 = the receiver's deadline passed. `bits` is the final received set (for error feedback).
    """

    KIND, LAYOUT, TAIL = 8, struct.Struct("!IBBIHI"), True
    round: int
    direction: int
    outcome: int
    sequence: int
    pass_: int
    delivered: int
    bits: bytes


@dataclass(frozen=True)
class End(Frame):
    """Server to worker: the round is over for everybody. Says whether it counts, and what holds for the next."""

    KIND, LAYOUT = 9, struct.Struct("!IBBd")
    round: int
    skipped: int
    critical: int
    tolerance: float


@dataclass(frozen=True)
class Epoch(Frame):
    """Worker to server at the end of an epoch, after `rounds` rounds: digest of parameters and optimiser state."""

    KIND, LAYOUT = 10, struct.Struct("!II32s")
    epoch: int
    rounds: int
    digest: bytes


@dataclass(frozen=True)
class Replicas(Frame):
    """Server to worker: whether all digests agreed. If not, each worker answers with its State."""

    KIND, LAYOUT = 11, struct.Struct("!IB")
    epoch: int
    identical: int


@dataclass(frozen=True)
class State(Frame):
    """Worker to server: parameters and optimiser state as little-endian float32."""

    KIND, LAYOUT, TAIL = 12, struct.Struct("!I"), True
    epoch: int
    values: bytes


@dataclass(frozen=True)
class Bye(Frame):
    """Worker to server: this worker has done its last round."""

    KIND, LAYOUT = 13, struct.Struct("!I")
    rounds: int


_PREFIX = struct.Struct("!IBB")
PREFIX_BYTES = _PREFIX.size
_SESSION = struct.Struct("!I")
_STREAM_HEADER = struct.Struct("!III")
STREAM_HEADER_BYTES = _STREAM_HEADER.size


def encode(frame: Frame) -> bytes:
    """Bytes of a control frame, prefix included. Raises LocalProtocolError for a value that its field cannot hold."""
    values = list(vars(frame).values())
    tail = values.pop() if frame.TAIL else b""
    try:
        body = frame.LAYOUT.pack(*values) + tail
    except struct.error as error:
        raise LocalProtocolError(f"{type(frame).__name__} {values}: {error}") from error
    return _PREFIX.pack(len(body), VERSION, frame.KIND) + body


def parse_prefix(data: bytes | bytearray | memoryview) -> tuple[int, int]:
    """(body length, type) of a frame whose first PREFIX_BYTES are given.

    Raises PeerProtocolError for another version, an unknown type or a length that cannot be.
    """
    if len(data) < PREFIX_BYTES:
        raise PeerProtocolError(f"control frame of {len(data)} bytes")
    length, version, kind = _PREFIX.unpack(bytes(data[:PREFIX_BYTES]))
    if version != VERSION:
        raise PeerProtocolError(f"control frame of version {version}; this program speaks version {VERSION}")
    cls = _BY_KIND.get(kind)
    if cls is None:
        raise PeerProtocolError(f"control frame of unknown type {kind}")
    size = cls.LAYOUT.size
    if length > MAX_BODY_BYTES or length < size or (length > size and not cls.TAIL):
        raise PeerProtocolError(f"{cls.__name__} frame with a body of {length} bytes")
    return length, kind


def parse_body(kind: int, body: bytes | memoryview) -> Frame:
    """The frame of a type and body whose length parse_prefix has accepted."""
    cls = _BY_KIND[kind]
    values: tuple[Any, ...] = cls.LAYOUT.unpack_from(body)
    if cls.TAIL:
        values = (*values, bytes(body[cls.LAYOUT.size :]))
    make: Callable[..., Frame] = cls
    return make(*values)


class FrameReader:
    """Cuts a byte stream into frames; bytes may come in pieces of any size.

    `max_bytes` limits the body of a frame; it may be changed between two calls.
    """

    def __init__(self, max_bytes: int = MAX_BODY_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Frames that `data` completes. Raises PeerProtocolError on bytes that are not a frame."""
        self._buffer += data
        while len(self._buffer) >= PREFIX_BYTES:
            length, kind = parse_prefix(self._buffer)
            if length > self.max_bytes:
                raise PeerProtocolError(f"control frame of {length} bytes; at most {self.max_bytes} are taken here")
            end = PREFIX_BYTES + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[PREFIX_BYTES:end])
            del self._buffer[:end]
            yield parse_body(kind, body)


def encode_hint(session: int, frame: Frame) -> bytes:
    """A control frame as a datagram of its own."""
    return _SESSION.pack(session) + encode(frame)


def parse_hint(session: int, datagram: bytes) -> Frame | None:
    """The frame in a hint datagram; None for one that is not of this session or not exactly one frame."""
    if len(datagram) < _SESSION.size + PREFIX_BYTES or _SESSION.unpack_from(datagram)[0] != session:
        return None
    try:
        length, kind = parse_prefix(datagram[_SESSION.size :])
    except PeerProtocolError:
        return None
    if len(datagram) != _SESSION.size + PREFIX_BYTES + length:
        return None
    return parse_body(kind, datagram[_SESSION.size + PREFIX_BYTES :])


def encode_stream_header(session: int, round_: int, length: int) -> bytes:
    """What goes before the values of a round on the `tcp` transport's data connection."""
    return _STREAM_HEADER.pack(session, round_, length)


def parse_stream_header(data: bytes) -> tuple[int, int, int]:
    """(session, round, payload bytes). Raises PeerProtocolError on a short header."""
    if len(data) != STREAM_HEADER_BYTES:
        raise PeerProtocolError(f"stream header of {len(data)} bytes")
    session, round_, length = _STREAM_HEADER.unpack(data)
    return session, round_, length


FRAMES: tuple[type[Frame], ...] = (
    Hello,
    Welcome,
    Refuse,
    Ready,
    Start,
    Probe,
    Bitmap,
    Stop,
    End,
    Epoch,
    Replicas,
    State,
    Bye,
)
"""Every type of frame, in the order of its number."""
_BY_KIND = {frame.KIND: frame for frame in FRAMES}

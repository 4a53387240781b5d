"""Chunks of a gradient: layout, send order, need and the received set. Pure functions of arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from dblp.dtypes import FLOAT32, WireArray, WireDtype

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class TensorSpec:
    """Name and shape of one tensor, in the order in which the tensors lie in the flat buffer."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """How `values` numbers are cut into chunks of `chunk_values` numbers; the last one may be shorter.

    On the wire they have the format `dtype`; sums are float32 whatever it is.
    """

    values: int
    chunk_values: int
    dtype: WireDtype = FLOAT32

    @property
    def chunks(self) -> int:
        return -(-self.values // self.chunk_values)

    @property
    def last_values(self) -> int:
        """Numbers in the last chunk, 1..chunk_values."""
        return self.values - (self.chunks - 1) * self.chunk_values

    @property
    def chunk_bytes(self) -> int:
        """Payload of a full chunk."""
        return self.chunk_values * self.dtype.value_bytes

    @property
    def last_bytes(self) -> int:
        """Payload of the last chunk."""
        return self.last_values * self.dtype.value_bytes

    def matrix(self) -> WireArray:
        """A zeroed buffer of shape (chunks, chunk_values), as on the wire; what lies behind `values` stays zero."""
        return np.zeros((self.chunks, self.chunk_values), self.dtype.storage)

    def spread(self, flat: FloatArray, out: WireArray) -> int:
        """Rounds numbers (values,) into their chunks, `out` (chunks, chunk_values), which need not be contiguous.

        How many finite numbers were beyond the largest that the wire's format has.
        """
        full = self.values // self.chunk_values
        saturated = self.dtype.encode(flat[: full * self.chunk_values].reshape(full, self.chunk_values), out[:full])
        if full < self.chunks:
            saturated += self.dtype.encode(flat[full * self.chunk_values :], out[-1, : self.last_values])
        return saturated

    def collect(self, wire: WireArray, flat: FloatArray) -> None:
        """Inverse of spread: the numbers of contiguous chunks, exactly."""
        self.dtype.decode_into(wire.reshape(-1)[: self.values], flat)

    def required(self, tensors: Sequence[TensorSpec], patterns: Sequence[str]) -> BoolArray | None:
        """Chunks that hold a part of a tensor whose name matches a pattern; None where there is none."""
        mask = np.zeros(self.chunks, np.bool_)
        start = 0
        for tensor in tensors:
            if any(fnmatchcase(tensor.name, pattern) for pattern in patterns) and tensor.size:
                mask[start // self.chunk_values : (start + tensor.size - 1) // self.chunk_values + 1] = True
            start += tensor.size
        return mask if mask.any() else None


def need(chunks: int, tolerance: float, threshold: str = "integer") -> int:
    """How many of `chunks` must arrive under `tolerance` (a share, 0..1).

    "integer" allows floor(pN + 1e-9) missing; "float" is the smallest count whose missing share compares as <= p.
    """
    if not 0.0 <= tolerance <= 1.0:
        raise ValueError(f"tolerance {tolerance} is not in 0..1")
    may_miss = math.floor(tolerance * chunks + 1e-9)
    if threshold == "float":
        may_miss = min(chunks, may_miss + 1)
        while may_miss and not may_miss / chunks <= tolerance:
            may_miss -= 1
    return chunks - min(may_miss, chunks)


def send_order(kind: str, chunks: int, *, seed: int, round_: int, rank: int, direction: int) -> IntArray:
    """Order in which the chunks of a round are sent first, a permutation of 0..chunks-1.

    Depends on (seed, round, rank), so that the workers do not all omit the same chunks after an early stop.
    """
    order = np.arange(chunks, dtype=np.int64)
    if kind == "sequential" or chunks < 2:
        return order
    # RandomState's streams are frozen; those of default_rng may change from one numpy to the next.
    random = np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, round_, rank, direction])
    if kind == "rotate":
        return np.roll(order, -int(random.randint(chunks)))
    if kind == "shuffle":
        random.shuffle(order)
        return order
    raise ValueError(f"unknown send order {kind!r}")


def pack_bits(received: BoolArray) -> bytes:
    """Bitmap of the received chunks, chunk 0 in the highest bit of the first byte."""
    return np.packbits(received).tobytes()


def unpack_bits(bits: bytes, chunks: int) -> BoolArray:
    """Inverse of pack_bits. Raises ValueError when the length does not fit the number of chunks."""
    if len(bits) != -(-chunks // 8):
        raise ValueError(f"bitmap of {len(bits)} bytes for {chunks} chunks")
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=chunks).view(np.bool_)

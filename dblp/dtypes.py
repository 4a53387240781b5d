"""Number formats of a value on the wire: float32, or rounded to float16 or bfloat16. Pure functions of arrays.

Rounding is to nearest, ties to even (IEEE 754). A finite number beyond the largest of the format becomes that largest
number and is counted, where IEEE 754 has infinity: one infinity in one gradient would end the training of all
replicas. Infinities and NaN stay what they are, so a diverged training still shows.

float16: sign, 5 bits of exponent, 10 of fraction; up to 65504, normal from 2**-14, subnormal from 2**-24 on.
bfloat16: the upper half of a float32.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
WireArray = NDArray[Any]

BLOCK_VALUES = 1 << 14
"""Values that are converted at once: what the steps pass on to each other stays in the cache."""
_MAGNITUDE, _EXPONENT = 0x7FFFFFFF, 0x7F800000


def blocks(rows: int, row_values: int) -> Iterator[slice]:
    """Consecutive slices of an array of `rows` rows, about BLOCK_VALUES values each."""
    step = max(1, BLOCK_VALUES // max(1, row_values))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class WireDtype:
    """A number format. This class is float32 itself: nothing is rounded.

    Attributes:
        name: as in numpy and torch.
        storage: numpy type of arrays that hold such values; 16-bit formats are kept as their bits.
        value_bytes: bytes of a value.
    """

    name = "float32"
    storage: np.dtype[Any] = np.dtype("<f4")

    @property
    def value_bytes(self) -> int:
        return self.storage.itemsize

    def encode(self, values: FloatArray, out: WireArray) -> int:
        """Rounds `values` into `out`, of the same shape. How many finite ones were beyond the largest number."""
        np.copyto(out, values)
        return 0

    def decode(self, wire: WireArray) -> FloatArray:
        """The exact values, of the same shape. May share memory with `wire`."""
        return wire

    def decode_into(self, wire: WireArray, out: FloatArray) -> None:
        """The exact values of `wire` into `out`, of the same shape, without a copy of the whole between them."""
        for part in blocks(len(wire), wire[:1].size):
            out[part] = self.decode(wire[part])


class _Rounded(WireDtype, abc.ABC):
    """A format of 16 bits. `overflow`: bits of the least float32 magnitude that would round to infinity."""

    storage = np.dtype("<u2")
    largest: Any = np.float32(0.0)
    overflow = 0

    def encode(self, values: FloatArray, out: WireArray) -> int:
        return sum(self._encode(values[part], out[part]) for part in blocks(len(values), values[:1].size))

    def _encode(self, values: FloatArray, out: WireArray) -> int:
        bits = values.view(np.uint32)
        magnitude = bits & np.uint32(_MAGNITUDE)
        if magnitude.max(initial=0) < self.overflow:
            out[...] = self._round(bits, magnitude)
            return 0
        finite = np.isfinite(values)
        limited = np.clip(np.where(finite, values, np.float32(0.0)), -self.largest, self.largest).view(np.uint32)
        out[...] = self._round(limited, limited & np.uint32(_MAGNITUDE))
        out[~finite] = self._special(values[~finite])
        return int(np.count_nonzero(finite & (magnitude >= self.overflow)))

    @abc.abstractmethod
    def _round(self, bits: NDArray[np.uint32], magnitude: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """The format's bits, in the lower halves, of finite numbers up to the largest."""

    @abc.abstractmethod
    def _special(self, values: FloatArray) -> NDArray[np.uint16]:
        """The format's bits of infinities and NaN."""


class _Float16(_Rounded):
    name = "float16"
    largest = np.float32(65504.0)
    overflow = 0x477FF000  # 65520, half-way to what would be the next number

    def _round(self, bits: NDArray[np.uint32], magnitude: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """numpy's own conversion takes twice as long. After M. Dukhan's FP16 library, fp16_ieee_from_fp32_value.

        With E the exponent, the last bit of a float32 near 2**(E+13) is worth what the last bit of a float16 near
        2**E is. So to add 2**(E+13) rounds as the processor does, and what the sum's bits are beyond those of
        2**(E+13) is the fraction. Below 2**-14 the exponent stays: the numbers there are subnormal.
        """
        scale = np.maximum(magnitude & np.uint32(_EXPONENT), np.uint32((127 - 14) << 23))
        scale += np.uint32(13 << 23)
        rounded: NDArray[np.uint32] = (magnitude.view(np.float32) + scale.view(np.float32)).view(np.uint32)
        rounded -= scale
        scale >>= np.uint32(13)
        rounded += scale
        sign = bits >> np.uint32(16)
        sign &= np.uint32(0x8000)
        sign -= np.uint32((127 - 14 + 13) << 10)  # modulo 2**32, of which the lower 16 bits are used
        rounded += sign
        return rounded

    def _special(self, values: FloatArray) -> NDArray[np.uint16]:
        return values.astype(np.float16).view(np.uint16)

    def decode(self, wire: WireArray) -> FloatArray:
        return _float16_values().take(wire, mode="clip")  # "raise", the default, checks what cannot be


@functools.cache
def _float16_values() -> FloatArray:
    """The value of each of the 65,536 bit patterns: to look them up is three times as fast as to convert them."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


class _BFloat16(_Rounded):
    name = "bfloat16"
    largest = np.array(0x7F7F0000, np.uint32).view(np.float32)[()]
    overflow = 0x7F7F8000

    def _round(self, bits: NDArray[np.uint32], magnitude: NDArray[np.uint32]) -> NDArray[np.uint32]:
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += bits
        rounded += np.uint32(0x7FFF)
        rounded >>= np.uint32(16)
        return rounded

    def _special(self, values: FloatArray) -> NDArray[np.uint16]:
        quiet = np.isnan(values).astype(np.uint32) << np.uint32(6)  # a NaN whose upper half has no fraction stays one
        upper: NDArray[np.uint16] = (values.view(np.uint32) >> np.uint32(16) | quiet).astype(np.uint16)
        return upper

    def decode(self, wire: WireArray) -> FloatArray:
        bits = wire.astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32)


FLOAT32, FLOAT16, BFLOAT16 = WireDtype(), _Float16(), _BFloat16()
DTYPES: dict[str, WireDtype] = {dtype.name: dtype for dtype in (FLOAT32, FLOAT16, BFLOAT16)}

"""Repeatable loss: the decision to drop a packet as a pure function of seed, direction, rank and key.

`drop = hash(seed, direction, rank, key) < threshold`, so timing, ports and session play no part: the eBPF
program, a simulator and a later analysis decide alike. The hash is the finaliser of splitmix64 (Steele, Lea,
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), applied once per 32-bit key word.

`mix`, `port_state`, `key_words` and `drops_scalar` are the reference in plain integers; `drops` is the same
function over numpy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

GAMMA = 0x9E3779B97F4A7C15
MULTIPLY_1 = 0xBF58476D1CE4E5B9
MULTIPLY_2 = 0x94D049BB133111EB
SHIFT_1, SHIFT_2, SHIFT_3 = 30, 27, 31
U64 = 0xFFFF_FFFF_FFFF_FFFF
U32 = 0xFFFF_FFFF
FULL = 1 << 32
"""The threshold of 100 % loss."""

DIRECTIONS = {"up": 0, "down": 1}

Word = int | npt.NDArray[np.integer]


def mix(value: int) -> int:
    """One step of splitmix64: a bijection on 64-bit integers that spreads every input bit."""
    x = (value + GAMMA) & U64
    x = ((x ^ (x >> SHIFT_1)) * MULTIPLY_1) & U64
    x = ((x ^ (x >> SHIFT_2)) * MULTIPLY_2) & U64
    return x ^ (x >> SHIFT_3)


def port_state(seed: int, direction: str, rank: int) -> int:
    """The 64-bit state of one flow: `direction` is "up" (to the server) or "down", `rank` the worker's rank.

    Raises ValueError when the direction is unknown, or seed (0..2**64-1) or rank (0..2**32-1) out of range.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction {direction!r}: expected one of {', '.join(DIRECTIONS)}")
    if not 0 <= seed <= U64:
        raise ValueError(f"seed {seed}: expected 0..2**64-1")
    if not 0 <= rank <= U32:
        raise ValueError(f"rank {rank}: expected 0..2**32-1")
    return mix(mix(seed) ^ (DIRECTIONS[direction] << 32 | rank))


def threshold(ratio: float) -> int:
    """The bound that the upper 32 bits of the hash are compared with: `round(ratio * 2**32)`, 0..2**32."""
    if not 0.0 <= ratio <= 1.0:  # also refuses NaN
        raise ValueError(f"loss ratio {ratio}: expected 0..1")
    return round(ratio * FULL)


def key_words(payload: bytes | memoryview, ranges: Sequence[tuple[int, int]]) -> tuple[int, ...] | None:
    """The key of a UDP payload as big-endian 32-bit words; None when the payload ends before the last range.

    Ranges are half-open byte ranges; their bytes are concatenated and zero-padded to a multiple of four.
    """
    if any(stop > len(payload) for _, stop in ranges):
        return None
    key = b"".join(bytes(payload[start:stop]) for start, stop in ranges)
    key += bytes(-len(key) % 4)
    return tuple(int.from_bytes(key[at : at + 4], "big") for at in range(0, len(key), 4))


def drops_scalar(state: int, words: Sequence[int], limit: int) -> bool:
    """Whether the packet with these key words is dropped; `limit` comes from `threshold`. The reference."""
    return hash_scalar(state, words) >> 32 < limit


def hash_scalar(state: int, words: Sequence[int]) -> int:
    """The key's hash: the upper 32 bits decide about loss, the lower about a second copy, its `mix` about damage."""
    for word in words:
        state = mix(state ^ word)
    return state


def duplicates(state: int, words: Sequence[Word], limit: int) -> npt.NDArray[np.bool_]:
    """Whether packets that are not dropped get through twice; arguments as of `drops`."""
    return np.asarray((hashes(state, words) & np.uint64(U32)) < np.uint64(limit), dtype=np.bool_)


def corrupts(state: int, words: Sequence[Word], limit: int) -> npt.NDArray[np.bool_]:
    """Whether packets that are not dropped arrive damaged; arguments as of `drops`."""
    with np.errstate(over="ignore"):
        draws = mix_array(hashes(state, words))
    return np.asarray((draws >> np.uint64(32)) < np.uint64(limit), dtype=np.bool_)


def drops(state: int, words: Sequence[Word], limit: int) -> npt.NDArray[np.bool_]:
    """Whether packets are dropped. Key words are numbers or arrays and broadcast to the result's shape.

    `state` comes from `port_state`, `limit` from `threshold`. For DBLP the words are round, sequence and
    pass << 16.
    """
    return np.asarray((hashes(state, words) >> np.uint64(32)) < np.uint64(limit), dtype=np.bool_)


def hashes(state: int, words: Sequence[Word]) -> npt.NDArray[np.uint64]:
    """`hash_scalar` over arrays."""
    s: npt.NDArray[np.uint64] = np.asarray(state, dtype=np.uint64)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant; 0-d arrays would warn
        for word in words:
            s = mix_array(s ^ np.asarray(word).astype(np.uint64))
    return s


def mix_array(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`mix` of each number."""
    x = x + np.uint64(GAMMA)
    x = (x ^ (x >> np.uint64(SHIFT_1))) * np.uint64(MULTIPLY_1)
    x = (x ^ (x >> np.uint64(SHIFT_2))) * np.uint64(MULTIPLY_2)
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(SHIFT_3))
    return mixed

"""How the loss program decides: by the mask (`mask`), by a chain (`chain`), or by the kernel's random numbers.

Each part ends with a jump to "count", with the verdict in R8, or to what decides next.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

from netem.kernel.bpf_asm import FP, R0, R1, R2, R3, R4, R5, R7, R8, R9, Assembler, Register, Size
from netem.links import mask
from netem.links.base import Key
from netem.links.chain import BLOCK
from netem.links.program_layout import (
    BAD_LOSS,
    BASE,
    BASE_PLACE,
    CHAIN,
    CORRUPT,
    CORRUPT_BELOW,
    COUNTER_KEY,
    FLAGS,
    FLIPS,
    GOOD_LOSS,
    HIGH,
    LOW,
    MATCH_ALL,
    PLACE,
    PRANDOM,
    START,
    START_PLACE,
    STATE,
    THRESHOLD,
    TWICE,
    TWICE_BELOW,
    WALK,
    ZERO,
    Headers,
    find_counter,
    lookup,
)

Chained = Set[Literal["rules", "base"]]


def decide_by_key(a: Assembler, key: Key, headers: Headers, chained: Chained) -> None:
    """Duplicate below the lower half of the key's hash, corrupt below its next, lose below its upper half or by the
    chain."""
    _hash(a, _words(key, headers))
    a.load(8, R2, R7, TWICE_BELOW)
    a.mov(R1, Register(R8))
    a.alu("lsh", R1, 32)
    a.alu("rsh", R1, 32)
    a.alu("sub", R1, Register(R2))  # the sign, not a jump: each would double what the verifier has to follow
    a.alu("rsh", R1, 63)
    a.store(8, FP, TWICE, Register(R1))
    a.mov(R1, Register(R8))
    mix(a, R1)
    a.alu("rsh", R1, 32)
    a.load(8, R2, R7, CORRUPT_BELOW)
    a.alu("sub", R1, Register(R2))
    a.alu("rsh", R1, 63)
    a.store(8, FP, CORRUPT, Register(R1))
    a.alu("rsh", R8, 32)
    if "rules" in chained:
        a.load(4, R2, R7, FLAGS)
        a.jump_if(R2, "&", CHAIN, "chain")
    a.load(8, R2, R7, THRESHOLD)
    a.jump_if(R8, "<", Register(R2), "lost")
    a.mov(R8, 0)
    a.jump("base")
    a.label("lost")
    a.mov(R8, 1)
    a.jump("count")


def _words(key: Key, headers: Headers) -> list[list[int]]:
    """Where the key's words lie in the stack."""
    places = [headers.payload + at for start, stop in key.ranges for at in range(start, stop)]
    return [places[first : first + 4] for first in range(0, len(places), 4)]


def _hash(a: Assembler, words: list[list[int]]) -> None:
    """R8 = the rule's state, mixed with these words of the stack."""
    a.load(8, R8, R7, STATE)
    for places in words:
        word(a, places)
        a.alu("xor", R8, Register(R1))
        mix(a, R8)


def decide_by_chain(a: Assembler, key: Key | None, headers: Headers) -> None:
    """Along the key's place, else along the data packets of this sender and index, by how many came before."""
    if key is not None and key.place_word is not None:
        words = _words(key, headers)
        _hash(a, [places for n, places in enumerate(words) if n != key.place_word])
        word(a, words[key.place_word])
        a.mov(R0, Register(R1))
    else:
        a.mov(R8, 0)
        find_counter(a, "random")
        a.mov(R1, 1)
        a.atomic_fetch_add(R0, PLACE, R1)
        a.mov(R0, Register(R1))
        a.load(8, R8, R7, STATE)
        a.load(4, R1, FP, COUNTER_KEY + 4)
        a.alu("xor", R8, Register(R1))
        mix(a, R8)
    walk(a, R7, 0, kept="base")


def walk(a: Assembler, rule: int, at: int, kept: str) -> None:
    """Is place R0 of the chain with base R8 lost (`chain`)? R8 = 1 and on to "count", or R8 = 0 and on to `kept`.

    Every way out of the loop is the next instruction and not a jump: the verifier keeps what it has yet to follow in
    a list of limited length, and follows the next instruction first.
    """
    loop, bad, good, decided, lost = (a.fresh(name) for name in ("loop", "bad", "good", "decided", "lost"))
    first, higher, lower, inside = (a.fresh(name) for name in ("first", "higher", "lower", "inside"))
    a.mov(R1, Register(R0))
    a.alu("rsh", R1, BLOCK.bit_length() - 1)
    a.jump_if(R1, "==", 0, first)
    a.alu("sub", R1, 1)
    a.label(first)
    a.alu("lsh", R1, BLOCK.bit_length() - 1)
    a.store(8, FP, START_PLACE, Register(R1))
    for offset in (START, LOW, HIGH, FLIPS, BAD_LOSS, GOOD_LOSS):
        a.load(8, R1, rule, at + offset)
        a.store(8, FP, WALK + offset - LOW, Register(R1))
    a.mov(R4, 0)  # 1: the state is the opposite of that at place R0
    a.mov(R5, 0)
    _draw(a)
    a.mov(R3, Register(R1))
    a.alu("lsh", R3, 32)
    a.alu("rsh", R3, 32)
    a.label(loop)
    _draw(a)
    a.alu("rsh", R1, 32)
    a.load(8, R2, FP, START_PLACE)
    a.jump_if(R0, "!=", Register(R2), inside)
    a.load(8, R2, FP, WALK + START - LOW)
    a.jump_if(R1, "<", Register(R2), bad)
    a.jump(good)
    a.label(inside)
    a.load(8, R2, FP, WALK + LOW - LOW)
    a.jump_if(R1, ">=", Register(R2), higher)
    a.label(bad)
    a.alu("xor", R4, 1)
    a.label(good)
    a.jump(decided)
    a.label(higher)
    a.load(8, R2, FP, WALK + HIGH - LOW)
    a.jump_if(R1, "<", Register(R2), lower)
    a.jump(decided)
    a.label(lower)
    a.load(8, R2, FP, WALK + FLIPS - LOW)
    a.alu("xor", R4, Register(R2))
    a.alu("sub", R0, 1)
    a.alu("add", R5, 1)
    a.jump_if(R5, "<", 2 * BLOCK, loop)
    a.label(decided)
    a.load(8, R2, FP, WALK + BAD_LOSS - LOW)
    a.jump_if(R4, "&", 1, lost)
    a.load(8, R2, FP, WALK + GOOD_LOSS - LOW)
    a.label(lost)
    a.mov(R8, 0)
    a.jump_if(R3, ">=", Register(R2), kept)
    a.mov(R8, 1)
    a.jump("count")


def _draw(a: Assembler) -> None:
    """R1 = the number of place R0 of the chain with base R8."""
    a.mov(R1, Register(R8))
    a.alu("xor", R1, Register(R0))
    mix(a, R1)


def mix(a: Assembler, x: int) -> None:
    """`mask.mix` of a register other than R2."""
    a.load_constant(R2, mask.GAMMA)
    a.alu("add", x, Register(R2))
    steps = ((mask.SHIFT_1, mask.MULTIPLY_1), (mask.SHIFT_2, mask.MULTIPLY_2), (mask.SHIFT_3, None))
    for shift, factor in steps:
        a.mov(R2, Register(x))
        a.alu("rsh", R2, shift)
        a.alu("xor", x, Register(R2))
        if factor is not None:
            a.load_constant(R2, factor)
            a.alu("mul", x, Register(R2))


def word(a: Assembler, places: list[int]) -> None:
    """R1 = up to four bytes of the stack, most significant first, zero-padded; aligned neighbours at once."""
    a.mov(R1, 0)
    done = 0
    while done < len(places):
        size = _run(places[done:])
        a.load(size, R2, FP, places[done])
        if size != 1:
            a.swap_be(R2, 32 if size == 4 else 16)
        shift = 8 * (4 - done - size)
        if shift:
            a.alu("lsh", R2, shift)
        a.alu("or", R1, Register(R2))
        done += size


def _run(places: list[int]) -> Size:
    """How many of these bytes one aligned load can take."""
    sizes: tuple[Size, ...] = (4, 2)
    for size in sizes:
        neighbours = [places[0] + n for n in range(size)]
        if places[:size] == neighbours and places[0] % size == 0:
            return size
    return 1


def decide_at_random(a: Assembler) -> None:
    """Other packets under `match: all`, and data without a key ("random")."""
    a.label("other")
    a.mov(R8, 0)
    a.load(4, R1, R7, FLAGS)
    a.alu("and", R1, MATCH_ALL)
    a.jump_if(R1, "==", 0, "base")
    a.label("random")
    _drop_below(a, R7, THRESHOLD, "base")
    a.jump("count")


def decide_base(a: Assembler, chained: Chained) -> None:
    """The base loss of all that no rule has lost: at random, or by the port's one chain."""
    a.label("base")
    if "base" not in chained:
        _drop_below(a, R9, BASE + THRESHOLD, "count")
        return
    lookup(a, "events", ZERO)
    a.jump_if(R0, "==", 0, "pass")
    a.mov(R1, 1)
    a.atomic_fetch_add(R0, BASE_PLACE, R1)
    a.mov(R0, Register(R1))
    a.load(8, R8, R9, BASE + STATE)
    walk(a, R9, BASE, kept="count")


def _drop_below(a: Assembler, base: int, offset: int, kept: str) -> None:
    a.load(8, R1, base, offset)
    a.jump_if(R1, "==", 0, kept)
    a.call(PRANDOM)
    a.alu("lsh", R0, 32)
    a.alu("rsh", R0, 32)
    a.load(8, R1, base, offset)
    a.jump_if(R0, ">=", Register(R1), kept)
    a.mov(R8, 1)

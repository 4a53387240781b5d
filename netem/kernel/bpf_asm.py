"""An assembler for eBPF instructions: labels, named maps, no compiler.

Encoding: Linux `Documentation/bpf/standardization/instruction-set.rst` (RFC 9669). Eight bytes an
instruction: opcode, registers, 16-bit offset, 32-bit immediate. Map references and jump targets are names
until `assemble`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from ctypes import Structure, c_int16, c_int32, c_uint8
from dataclasses import dataclass, replace
from typing import Literal

R0, R1, R2, R3, R4, R5, R6, R7, R8, R9, FP = range(11)
"""R0: result; R1..R5: arguments, lost by a call; R6..R9: kept by a call; FP: end of the stack, read only."""

Size = Literal[1, 2, 4, 8]

_SIZES = {4: 0x00, 2: 0x08, 1: 0x10, 8: 0x18}
_ALU = {
    "add": 0x00, "sub": 0x10, "mul": 0x20, "div": 0x30, "or": 0x40, "and": 0x50, "lsh": 0x60, "rsh": 0x70,
    "mod": 0x90, "xor": 0xA0, "mov": 0xB0,
}  # fmt: skip
_JUMPS = {"==": 0x10, ">": 0x20, ">=": 0x30, "&": 0x40, "!=": 0x50, "<": 0xA0, "<=": 0xB0}
_LDX, _ST, _STX, _ALU32_CLASS, _JMP, _ALU64 = 0x01, 0x02, 0x03, 0x04, 0x05, 0x07
_MEM, _ATOMIC, _BY_REGISTER, _FETCH = 0x60, 0xC0, 0x08, 0x01
_LD_IMM64, _PSEUDO_MAP_FD, _TO_BIG_ENDIAN = 0x18, 1, 0xD0


class AssemblyError(ValueError):
    """The program text is not a valid program: unknown label or map, value out of range."""


class _Encoded(Structure):
    _fields_ = (("code", c_uint8), ("registers", c_uint8), ("offset", c_int16), ("immediate", c_int32))


@dataclass(frozen=True)
class Register:
    """A register used as an operand, to tell it from a number."""

    number: int


@dataclass(frozen=True)
class Instruction:
    """One slot of eight bytes. `target` names the label to jump to, `map_name` the map to insert."""

    code: int
    dst: int = 0
    src: int = 0
    offset: int = 0
    immediate: int = 0
    target: str | None = None
    map_name: str | None = None

    def encode(self) -> bytes:
        if not -(2**15) <= self.offset < 2**15:
            raise AssemblyError(f"offset {self.offset} does not fit 16 bits")
        if not -(2**31) <= self.immediate < 2**31:
            raise AssemblyError(f"immediate {self.immediate} does not fit 32 bits, use load_constant")
        low, high = (self.dst, self.src) if sys.byteorder == "little" else (self.src, self.dst)
        return bytes(_Encoded(self.code, low | high << 4, self.offset, self.immediate))


LOAD_8_BYTES = _LDX | _MEM | _SIZES[8]
"""Opcode of `Assembler.load` with a size of 8."""


def decode(code: bytes) -> list[Instruction]:
    """Machine code as instructions, without names."""
    if len(code) % 8:
        raise AssemblyError(f"{len(code)} bytes are no whole number of instructions")
    slots = [_Encoded.from_buffer_copy(code, at) for at in range(0, len(code), 8)]
    low_first = sys.byteorder == "little"
    halves = [(each.registers & 15, each.registers >> 4) for each in slots]
    return [
        Instruction(each.code, *(pair if low_first else pair[::-1]), each.offset, each.immediate)
        for each, pair in zip(slots, halves, strict=True)
    ]


class Assembler:
    """Collects instructions; `assemble` resolves labels and maps. Destination first, as in kernel dumps."""

    def __init__(self) -> None:
        self._slots: list[Instruction] = []
        self._labels: dict[str, int] = {}
        self._unique = 0

    def __len__(self) -> int:
        return len(self._slots)

    def label(self, name: str) -> None:
        """Name the next instruction."""
        if name in self._labels:
            raise AssemblyError(f"label {name!r} is defined twice")
        self._labels[name] = len(self._slots)

    def fresh(self, stem: str) -> str:
        """A label name used nowhere else."""
        self._unique += 1
        return f"{stem}.{self._unique}"

    def alu(self, operation: str, dst: int, operand: int | Register) -> None:
        """64-bit `dst = dst operation operand`; a number is sign-extended from 32 bits."""
        if isinstance(operand, Register):
            self._emit(Instruction(_ALU64 | _ALU[operation] | _BY_REGISTER, dst, operand.number))
        else:
            self._emit(Instruction(_ALU64 | _ALU[operation], dst, immediate=operand))

    def mov(self, dst: int, operand: int | Register) -> None:
        self.alu("mov", dst, operand)

    def swap_be(self, dst: int, bits: Literal[16, 32, 64]) -> None:
        """Convert the low `bits` between network and host order; the rest becomes zero."""
        self._emit(Instruction(_ALU32_CLASS | _TO_BIG_ENDIAN | _BY_REGISTER, dst, immediate=bits))

    def load(self, size: Size, dst: int, base: int, offset: int) -> None:
        """`dst = *(unsigned size bytes *)(base + offset)`"""
        self._emit(Instruction(_LDX | _MEM | _SIZES[size], dst, base, offset))

    def store(self, size: Size, base: int, offset: int, src: int | Register) -> None:
        """`*(size bytes *)(base + offset) = src`"""
        if isinstance(src, Register):
            self._emit(Instruction(_STX | _MEM | _SIZES[size], base, src.number, offset))
        else:
            self._emit(Instruction(_ST | _MEM | _SIZES[size], base, 0, offset, src))

    def atomic_add(self, base: int, offset: int, src: int) -> None:
        """`*(u64 *)(base + offset) += src`, atomically"""
        self._emit(Instruction(_STX | _ATOMIC | _SIZES[8], base, src, offset))

    def atomic_fetch_add(self, base: int, offset: int, src: int) -> None:
        """`old = *(u64 *)(base + offset); *(u64 *)(base + offset) += src; src = old`, atomically (Linux 5.12)"""
        self._emit(Instruction(_STX | _ATOMIC | _SIZES[8], base, src, offset, _FETCH))

    def load_constant(self, dst: int, value: int) -> None:
        """A full 64-bit number (two slots)."""
        self._wide(dst, 0, value)

    def load_map(self, dst: int, map_name: str) -> None:
        """A pointer to the map of this name (two slots)."""
        self._wide(dst, _PSEUDO_MAP_FD, 0, map_name)

    def jump(self, target: str) -> None:
        self._emit(Instruction(_JMP, target=target))

    def jump_if(self, dst: int, condition: str, operand: int | Register, target: str) -> None:
        """Unsigned 64-bit comparison; "&" jumps when a common bit is set."""
        if isinstance(operand, Register):
            self._emit(Instruction(_JMP | _JUMPS[condition] | _BY_REGISTER, dst, operand.number, target=target))
        else:
            self._emit(Instruction(_JMP | _JUMPS[condition], dst, immediate=operand, target=target))

    def call(self, helper: int) -> None:
        self._emit(Instruction(_JMP | 0x80, immediate=helper))

    def exit(self) -> None:
        self._emit(Instruction(_JMP | 0x90))

    def assemble(self, map_fds: Mapping[str, int] | None = None) -> bytes:
        """Machine code, with every map name replaced by its file descriptor."""
        return b"".join(self._resolve(at, slot, map_fds or {}).encode() for at, slot in enumerate(self._slots))

    def _resolve(self, at: int, slot: Instruction, map_fds: Mapping[str, int]) -> Instruction:
        if slot.target is not None:
            if slot.target not in self._labels:
                raise AssemblyError(f"unknown label {slot.target!r}")
            return replace(slot, offset=self._labels[slot.target] - at - 1)
        if slot.map_name is not None:
            if slot.map_name not in map_fds:
                raise AssemblyError(f"unknown map {slot.map_name!r}")
            return replace(slot, immediate=map_fds[slot.map_name])
        return slot

    def _wide(self, dst: int, src: int, value: int, map_name: str | None = None) -> None:
        if not -(2**63) <= value < 2**64:
            raise AssemblyError(f"constant {value} does not fit 64 bits")
        self._emit(Instruction(_LD_IMM64, dst, src, immediate=_signed(value), map_name=map_name))
        self._emit(Instruction(0, immediate=_signed(value >> 32)))

    def _emit(self, instruction: Instruction) -> None:
        self._slots.append(instruction)


def _signed(value: int) -> int:
    """The low 32 bits as the signed number that the immediate field holds."""
    return c_int32(value & 0xFFFF_FFFF).value

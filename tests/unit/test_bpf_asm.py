"""The eBPF assembler: encodings against known ones, labels, and the shape of the loss program."""

from __future__ import annotations

import sys

import pytest

from netem.kernel.bpf_asm import FP, R0, R1, R2, R6, Assembler, AssemblyError, Register
from netem.links.base import Flow, Key
from netem.links.program import PAYLOAD_MAX, loss_program

pytestmark = pytest.mark.skipif(sys.byteorder != "little", reason="encodings below are little-endian")

# (how it is written, the kernel's encoding: opcode, registers src:dst, offset, immediate)
ENCODINGS = [
    (lambda a: a.mov(R0, -1), "b7 00 0000 ffffffff"),
    (lambda a: a.mov(R6, Register(R1)), "bf 16 0000 00000000"),
    (lambda a: a.alu("add", R2, -8), "07 02 0000 f8ffffff"),
    (lambda a: a.alu("mul", R1, Register(R2)), "2f 21 0000 00000000"),
    (lambda a: a.alu("rsh", R1, 32), "77 01 0000 20000000"),
    (lambda a: a.alu("xor", R1, Register(R2)), "af 21 0000 00000000"),
    (lambda a: a.swap_be(R1, 16), "dc 01 0000 10000000"),
    (lambda a: a.load(4, R2, R1, 16), "61 12 1000 00000000"),
    (lambda a: a.load(1, R2, FP, -24), "71 a2 e8ff 00000000"),
    (lambda a: a.load(8, R2, R1, 0), "79 12 0000 00000000"),
    (lambda a: a.store(4, FP, -4, 7), "62 0a fcff 07000000"),
    (lambda a: a.store(8, FP, -8, Register(R1)), "7b 1a f8ff 00000000"),
    (lambda a: a.atomic_add(R0, 8, R1), "db 10 0800 00000000"),
    (lambda a: a.atomic_fetch_add(R0, 8, R1), "db 10 0800 01000000"),
    (lambda a: a.load_constant(R1, 0x0123456789ABCDEF), "18 01 0000 efcdab89 00 00 0000 67452301"),
    (lambda a: a.call(7), "85 00 0000 07000000"),
    (lambda a: a.exit(), "95 00 0000 00000000"),
]


@pytest.mark.parametrize(("write", "expected"), ENCODINGS, ids=[text for _, text in ENCODINGS])
def test_encoding(write, expected: str) -> None:
    a = Assembler()
    write(a)
    assert a.assemble() == bytes.fromhex(expected)


def test_map_reference_takes_the_descriptor() -> None:
    a = Assembler()
    a.load_map(R1, "rules")
    assert a.assemble({"rules": 5}) == bytes.fromhex("18 11 0000 05000000 00 00 0000 00000000")
    with pytest.raises(AssemblyError, match="rules"):
        a.assemble({"other": 5})


def test_labels_forwards_and_backwards() -> None:
    a = Assembler()
    a.label("start")
    a.jump_if(R1, "==", 0, "end")
    a.load_constant(R2, 1)  # two slots: targets count slots
    a.jump("start")
    a.label("end")
    a.exit()
    code = a.assemble()
    assert code[0:8] == bytes.fromhex("15 01 0300 00000000")
    assert code[24:32] == bytes.fromhex("05 00 fcff 00000000")


def test_mistakes_are_errors() -> None:
    a = Assembler()
    a.label("here")
    with pytest.raises(AssemblyError, match="twice"):
        a.label("here")
    a.jump("nowhere")
    with pytest.raises(AssemblyError, match="nowhere"):
        a.assemble()
    for write in (
        lambda a: a.mov(R0, 2**31),
        lambda a: a.load(8, R0, FP, -(2**15) - 1),
    ):
        b = Assembler()
        write(b)
        with pytest.raises(AssemblyError, match="fit"):
            b.assemble()
    with pytest.raises(AssemblyError, match="64 bits"):
        Assembler().load_constant(R0, 2**64)


MAPS = {"control": 3, "rules": 4, "counters": 5, "events": 6, "sources": 7, "windows": 8}


def test_loss_program_is_a_function_of_flow_and_key() -> None:
    flow, key = Flow("udp", (29600, 29699)), Key(((4, 14),), (4, 8))
    assert loss_program(flow, key).assemble(MAPS) == loss_program(flow, key).assemble(MAPS)
    others = [(None, None), (flow, None), (Flow("udp", (29600, 29700)), key), (flow, Key(((4, 15),), (4, 8)))]
    assert len({loss_program(*each).assemble(MAPS) for each in others}) == len(others)


def test_loss_program_refuses_keys_it_cannot_read() -> None:
    with pytest.raises(ValueError, match="UDP"):
        loss_program(None, Key(((0, 4),)))
    with pytest.raises(ValueError, match="UDP"):
        loss_program(Flow("tcp", (1, 1)), Key(((0, 4),)))
    with pytest.raises(ValueError, match=str(PAYLOAD_MAX)):
        loss_program(Flow("udp", (1, 1)), Key(((0, PAYLOAD_MAX + 1),)))

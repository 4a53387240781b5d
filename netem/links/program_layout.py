"""What the parts of the loss program share: maps' layouts, the stack, and calls of the kernel's helpers."""

from __future__ import annotations

from dataclasses import dataclass

from netem.kernel.bpf_asm import FP, R0, R1, R2, R3, R4, Assembler, Register

EVENTS = ("fragments", "short", "overflow_seen", "overflow_dropped", "gso_seen")

RULE_BYTES, WINDOW_KEY_BYTES = 96, 12
CONTROL_BYTES = 16 + RULE_BYTES
COUNTER_KEY_BYTES, COUNTER_BYTES = 12, 48
EVENTS_BYTES = 8 * (len(EVENTS) + 1)
DATA, OTHER = 0, 1
MATCH_ALL, CHAIN, BY_INDEX = 1, 2, 4
"""Flags of a rule."""
PAYLOAD_MAX = 256
"""The stack holds 512 bytes: a key must end within this many bytes of the UDP payload."""

SHOT, NEXT_FILTER = 2, -1

LOOKUP, UPDATE, PRANDOM, CLONE_REDIRECT, LOAD_BYTES, STORE_BYTES, PULL_DATA = 1, 2, 7, 13, 26, 9, 39
SKB_LEN, SKB_MARK, SKB_PROTOCOL, SKB_IFINDEX, SKB_GSO_SEGS = 0, 8, 16, 40, 164
PROTO_NUMBER = {"tcp": 6, "udp": 17}
ETHERNET, IPV4, UDP = 14, 20, 8
NOEXIST, INGRESS = 1, 1
COPY_MARK = 0x64626C70
"""On a copy's way from the program back to the program, and nowhere else."""

# control, rule, counter, events
BANK, LABEL, BASE = 0, 8, 16
STATE, THRESHOLD, FIRST, LAST, FLAGS = 0, 8, 16, 20, 24
LOW, HIGH, START, BAD_LOSS, GOOD_LOSS, FLIPS, TWICE_BELOW, CORRUPT_BELOW = 32, 40, 48, 56, 64, 72, 80, 88
DROPPED, BYTES, PLACE, DUPLICATED, CORRUPTED = 8, 16, 24, 32, 40
BASE_PLACE = 8 * len(EVENTS)
# stack, as offsets from its end; every slot is naturally aligned, as the verifier demands
ZERO = -4
RULE_KEY = -16
COUNTER_KEY = -32
SEGMENTS = -40
TWICE = -48
WINDOW_KEY = -64
START_PLACE = -72
CORRUPT = -80
NEW_COUNTER = -128
WALK = -176
"""The chain that is being walked, a rule's fields from LOW on: on the stack, so that its map does not matter."""


@dataclass(frozen=True)
class Headers:
    """Where the program keeps a packet's headers: below the fixed slots, aligned to eight bytes, in one piece.

    `need` bytes from the transport header on are what classification and key ask for.
    """

    need: int

    @property
    def ip(self) -> int:
        return WALK - (IPV4 + self.need + 7) // 8 * 8

    @property
    def transport(self) -> int:
        return self.ip + IPV4

    @property
    def payload(self) -> int:
        return self.transport + UDP


def lookup(a: Assembler, map_name: str, key_at: int) -> None:
    a.load_map(R1, map_name)
    stack_pointer(a, R2, key_at)
    a.call(LOOKUP)


def stack_pointer(a: Assembler, dst: int, offset: int) -> None:
    a.mov(dst, Register(FP))
    a.alu("add", dst, offset)


def load_bytes(a: Assembler, to: int, size: int) -> None:
    """Copy from packet R1 at offset R2 to the stack; R0 is 0 on success."""
    stack_pointer(a, R3, to)
    a.mov(R4, size)
    a.call(LOAD_BYTES)


def event(a: Assembler, name: str, by_segments: bool = False) -> None:
    absent = a.fresh("absent")
    lookup(a, "events", ZERO)
    a.jump_if(R0, "==", 0, absent)
    if by_segments:
        a.load(8, R1, FP, SEGMENTS)
    else:
        a.mov(R1, 1)
    a.atomic_add(R0, 8 * EVENTS.index(name), R1)
    a.label(absent)


def find_counter(a: Assembler, absent: str) -> None:
    """R0 = the packet's counter, made if it is not there; to `absent` if the map is full."""
    found = a.fresh("found")
    lookup(a, "counters", COUNTER_KEY)
    a.jump_if(R0, "!=", 0, found)
    for at in range(0, COUNTER_BYTES, 8):
        a.store(8, FP, NEW_COUNTER + at, 0)
    a.load_map(R1, "counters")
    stack_pointer(a, R2, COUNTER_KEY)
    stack_pointer(a, R3, NEW_COUNTER)
    a.mov(R4, NOEXIST)  # another CPU may have been first: its element must stay
    a.call(UPDATE)
    lookup(a, "counters", COUNTER_KEY)
    a.jump_if(R0, "==", 0, absent)
    a.label(found)

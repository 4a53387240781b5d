"""The loss program: a direct-action classifier that decides, counts, and drops.

Flow and key are compiled in (`loss_program(flow, key)`); what changes during a run sits in maps:

control   array of one: `Control` bank in use, label, base threshold. One 8-byte word each, so a change of
the bank
          switches all rules of a port at once.
rules     hash: (source, bank) -> state, threshold, first, last, flags. Only the bank not in use is ever
written. counters  hash: (source, index, kind) -> seen, dropped, bytes. events    array of one: what makes
numbers doubtful (`EVENTS`).

For every IPv4 packet of a known source: classify as data (protocol and ports of the flow) or other, decide,
count. Data with a key is decided by the mask (`mask`), within the rule's index window; data without one,
and with `match: all` the rest too, by the kernel's random numbers. Headers are read by bpf_skb_load_bytes,
so packets whose payload is not linear are read as well. Fragments have no ports beyond the first one:
counted and passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from netem.kernel.bpf_asm import FP, R0, R1, R2, R3, R4, R6, R7, R8, R9, Assembler, Register, Size
from netem.links import mask
from netem.links.base import Flow, Key

EVENTS = ("fragments", "short", "overflow_seen", "overflow_dropped", "gso_seen")

CONTROL_BYTES, RULE_KEY_BYTES, RULE_BYTES = 24, 8, 32
COUNTER_KEY_BYTES, COUNTER_BYTES = 12, 24
EVENTS_BYTES = 8 * len(EVENTS)
DATA, OTHER = 0, 1
MATCH_ALL = 1
PAYLOAD_MAX = 256
"""The stack holds 512 bytes: a key must end within this many bytes of the UDP payload."""

SHOT, NEXT_FILTER = 2, -1

_LOOKUP, _UPDATE, _PRANDOM, _LOAD_BYTES = 1, 2, 7, 26
_SKB_LEN, _SKB_PROTOCOL, _SKB_GSO_SEGS = 0, 16, 164
_PROTO_NUMBER = {"tcp": 6, "udp": 17}
_ETHERNET, _IPV4, _UDP = 14, 20, 8
_NOEXIST = 1

# control, rule
_BANK, _LABEL, _BASE = 0, 8, 16
_STATE, _THRESHOLD, _FIRST, _LAST, _FLAGS = 0, 8, 16, 20, 24
# stack, as offsets from its end; every slot is naturally aligned, as the verifier demands
_ZERO = -4
_RULE_KEY = -16
_COUNTER_KEY = -32
_SEGMENTS = -40
_NEW_COUNTER = -64


@dataclass(frozen=True)
class _Headers:
    """Where the program keeps a packet's headers: below the fixed slots, aligned to eight bytes, in one piece.

    `need` bytes from the transport header on are what classification and key ask for.
    """

    need: int

    @property
    def ip(self) -> int:
        return _NEW_COUNTER - (_IPV4 + self.need + 7) // 8 * 8

    @property
    def transport(self) -> int:
        return self.ip + _IPV4

    @property
    def payload(self) -> int:
        return self.transport + _UDP


By = Literal["source", "destination"]
"""Whose packets rules and counters tell apart: the sender's, or the receiver's where all have one sender."""


def loss_program(flow: Flow | None, key: Key | None, by: By = "source") -> Assembler:
    """The program's text. A key needs a UDP flow; ValueError when it reaches past PAYLOAD_MAX."""
    if key is not None and (flow is None or flow.proto != "udp"):
        raise ValueError("a key needs a UDP flow: it names bytes of the UDP payload")
    if key is not None and key.payload_bytes > PAYLOAD_MAX:
        raise ValueError(f"key ends at payload byte {key.payload_bytes}, at most {PAYLOAD_MAX} can be read")
    ports = 4 if flow is not None else 0
    headers = _Headers(ports if key is None else _UDP + key.payload_bytes)
    a = Assembler()
    _load_headers(a, headers)
    _find_rule(a, headers, by)
    _prepare(a, headers)
    if flow is not None:
        if key is not None:
            _classify_keyed(a, flow, headers)
            _decide_by_mask(a, key, headers)
        else:
            _classify_by_ports(a, flow, headers)
            a.store(4, FP, _COUNTER_KEY + 8, DATA)
            a.mov(R8, 0)
            a.jump("random")
    _decide_at_random(a)
    _count(a)
    _fragment(a)
    return a


def _load_headers(a: Assembler, headers: _Headers) -> None:
    """R6 = packet; its headers on the stack. R8 = 1 when they are all there, 0 when it is the IPv4 header alone.

    One helper call is the rule: it costs as much as a hash lookup. IPv4 options or a short packet take a second one.
    """
    a.mov(R6, Register(R1))
    a.load(4, R2, R6, _SKB_PROTOCOL)
    a.swap_be(R2, 16)
    a.jump_if(R2, "!=", 0x0800, "pass")
    a.mov(R8, 1)
    a.mov(R2, _ETHERNET)
    _load_bytes(a, headers.ip, _IPV4 + headers.need)
    a.jump_if(R0, "!=", 0, "ip alone")
    a.load(1, R1, FP, headers.ip)
    a.alu("and", R1, 0x0F)
    a.jump_if(R1, "==", 5, "ip there")
    a.label("ip alone")
    a.mov(R8, 0)
    a.mov(R1, Register(R6))
    a.mov(R2, _ETHERNET)
    _load_bytes(a, headers.ip, _IPV4)
    a.jump_if(R0, "!=", 0, "pass")
    a.label("ip there")


def _find_rule(a: Assembler, headers: _Headers, by: By) -> None:
    """R9 = control, R7 = rule of the packet's source (or destination); packets that have none pass."""
    a.store(4, FP, _ZERO, 0)
    _lookup(a, "control", _ZERO)
    a.jump_if(R0, "==", 0, "pass")
    a.mov(R9, Register(R0))
    a.load(4, R1, FP, headers.ip + (12 if by == "source" else 16))
    a.store(4, FP, _RULE_KEY, Register(R1))
    a.store(4, FP, _COUNTER_KEY, Register(R1))
    a.load(8, R1, R9, _BANK)
    a.store(4, FP, _RULE_KEY + 4, Register(R1))
    _lookup(a, "rules", _RULE_KEY)
    a.jump_if(R0, "==", 0, "pass")
    a.mov(R7, Register(R0))


def _prepare(a: Assembler, headers: _Headers) -> None:
    """Sort out fragments, note the number of segments, take the packet for "other" until shown otherwise."""
    a.load(2, R1, FP, headers.ip + 6)
    a.swap_be(R1, 16)
    a.alu("and", R1, 0x3FFF)  # more fragments | offset
    a.jump_if(R1, "!=", 0, "fragment")
    a.store(8, FP, _SEGMENTS, 1)
    a.load(4, R1, R6, _SKB_GSO_SEGS)
    a.jump_if(R1, "<=", 1, "single")
    a.store(8, FP, _SEGMENTS, Register(R1))
    _event(a, "gso_seen")
    a.label("single")
    a.load(8, R1, R9, _LABEL)
    a.store(4, FP, _COUNTER_KEY + 4, Register(R1))
    a.store(4, FP, _COUNTER_KEY + 8, OTHER)


def _classify_keyed(a: Assembler, flow: Flow, headers: _Headers) -> None:
    """Fall through if this is data with a whole key, all its headers loaded; else go to "other"."""
    _check_protocol(a, flow, headers)
    a.jump_if(R8, "!=", 0, "loaded")
    _load_transport(a, headers, headers.need)
    a.jump_if(R0, "==", 0, "loaded")
    _load_transport(a, headers, 4)  # shorter than header and key: are its ports those of data?
    a.jump_if(R0, "!=", 0, "other")
    _check_ports(a, flow, headers)
    a.label("short")
    _event(a, "short")
    a.jump("other")
    a.label("loaded")
    _check_ports(a, flow, headers)
    a.load(2, R1, FP, headers.transport + 4)  # what UDP says, not what padding adds
    a.swap_be(R1, 16)
    a.jump_if(R1, "<", headers.need, "short")


def _classify_by_ports(a: Assembler, flow: Flow, headers: _Headers) -> None:
    _check_protocol(a, flow, headers)
    a.jump_if(R8, "!=", 0, "loaded")
    _load_transport(a, headers, headers.need)
    a.jump_if(R0, "!=", 0, "other")
    a.label("loaded")
    _check_ports(a, flow, headers)


def _decide_by_mask(a: Assembler, key: Key, headers: _Headers) -> None:
    a.mov(R8, 0)  # from here on R8 is the verdict
    a.store(4, FP, _COUNTER_KEY + 8, DATA)
    if key.index is not None:
        _word(a, [headers.payload + at for at in range(*key.index)])
        a.store(4, FP, _COUNTER_KEY + 4, Register(R1))
        a.load(4, R2, R7, _FIRST)
        a.jump_if(R1, "<", Register(R2), "base")
        a.load(4, R2, R7, _LAST)
        a.jump_if(R1, ">", Register(R2), "base")
    a.load(8, R8, R7, _STATE)
    places = [headers.payload + at for start, stop in key.ranges for at in range(start, stop)]
    for first in range(0, len(places), 4):
        _word(a, places[first : first + 4])
        a.alu("xor", R8, Register(R1))
        _mix(a)
    a.mov(R1, Register(R8))
    a.alu("rsh", R1, 32)
    a.mov(R8, 0)
    a.load(8, R2, R7, _THRESHOLD)
    a.jump_if(R1, ">=", Register(R2), "base")
    a.mov(R8, 1)
    a.jump("count")


def _mix(a: Assembler) -> None:
    """`mask.mix` of R8."""
    a.load_constant(R2, mask.GAMMA)
    a.alu("add", R8, Register(R2))
    steps = ((mask.SHIFT_1, mask.MULTIPLY_1), (mask.SHIFT_2, mask.MULTIPLY_2), (mask.SHIFT_3, None))
    for shift, factor in steps:
        a.mov(R2, Register(R8))
        a.alu("rsh", R2, shift)
        a.alu("xor", R8, Register(R2))
        if factor is not None:
            a.load_constant(R2, factor)
            a.alu("mul", R8, Register(R2))


def _word(a: Assembler, places: list[int]) -> None:
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


def _decide_at_random(a: Assembler) -> None:
    """Other packets under `match: all`, data without a key ("random"), and the base loss of all ("base")."""
    a.label("other")
    a.mov(R8, 0)
    a.load(4, R1, R7, _FLAGS)
    a.jump_if(R1, "==", 0, "base")
    a.label("random")
    _drop_below(a, R7, _THRESHOLD, "base")
    a.jump("count")
    a.label("base")
    _drop_below(a, R9, _BASE, "count")


def _drop_below(a: Assembler, base: int, offset: int, kept: str) -> None:
    a.load(8, R1, base, offset)
    a.jump_if(R1, "==", 0, kept)
    a.call(_PRANDOM)
    a.alu("lsh", R0, 32)
    a.alu("rsh", R0, 32)
    a.load(8, R1, base, offset)
    a.jump_if(R0, ">=", Register(R1), kept)
    a.mov(R8, 1)


def _count(a: Assembler) -> None:
    """Count the packet, in segments, under its key (no room for a new key: as an event). Then the verdict."""
    a.label("count")
    _lookup(a, "counters", _COUNTER_KEY)
    a.jump_if(R0, "!=", 0, "found")
    for at in range(0, COUNTER_BYTES, 8):
        a.store(8, FP, _NEW_COUNTER + at, 0)
    a.load_map(R1, "counters")
    _stack_pointer(a, R2, _COUNTER_KEY)
    _stack_pointer(a, R3, _NEW_COUNTER)
    a.mov(R4, _NOEXIST)  # another CPU may have been first: its element must stay
    a.call(_UPDATE)
    _lookup(a, "counters", _COUNTER_KEY)
    a.jump_if(R0, "!=", 0, "found")
    _event(a, "overflow_seen", by_segments=True)
    a.jump_if(R8, "==", 0, "pass")
    _event(a, "overflow_dropped", by_segments=True)
    a.jump("drop")
    a.label("found")
    a.load(8, R1, FP, _SEGMENTS)
    a.atomic_add(R0, 0, R1)
    a.load(4, R2, R6, _SKB_LEN)
    a.atomic_add(R0, 16, R2)
    a.jump_if(R8, "==", 0, "pass")
    a.atomic_add(R0, 8, R1)
    a.label("drop")
    a.mov(R0, SHOT)
    a.exit()
    a.label("pass")
    a.mov(R0, NEXT_FILTER)
    a.exit()


def _fragment(a: Assembler) -> None:
    a.label("fragment")
    _event(a, "fragments")
    a.jump("pass")


def _event(a: Assembler, name: str, by_segments: bool = False) -> None:
    absent = a.fresh("absent")
    _lookup(a, "events", _ZERO)
    a.jump_if(R0, "==", 0, absent)
    if by_segments:
        a.load(8, R1, FP, _SEGMENTS)
    else:
        a.mov(R1, 1)
    a.atomic_add(R0, 8 * EVENTS.index(name), R1)
    a.label(absent)


def _check_protocol(a: Assembler, flow: Flow, headers: _Headers) -> None:
    a.load(1, R1, FP, headers.ip + 9)
    a.jump_if(R1, "!=", _PROTO_NUMBER[flow.proto], "other")


def _check_ports(a: Assembler, flow: Flow, headers: _Headers) -> None:
    for window, at in ((flow.src_ports, 0), (flow.dst_ports, 2)):
        if window is not None:
            a.load(2, R1, FP, headers.transport + at)
            a.swap_be(R1, 16)
            a.jump_if(R1, "<", window[0], "other")
            a.jump_if(R1, ">", window[1], "other")


def _load_transport(a: Assembler, headers: _Headers, size: int) -> None:
    """Load the transport header and what follows from where it is: the IPv4 header's length varies."""
    a.load(1, R2, FP, headers.ip)
    a.alu("and", R2, 0x0F)
    a.alu("lsh", R2, 2)
    a.alu("add", R2, _ETHERNET)
    a.mov(R1, Register(R6))
    _load_bytes(a, headers.transport, size)


def _load_bytes(a: Assembler, to: int, size: int) -> None:
    """Copy from packet R1 at offset R2 to the stack; R0 is 0 on success."""
    _stack_pointer(a, R3, to)
    a.mov(R4, size)
    a.call(_LOAD_BYTES)


def _lookup(a: Assembler, map_name: str, key_at: int) -> None:
    a.load_map(R1, map_name)
    _stack_pointer(a, R2, key_at)
    a.call(_LOOKUP)


def _stack_pointer(a: Assembler, dst: int, offset: int) -> None:
    a.mov(dst, Register(FP))
    a.alu("add", dst, offset)

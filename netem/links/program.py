"""The loss program: a direct-action classifier that decides, counts, and drops.

Flow and key are compiled in (`loss_program(flow, key)`); what changes during a run sits in maps:

control   array of one: `Control` bank in use, label, base loss. One 8-byte word each, so a change of the bank
          switches all rules of a port at once.
sources   hash: source -> its number. Written before the program runs, and never again: a look-up in a hash whose
          elements are replaced meanwhile may miss one.
rules     array: 2 * number + bank -> a rule. Only the bank not in use is ever written.
windows   hash: (source, index, bank) -> a rule, for a source whose rule in `rules` says BY_INDEX.
counters  hash: (source, index, kind) -> seen, dropped, bytes, place, duplicated.
events    array of one: what makes numbers doubtful (`EVENTS`), and the place of the base loss's chain.

For every IPv4 packet of a known source: classify as data (protocol and ports of the flow) or other, decide,
count. Data with a key is decided by the mask (`mask`), within the rule's index window; data without one,
and with `match: all` the rest too, by the kernel's random numbers. Loss in bursts follows `chain`. What gets through
may be duplicated: the copy goes out by the same interface, with a mark by which the program knows it.

Headers are read by bpf_skb_load_bytes, so packets whose payload is not linear are read as well. Fragments have no ports
beyond the first one: counted and passed.
"""

from __future__ import annotations

from typing import Literal

from netem.kernel.bpf_asm import FP, R0, R1, R2, R3, R4, R5, R6, R7, R8, R9, Assembler, Register
from netem.links.base import Flow, Key
from netem.links.program_decide import Chained, decide_at_random, decide_base, decide_by_chain, decide_by_key, word
from netem.links.program_layout import (
    BANK,
    BY_INDEX,
    BYTES,
    CHAIN,
    CLONE_REDIRECT,
    COPY_MARK,
    CORRUPT,
    CORRUPTED,
    COUNTER_KEY,
    DATA,
    DROPPED,
    DUPLICATED,
    ETHERNET,
    FIRST,
    FLAGS,
    INGRESS,
    IPV4,
    LABEL,
    LAST,
    NEXT_FILTER,
    OTHER,
    PAYLOAD_MAX,
    PROTO_NUMBER,
    PULL_DATA,
    RULE_KEY,
    SEGMENTS,
    SHOT,
    SKB_GSO_SEGS,
    SKB_IFINDEX,
    SKB_LEN,
    SKB_MARK,
    SKB_PROTOCOL,
    STORE_BYTES,
    TWICE,
    UDP,
    WINDOW_KEY,
    ZERO,
    Headers,
    event,
    find_counter,
    load_bytes,
    lookup,
    stack_pointer,
)

By = Literal["source", "destination"]
"""Whose packets rules and counters tell apart: the sender's, or the receiver's where all have one sender."""


def loss_program(
    flow: Flow | None,
    key: Key | None,
    by: By = "source",
    *,
    ingress: bool = False,
    chained: Chained = frozenset(),
) -> Assembler:
    """The program's text. A key needs a UDP flow; ValueError when it reaches past PAYLOAD_MAX.

    `ingress`: copies of packets come in once more, instead of going out. `chained`: what may be lost by a chain;
    it takes the verifier some time.
    """
    if key is not None and (flow is None or flow.proto != "udp"):
        raise ValueError("a key needs a UDP flow: it names bytes of the UDP payload")
    if key is not None and key.payload_bytes > PAYLOAD_MAX:
        raise ValueError(f"key ends at payload byte {key.payload_bytes}, at most {PAYLOAD_MAX} can be read")
    ports = 4 if flow is not None else 0
    headers = Headers(ports if key is None else UDP + key.payload_bytes)
    a = Assembler()
    _load_headers(a, headers)
    _find_rule(a, headers, by)
    _prepare(a, headers)
    if flow is not None:
        if key is not None:
            _classify_keyed(a, flow, headers)
            _find_window(a, key, headers)
            decide_by_key(a, key, headers, chained)
        else:
            _classify_by_ports(a, flow, headers)
            a.store(4, FP, COUNTER_KEY + 8, DATA)
            a.mov(R8, 0)
            if "rules" in chained:
                a.load(4, R1, R7, FLAGS)
                a.jump_if(R1, "&", CHAIN, "chain")
            a.jump("random")
        if "rules" in chained:
            a.label("chain")
            decide_by_chain(a, key, headers)
    decide_at_random(a)
    decide_base(a, chained)
    _count(a)
    _pass(a, headers, INGRESS if ingress else 0)
    _fragment(a)
    return a


def _load_headers(a: Assembler, headers: Headers) -> None:
    """R6 = packet; its headers on the stack. R8 = 1 when they are all there, 0 when it is the IPv4 header alone.

    One helper call is the rule: it costs as much as a hash lookup. IPv4 options or a short packet take a second one.
    """
    a.mov(R6, Register(R1))
    a.load(4, R2, R6, SKB_MARK)
    a.jump_if(R2, "==", COPY_MARK, "copy")
    a.load(4, R2, R6, SKB_PROTOCOL)
    a.swap_be(R2, 16)
    a.jump_if(R2, "!=", 0x0800, "pass")
    a.mov(R8, 1)
    a.mov(R2, ETHERNET)
    load_bytes(a, headers.ip, IPV4 + headers.need)
    a.jump_if(R0, "!=", 0, "ip alone")
    a.load(1, R1, FP, headers.ip)
    a.alu("and", R1, 0x0F)
    a.jump_if(R1, "==", 5, "ip there")
    a.label("ip alone")
    a.mov(R8, 0)
    a.mov(R1, Register(R6))
    a.mov(R2, ETHERNET)
    load_bytes(a, headers.ip, IPV4)
    a.jump_if(R0, "!=", 0, "pass")
    a.label("ip there")


def _find_rule(a: Assembler, headers: Headers, by: By) -> None:
    """R9 = control, R7 = rule of the packet's source (or destination); packets that have none pass."""
    a.store(4, FP, ZERO, 0)
    lookup(a, "control", ZERO)
    a.jump_if(R0, "==", 0, "pass")
    a.mov(R9, Register(R0))
    a.load(4, R1, FP, headers.ip + (12 if by == "source" else 16))
    a.store(4, FP, COUNTER_KEY, Register(R1))
    lookup(a, "sources", COUNTER_KEY)
    a.jump_if(R0, "==", 0, "pass")
    a.load(4, R1, R0, 0)
    a.alu("lsh", R1, 1)
    a.load(8, R2, R9, BANK)
    a.store(4, FP, WINDOW_KEY + 8, Register(R2))
    a.alu("or", R1, Register(R2))
    a.store(4, FP, RULE_KEY, Register(R1))
    lookup(a, "rules", RULE_KEY)
    a.jump_if(R0, "==", 0, "pass")
    a.mov(R7, Register(R0))


def _prepare(a: Assembler, headers: Headers) -> None:
    """Sort out fragments, note the number of segments, take the packet for "other" until shown otherwise."""
    a.load(2, R1, FP, headers.ip + 6)
    a.swap_be(R1, 16)
    a.alu("and", R1, 0x3FFF)  # more fragments | offset
    a.jump_if(R1, "!=", 0, "fragment")
    a.store(8, FP, SEGMENTS, 1)
    a.store(8, FP, TWICE, 0)
    a.store(8, FP, CORRUPT, 0)
    a.load(4, R1, R6, SKB_GSO_SEGS)
    a.jump_if(R1, "<=", 1, "single")
    a.store(8, FP, SEGMENTS, Register(R1))
    event(a, "gso_seen")
    a.label("single")
    a.load(8, R1, R9, LABEL)
    a.store(4, FP, COUNTER_KEY + 4, Register(R1))
    a.store(4, FP, COUNTER_KEY + 8, OTHER)


def _classify_keyed(a: Assembler, flow: Flow, headers: Headers) -> None:
    """Fall through if this is data with a whole key, all its headers loaded; else go to "other"."""
    _check_protocol(a, flow, headers)
    a.jump_if(R8, "!=", 0, "loaded")
    _load_transport(a, headers, headers.need)
    a.jump_if(R0, "==", 0, "loaded")
    _load_transport(a, headers, 4)  # shorter than header and key: are its ports those of data?
    a.jump_if(R0, "!=", 0, "other")
    _check_ports(a, flow, headers)
    a.label("short")
    event(a, "short")
    a.jump("other")
    a.label("loaded")
    _check_ports(a, flow, headers)
    a.load(2, R1, FP, headers.transport + 4)  # what UDP says, not what padding adds
    a.swap_be(R1, 16)
    a.jump_if(R1, "<", headers.need, "short")


def _classify_by_ports(a: Assembler, flow: Flow, headers: Headers) -> None:
    _check_protocol(a, flow, headers)
    a.jump_if(R8, "!=", 0, "loaded")
    _load_transport(a, headers, headers.need)
    a.jump_if(R0, "!=", 0, "other")
    a.label("loaded")
    _check_ports(a, flow, headers)


def _find_window(a: Assembler, key: Key, headers: Headers) -> None:
    """R7 = the rule for this packet's index, or on to "base" where there is none."""
    a.mov(R8, 0)  # from here on R8 is the verdict
    a.store(4, FP, COUNTER_KEY + 8, DATA)
    if key.index is None:
        return
    word(a, [headers.payload + at for at in range(*key.index)])
    a.store(4, FP, COUNTER_KEY + 4, Register(R1))
    a.load(4, R2, R7, FLAGS)
    a.jump_if(R2, "&", BY_INDEX, "by index")
    a.load(4, R2, R7, FIRST)
    a.jump_if(R1, "<", Register(R2), "base")
    a.load(4, R2, R7, LAST)
    a.jump_if(R1, ">", Register(R2), "base")
    a.jump("in window")
    a.label("by index")
    a.store(4, FP, WINDOW_KEY + 4, Register(R1))
    a.load(4, R1, FP, COUNTER_KEY)
    a.store(4, FP, WINDOW_KEY, Register(R1))
    lookup(a, "windows", WINDOW_KEY)
    a.jump_if(R0, "==", 0, "base")
    a.mov(R7, Register(R0))
    a.label("in window")


def _count(a: Assembler) -> None:
    """Count the packet, in segments, under its key (no room for a new key: as an event). Then the verdict."""
    a.label("count")
    find_counter(a, "uncounted")
    a.load(8, R1, FP, SEGMENTS)
    a.atomic_add(R0, 0, R1)
    a.load(4, R2, R6, SKB_LEN)
    a.atomic_add(R0, BYTES, R2)
    a.jump_if(R8, "==", 0, "passes")
    a.atomic_add(R0, DROPPED, R1)
    a.label("drop")
    a.mov(R0, SHOT)
    a.exit()
    a.label("uncounted")
    event(a, "overflow_seen", by_segments=True)
    a.jump_if(R8, "==", 0, "pass")
    event(a, "overflow_dropped", by_segments=True)
    a.jump("drop")


def _pass(a: Assembler, headers: Headers, copy_flags: int) -> None:
    """Let the packet go on, and a copy of it before it where that is decided: counted if it could be made."""
    a.label("passes")
    a.mov(R7, Register(R0))
    a.load(8, R1, FP, TWICE)
    a.jump_if(R1, "==", 0, "once")
    _set_mark(a, COPY_MARK)
    a.mov(R1, Register(R6))
    a.load(4, R2, R6, SKB_IFINDEX)
    a.mov(R3, copy_flags)
    a.call(CLONE_REDIRECT)
    _set_mark(a, 0)
    a.jump_if(R0, "!=", 0, "once")
    a.load(8, R1, FP, SEGMENTS)
    a.atomic_add(R7, DUPLICATED, R1)
    a.label("once")
    _corrupt(a, headers)
    a.label("pass")
    a.mov(R0, NEXT_FILTER)
    a.exit()
    a.label("copy")
    _set_mark(a, 0)
    # A clone shares its list of fragments with the original, and GRO behind a veth takes such lists to pieces.
    a.mov(R1, Register(R6))
    a.mov(R2, 0)
    a.call(PULL_DATA)
    a.jump("pass")


def _corrupt(a: Assembler, headers: Headers) -> None:
    """Flip a bit of the IPv4 header's checksum, where that is decided: the receiver's kernel throws the packet away.

    The payload's checksum would not tell: between virtual interfaces nobody computes it (CHECKSUM_PARTIAL).
    """
    a.load(8, R1, FP, CORRUPT)
    a.jump_if(R1, "==", 0, "pass")
    a.load(2, R1, FP, headers.ip + 10)
    a.alu("xor", R1, 1)
    a.store(2, FP, headers.ip + 10, Register(R1))
    a.mov(R1, Register(R6))
    a.mov(R2, ETHERNET + 10)
    stack_pointer(a, R3, headers.ip + 10)
    a.mov(R4, 2)
    a.mov(R5, 0)
    a.call(STORE_BYTES)
    a.jump_if(R0, "!=", 0, "pass")
    a.load(8, R1, FP, SEGMENTS)
    a.atomic_add(R7, CORRUPTED, R1)


def _set_mark(a: Assembler, mark: int) -> None:
    a.mov(R1, mark)
    a.store(4, R6, SKB_MARK, Register(R1))


def _fragment(a: Assembler) -> None:
    a.label("fragment")
    event(a, "fragments")
    a.jump("pass")


def _check_protocol(a: Assembler, flow: Flow, headers: Headers) -> None:
    a.load(1, R1, FP, headers.ip + 9)
    a.jump_if(R1, "!=", PROTO_NUMBER[flow.proto], "other")


def _check_ports(a: Assembler, flow: Flow, headers: Headers) -> None:
    for window, at in ((flow.src_ports, 0), (flow.dst_ports, 2)):
        if window is not None:
            a.load(2, R1, FP, headers.transport + at)
            a.swap_be(R1, 16)
            a.jump_if(R1, "<", window[0], "other")
            a.jump_if(R1, ">", window[1], "other")


def _load_transport(a: Assembler, headers: Headers, size: int) -> None:
    """Load the transport header and what follows from where it is: the IPv4 header's length varies."""
    a.load(1, R2, FP, headers.ip)
    a.alu("and", R2, 0x0F)
    a.alu("lsh", R2, 2)
    a.alu("add", R2, ETHERNET)
    a.mov(R1, Register(R6))
    load_bytes(a, headers.transport, size)

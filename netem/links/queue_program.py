"""The programs of a queue recorder: where packets enter a port's queue, where they leave it, and where they arrive.

A packet that enters is given a tag, which it carries in its time stamp to the others: whose it is (the recorder's
number), what it is (`kind`) and, inside the window, the number of its record. So all write to one record, nothing is
matched afterwards, and a record without a time of leaving is that of a packet that the queue dropped. The time stamp is
set as one of departure (mono delivery time, Linux 5.18), which survives the way into another namespace.

enter     classifier at the egress of the port, in front of its queueing discipline
leave     tracepoint net_dev_start_xmit: the packet is out of the queue and goes to the device. This gives the time.
          (Where the device was busy the packet leaves again: the last time counts.)
arrive    classifier at the ingress of the interface behind the port. This counts, gives the time to a record that has
          none (on a loaded machine tracepoints are missed now and then), and takes the tag off.
A tracepoint is the whole host's; packets without the tag of this recorder are none of its business.

windows   array of one: pairs of from, until (CLOCK_MONOTONIC): only packets that enter inside one are recorded.
next      array of one: number of the next record; beyond the capacity it goes on counting.
counts    array, one for each kind: packets and bytes in, packets out, whatever the window.
records   array: time in, time out (0: never), bytes, kind.
"""

from __future__ import annotations

from collections.abc import Sequence

from netem.kernel.bpf_asm import FP, LOAD_8_BYTES, R0, R1, R2, R3, R4, R6, R7, R8, R9, Assembler, Register, decode
from netem.links.base import Flow

NEXT_BYTES, COUNT_BYTES, RECORD_BYTES = 8, 24, 24
MAX_WINDOWS = 16
WINDOWS_BYTES = 16 * MAX_WINDOWS
MAX_RECORDS = 1 << 24
MAX_KINDS = 8
MAX_NUMBER = (1 << 30) - 1

_LOOKUP, _KTIME_NS, _LOAD_BYTES, _PROBE_READ, _SET_TSTAMP = 1, 5, 26, 113, 192
_SKB_LEN, _SKB_PROTOCOL, _SKB_TSTAMP, _SKB_TSTAMP_TYPE = 0, 16, 152, 180
_NO_TYPE, _MONO = 0, 1
_NEXT_FILTER = -1
_PROTO_NUMBER = {"tcp": 6, "udp": 17}
_ETHERNET, _IPV4_PROTOCOL, _IPV4_FRAGMENT = 14, 9, 6

# A tag is 1 << 62 | recorder << 32 | kind << 29 | (number of the record + 1, or 0): as a time, 146 years after boot.
_TAG_BIT, _RECORDER_SHIFT, _KIND_SHIFT = 62, 32, 29
_RECORD_MASK, _KIND_MASK = (1 << 29) - 1, MAX_KINDS - 1

# counts
_PACKETS_IN, _BYTES_IN, _PACKETS_OUT = 0, 8, 16
# record
_TIME_IN, _TIME_OUT, _BYTES, _KIND = 0, 8, 16, 20
# stack, as offsets from its end
_KEY = -4
_HEADER = -32  # the IPv4 header of 20 bytes
_PORTS = -40
_TAG = -48


def enter_program(number: int, flows: Sequence[tuple[int, Flow]], records: int) -> Assembler:
    """`flows`: (kind, flow), the first that matches decides; what none matches is of kind 0.

    ValueError when number, kinds or records are more than a tag holds.
    """
    if not 0 <= number <= MAX_NUMBER or not 0 < records <= MAX_RECORDS:
        raise ValueError(f"recorder {number} of {records} packets: expected 0..{MAX_NUMBER} and 1..{MAX_RECORDS}")
    if any(not 0 <= kind < MAX_KINDS for kind, _ in flows):
        raise ValueError(f"a kind of packet is 0..{MAX_KINDS - 1}")
    a = Assembler()
    _only_ipv4(a)
    _classify(a, flows)
    _lookup(a, "counts", Register(R7))
    a.mov(R1, 1)
    a.atomic_add(R0, _PACKETS_IN, R1)
    a.load(4, R1, R6, _SKB_LEN)
    a.atomic_add(R0, _BYTES_IN, R1)
    a.load_constant(R1, _owner(number) << _RECORDER_SHIFT)
    a.mov(R2, Register(R7))
    a.alu("lsh", R2, _KIND_SHIFT)
    a.alu("or", R1, Register(R2))
    a.store(8, FP, _TAG, Register(R1))
    _record(a, records)
    a.label("tag")
    a.mov(R1, Register(R6))
    a.load(8, R2, FP, _TAG)
    a.mov(R3, _MONO)
    a.call(_SET_TSTAMP)
    a.label("pass")
    a.mov(R0, _NEXT_FILTER)
    a.exit()
    return a


def leave_program(number: int, records: int, time_stamp_at: int) -> Assembler:
    """Puts the time into the record. `time_stamp_at`: see `time_stamp_offset`."""
    a = Assembler()
    a.load(8, R6, R1, 0)
    a.store(8, FP, _TAG, 0)
    a.mov(R1, Register(FP))
    a.alu("add", R1, _TAG)
    a.mov(R2, 8)
    a.mov(R3, Register(R6))
    a.alu("add", R3, time_stamp_at)
    a.call(_PROBE_READ)
    a.jump_if(R0, "!=", 0, "end")
    a.load(8, R8, FP, _TAG)
    _own_tag(a, number, "end")
    _find_record(a, records, "end")
    a.call(_KTIME_NS)
    a.store(8, R9, _TIME_OUT, Register(R0))
    a.label("end")
    a.mov(R0, 0)
    a.exit()
    return a


def arrive_program(number: int, records: int) -> Assembler:
    """Counts what came through."""
    a = Assembler()
    _only_ipv4(a)
    a.load(1, R1, R6, _SKB_TSTAMP_TYPE)
    a.jump_if(R1, "!=", _MONO, "pass")
    a.load(8, R8, R6, _SKB_TSTAMP)
    _own_tag(a, number, "pass")
    a.mov(R7, Register(R8))
    a.alu("rsh", R7, _KIND_SHIFT)
    a.alu("and", R7, _KIND_MASK)
    _lookup(a, "counts", Register(R7))
    a.mov(R1, 1)
    a.atomic_add(R0, _PACKETS_OUT, R1)
    _find_record(a, records, "clear")
    a.load(8, R1, R9, _TIME_OUT)
    a.jump_if(R1, "!=", 0, "clear")
    a.call(_KTIME_NS)
    a.store(8, R9, _TIME_OUT, Register(R0))
    a.label("clear")
    a.mov(R1, Register(R6))
    a.mov(R2, 0)
    a.mov(R3, _NO_TYPE)
    a.call(_SET_TSTAMP)
    a.label("pass")
    a.mov(R0, _NEXT_FILTER)
    a.exit()
    return a


def time_stamp_probe() -> Assembler:
    """Reads a packet's time stamp: what the kernel makes of it says where that lies (`time_stamp_offset`)."""
    a = Assembler()
    a.load(1, R2, R1, _SKB_TSTAMP_TYPE)  # without this the time stamp is not read as it is
    a.load(8, R3, R1, _SKB_TSTAMP)
    a.mov(R0, _NEXT_FILTER)
    a.exit()
    return a


def time_stamp_offset(translated: bytes) -> int:
    """Offset of the time stamp in the kernel's own packet structure, from the probe's translated instructions.

    ValueError when they are not as expected: one load of eight bytes from the first argument.
    """
    loads = [slot for slot in decode(translated) if slot.code == LOAD_8_BYTES and slot.src == R1]
    if len(loads) != 1:
        raise ValueError(f"{len(loads)} loads of eight bytes in the probe of the time stamp, expected one")
    return loads[0].offset


def _owner(number: int) -> int:
    return number | 1 << (_TAG_BIT - _RECORDER_SHIFT)


def _own_tag(a: Assembler, number: int, foreign: str) -> None:
    """R8 is a tag of this recorder; to `foreign` otherwise."""
    a.mov(R1, Register(R8))
    a.alu("rsh", R1, _RECORDER_SHIFT)
    a.load_constant(R2, _owner(number))
    a.jump_if(R1, "!=", Register(R2), foreign)


def _find_record(a: Assembler, records: int, absent: str) -> None:
    """R9 = the record that R8, the tag, names."""
    a.alu("and", R8, _RECORD_MASK)
    a.jump_if(R8, "==", 0, absent)
    a.alu("sub", R8, 1)
    a.jump_if(R8, ">=", records, absent)
    _lookup(a, "records", Register(R8), absent=absent)
    a.mov(R9, Register(R0))


def _only_ipv4(a: Assembler) -> None:
    """R6 = packet. Others cannot carry a time of departure."""
    a.mov(R6, Register(R1))
    a.load(4, R2, R6, _SKB_PROTOCOL)
    a.swap_be(R2, 16)
    a.jump_if(R2, "!=", 0x0800, "pass")


def _classify(a: Assembler, flows: Sequence[tuple[int, Flow]]) -> None:
    """R7 = kind. IPv4 options would shift the ports: such packets, and fragments, are of kind 0."""
    a.mov(R7, 0)
    _load_bytes(a, _ETHERNET, _HEADER, 20)
    a.jump_if(R0, "!=", 0, "classified")
    a.load(1, R1, FP, _HEADER)
    a.jump_if(R1, "!=", 0x45, "classified")
    a.load(2, R1, FP, _HEADER + _IPV4_FRAGMENT)
    a.swap_be(R1, 16)
    a.alu("and", R1, 0x3FFF)  # more fragments | offset
    a.jump_if(R1, "!=", 0, "classified")
    _load_bytes(a, _ETHERNET + 20, _PORTS, 4)
    a.jump_if(R0, "!=", 0, "classified")
    for kind, flow in flows:
        differs = a.fresh("differs")
        a.load(1, R1, FP, _HEADER + _IPV4_PROTOCOL)
        a.jump_if(R1, "!=", _PROTO_NUMBER[flow.proto], differs)
        for window, at in ((flow.src_ports, 0), (flow.dst_ports, 2)):
            if window is not None:
                a.load(2, R1, FP, _PORTS + at)
                a.swap_be(R1, 16)
                a.jump_if(R1, "<", window[0], differs)
                a.jump_if(R1, ">", window[1], differs)
        a.mov(R7, kind)
        a.jump("classified")
        a.label(differs)
    a.label("classified")


def _record(a: Assembler, records: int) -> None:
    """Inside the window: a record, and its number into the tag. What finds no room is counted by "next" alone."""
    a.call(_KTIME_NS)
    a.mov(R8, Register(R0))
    _lookup(a, "windows", 0, absent="tag")
    for at in range(0, WINDOWS_BYTES, 16):
        closed = a.fresh("closed")
        a.load(8, R1, R0, at)
        a.jump_if(R8, "<", Register(R1), closed)
        a.load(8, R1, R0, at + 8)
        a.jump_if(R8, "<", Register(R1), "open")
        a.label(closed)
    a.jump("tag")
    a.label("open")
    _lookup(a, "next", 0, absent="tag")
    a.mov(R1, 1)
    a.atomic_fetch_add(R0, 0, R1)
    a.mov(R9, Register(R1))
    a.jump_if(R9, ">=", records, "tag")
    _lookup(a, "records", Register(R9), absent="tag")
    a.store(8, R0, _TIME_IN, Register(R8))
    a.store(8, R0, _TIME_OUT, 0)
    a.load(4, R1, R6, _SKB_LEN)
    a.store(4, R0, _BYTES, Register(R1))
    a.store(4, R0, _KIND, Register(R7))
    a.load(8, R1, FP, _TAG)
    a.alu("add", R1, Register(R9))
    a.alu("add", R1, 1)
    a.store(8, FP, _TAG, Register(R1))


def _lookup(a: Assembler, map_name: str, key: int | Register, absent: str = "pass") -> None:
    """R0 = the element of an array."""
    a.store(4, FP, _KEY, key)
    a.load_map(R1, map_name)
    a.mov(R2, Register(FP))
    a.alu("add", R2, _KEY)
    a.call(_LOOKUP)
    a.jump_if(R0, "==", 0, absent)


def _load_bytes(a: Assembler, offset: int, to: int, size: int) -> None:
    a.mov(R1, Register(R6))
    a.mov(R2, offset)
    a.mov(R3, Register(FP))
    a.alu("add", R3, to)
    a.mov(R4, size)
    a.call(_LOAD_BYTES)

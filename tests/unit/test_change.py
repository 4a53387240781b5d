"""A change of a netem port as one batch: what is asked in which order, and what the answers must say."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping

import pytest

from netem.kernel import qdisc, u32
from netem.kernel import rtnetlink as rt
from netem.kernel.errors import KernelError
from netem.kernel.netem_options import report
from netem.kernel.qdisc import Netem, Prio, Qdisc
from netem.kernel.rtnetlink import Answer
from netem.kernel.u32 import Filter
from netem.links.base import Flow, LossRule, Shape
from netem.links.change import Change, State, change, read_after, read_before
from netem.links.ledger import Part
from netem.links.steering import Steering, steer, watch
from netem.links.tree import PRIO_HANDLE, tree

A, B = "10.77.0.2", "10.77.0.3"
FLOW = Flow("udp", dst_ports=(29600, 29600))
WATCH = watch(FLOW, [A, B], PRIO_HANDLE, 3)
CALM = State(7, tree(Shape(), 1500, [0.0, 0.0, 0.0]), Steering(), WATCH, (0x800_00801, 0x800_00802))


def lossy(priority: int = 1) -> Steering:
    return steer([LossRule(A, 1, 0.9), LossRule(B, 1, 0.5)], FLOW, None, [A, B], 2, PRIO_HANDLE, priority)


BURST = change(CALM, tree(Shape(), 1500, [0.0, 0.9, 0.5]), lossy())


def describe(part: Qdisc, seen: int = 0) -> bytes:
    """A qdisc as the kernel reports it."""
    options = qdisc.options(part)
    if isinstance(part, Netem):
        values = report(part.options)
        options = values.pop(0) + rt.encode(values)
    stats = {1: struct.pack("=QI", 100 * seen, seen), 3: struct.pack("=5I", 0, 0, 0, 0, 0)}
    head = qdisc.TCMSG.pack(0, 7, part.handle, part.parent, 0)
    return head + rt.encode({qdisc.KIND: qdisc.kind_of(part), qdisc.OPTIONS: options, qdisc.STATS2: stats})


def describe_filter(item: Filter, handle: int, hits: int = 0) -> bytes:
    counts = struct.pack("=QQ", hits, hits)
    values: Mapping[int, rt.Value] = {1: item.target, 5: item.selector, 9: counts}
    head = qdisc.TCMSG.pack(0, 7, handle, item.parent, socket.htons(0x0800) | item.priority << 16)
    return head + rt.encode({qdisc.KIND: "u32", qdisc.OPTIONS: values})


def answers(made: Change, hits: int = 5) -> list[Answer]:
    """What a kernel answers that does as it is told; its hash tables among the filters."""
    found = [Answer(of, qdisc.NEWQDISC, describe(part, seen=3)) for of, part in enumerate(made.before.tree)]
    first = len(found)
    pairs = zip(made.before.filters, made.before.handles, strict=True)
    found += [Answer(first + n, 44, describe_filter(item, at, 1)) for n, (item, at) in enumerate(pairs)]
    found += [
        Answer(made.written + of, qdisc.NEWQDISC, describe(part, seen=4)) for of, part in enumerate(made.after.tree)
    ]
    last = len(made.requests) - 1
    table = qdisc.TCMSG.pack(0, 7, 0x800_00000, PRIO_HANDLE, 0) + rt.encode({qdisc.KIND: "u32", qdisc.OPTIONS: {4: 1}})
    found.append(Answer(last, 44, table))
    found += [
        Answer(last, 44, describe_filter(item, 0x801_00800 + n, hits)) for n, item in enumerate(made.after.filters)
    ]
    return found


def test_reads_then_changes_then_reads() -> None:
    kinds = [request.kind for request in BURST.requests]
    get, new = qdisc.GETQDISC, qdisc.NEWQDISC
    # Prio and three bands, two counting filters; two bands change, two filters come; and all over again.
    assert kinds == [get] * 4 + [46] * 2 + [new] * 2 + [44] * 2 + [get] * 4 + [46]
    assert (BURST.reads, BURST.written) == (6, 10)
    assert BURST.requests[-1].flags == rt.DUMP
    assert not any(request.flags & rt.DUMP == rt.DUMP for request in BURST.requests[:-1])


def test_the_new_filters_come_before_the_old_ones_go() -> None:
    burst = State(7, BURST.after.tree, lossy(), WATCH, (1, 2, 3, 4))
    kinds = [request.kind for request in change(burst, CALM.tree, lossy(priority=2)).requests]
    assert kinds[kinds.index(44) :][:3] == [44, 44, 45]


def test_what_stays_is_not_written() -> None:
    made = change(CALM, CALM.tree, Steering())
    assert made.reads == made.written


def test_counters_before_and_after_and_the_handles() -> None:
    found = answers(BURST)
    before = read_before(BURST, found)
    assert {band: stats.seen for band, stats in before.stats.items()} == {0: 3, 1: 3, 2: 3}
    assert before.hits == {(0, Part(A)): 1, (0, Part(B)): 1}
    after, state = read_after(BURST, found)
    assert {band: stats.seen for band, stats in after.stats.items()} == {0: 4, 1: 4, 2: 4}
    assert after.hits == {(1, Part(A)): 5, (2, Part(B)): 5, (0, Part(A)): 5, (0, Part(B)): 5}
    assert state.handles == (0x801_00800, 0x801_00801, 0x801_00802, 0x801_00803)
    assert (state.tree, state.steering, state.watch) == (BURST.after.tree, lossy(), WATCH)


@pytest.mark.parametrize("of", [1, 2, 3])
def test_somebody_else_changed_a_band_before(of: int) -> None:
    found = answers(BURST)
    part = CALM.tree[of]
    assert isinstance(part, Netem)
    other = tree(Shape(limit_packets=77), 1500, [0.0, 0.0, 0.0])[of]
    found[of] = Answer(of, qdisc.NEWQDISC, describe(other))
    with pytest.raises(KernelError, match="limit is 77 instead of 10000"):
        read_before(BURST, found)


@pytest.mark.parametrize("part", range(4))
def test_the_kernel_did_not_do_what_it_was_told(part: int) -> None:
    for damaged in (None, Answer(BURST.written + part, qdisc.NEWQDISC, describe(Prio(PRIO_HANDLE, qdisc.ROOT, 5)))):
        found = [a for a in answers(BURST) if a.of != BURST.written + part]
        found += [damaged] if damaged else []
        with pytest.raises(KernelError, match="read back"):
            read_after(BURST, found)


def test_a_foreign_filter_and_a_missing_one() -> None:
    foreign = Filter(PRIO_HANDLE, 9, PRIO_HANDLE | 1, (u32.Match(0, b"\x45", b"\xff"),))
    last = len(BURST.requests) - 1
    with pytest.raises(KernelError, match="not asked for"):
        read_after(BURST, [*answers(BURST), Answer(last, 44, describe_filter(foreign, 9))])
    with pytest.raises(KernelError, match="missing"):
        read_after(BURST, answers(BURST)[:-1])
    with pytest.raises(KernelError, match="missing"):
        read_before(BURST, [a for a in answers(BURST) if a.of != 4])

"""Qdiscs as values: plans, messages and the comparison with what the kernel reports. No kernel needed."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from netem.kernel import qdisc
from netem.kernel import rtnetlink as rt
from netem.kernel.errors import KernelError
from netem.kernel.netem_options import NetemOptions, Overhead, Rate
from netem.kernel.qdisc import Command, Found, Netem, Pfifo, Prio, Stats, Tbf, handle

OPTIONS = NetemOptions(1000)
TBF = Tbf(handle(1), qdisc.ROOT, 10**9, 10_000, 10_000)
PRIO = Prio(handle(0x10), handle(1, 1), 2)
FIRST = Netem(handle(0x100), handle(0x10, 1), OPTIONS)
SECOND = Netem(handle(0x101), handle(0x10, 2), OPTIONS)
TREE = (TBF, PRIO, FIRST, SECOND)


def decoded(request: rt.Request) -> Any:
    """A request as pyroute2 reads it."""
    message = tcmsg((16 + len(request.body)).to_bytes(4, "little") + bytes(12) + request.body)
    message.decode()
    return message


def test_a_new_tree_is_added_parents_first() -> None:
    assert qdisc.plan((), TREE) == tuple(Command("add", item) for item in TREE)


def test_parameters_change_in_place_and_only_where_they_differ() -> None:
    lossy = replace(SECOND, options=NetemOptions(1000, loss=0.9))
    assert qdisc.plan(TREE, (TBF, PRIO, FIRST, lossy)) == (Command("change", lossy),)
    assert qdisc.plan(TREE, TREE) == ()


def test_another_structure_is_built_anew() -> None:
    commands = qdisc.plan(TREE, (FIRST,))
    assert commands == (Command("delete", TBF), Command("add", FIRST))
    assert qdisc.plan(TREE, ()) == (Command("delete", TBF),)
    wider = (TBF, Prio(PRIO.handle, PRIO.parent, 3), FIRST, SECOND)
    assert qdisc.plan(TREE, wider)[0].verb == "delete"


def test_a_distribution_is_only_taken_away_with_its_qdisc() -> None:
    """sch_netem has no message for it."""
    with_table = replace(FIRST, options=NetemOptions(1000, 10, 5, table=(1, 2)))
    without = replace(FIRST, options=NetemOptions(1000, 10, 5))
    assert qdisc.plan((with_table,), (without,)) == (Command("delete", with_table), Command("add", without))
    assert qdisc.plan((without,), (with_table,)) == (Command("change", with_table),)


def test_pyroute2_reads_a_netem_message() -> None:
    options = NetemOptions(
        12_500, 10_000_000, 500_000, loss=0.9, duplicate_ratio=0.1, rate=Rate(1000, Overhead(-14, 48, 5))
    )
    sent = qdisc.request(7, Command("change", Netem(handle(0x101), handle(0x10, 2), options)))
    assert (sent.kind, sent.flags) == (36, 0)
    read = decoded(sent)
    assert (read["index"], read["handle"], read["parent"]) == (7, handle(0x101), handle(0x10, 2))
    assert read.get_attr("TCA_KIND") == "netem"
    said = read.get_attr("TCA_OPTIONS")
    assert (said["limit"], said["loss"], said["duplicate"]) == (12_500, round(0.9 * (2**32 - 1)), 429496730)
    assert (said["delay"], said["jitter"]) == (10_000_000 // 64, 500_000 // 64)
    rate = said.get_attr("TCA_NETEM_RATE")
    assert (rate["rate"], rate["cell_size"], rate["cell_overhead"]) == (1000, 48, 5)


def test_pyroute2_reads_the_other_qdiscs() -> None:
    read = decoded(qdisc.request(7, Command("add", TBF)))
    parms = read.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")
    assert (parms["rate"], parms["limit"]) == (125_000_000, 10_000)
    assert rt.number(rt.attributes(qdisc.options(TBF))[6]) == 10_000  # TCA_TBF_BURST, which pyroute2 does not know
    read = decoded(qdisc.request(7, Command("add", PRIO))).get_attr("TCA_OPTIONS")
    assert (read["bands"], list(read["priomap"])) == (2, [0] * 16)
    read = decoded(qdisc.request(7, Command("add", Pfifo(1, 2, 77)))).get_attr("TCA_OPTIONS")
    assert read["limit"] == 77
    added, deleted = (qdisc.request(7, Command(verb, TBF)) for verb in ("add", "delete"))
    assert (added.flags, deleted.kind) == (rt.CREATE | rt.EXCLUSIVE, 37)


def found(item: qdisc.Qdisc, **changed: Any) -> dict[int, Found]:
    """What `dump` gives for a qdisc that is in place."""
    there = Found(7, item.handle, item.parent, qdisc.kind_of(item), qdisc.options(item), Stats())
    return {item.handle: there._replace(**changed)}


@pytest.mark.parametrize("item", [TBF, PRIO, FIRST, Pfifo(1, 2, 77)])
def test_what_is_in_place_is_no_difference(item: qdisc.Qdisc) -> None:
    qdisc.verify(found(item), (item,))


@pytest.mark.parametrize(
    ("item", "changed", "expected"),
    [
        (TBF, {"options": qdisc.options(replace(TBF, rate_bps=8))}, "rate in bytes/s is 1 instead of 125000000"),
        (TBF, {"options": qdisc.options(replace(TBF, limit_bytes=9))}, "limit is 9 instead of 10000"),
        (TBF, {"options": qdisc.options(TBF)[:-8]}, "burst is 0 bytes instead of 10000"),
        (PRIO, {"options": qdisc.options(replace(PRIO, bands=3))}, "bands is 3 instead of 2"),
        (PRIO, {"options": qdisc.options(PRIO)[:4] + b"\1" * 16}, "map is"),
        (FIRST, {"options": qdisc.options(Netem(1, 2, NetemOptions(77)))}, "limit is 77 instead of 1000"),
        (FIRST, {"parent": 9}, "found netem below 0:9"),
        (FIRST, {"kind": "pfifo"}, "found pfifo"),
        (FIRST, {"handle": 9}, None),
        (Pfifo(1, 2, 77), {"options": struct.pack("=I", 5)}, "limit is 5 instead of 77"),
    ],
)
def test_the_reading_back_finds_every_difference(item: qdisc.Qdisc, changed: dict[str, Any], expected: str) -> None:
    there = {} if expected is None else found(item, **changed)
    with pytest.raises(KernelError, match=expected or "it is not there"):
        qdisc.verify(there, (item,))


def test_a_dumped_qdisc_with_its_counters() -> None:
    basic, queue = struct.pack("=QI", 900, 7), struct.pack("=5I", 2, 100, 3, 0, 0)
    stats: rt.Value = {qdisc.STATS2: {1: basic, 3: queue}}
    values: dict[int, rt.Value] = {qdisc.KIND: "pfifo", qdisc.OPTIONS: struct.pack("=I", 77), **stats}
    body = qdisc.TCMSG.pack(0, 7, handle(1), qdisc.ROOT, 0) + rt.encode(values)
    (read,) = qdisc.by_handle([body]).values()
    assert read == Found(7, handle(1), qdisc.ROOT, "pfifo", struct.pack("=I", 77), Stats(12, 3, 2, 1000))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Tbf(1, 2, 0, 1, 1),
        lambda: Tbf(1, 2, qdisc.TBF_RATE_MAX_BPS + 1, 1, 1),
        lambda: Tbf(1, 2, 1000, 0, 1),
        lambda: Tbf(1, 2, 1000, 1, 2**32),
        lambda: Prio(1, 2, 1),
        lambda: Prio(1, 2, 17),
    ],
)
def test_values_that_the_kernel_would_cut_are_refused(build: Any) -> None:
    with pytest.raises(ValueError):
        build()


def test_handles_are_shown_as_tc_does() -> None:
    shown = [qdisc.show(h) for h in (handle(0x10), handle(0x10, 2), qdisc.ROOT)]
    assert shown == ["10:", "10:2", "root"]


def test_burst_holds_frames_and_a_millisecond() -> None:
    assert qdisc.burst_bytes(1_000_000, 1500) == 4 * 1514
    assert qdisc.burst_bytes(10**9, 1500) == 125_000


def test_counters_wrap() -> None:
    before = Stats(seen=2**32 - 5, dropped=2**32 - 1, bytes_kept=100)
    assert Stats(seen=5, dropped=1, waiting=2, bytes_kept=160).since(before) == Stats(10, 2, 2, 60)

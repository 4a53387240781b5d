"""Qdiscs as values: plans, encodings and the comparison with what the kernel reports. No kernel needed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from netem.kernel import qdisc
from netem.kernel.qdisc import Command, Netem, Prio, Stats, Tbf, handle

TBF = Tbf(handle(1), qdisc.ROOT, 10**9, 10_000, 10_000)
PRIO = Prio(handle(0x10), handle(1, 1), 2)
FIRST = Netem(handle(0x100), handle(0x10, 1), 1000)
SECOND = Netem(handle(0x101), handle(0x10, 2), 1000)
TREE = (TBF, PRIO, FIRST, SECOND)


class Options(dict[str, Any]):
    """As pyroute2 decodes them: fields by key, nested attributes by get_attr."""

    def get_attr(self, name: str) -> Any:
        return self.get(name)


def reported(item: Netem, **changed: Any) -> Options:
    """What the kernel would dump for a netem qdisc."""
    sent = qdisc.options(item)
    return Options({**sent, **dict(sent.pop("attrs")), **changed})


def test_a_new_tree_is_added_parents_first() -> None:
    assert qdisc.plan((), TREE) == tuple(Command("add", item) for item in TREE)


def test_parameters_change_in_place_and_only_where_they_differ() -> None:
    lossy = Netem(SECOND.handle, SECOND.parent, 1000, loss_ratio=0.9)
    assert qdisc.plan(TREE, (TBF, PRIO, FIRST, lossy)) == (Command("change", lossy),)
    assert qdisc.plan(TREE, TREE) == ()


def test_another_structure_is_built_anew() -> None:
    commands = qdisc.plan(TREE, (FIRST,))
    assert commands == (Command("delete", TBF), Command("add", FIRST))
    assert qdisc.plan(TREE, ()) == (Command("delete", TBF),)
    wider = (TBF, Prio(PRIO.handle, PRIO.parent, 3), FIRST, SECOND)
    assert qdisc.plan(TREE, wider)[0].verb == "delete"


def test_every_change_carries_the_full_state() -> None:
    sent = qdisc.options(FIRST)
    assert sent.keys() == {"delay", "limit", "loss", "gap", "duplicate", "jitter", "attrs"}
    names = [name for name, _ in sent["attrs"]]
    assert names == ["TCA_NETEM_CORR", "TCA_NETEM_REORDER", "TCA_NETEM_CORRUPT", "TCA_NETEM_RATE"]
    assert all(value == 0 for _, values in sent["attrs"] for value in values.values())


def test_the_message_survives_the_wire() -> None:
    item = Netem(handle(0x101), handle(0x10, 2), 12_500, 10_000, 500, 0.9, in_order=True)
    sent = qdisc.netem_message(7, item)
    sent.encode()
    read = tcmsg(bytes(sent.data))
    read.decode()
    assert (read["index"], read["handle"], read["parent"]) == (7, item.handle, item.parent)
    assert read.get_attr("TCA_KIND") == "netem"
    assert qdisc.differences(item, read.get_attr("TCA_OPTIONS")) == []
    assert qdisc.differences(FIRST, read.get_attr("TCA_OPTIONS")) != []


@given(st.floats(0.0, 1.0))
def test_loss_survives_the_32_bit_encoding(ratio: float) -> None:
    encoded = qdisc.loss_probability(ratio)
    assert 0 <= encoded <= qdisc.U32_MAX
    assert abs(qdisc.loss_ratio(encoded) - ratio) < 1e-9


def test_never_and_always_are_exact() -> None:
    assert (qdisc.loss_probability(0.0), qdisc.loss_probability(1.0)) == (0, 2**32 - 1)


@pytest.mark.parametrize("ratio", [0.0, 0.001, 0.5, 0.9, 1.0])
def test_the_same_loss_is_no_difference(ratio: float) -> None:
    item = Netem(1, 2, 1000, delay_us=10_000, jitter_us=500, loss_ratio=ratio, in_order=True)
    assert qdisc.differences(item, reported(item)) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"loss": 1 << 31}, "loss is 0.5"),
        ({"loss": 0}, "loss is 0.0"),
        ({"limit": 77}, "limit is 77 instead of 1000"),
        ({"delay": 0}, "delay is 0.0 us instead of 10000 us"),
        ({"duplicate": 5}, "duplicate is 5"),
        ({"gap": 1}, "gap is 1"),
        ({"TCA_NETEM_RATE": {"rate": 1000}}, "rate is 1000 instead of 0"),
        ({"TCA_NETEM_CORRUPT": {"prob_corrupt": 9}}, "corrupt is set"),
        ({"TCA_NETEM_CORR": {"loss_corr": 9}}, "corr is set"),
    ],
)
def test_the_reading_back_finds_every_difference(changed: dict[str, Any], expected: str) -> None:
    item = Netem(1, 2, 1000, delay_us=10_000, loss_ratio=0.9)
    (difference,) = qdisc.differences(item, reported(item, **changed))
    assert difference.startswith(expected)


def test_a_small_loss_is_not_taken_for_none() -> None:
    item = Netem(1, 2, 1000, loss_ratio=1e-7)
    assert qdisc.differences(item, reported(item, loss=0))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Netem(1, 2, 0),
        lambda: Netem(1, 2, 2**32),
        lambda: Netem(1, 2, 1000, loss_ratio=1.5),
        lambda: Netem(1, 2, 1000, delay_us=qdisc.DELAY_MAX_US + 1),
        lambda: Netem(1, 2, 1000, delay_us=-1),
        lambda: Tbf(1, 2, 0, 1, 1),
        lambda: Tbf(1, 2, qdisc.RATE_MAX_BPS + 1, 1, 1),
        lambda: Tbf(1, 2, 1000, 0, 1),
        lambda: Prio(1, 2, 1),
        lambda: Prio(1, 2, 17),
    ],
)
def test_values_that_the_kernel_would_cut_are_refused(build: Any) -> None:
    with pytest.raises(ValueError):
        build()


def test_delays_reach_minutes_in_ticks_of_64_ns() -> None:
    assert 270e6 < qdisc.DELAY_MAX_US < 275e6


def test_handles_are_shown_as_tc_does() -> None:
    shown = [qdisc.show(h) for h in (handle(0x10), handle(0x10, 2), qdisc.ROOT)]
    assert shown == ["10:", "10:2", "root"]


def test_burst_holds_frames_and_a_millisecond() -> None:
    assert qdisc.burst_bytes(1_000_000, 1500) == 4 * 1514
    assert qdisc.burst_bytes(10**9, 1500) == 125_000


def test_counters_wrap() -> None:
    before = Stats(seen=2**32 - 5, dropped=2**32 - 1, bytes_kept=100)
    assert Stats(seen=5, dropped=1, waiting=2, bytes_kept=160).since(before) == Stats(10, 2, 2, 60)

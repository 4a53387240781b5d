"""The netem backend's decisions: the qdisc tree of a shape, the size of the limit, losses that add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from netem.kernel import qdisc
from netem.kernel.loss_models import FourState, GilbertElliott
from netem.kernel.netem_options import NetemOptions, Overhead, Rate, Slot
from netem.kernel.qdisc import Netem, Prio, Tbf, handle
from netem.links import chain
from netem.links.base import Extras, LinkError, LossRule, Shape, UnsupportedFeature
from netem.links.fake import FakePort
from netem.links.netem import NetemPort
from netem.links.tree import IN_ORDER, combined, limit_packets, own_loss, tree


def test_the_tree_without_rate() -> None:
    assert tree(Shape(delay_us=10_000, loss_ratio=0.01), 1500, [0.01, 0.9]) == (
        Prio(handle(0x10), qdisc.ROOT, 2),
        Netem(handle(0x100), handle(0x10, 1), NetemOptions(12_500, 10_000_000, loss=0.01)),
        Netem(handle(0x101), handle(0x10, 2), NetemOptions(12_500, 10_000_000, loss=0.9)),
    )


def test_the_tree_with_rate() -> None:
    tbf, prio, *bands = tree(Shape(delay_us=1000, rate_bps=10**9), 1500, [0.0, 0.5, 0.0])
    assert tbf == Tbf(handle(1), qdisc.ROOT, 10**9, 1 << 18, 1 << 18), "a quarter of 1 MiB, as in the backend bpf"
    assert prio == Prio(handle(0x10), handle(1, 1), 3)
    assert [b.parent for b in bands] == [handle(0x10, 1), handle(0x10, 2), handle(0x10, 3)]


def test_without_loss_of_its_own_it_needs_no_bands() -> None:
    tbf, netem = tree(Shape(delay_us=1000, rate_bps=10**9), 1500, [0.0])
    assert (tbf.parent, netem.parent, netem.handle) == (qdisc.ROOT, handle(1, 1), handle(0x100))


@pytest.mark.parametrize("loss", [0.0, 0.3, 0.9, 1.0])
def test_all_bands_differ_by_their_loss_only(loss: float) -> None:
    shape = Shape(delay_us=5000, jitter_us=700, rate_bps=10**8)
    bands = [q for q in tree(shape, 1500, [0.0, loss]) if isinstance(q, Netem)]
    assert {replace(b.options, loss=0.0) for b in bands} == {replace(bands[0].options, loss=0.0)}
    assert [b.options.loss for b in bands] == [0.0, loss]


def test_jitter_reorders_only_without_a_rate() -> None:
    for rate_bps, in_order in ((None, False), (10**8, True)):
        bands = tree(Shape(delay_us=5000, jitter_us=700, rate_bps=rate_bps), 1500, [0.0])
        assert bands[-1].options.rate == (IN_ORDER if in_order else None)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (Shape(), 10_000),
        (Shape(delay_us=1_000), 10_000),  # 1.5 x 10 Gbit/s x 1 ms are 1,250 packets
        (Shape(delay_us=100_000), 125_000),
        (Shape(delay_us=60_000, jitter_us=40_000), 125_000),
        (Shape(rate_bps=10**8, delay_us=1_000), 1_000),
        (Shape(rate_bps=10**9, delay_us=100_000), 12_500),
        (Shape(rate_bps=10**9, delay_us=100_000, queue_bytes=150_000), 12_600),
        (Shape(rate_bps=10**9, queue_bytes=15_000), 10),
        (Shape(rate_bps=10**9, delay_us=100_000, limit_packets=7), 7),
        (Shape(queue_bytes=15_000), 10_000),
    ],
)
def test_limit(shape: Shape, expected: int) -> None:
    assert limit_packets(shape, 1500) == expected


def test_independent_losses() -> None:
    assert combined(0.0, 0.9) == pytest.approx(0.9)
    assert combined(0.1, 0.5) == pytest.approx(0.55)
    assert combined(1.0, 0.0) == combined(0.0, 1.0) == 1.0
    assert combined(0.0, 0.0) == 0.0


def test_a_link_with_all_that_netem_can_do() -> None:
    extras = Extras(
        table=(1, 2), loss=FourState(0.1, 0.5), limit_packets=7, duplicate_ratio=0.1, corrupt_ratio=0.2,
        reorder_ratio=0.3, reorder_gap=4, slot=Slot(1, 2), ecn=True, overhead=Overhead(24),
    )  # fmt: skip
    shape = Shape(delay_us=5, jitter_us=2, rate_bps=8000, extras=extras)
    assert extras.loss is not None
    above, netem = tree(shape, 1500, [extras.loss])
    assert isinstance(above, Prio)
    assert isinstance(netem, Netem)
    assert (above.parent, netem.parent) == (qdisc.ROOT, above.handle | 1), "it tells drops from marks"
    assert netem.options == NetemOptions(
        7, 5000, 2000, 0.0, (1, 2), extras.loss, 0.1, 0.3, 4, 0.2, Rate(1000, Overhead(24)), Slot(1, 2), True
    )


def test_a_links_own_loss_as_netem_makes_it() -> None:
    assert own_loss(Shape(loss_ratio=0.1)) == 0.1
    assert own_loss(Shape(chain=chain.GilbertElliott(0.1, 0.5, 0.2, 0.9))) == GilbertElliott(0.1, 0.5, 0.2, 0.9)
    assert own_loss(Shape(extras=Extras(loss=FourState(0.1, 0.5)))) == FourState(0.1, 0.5)


def test_a_burst_on_top_of_a_chain_of_losses() -> None:
    own = GilbertElliott(0.1, 0.5)
    assert combined(own, 0.0) == own
    assert combined(own, 0.75) == GilbertElliott(0.1, 0.5, 0.0, 0.25)
    assert combined(FourState(0.1, 0.5), 0.0) == FourState(0.1, 0.5)
    with pytest.raises(ValueError, match="gilbert_elliott"):
        combined(FourState(0.1, 0.5), 0.9)


@pytest.mark.parametrize(
    "extras", [Extras(duplicate_ratio=0.1), Extras(overhead=Overhead(24)), Extras(slot=Slot(1, 2))]
)
def test_what_needs_a_single_netem_is_refused_before_anything_is_built(extras: Extras) -> None:
    port = NetemPort("p", "no-such-namespace", "eth0")
    with pytest.raises(UnsupportedFeature, match="loss_engine: bpf"):
        port.install(Shape(extras=extras), None, None, ["10.77.0.2"])


def test_four_states_are_not_for_the_mask() -> None:
    port = NetemPort("p", "no-such-namespace", "eth0", classifier=FakePort("q"))
    with pytest.raises(UnsupportedFeature, match="loss_engine: netem"):
        port.install(Shape(extras=Extras(loss=FourState(0.1, 0.5))), None, None, ["10.77.0.2"])


def test_loss_behind_the_rate_is_refused_before_anything_is_built() -> None:
    port = NetemPort("p", "no-such-namespace", "eth0")
    with pytest.raises(UnsupportedFeature, match=r"loss_at: after_rate.*loss_engine: bpf"):
        port.install(Shape(rate_bps=10**6, loss_at="after_rate"), None, None, [])


def test_a_port_must_be_installed_first() -> None:
    port = NetemPort("p", "no-such-namespace", "eth0")
    with pytest.raises(LinkError, match="before the port was installed"):
        port.set_loss([LossRule("10.77.0.2", 1, 0.5)])
    assert port.counters() == []
    port.close()
    port.close()


def test_the_loss_engine_is_named() -> None:
    assert NetemPort("p", None, "eth0").loss_engine == "netem"
    assert NetemPort("p", None, "eth0", classifier=FakePort("q")).loss_engine == "fake"

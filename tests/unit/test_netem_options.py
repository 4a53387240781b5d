"""netem's whole state as a value: one table of (options, bytes) both ways, and what is refused. No kernel needed."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.kernel import distributions
from netem.kernel import netem_options as no
from netem.kernel.loss_models import FourState, GilbertElliott, probability, ratio_of
from netem.kernel.netem_options import NetemOptions, Overhead, Rate, Slot

HALF, FULL = 0x80000000, 0xFFFFFFFF


def wire(qopt: tuple[int, ...], **values: bytes) -> bytes:
    """TCA_OPTIONS as linux/pkt_sched.h lays them out, written down without the module under test."""
    numbers = {
        "corr": 1, "delay_dist": 2, "reorder": 3, "corrupt": 4, "loss": 5, "rate": 6, "ecn": 7, "rate64": 8,
        "latency64": 10, "jitter64": 11, "slot": 12, "slot_dist": 13, "seed": 14,
    }  # fmt: skip
    plain = {
        "corr": bytes(12), "reorder": bytes(8), "corrupt": bytes(8), "rate": bytes(16), "ecn": bytes(4),
        "latency64": bytes(8), "jitter64": bytes(8), "slot": bytes(40),
    }  # fmt: skip
    raw = struct.pack("=6I", *qopt)
    for name, value in {**plain, **values}.items():
        raw += struct.pack("=HH", 4 + len(value), numbers[name]) + value + bytes(-len(value) % 4)
    return raw


def u32(*values: int) -> bytes:
    return struct.pack(f"={len(values)}I", *values)


def nested(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value


def i64(*values: int) -> bytes:
    return struct.pack(f"={len(values)}q", *values)


HALF_RATIO = ratio_of(HALF)
TABLE: list[tuple[str, NetemOptions, bytes]] = [
    ("nothing", NetemOptions(1000), wire((0, 1000, 0, 0, 0, 0))),
    (
        "delay, jitter",
        NetemOptions(12_500, 10_000_000, 4_000_000),
        wire((156_250, 12_500, 0, 0, 0, 62_500), latency64=i64(10_000_000), jitter64=i64(4_000_000)),
    ),
    ("delay of an hour", NetemOptions(9, 3600 * 10**9), wire((FULL, 9, 0, 0, 0, 0), latency64=i64(3600 * 10**9))),
    (
        "delay correlation",
        NetemOptions(9, 64, 64, delay_correlation=HALF_RATIO),
        wire((1, 9, 0, 0, 0, 1), corr=u32(HALF, 0, 0), latency64=i64(64), jitter64=i64(64)),
    ),
    (
        "table",
        NetemOptions(9, 0, 64, table=(-8192, 0, 8192)),
        wire((0, 9, 0, 0, 0, 1), jitter64=i64(64), delay_dist=struct.pack("=3h", -8192, 0, 8192)),
    ),
    ("loss", NetemOptions(9, loss=HALF_RATIO), wire((0, 9, HALF, 0, 0, 0))),
    ("all lost", NetemOptions(9, loss=1.0), wire((0, 9, FULL, 0, 0, 0))),
    (
        "gilbert: h and 1-k",
        NetemOptions(9, loss=GilbertElliott(HALF_RATIO, 1.0)),
        wire((0, 9, 0, 0, 0, 0), loss=nested(2, u32(HALF, FULL, 0, 0))),
    ),
    (
        "gilbert-elliott: 25% pass in the bad state, 0.1% are lost in the good one",
        NetemOptions(9, loss=GilbertElliott(HALF_RATIO, 1.0, ratio_of(0x40000000), ratio_of(FULL - 4294967))),
        wire((0, 9, 0, 0, 0, 0), loss=nested(2, u32(HALF, FULL, 0x40000000, 4294967))),
    ),
    (
        "four states: p13, p31, p32, p14, p23",
        NetemOptions(9, loss=FourState(ratio_of(1), ratio_of(2), ratio_of(3), ratio_of(5), ratio_of(4))),
        wire((0, 9, 0, 0, 0, 0), loss=nested(1, u32(1, 2, 3, 4, 5))),
    ),
    ("duplicate", NetemOptions(9, duplicate_ratio=HALF_RATIO), wire((0, 9, 0, 0, HALF, 0))),
    (
        "reorder, gap",
        NetemOptions(9, 64, reorder_ratio=HALF_RATIO, reorder_gap=5),
        wire((1, 9, 0, 5, 0, 0), reorder=u32(HALF, 0), latency64=i64(64)),
    ),
    ("corrupt", NetemOptions(9, corrupt_ratio=HALF_RATIO), wire((0, 9, 0, 0, 0, 0), corrupt=u32(HALF, 0))),
    (
        "rate, overheads, cells",
        NetemOptions(9, rate=Rate(125_000, Overhead(-14, 48, 5))),
        wire((0, 9, 0, 0, 0, 0), rate=struct.pack("=IiIi", 125_000, -14, 48, 5)),
    ),
    (
        "rate of 64 bits",
        NetemOptions(9, rate=Rate(2**33)),
        wire((0, 9, 0, 0, 0, 0), rate=struct.pack("=IiIi", FULL, 0, 0, 0), rate64=i64(2**33)),
    ),
    (
        "slot",
        NetemOptions(9, slot=Slot(1000, 2000, packets=3, bytes=4)),
        wire((0, 9, 0, 0, 0, 0), slot=struct.pack("=qqiiqq", 1000, 2000, 3, 4, 0, 0)),
    ),
    (
        "slot by a distribution",
        NetemOptions(9, slot=Slot(mean_ns=1000, deviation_ns=200, table=(1, 2))),
        wire(
            (0, 9, 0, 0, 0, 0), slot=struct.pack("=qqiiqq", 0, 0, 0, 0, 1000, 200), slot_dist=struct.pack("=2h", 1, 2)
        ),
    ),
    ("ecn", NetemOptions(9, loss=1.0, ecn=True), wire((0, 9, FULL, 0, 0, 0), ecn=u32(1))),
    ("seed", NetemOptions(9, prng_seed=7), wire((0, 9, 0, 0, 0, 0), seed=i64(7))),
]
rows = pytest.mark.parametrize(("options", "raw"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])


def attributes(raw: bytes) -> tuple[bytes, dict[int, bytes]]:
    """The fixed part, and the attributes whatever their order."""
    from netem.kernel import rtnetlink as rt

    return raw[:24], rt.attributes(raw[24:])


@rows
def test_encoded(options: NetemOptions, raw: bytes) -> None:
    assert attributes(no.encode(options)) == attributes(raw)


@rows
def test_decoded(options: NetemOptions, raw: bytes) -> None:
    assert no.decode(raw) == options


@rows
def test_the_kernels_report_agrees(options: NetemOptions, raw: bytes) -> None:
    """A kernel leaves out tables, and what is switched off, and reports a seed whoever chose it."""
    report = no.report(options)
    fixed = report.pop(0)
    from netem.kernel import rtnetlink as rt

    reported = fixed + rt.encode(report)
    if options.prng_seed is None:
        reported += rt.encode({no.PRNG_SEED: i64(99)})
    assert no.agrees(no.report(options), reported)
    assert no.differences(options, reported) == []
    other = replace(options, limit_packets=77)
    assert not no.agrees(no.report(other), reported)
    assert no.differences(other, reported) == [f"limit is {options.limit_packets} instead of 77"]


def test_every_message_carries_the_whole_state() -> None:
    """What a change leaves out the kernel keeps: all but the model of loss and tables, which have no zero."""
    kinds = set(attributes(no.encode(NetemOptions(1)))[1])
    assert kinds == {1, 3, 4, 6, 7, 10, 11, 12}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"loss": 0.5}, "loss is 0.5 instead of 0.9"),
        ({"loss": 0.0}, "loss is 0 instead of 0.9"),
        ({"loss": GilbertElliott(0.1, 0.5)}, "loss is GilbertElliott"),
        ({"delay_ns": 0}, "delay is 0 instead of 10000"),
        ({"jitter_ns": 1}, "jitter is 1 instead of 0"),
        ({"duplicate_ratio": 1e-9}, "duplicate is 9.3"),
        ({"corrupt_ratio": 0.5}, "corrupt is 0.5"),
        ({"rate": Rate(1000)}, "rate is Rate"),
        ({"slot": Slot(1, 2)}, "slot is Slot"),
        ({"ecn": True}, "ecn is True"),
    ],
)
def test_the_reading_back_finds_every_difference(change: dict[str, Any], expected: str) -> None:
    wanted = NetemOptions(1000, 10_000, loss=0.9)
    raw = no.encode(replace(wanted, **change))
    assert not no.agrees(no.report(wanted), raw)
    (difference,) = no.differences(wanted, raw)
    assert difference.startswith(expected)


def test_a_seed_that_the_kernel_ignored_is_a_difference() -> None:
    (difference,) = no.differences(NetemOptions(9, prng_seed=7), no.encode(NetemOptions(9)))
    assert "Linux 6.6" in difference


def test_correlations_that_are_not_offered_are_a_difference() -> None:
    for raw in (
        wire((0, 9, 0, 0, 0, 0), corr=u32(0, HALF, 0)),
        wire((0, 9, 0, 0, 0, 0), corr=u32(0, 0, HALF)),
        wire((0, 9, 0, 0, 0, 0), corrupt=u32(0, HALF)),
    ):
        assert "not offered" in no.differences(NetemOptions(9), raw)[0]


def test_a_small_loss_is_not_taken_for_none() -> None:
    assert probability(1e-12) == 1
    assert no.differences(NetemOptions(9, loss=1e-7), no.encode(NetemOptions(9)))


@given(st.floats(0.0, 1.0))
def test_ratios_survive_the_32_bits(ratio: float) -> None:
    assert 0 <= probability(ratio) <= FULL
    assert abs(ratio_of(probability(ratio)) - ratio) < 1e-9
    assert probability(ratio_of(probability(ratio))) == probability(ratio)


@pytest.mark.parametrize(
    "build",
    [
        lambda: NetemOptions(0),
        lambda: NetemOptions(2**32),
        lambda: NetemOptions(9, -1),
        lambda: NetemOptions(9, 0, 2**31),
        lambda: NetemOptions(9, loss=1.5),
        lambda: NetemOptions(9, 5, table=(1,)),
        lambda: NetemOptions(9, 5, delay_correlation=0.5),
        lambda: NetemOptions(9, 5, reorder_ratio=0.5),
        lambda: NetemOptions(9, reorder_ratio=0.5, reorder_gap=1),
        lambda: NetemOptions(9, 0, 5, table=()),
        lambda: NetemOptions(9, 0, 5, table=(2**15,)),
        lambda: NetemOptions(9, 0, 5, table=(0,) * 16385),
        lambda: NetemOptions(9, prng_seed=2**64),
        lambda: Rate(0),
        lambda: Overhead(cell_overhead=5),
        lambda: Overhead(2**31),
        lambda: Slot(),
        lambda: Slot(5, 4),
        lambda: Slot(1, 2, deviation_ns=5),
        lambda: GilbertElliott(0, 0),
        lambda: GilbertElliott(1.1, 0),
        lambda: GilbertElliott.of_bursts(0.9, 2),
        lambda: GilbertElliott.of_bursts(0.0, 2),
        lambda: GilbertElliott.of_bursts(0.1, 0.5),
        lambda: FourState(0.6, 0.5, p14=0.5),
        lambda: FourState(0.1, 0.6, p32=0.5),
        lambda: FourState(0.1, 0.0),
        lambda: FourState(0.1, 0.5, 0.5, 0.0),
    ],
)
def test_what_the_kernel_would_cut_or_not_do_is_refused(build: Callable[[], object]) -> None:
    with pytest.raises(ValueError):
        build()


@pytest.mark.parametrize(("loss", "burst"), [(0.01, 1.0), (0.05, 5.0), (0.3, 20.0), (0.5, 1.0)])
def test_gilbert_by_mean_loss_and_burst(loss: float, burst: float) -> None:
    model = GilbertElliott.of_bursts(loss, burst)
    assert model.mean_ratio == pytest.approx(loss)
    assert 1 / model.r == pytest.approx(burst)
    lost = chain(model, 200_000)
    assert fmean(lost) == pytest.approx(loss, rel=0.1)
    runs = "".join("1" if x else " " for x in lost).split()
    assert fmean(map(len, runs)) == pytest.approx(burst, rel=0.1)


def chain(model: GilbertElliott, packets: int) -> list[bool]:
    """As the kernel decides (loss_gilb_ell): the state moves on, the loss is that of the state before."""
    source, bad, lost = random.Random(1), False, []
    for _ in range(packets):
        moved = source.random() < (model.r if bad else model.p)
        lost.append(source.random() >= (model.h if bad else model.k))
        bad ^= moved
    return lost


def test_a_loss_on_top_of_a_chain_is_an_independent_one() -> None:
    model = GilbertElliott(0.1, 0.4, 0.2, 0.9).with_loss(0.5)
    assert (model.h, model.k) == (0.1, 0.45)
    assert 1 - model.mean_ratio == pytest.approx((1 - GilbertElliott(0.1, 0.4, 0.2, 0.9).mean_ratio) / 2)


@pytest.mark.parametrize("model", [FourState(0.02, 0.3, 0.2, 0.5, 0.01), FourState(0.05, 0.5)])
def test_four_states_lose_what_they_say(model: FourState) -> None:
    source, state, counts = random.Random(3), 1, []
    moves = {
        1: [(4, model.p14), (3, model.p13), (1, 1.0)],
        2: [(3, model.p23), (2, 1.0)],
        3: [(2, model.p32), (1, model.p31), (3, 1.0)],
        4: [(1, 1.0)],
    }
    for _ in range(400):
        lost = 0
        for _ in range(1000):
            at = source.random()
            for target, share in moves[state]:
                at -= share
                if at < 0:
                    state = target
                    break
            lost += state > 2
        counts.append(lost)
    mean = model.mean_ratio
    assert fmean(counts) / 1000 == pytest.approx(mean, rel=0.05)
    assert pstdev(counts) ** 2 / (1000 * mean * (1 - mean)) == pytest.approx(model.clustering, rel=0.3)


def test_two_states_are_four_without_the_others() -> None:
    two = GilbertElliott.of_bursts(0.05, 5)
    assert FourState(two.p, two.r).mean_ratio == pytest.approx(two.mean_ratio)
    assert FourState(two.p, two.r).clustering == pytest.approx(two.clustering)


@pytest.mark.parametrize("name", distributions.NAMES)
def test_tables_have_mean_0_and_deviation_1(name: str) -> None:
    table = distributions.table(name)
    assert list(table) == sorted(table)
    assert abs(fmean(table)) < 1
    assert pstdev(table) == pytest.approx(distributions.SCALE, rel=1e-3)


def test_what_tells_the_tables_apart() -> None:
    """Share within one standard deviation: 68 % of a normal one; the heavy tails have the rest near the mean."""
    within = {
        name: sum(abs(x) < distributions.SCALE for x in distributions.table(name)) / len(distributions.table(name))
        for name in distributions.NAMES
    }
    assert within["normal"] == pytest.approx(0.6827, abs=0.001)
    assert within["pareto"] > within["paretonormal"] > within["normal"]


def test_table_files() -> None:
    assert distributions.parse("# a comment\n -8192 0\n8192 # one\n") == (-8192, 0, 8192)
    for text in ("", "# nothing", "1.5", "40000", "x"):
        with pytest.raises(ValueError):
            distributions.parse(text)


def test_a_table_cannot_be_taken_away() -> None:
    plain, tabled = NetemOptions(9, 5, 5), NetemOptions(9, 5, 5, table=(1, 2))
    slotted = NetemOptions(9, slot=Slot(mean_ns=5, deviation_ns=1, table=(1,)))
    assert no.replaceable(plain, tabled)
    assert no.replaceable(tabled, tabled)
    assert not no.replaceable(tabled, plain)
    assert not no.replaceable(slotted, NetemOptions(9, slot=Slot(1, 2)))

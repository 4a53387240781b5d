"""doctor --fidelity on real links of the bpf backend: a short table, and settings that are not what was asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from netem.links.base import Shape
from netem.probing.judges import Accounted, Bursts, Limit, Loss, Speed
from netem.probing.measure import Row, Table, bench, measure
from netem.probing.probe import Sending, exchange
from netem.probing.settings import Put, Setting, chosen

pytestmark = [pytest.mark.usefixtures("unchanged_host"), pytest.mark.timeout(120)]
PACKETS = 20_000
BURSTS = "loss 20 % in bursts of 3"


def test_a_short_table(state_dir: Path) -> None:
    losses = ["no loss", "loss 40 %", "loss 100 %", "steady loss 2 %", "burst: 20 %, twice 10 %, corrupt 5 %"]
    counted = chosen([*losses, "duplicate 10 %", "corrupt 5 %", "queue 64 KiB, rate 10 Mbit/s"], PACKETS)
    timed = chosen(["rate 10 Mbit/s", "rate 20 Mbit/s, loss 30 %"], PACKETS)
    elsewhere = chosen(["delay 5 ms", "four_state", "slot 5 ms", "limit 100, delay 400 ms"], PACKETS)
    seen: list[Row] = []
    rows = [*counted, *chosen([BURSTS]), *timed, *elsewhere]
    found = measure("bpf", state_dir, rows, seen.append)
    assert tuple(seen) == found.rows
    verdicts = {row.setting: row.verdict for row in found.rows}
    assert {verdicts[row.name] for row in counted} | {verdicts[BURSTS]} == {"held"}, verdicts
    assert {verdicts[row.name] for row in timed} <= {"held", "disturbed"}, verdicts
    assert {verdicts[row.name] for row in elsewhere} == {"elsewhere"}
    assert {row.backends for row in found.rows if row.verdict == "elsewhere"} == {("netem",)}
    assert found.failed == ()
    predicted = {row.setting for row in found.rows for each in row.measures if each.what == "unlike predicted"}
    assert {BURSTS, "loss 40 %", "burst: 20 %, twice 10 %, corrupt 5 %", "duplicate 10 %", "corrupt 5 %"} <= predicted


def beside(found: Table) -> list[tuple[str, list[str]]]:
    """What was measured of rows that did not hold. (A slow link on a busy machine is `disturbed`, not `failed`.)"""
    measures = {row.setting: row.measures for row in found.rows if row.verdict in ("failed", "disturbed")}
    return [(name, [each.what for each in of if not each.ok]) for name, of in measures.items()]


def test_what_is_not_as_asked_is_found(state_dir: Path) -> None:
    """50 % in place of 40 %, losses one by one in place of bursts, another mask, half the rate, a shorter queue."""
    (forty,) = chosen(["loss 40 %"], PACKETS)
    (bursts,) = chosen([BURSTS])
    wrong = [
        Setting("50 for 40", Put(ratio=0.5), forty.sending, (Loss(0.4), Accounted())),
        replace(bursts, put=Put(ratio=0.2), judges=tuple(each for each in bursts.judges if isinstance(each, Bursts))),
        Setting("40 for none", Put(ratio=0.4), forty.sending, (Loss(0.0),)),
        Setting("slow", Put(Shape(rate_bps=10**7, queue_bytes=10**6)), Sending(300, 1500), (Speed(2e7, 1514),)),
        Setting("shallow", Put(Shape(rate_bps=10**7, queue_bytes=32768)), Sending(300, 1500), (Limit(47, 1e7, 1514),)),
    ]
    found = measure("bpf", state_dir, wrong)
    assert found.failed[:3] == ("50 for 40", BURSTS, "40 for none")
    assert beside(found) == [
        ("50 for 40", ["loss"]),
        (BURSTS, ["mean burst", "mean gap"]),
        ("40 for none", ["loss"]),
        ("slow", ["rate"]),
        ("shallow", ["got through", "of the first"]),
    ]


def test_one_packet_beside_the_prediction(state_dir: Path) -> None:
    """The mask of another loss, nearly the same: its share passes, its packets do not."""
    (forty,) = chosen(["loss 40 %"], PACKETS)
    predicted = forty.judges_on("bpf")[-1]
    near = Setting("nearly", Put(ratio=0.4005), forty.sending, (Loss(0.4),))
    with bench("bpf", state_dir) as place:
        place.apply(near.put)
        found = exchange(place.out, place.inlet, near.sending, place.dropped)
    assert found.dropped == found.lost.sum()
    unlike = [each.achieved for each in predicted.measures(found, None)]  # type: ignore[arg-type]
    assert 0 < unlike[0] < 0.002 * PACKETS

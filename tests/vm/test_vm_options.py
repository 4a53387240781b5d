"""Every option of netem on a real sch_netem: written, read back, and shown by tc. The table: pytest -s this file."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(1300)
Measured = dict[str, Any]
SIGMAS = 5


def test_every_option(measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured["rows"]
    with capsys.disabled():
        print("\n  vm: option              read back  value")
        for name, row in rows.items():
            verdict = "equal" if row["agrees"] and not row["differences"] else "DIFFERS"
            print(f"  vm: {name:20}{verdict:11}{row['found']}")
    assert {name: row["differences"] for name, row in rows.items() if row["differences"]} == {}
    assert [name for name, row in rows.items() if not row["agrees"]] == [], "the quick comparison says the same"
    assert len(rows) >= 24


@pytest.mark.check("every_option")
def test_what_tc_shows(measured: Measured) -> None:
    """An independent reader of the same messages."""
    shown = {name: row["tc"] for name, row in measured["rows"].items()}
    if not shown["plain"]:
        pytest.skip("tc is not installed (Debian, Ubuntu: apt-get install iproute2)")

    def near(value: float, expected: float) -> bool:
        return math.isclose(value, expected, rel_tol=1e-3, abs_tol=1e-6)

    assert near(shown["delay"]["delay"]["delay"], 0.01)
    assert near(shown["jitter"]["delay"]["jitter"], 0.004)
    assert near(shown["correlation"]["delay"]["correlation"], 0.25)
    assert near(shown["loss"]["loss-random"]["loss"], 0.3)
    gilbert = shown["gilbert-elliott"]["loss-gemodel"]
    assert [near(gilbert[k], v) for k, v in {"p": 0.01, "r": 0.2, "1-h": 0.75, "1-k": 0.001}.items()] == [True] * 4
    states = shown["four states"]["loss-state"]
    expected = {"p13": 0.02, "p31": 0.3, "p32": 0.2, "p23": 0.5, "p14": 0.01}
    assert [near(states[k], v) for k, v in expected.items()] == [True] * 5
    assert near(shown["duplicate"]["duplicate"]["duplicate"], 0.1)
    assert near(shown["reorder"]["reorder"]["reorder"], 0.25)
    assert shown["reorder"]["gap"] == 5
    assert near(shown["corrupt"]["corrupt"]["corrupt"], 0.001)
    rate = shown["rate, overheads"]["rate"]
    assert (rate["rate"], rate["cellsize"], rate["celloverhead"]) == (125_000, 48, 5)
    assert shown["rate, 64 bits"]["rate"]["rate"] == 2**33
    assert shown["ecn"]["ecn"] is True
    assert shown["nothing left of it"] == shown["plain"]


def test_set_by_tc(measured: Measured) -> None:
    """What tc writes we read as what tc was asked for: also its 1-h and 1-k."""
    rows = measured["rows"]
    if all("No such file" in row["error"] for row in rows.values()):
        pytest.skip("tc is not installed (Debian, Ubuntu: apt-get install iproute2)")
    assert {words: row for words, row in rows.items() if row["error"] or row["differences"]} == {}


def test_seed_refused(measured: Measured, guest: Measured) -> None:
    """Debian's 6.1 knows no PRNG_SEED and says nothing about it: reading back finds it."""
    release = tuple(int(part) for part in guest["kernel"]["release"].split(".")[:2])
    if release >= (6, 6):
        assert measured["differences"] == []
    else:
        assert "Linux 6.6" in measured["differences"][0]


def test_port_options(measured: Measured) -> None:
    sent, loss = measured["sent"], measured["loss"]

    def far(received: int, expected: float, clustering: float) -> float:
        return abs(received - sent * expected) / math.sqrt(clustering * sent * expected * (1 - expected))

    assert far(measured["steady"], 1 - loss, measured["clustering"]) < SIGMAS
    assert far(measured["burst"], (1 - loss) / 2, measured["clustering"]) < SIGMAS, "a burst comes on top"
    (count,) = (c for c in measured["counters"] if c["source"] == "10.77.0.2" and c["kind"] == "data")
    assert count["seen"] == 2 * sent
    others = sum(c["seen"] for c in measured["counters"] if c["source"] == "*")
    lost = 2 * sent - measured["steady"] - measured["burst"]
    dropped = sum(c["dropped"] for c in measured["counters"])  # shared out in proportion: exact in all only
    assert 0 <= dropped + measured["devices"] - lost <= others, "netem's drops, and those of a full ring"
    assert measured["health"]["queue_dropped"] == 0, "losses in bursts are not taken for an overflow"
    more = measured["doubled"] - sent
    assert abs(more - sent * measured["duplicate"]) < SIGMAS * math.sqrt(sent * measured["duplicate"])
    assert measured["qdiscs"] == ["100:", "ffff:"], "one netem, and clsact for the mask"


def test_reshaped(measured: Measured) -> None:
    assert (measured["netem"]["delay_ns"], measured["tbf"]) == (5_000_000, "tbf")
    assert measured["netem"]["loss"] == pytest.approx(0.1), "the base loss stays"
    assert "rate in bytes/s is 12500000 instead of 125000000" in measured["refused"]
    assert measured["left"] == ["0:"]


def test_duplicates_side_by_side(measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels of which some refuse it, some do it for each band: why it takes a port with a single netem."""
    with capsys.disabled():
        print(f"\n  vm: two netems, one duplicates: this kernel says {measured['said']}", end=" ")
    assert measured["said"]

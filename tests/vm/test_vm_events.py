"""Events and impairments on a real sch_netem, as guest_events.py has measured them."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(1300)
Measured = dict[str, Any]
SENDER = "10.77.0.2"


def test_held_packet(measured: Measured) -> None:
    """What a rate limiter has taken out and put back is neither counted twice nor missing later."""
    assert measured["arrived"] == measured["sent"]
    assert {(c["source"], c["kind"]): (c["seen"], c["dropped"]) for c in measured["counters"]} == {
        (SENDER, "data"): (measured["sent"], 0)
    }


@pytest.mark.parametrize("tree", ["bands", "alone"])
@pytest.mark.check("ecn")
def test_a_mark_is_no_drop(measured: Measured, tree: str) -> None:
    """A mark is no drop: what the port says it saw and dropped is what was sent and did not arrive."""
    capable, not_capable = measured[f"{tree} True"], measured[f"{tree} False"]
    assert capable["received"] == 1_000
    assert 200 < measured[f"{tree} marked"] < 400
    assert _sums(capable) == (1_000, 0)
    lost = 1_000 - not_capable["received"]
    assert 200 < lost < 400
    assert _sums(not_capable) == (2_000, lost)
    assert not_capable["health"]["queue_dropped"] == 0


def _sums(account: dict[str, Any]) -> tuple[int, int]:
    return sum(c["seen"] for c in account["counters"]), sum(c["dropped"] for c in account["counters"])


def test_altered_run(measured: Measured) -> None:
    """Copies and damage on every kind of link: the verdict is right, and says what explains the gap."""
    for engine, found in measured.items():
        if engine == "took_s":
            continue
        assert found["status"] == 0, found["output"]
        (totals,) = (check for check in found["checks"] if check["name"] == "totals")
        assert "receivers' kernels refused" in totals["detail"]


def _asked(change: dict[str, Any]) -> tuple[list[tuple[float, list[str]]], list[tuple[str, Any, Any]]]:
    """The part of the state that is by time, or by iteration: rounds and times meet as fast as the machine is."""
    timed = change["planned_s"] is not None
    bursts = [(burst["loss"], burst["workers"]) for burst in change["bursts"] if (burst["loss"] != 0.6) == timed]
    shifts = [shift for shift in change["shifts"] if (shift["link"] == "worker2.up") == timed]
    return bursts, [(shift["link"], shift["rate_bps"], shift["delay_s"]) for shift in shifts]


def test_event_run(measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    """Every change is made, read back and undone in the order of the file, at its time; where two meet both hold."""
    assert measured["status"] == 0, measured["output"]
    both, one, two = ["worker1", "worker2"], ["worker1"], ["worker2"]
    slow = [("worker2.up", 20_000_000, None)]
    by_round = [change for change in measured["changes"] if change["planned_s"] is None]
    assert [(change["planned_round"], *_asked(change)) for change in by_round] == [
        (3, [(0.6, both)], []), (4, [], []),
        (5, [], [("left to right", 10_000_000, None)]), (6, [], []),
        (7, [], [("right to left", None, 0.03)]), (8, [], []),
    ]  # fmt: skip
    by_time = [change for change in measured["changes"] if change["planned_s"] is not None]
    assert [(change["planned_s"], *_asked(change)) for change in by_time] == [
        (1.0, [(0.5, one)], []), (1.1, [(0.5, one), (0.9, one)], []), (1.15, [(0.5, one), (0.9, one)], slow),
        (1.2, [(0.9, one)], []), (1.3, [], []), (1.5, [(1.0, two)], []), (1.6, [], []),
    ]  # fmt: skip
    assert all(change["lateness_s"] >= 0.0 for change in by_time)
    late = sorted(change["lateness_s"] for change in by_time)
    with capsys.disabled():
        print(
            f"\n  vm: events by time: late by {1e3 * late[len(late) // 2]:.1f} ms, at most {1e3 * late[-1]:.1f}",
            end=" ",
        )
    release = tuple(int(part) for part in measured["manifest"]["kernel"].split()[1].split(".")[:2])
    said = "seeded" if release >= (6, 6) else "could not be seeded: that needs Linux 6.6 or newer"
    assert measured["manifest"]["netem_random"] == said
    names = {check["name"] for check in measured["checks"]}
    assert {"event times", "totals", "burst loss"} <= names

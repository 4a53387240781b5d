"""Where the server's threads meet. Every thread is joined with a limit; nothing sleeps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from dblp.collective.meeting import Meeting
from dblp.errors import DblpError, PeerLost

LIMIT_S = 5.0


def together(parties: int, body: Callable[[int], Any]) -> dict[int, Any]:
    """What each of ranks 1..parties returned or raised."""
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(1, parties + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(results) == list(range(1, parties + 1)), "a thread hangs"
    return results


def wait_until_offered(meeting: Meeting, count: int) -> None:
    """Until that many have come, and so (they hold the lock until then) wait."""
    pause = threading.Event()
    for _ in range(int(LIMIT_S / 0.001)):
        with meeting._condition:
            if len(meeting._offers) == count:
                return
        pause.wait(0.001)


@pytest.mark.parametrize("parties", [1, 3, 8])
def test_last_one_acts_for_all_again_and_again(parties: int) -> None:
    meeting, calls = Meeting(parties), []

    def action(offers: dict[int, int]) -> int:
        calls.append(dict(sorted(offers.items())))
        return sum(offers.values())

    def body(rank: int) -> list[int]:
        return [meeting.meet(rank, rank * turn, action, LIMIT_S) for turn in range(50)]

    results = together(parties, body)
    total = sum(range(1, parties + 1))
    assert all(result == [total * turn for turn in range(50)] for result in results.values())
    assert calls == [{rank: rank * turn for rank in range(1, parties + 1)} for turn in range(50)]


def test_failing_action_fails_all_and_every_later_meeting() -> None:
    meeting = Meeting(3)

    def action(offers: Any) -> None:
        raise PeerLost("worker 2", 4, "testing", "gone")

    results = together(3, lambda rank: meeting.meet(rank, None, action, LIMIT_S))
    assert sorted(type(result).__name__ for result in results.values()) == ["DblpError", "DblpError", "PeerLost"]
    assert all("lost worker 2 in round 4" in str(result) for result in results.values())
    with pytest.raises(DblpError, match="because of another worker: lost worker 2"):
        meeting.meet(1, None, action, LIMIT_S)


def test_failure_of_one_wakes_those_who_wait() -> None:
    meeting = Meeting(3)

    def body(rank: int) -> Any:
        if rank == 3:
            wait_until_offered(meeting, 2)
            meeting.fail(PeerLost("worker 3", 1, "computing", "it closed the connection"))
            meeting.fail(DblpError("a later failure does not hide the first"))
            return None
        return meeting.meet(rank, None, lambda offers: None, 4 * LIMIT_S)

    results = together(3, body)
    for rank in (1, 2):
        assert isinstance(results[rank], DblpError)
        assert "because of another worker: lost worker 3 in round 1" in str(results[rank])


def test_missing_parties_are_named_after_the_limit() -> None:
    meeting = Meeting(3)
    results = together(1, lambda rank: meeting.meet(2, None, lambda offers: None, 0.05))
    assert str(results[1]) == "worker(s) [1, 3] did not reach the end of the round within 0.05 s"

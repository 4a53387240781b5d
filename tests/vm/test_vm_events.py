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

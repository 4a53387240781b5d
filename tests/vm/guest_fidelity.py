"""Guest side: rows of doctor --fidelity on a real sch_netem, and one whose port does something else than it says."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from netem.probing.measure import measure
from netem.probing.settings import Put, chosen

COUNTED = [
    "loss 10 %",
    "steady 2 % and loss 50 %",
    "loss 90 %",
    "four_state",
    "ecn, loss 10 %",
    "duplicate 10 %",
    "corrupt 5 %",
    "limit 100, delay 400 ms",
]
TIMED = ["delay 5 ms", "jitter 2 ms normal, delay 12 ms", "rate 10 Mbit/s, overhead 24 B", "rate 1 Mbit/s"]
OF_MANY = ["loss 20 % in bursts of 3"]
"""5 % of a mean burst are told from chance with many packets only."""
FEW = 10_000


def fidelity_table() -> dict[str, Any]:
    rows = [*chosen(COUNTED, FEW), *chosen(OF_MANY), *chosen(TIMED, FEW)]
    wrong = replace(rows[0], name="50 for 10", put=Put(ratio=0.5))
    with tempfile.TemporaryDirectory() as name:
        found = measure("netem", Path(name), [*rows, wrong]).to_json()
    return {"counted": [*COUNTED, *OF_MANY], "timed": TIMED, "wrong": wrong.name, **found}


CHECKS = (fidelity_table,)

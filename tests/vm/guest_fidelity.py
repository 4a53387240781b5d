"""Guest side: the table of doctor --fidelity on a real sch_netem, and a row whose port does not do what it says."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from netem.probing.measure import measure
from netem.probing.settings import PACKETS, Put, Setting, chosen, settings

FEW = 10_000
BURSTS = "loss 20 % in bursts of 3"


def rows() -> tuple[Setting, ...]:
    """All of them; on an emulated processor with fewer packets, but for one of bursts, whose 5 % take many."""
    if "User Mode Linux" in Path("/proc/cpuinfo").read_text():
        return settings(PACKETS)
    return *(row for row in settings(FEW) if "in bursts of" not in row.name), *chosen([BURSTS])


def fidelity_table() -> dict[str, Any]:
    (ten,) = chosen(["loss 10 %"], FEW)
    wrong = replace(ten, name="50 for 10", put=Put(ratio=0.5))
    tried = (*rows(), wrong)
    with tempfile.TemporaryDirectory() as name:
        found = measure("netem", Path(name), tried).to_json()
    timed = [row.name for row in tried if any(judge.timed for judge in row.judges)]
    return {"timed": timed, "wrong": wrong.name, **found}


CHECKS = (fidelity_table,)

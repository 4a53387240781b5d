"""doctor --fidelity on a real sch_netem: requested beside achieved, row by row. The table: pytest -s this file."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(1300)
Measured = dict[str, Any]


def test_fidelity_table(measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["setting"]: row for row in measured["rows"]}
    with capsys.disabled():
        for name, row in rows.items():
            for each in (each for each in row["measures"] if each["requested"] or not each["ok"]):
                low, achieved, high = (
                    float("nan") if each[key] is None else each[key] for key in ("low", "achieved", "high")
                )
                print(
                    f"\n  vm: {name:38}{each['what']:14}{each['unit']:8} asked {each['requested']:<10.5g} "
                    f"achieved {achieved:<10.5g} not refuted {low:.5g} .. {high:.5g}  "
                    f"{row['verdict'] if each['ok'] else 'BESIDE'}",
                    end="",
                )
        print(end=" ")
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    assert verdicts.pop(measured["wrong"]) == "failed", "50 % is not taken for 10 %"
    timed = {name: verdicts.pop(name) for name in measured["timed"]}
    assert [rows[name] for name, verdict in timed.items() if verdict not in ("held", "disturbed")] == []
    elsewhere = {row["setting"]: row["backends"] for row in measured["rows"] if row["verdict"] == "elsewhere"}
    assert [rows[name] for name, verdict in verdicts.items() if verdict not in ("held", "elsewhere")] == []
    assert list(elsewhere.values()) == [["bpf", "loss_engine: bpf"]] * 2, "rules that only the mask makes"
    assert len(verdicts) + len(timed) >= 20

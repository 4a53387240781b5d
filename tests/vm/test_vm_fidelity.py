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
            for each in row["measures"]:
                print(
                    f"\n  vm: {name:36}{each['what']:20}{each['unit']:8} asked {each['requested']:<10.5g} "
                    f"achieved {each['achieved']:<10.5g} not refuted {each['low']:.5g} .. {each['high']:.5g}  "
                    f"{row['verdict'] if each['ok'] else 'BESIDE'}",
                    end="",
                )
        print(end=" ")
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    assert {verdicts[name] for name in measured["counted"]} == {"held"}, verdicts
    assert {verdicts[name] for name in measured["timed"]} <= {"held", "disturbed"}, verdicts
    assert verdicts[measured["wrong"]] == "failed", "50 % is not taken for 10 %"
    assert not measured["ok"]

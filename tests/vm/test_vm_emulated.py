"""The other engine: a kernel from /boot on a processor that QEMU emulates, and that it comes to the same there."""

from __future__ import annotations

from typing import Any

import pytest

from netem.analysis.intervals import clopper_pearson

pytestmark = pytest.mark.timeout(1300)
FALSE_ALARM = 1e-5


def test_every_check_ran(emulated: dict[str, Any]) -> None:
    checks = {name: found for name, found in emulated.items() if isinstance(found, dict)}
    assert len(checks) >= 6
    assert {name: found["error"] for name, found in checks.items() if "error" in found} == {}


def test_netem_does_what_is_asked(emulated: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert emulated["kernel"]["netem"]
    loss, delay = emulated["loss_90"], emulated["delay"]
    lost = loss["sent"] - loss["received"]
    with capsys.disabled():
        print(
            f"\n  vm: kernel {emulated['kernel']['release']}, emulated, booted in {emulated['boot_s']:.0f} s; loss of "
            f"90 %: {lost / loss['sent']:.2%}; delay of 10 ms: {1e3 * (delay['data_s'] - delay['base_s']):.2f} ms",
            end=" ",
        )
    assert loss["requested"] in clopper_pearson(lost, loss["sent"], FALSE_ALARM)
    assert delay["data_s"] - delay["base_s"] >= 0.0099
    change = emulated["change_in_place"]
    assert (change["received"], change["before"]) == (change["sent"], change["after"])
    rows = emulated["every_option"]["rows"]
    assert {name: row["differences"] for name, row in rows.items() if row["differences"]} == {}


def test_a_run_is_faithful(emulated: dict[str, Any]) -> None:
    assert emulated["burst_run"]["status"] == 0, emulated["burst_run"]["output"]

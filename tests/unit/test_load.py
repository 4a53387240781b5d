"""Whether the machine was too busy: counters of the kernel, and what rounds waited for a core."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from netem.analysis import load
from netem.analysis.fidelity import fidelity
from netem.analysis.load import Load, Snapshot
from netem.analysis.records import RoundRow
from netem.analysis.run import RunData
from tests.unit.analysis_data import faithful_run


def _proc(folder: Path, stat: str, softnet: str) -> Path:
    (folder / "net").mkdir(parents=True)
    (folder / "stat").write_text(stat)
    (folder / "net" / "softnet_stat").write_text(softnet)
    return folder


def test_snapshots_read_what_the_kernel_writes(tmp_path: Path) -> None:
    stat = "cpu  100 2 30 400 5 0 60 7 9 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"
    softnet = "1fa7d0d3 0000000a 00000686 0\n1f962b86 00000001 000005fa 0\n"
    assert load.snapshot(_proc(tmp_path / "a", stat, softnet)) == Snapshot(604, 7, 11)
    assert load.snapshot(tmp_path / "none") is None
    assert load.snapshot(_proc(tmp_path / "b", "cpu 1 2", softnet)) is None
    assert load.snapshot() is not None


def test_between_two_snapshots() -> None:
    assert load.between(Snapshot(1000, 10, 3), Snapshot(3000, 110, 5)) == Load(0.05, 2)
    assert load.between(Snapshot(1000, 10, 3), Snapshot(1000, 10, 3)) == Load(0.0, 0)
    assert load.between(None, Snapshot(1, 1, 1)) is None


def _waiting(waits_s: list[float | None], bursts: list[int]) -> dict[str, object]:
    run = faithful_run().runs[0]
    rows = [replace(row, latency_s=1.0, runqueue_s=None, burst=0) for row in run.rows[: len(waits_s)]]
    rows = [
        replace(row, runqueue_s=wait_s, burst=burst) for row, wait_s, burst in zip(rows, waits_s, bursts, strict=True)
    ]
    return load.summary(rows, [Load(0.02, 1), None, Load(0.01, 2)])


def test_burst_rounds_are_judged_where_there_are_any() -> None:
    found = _waiting([0.05, 0.3, None], [1, 0, 0])
    assert found["waiting_for_a_core"] == {"burst_rounds": 0.05, "other_rounds": 0.3}
    assert (found["busy"], found["steal"], found["backlog_dropped"]) == (False, 0.02, 3)
    assert _waiting([0.3, 0.3], [0, 0])["busy"] is True
    assert _waiting([None, None], [1, 0])["busy"] is None


@pytest.mark.parametrize(("what", "ok"), [(Load(0.09, 0), True), (Load(0.11, 0), False), (Load(0.0, 1), False)])
def test_a_stolen_processor_or_a_full_backlog_is_not_faithful(what: Load, ok: bool) -> None:
    data = faithful_run()
    judged = fidelity(replace(data, runs=tuple(replace(run, load=what) for run in data.runs)))
    assert [check.ok for check in judged.checks if check.name == "machine"] == [ok] * len(data.runs)
    assert judged.faithful is ok


def _with_waits(share: float | None, *, judged: bool = True) -> RunData:
    """A faithful run in whose burst rounds the transport waited for a core for this share of the latency."""
    data = faithful_run()

    def waited(row: RoundRow) -> RoundRow:
        own = 0.9 if not row.burst else share
        return replace(row, latency_s=2.0, runqueue_s=None if own is None else 2.0 * own)

    runs = tuple(replace(run, rows=tuple(map(waited, run.rows))) for run in data.runs)
    return replace(data, runs=runs, judge_latencies=judged)


@pytest.mark.parametrize(("share", "ok"), [(0.09, True), (0.11, False)])
def test_latencies_of_a_saturated_machine_are_not_faithful(share: float, ok: bool) -> None:
    """Burst rounds alone are judged: the others waited for 90 %."""
    judged = fidelity(_with_waits(share))
    found = [check for check in judged.checks if check.name == "saturation"]
    assert [check.ok for check in found] == [ok, ok]
    assert found[0].achieved == pytest.approx(share)
    assert judged.faithful is ok
    assert ("11.0%" in found[0].detail) is not ok


def test_waits_are_not_judged_where_latencies_are_only_reported_or_waits_are_not_known() -> None:
    for data in (_with_waits(0.5, judged=False), _with_waits(None)):
        judged = fidelity(data)
        assert judged.faithful
        assert "saturation" not in {check.name for check in judged.checks}

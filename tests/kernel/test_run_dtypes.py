"""`dblp-netem run` with 16 bits a value on the wire."""

from __future__ import annotations

from pathlib import Path

import pytest

from netem.analysis.records import RoundRow, read_csv
from tests.kernel.run_helpers import events, run, scenario, summary

pytestmark = pytest.mark.timeout(400)  # a whole run, on a machine that may be busy
TRANSPORTS = "{full: {fixed: 0.8%}, half: {fixed: 0.8%, wire_dtype: bfloat16}, tcp: {wire_dtype: float16}}"


def test_the_same_gradient_takes_half_the_packets(tmp_path: Path) -> None:
    """Bursts, oracle and fidelity count chunks as they are on the wire: 400 of float32, 200 of 16 bits."""
    path = scenario(tmp_path, transports=TRANSPORTS, extra="deadlines: {round: 2 s}")  # tcp is over then
    sizes = ("--set", "workload.chunks=null", "--set", "workload.shapes=[[400, 364]]")
    folder = run(path, tmp_path / "runs", *sizes)
    rows = [row for row in read_csv(folder / "rounds.csv", RoundRow) if row.outcome == "ok"]
    chunks = {name: {row.chunks for row in rows if row.transport == name} for name in ("full", "half", "tcp")}
    assert chunks == {"full": {400}, "half": {200}, "tcp": {200}}
    sent = {
        name: sum(row.bytes_sent for row in rows if row.transport == name and row.iteration == 1) for name in chunks
    }
    assert sent["half"] < 0.7 * sent["full"]
    found = summary(folder)
    assert found["fidelity"]["faithful"], found["fidelity"]["checks"]
    for name, dtype in (("full", "float32"), ("half", "bfloat16"), ("tcp", "float16")):
        facts = found["transports"][name]["facts"]
        assert (facts["profile"]["wire_dtype"], facts["saturated"]) == (dtype, 0)
        assert found["transports"][name]["replicas_identical"]
    burst = next(b for b in found["transports"]["half"]["burst_rounds"] if b["direction"] == "up")
    assert burst["packets_at_need"] == pytest.approx(199 / 0.1, rel=0.2)
    assert all(event["identical"] for event in events(folder, "replicas"))


def test_a_profile_sets_the_format_of_all_transports_and_chunks_are_packets(tmp_path: Path) -> None:
    path = scenario(tmp_path, chunks=50, bursts="  - {iteration: 3, loss: 60%}")
    folder = run(path, tmp_path / "runs", "--set", "profile={base: recommended, wire_dtype: float16}")
    assert {row.chunks for row in read_csv(folder / "rounds.csv", RoundRow)} == {50}
    assert {t["facts"]["profile"]["wire_dtype"] for t in summary(folder)["transports"].values()} == {"float16"}

"""Rounds of the transport over 5 ms of sch_netem each way, at a pace that the machine carries, beside the limit."""

from __future__ import annotations

from typing import Any

import pytest

from netem.analysis import oracle

pytestmark = [pytest.mark.timeout(1300), pytest.mark.check("long_path")]


def test_rounds_on_a_long_path(measured: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """All end well; their latencies are shown beside 1.25 times the erasure bound and 1.5 round trips, not judged: one
    round each, of an emulated processor, scatters around that. tests/sim/test_transport_rtt.py judges, over seeds.

    The rate of the bound is the pace, or where the machine does not carry it, that of the rounds without loss beside.
    """
    rtt_s, pace_hz, chunks = (measured[name] for name in ("rtt_s", "pace_hz", "chunks"))
    assert rtt_s >= 0.0099
    rounds = measured["rounds"]
    assert {one["outcome"] for one in rounds} == {"ok"}
    ratios = {}
    for before, one, after in zip(rounds, rounds[1:], rounds[2:], strict=False):
        if not one["loss"]:
            continue
        needed = oracle.need(chunks, one["tolerance"])
        clean_s = (before["latency_s"] + after["latency_s"]) / 2 - rtt_s
        rate_hz = min(pace_hz, needed / clean_s)
        bound_s = oracle.Packets(needed, one["loss"]).mean / rate_hz
        ratios[one["tolerance"], one["loss"]] = one["latency_s"] / (1.25 * bound_s + 1.5 * rtt_s)
    assert len(ratios) == 8
    with capsys.disabled():
        shown = ", ".join(f"{p:.1%}/{loss:.0%}: {ratio:.2f}" for (p, loss), ratio in ratios.items())
        print(
            f"\n  vm: {chunks} chunks, {pace_hz:.0f} packets a second ({measured['clean_hz']:.0f} without pace), RTT "
            f"{1e3 * rtt_s:.1f} ms; latency in limits, p/loss: {shown}", end=" ",
        )  # fmt: skip

"""Rounds of the transport over 5 ms of sch_netem each way, at a pace that the machine carries, against the limit."""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import Any

import pytest

from netem.analysis import oracle

pytestmark = [pytest.mark.timeout(1300), pytest.mark.check("long_path")]

CASES = 10


def test_rounds_on_a_long_path(measured: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """All end well. The mean of each case's latencies is at most 1.25 times the erasure bound and 1.5 round trips; on
    an emulated processor, where one round each is played, they are shown only. tests/sim/test_transport_rtt.py judges
    more sizes, over seeds.

    The rate of the bound is the pace, or where the machine does not carry it, that of the rounds of all chunks (p
    0.8 %) without loss beside.
    """
    rtt_s, pace_hz, chunks, rounds = (measured[name] for name in ("rtt_s", "pace_hz", "chunks", "rounds"))
    assert rtt_s >= 0.0099
    assert {one["outcome"] for one in rounds} == {"ok"}
    latencies: dict[tuple[float, float], list[float]] = {}
    for one in rounds:
        latencies.setdefault((one["tolerance"], one["loss"]), []).append(one["latency_s"])
    assert len(latencies) == CASES
    all_of_it = min(latencies)
    carried_hz = oracle.need(chunks, all_of_it[0]) / (fmean(latencies[all_of_it]) - rtt_s)
    rate_hz = min(pace_hz, carried_hz)
    shown, over = [], []
    for (p, loss), found in latencies.items():
        packets = oracle.Packets(oracle.need(chunks, p), loss).mean
        limit_s = 1.25 * packets / rate_hz + 1.5 * rtt_s
        ratio, spread = fmean(found) / limit_s, 1.96 * _standard_error(found) / limit_s
        shown.append(f"{p:.1%}/{loss:.0%}: {ratio:.2f} +- {spread:.2f}")
        over += [shown[-1]] if ratio > 1.0 else []
    with capsys.disabled():
        print(
            f"\n  vm: {chunks} chunks, {pace_hz:.0f} packets a second ({carried_hz:.0f} carried, "
            f"{measured['clean_hz']:.0f} without pace), RTT {1e3 * rtt_s:.1f} ms; mean latency in limits and its "
            f"interval of 95 %, p/loss: {', '.join(shown)}", end=" ",
        )  # fmt: skip
    assert not (over and measured["judged"]), over


def _standard_error(found: list[float]) -> float:
    return stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0

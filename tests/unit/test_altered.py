"""Sums of a run whose links damage and copy packets."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from netem.analysis.accounts import Group
from netem.analysis.altered import Altered, Ratios, balance, one_of
from netem.analysis.records import LinkCount
from netem.experiment.altering import ratios
from netem.kernel.refused import parse_snmp
from netem.spec import load_scenario_text

FLOW = (1, "up")
SENT = 20_000


def passed(draw: random.Random, packets: int, copied: float, damaged: float) -> tuple[int, int]:
    """(packets behind a link, of which it has damaged)."""
    behind = packets + sum(draw.random() < copied for _ in range(packets))
    return behind, sum(draw.random() < damaged for _ in range(behind))


def run(seed: int, copied: tuple[float, float], damaged: tuple[float, float], extra: int = 0) -> tuple[Altered, Group]:
    """A flow over two links; the second one loses 10 % on top. Damaged packets count as the socket's drops."""
    draw = random.Random(seed)
    seen, bad = passed(draw, SENT, copied[0], damaged[0])
    dropped = sum(draw.random() < 0.1 for _ in range(seen))
    arrived, worse = passed(draw, seen - dropped, copied[1], damaged[1])
    bad = round(bad * 0.9) + worse
    row: Any = SimpleNamespace(
        packets_sent=SENT, delivered=10_000, duplicate=arrived - 10_000 - bad - extra, late=0, dropped_socket=bad
    )
    group = Group(1, "up", "the run", [row], [LinkCount("up", 1, 0, seen, dropped, 0)], 0)
    return Altered({FLOW: Ratios(copied, damaged)}, {"up": bad}, {"up": 0} if any(damaged) else {}), group


@pytest.mark.parametrize("copied", [(0.0, 0.0), (0.02, 0.0), (0.01, 0.03)])
@pytest.mark.parametrize("damaged", [(0.0, 0.0), (0.0, 0.02), (0.01, 0.01)])
def test_what_was_asked_for_closes(copied: tuple[float, float], damaged: tuple[float, float]) -> None:
    for seed in range(5):
        altered, group = run(seed, copied, damaged)
        ok, detail = balance(altered, "up", [group], 0)
        assert ok, detail


@pytest.mark.parametrize("extra", [-2_000, 2_000])
def test_what_was_not_does_not(extra: int) -> None:
    altered, group = run(1, (0.02, 0.01), (0.01, 0.01), extra)
    ok, detail = balance(altered, "up", [group], 0)
    assert not ok
    assert f"kernels refused {altered.refused['up']}" in detail
    if extra > 0:
        assert balance(altered, "up", [group], extra)[0], "queues and devices may explain it"


def test_ratios_of_the_ways() -> None:
    spec = load_scenario_text(
        """\
topology:
  name: t
  hosts: {server: {role: server}, worker1: {role: worker}, worker2: {role: worker}}
  switches: [a, b]
  links:
    - {between: [server, a], up: {corrupt: 1%}, down: {duplicate: 3%}}
    - {between: [worker1, b], up: {duplicate: 2%, corrupt: 10%}}
    - {between: [worker2, a]}
    - {between: [b, a], up: {corrupt: 10%}}
workload: {kind: replay, chunks: 9, iterations: 9}
transports: {mlt: {fixed: 0%}}
"""
    ).spec
    found = ratios(spec.topology)
    assert found[1, "up"] == Ratios((0.02, 0.03), (pytest.approx(0.19), 0.0))
    assert found[2, "up"] == Ratios((0.0, 0.03), (0.0, 0.0))
    assert found[1, "down"] == found[2, "down"] == Ratios((0.0, 0.0), (pytest.approx(0.01), 0.0))
    assert one_of([]) == 0.0


def test_snmp() -> None:
    text = "Ip: Forwarding InHdrErrors\nIp: 2 7\nUdp: InErrors RcvbufErrors\nUdp: 9 4\n"
    assert parse_snmp(text) == {"Ip": {"Forwarding": 2, "InHdrErrors": 7}, "Udp": {"InErrors": 9, "RcvbufErrors": 4}}

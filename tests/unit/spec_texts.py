"""Scenarios that the tests of the specification change, and what refuses them."""

from __future__ import annotations

import pytest

from netem.spec import SpecError, load_scenario_text

FULL = """\
name: full
seed: 7
topology: star3
workload: {kind: train, epochs: 8, batch_size: 32}
transports:
  dblp: {low: 0.8%, high: 40.8%, detector: {schedule: {critical: 0..14}}}
  mlt: {fixed: 0.8%}
  tcp: {}
bursts:
  - {iteration: 40, loss: 90%}
  - {iteration: 90, loss: 60%, direction: down, for: 5 ms, workers: [worker3, worker1]}
capture: {at: [server], snap: 96 B, rounds: bursts}
expect:
  - dblp.accuracy >= 95%
"""
REPLAY = """\
topology: {star: {workers: 2}}
workload: {kind: replay, chunks: 100, iterations: 12}
transports: {mlt: {fixed: 0%}}
"""


def refused(text: str, *overrides: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        load_scenario_text(text, overrides, file="s.yaml")
    return caught.value

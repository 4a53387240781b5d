"""From a scenario's traffic to plans, windows and sentences."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from netem.experiment.generators import (
    BACKGROUND_PORTS,
    MICROBURST_PORTS,
    burst_plan,
    burst_window,
    describe_traffic,
    generated_flows,
    queue_limit,
    require_recorder,
    stream_event,
    stream_plan,
)
from netem.links.base import UnsupportedFeature
from netem.spec import Scenario, load_scenario_text
from netem.traffic.plan import NS, Burst, Sent, Stream
from tests.unit.spec_texts import REPLAY

MS = NS // 1000
TRAFFIC = """\
microbursts:
  - {iteration: 3, offset: 2 ms, duration: 500 us, packet: 300 B}
  - {at: 1.5 s, from: worker1, packets: 100, rate: 1 Gbit}
  - {at: 2 s, from: worker1, packets: 100}
background:
  - {from: worker1, rate: 100 Mbit, on: 10 ms, off: 30 ms, pattern: exponential}
  - {kind: iperf3-tcp, from: worker2, to: worker1}
queues: {before: 1 ms, after: 10 ms}
"""


@pytest.fixture(scope="module")
def spec() -> Scenario:
    return load_scenario_text(REPLAY + TRAFFIC).spec


@dataclass(frozen=True)
class Try:
    ok: bool
    detail: str = "no BPF"


def test_plans(spec: Scenario) -> None:
    assert [burst_plan(burst) for burst in spec.microbursts] == [
        Burst(2, 300, duration_ns=500_000), Burst(1, 1500, 10**9, packets=100), Burst(1, 1500, packets=100),
    ]  # fmt: skip
    assert stream_plan(spec.background[0], 5) == Stream(1500, 10**8, 0.01, 0.03, "exponential", 5)


def test_windows_hold_the_whole_burst(spec: Scenario) -> None:
    assert burst_window(spec, 0, NS) == (NS - MS, NS + MS // 2 + 10 * MS)
    assert burst_window(spec, 1, NS) == (NS - MS, NS + 100 * 1514 * 8 + 10 * MS)
    assert burst_window(spec, 2, NS)[1] >= NS + 100 * 10_000 + 10 * MS, "10 us a packet is what a slow machine takes"


def test_a_queue_is_known_in_bytes_where_the_topology_says_it() -> None:
    assert queue_limit(None, 65_536, None, 1500) is None
    assert queue_limit(10**9, 65_536, None, 1500) == 65_536
    assert queue_limit(10**9, None, 100, 1500) == 151_400
    assert queue_limit(10**9, None, None, 1500) is None


def test_generated_packets_are_told_apart_by_their_ports() -> None:
    assert MICROBURST_PORTS[1] < BACKGROUND_PORTS[0]
    assert {kind for kind, _ in generated_flows()} == {"microburst", "background"}


def test_what_a_stream_should_have_sent(spec: Scenario) -> None:
    """A quarter of a second on in a second, at 100 Mbit/s: 8,256 frames of 1,514 bytes a second."""
    event = stream_event(spec.background[0], Sent(0, 0, 0, NS, (2000,), 1, 2))
    assert event["planned_packets"] == round((10**8 // (8 * 1514) + 1) / 4)
    assert (event["from"], event["to"], event["packets"], event["refused"], event["skipped"]) == (
        "worker1", "server", 2000, 1, 2,
    )  # fmt: skip


def test_sentences(spec: Scenario) -> None:
    assert describe_traffic(spec) == [
        "microburst with round 3 + 2 ms: worker1, worker2 to server, 500 us, as fast as the machine",
        "microburst 1.5 s after the start: worker1 to server, 100 packets, 1 Gbit each",
        "microburst 2 s after the start: worker1 to server, 100 packets, as fast as the machine",
        "background udp: worker1 to server, 100 Mbit, 10 ms on, 30 ms off, exponential",
        "background iperf3-tcp: worker2 to worker1, as fast as it gets",
        "queues of the ports to server are recorded",
    ]
    assert describe_traffic(load_scenario_text(REPLAY).spec) == []


def test_recording_needs_bpf(spec: Scenario) -> None:
    require_recorder(spec, {"bpf": Try(True)})
    require_recorder(load_scenario_text(REPLAY).spec, {"bpf": Try(False)})
    with pytest.raises(UnsupportedFeature, match=r"recording a queue.*no BPF"):
        require_recorder(spec, {"bpf": Try(False)})
    with pytest.raises(UnsupportedFeature, match="not tried"):
        require_recorder(spec, {})

"""Microbursts, background traffic and recorded queues in a scenario: defaults, names, and what is refused."""

from __future__ import annotations

import pytest

from netem.spec import gates, load_scenario_text, resolved_yaml
from tests.unit.spec_texts import REPLAY, refused

BURST = "{iteration: 4, duration: 500 us}"


def with_traffic(*, bursts: str = "", background: str = "", queues: str = "") -> str:
    text = REPLAY
    for key, value in (("microbursts", bursts), ("background", background), ("queues", queues)):
        text += f"{key}: {value}\n" if value else ""
    return text


def test_a_microburst_is_of_all_other_hosts_to_the_server_in_full_packets() -> None:
    (burst,) = load_scenario_text(with_traffic(bursts=f"[{BURST}]")).spec.microbursts
    assert (burst.senders, burst.to, burst.packet_bytes) == (("worker1", "worker2"), "server", 1500)
    assert (burst.iteration, burst.at_s, burst.offset_s, burst.rate_bps) == (4, None, 0.0, None)
    assert (burst.duration_s, burst.packets) == (0.0005, None)


def test_quantities_and_wildcards() -> None:
    text = "[{at: 2.5 s, from: ['worker*'], rate: 10 Gbit, packet: 128 B, packets: 300}]"
    (burst,) = load_scenario_text(with_traffic(bursts=text)).spec.microbursts
    assert (burst.at_s, burst.rate_bps, burst.packet_bytes, burst.packets) == (2.5, 10**10, 128, 300)
    assert burst.senders == ("worker1", "worker2")
    (one,) = load_scenario_text(
        with_traffic(bursts="[{at: 0 s, from: server, to: worker2, duration: 100 us}]")
    ).spec.microbursts
    assert (one.senders, one.to) == (("server",), "worker2")


def test_queues_are_recorded_where_microbursts_go() -> None:
    text = "[{iteration: 1, duration: 1 ms}, {iteration: 2, from: server, to: worker2, duration: 1 ms}]"
    queues = load_scenario_text(with_traffic(bursts=text)).spec.queues
    assert queues.at == ("server", "worker2")
    assert (queues.before_s, queues.after_s, queues.packets, queues.during) == (0.005, 0.05, 131_072, "microbursts")
    assert load_scenario_text(REPLAY).spec.queues.at == ()
    assert load_scenario_text(with_traffic(queues="{at: [server], during: run}")).spec.queues.at == ("server",)
    assert load_scenario_text(with_traffic(bursts=text, queues="{at: []}")).spec.queues.at == ()


def test_background_of_each_kind() -> None:
    text = (
        "[{from: worker1, rate: 100 Mbit}, "
        "{from: worker2, to: worker1, rate: 1 Gbit, on: 10 ms, off: 30 ms, pattern: exponential}, "
        "{kind: iperf3-tcp, from: worker1}, {kind: iperf3-udp, from: worker1, rate: 10 Mbit}]"
    )
    plain, on_off, tcp, udp = load_scenario_text(with_traffic(background=text)).spec.background
    assert (plain.kind, plain.sender, plain.to, plain.rate_bps) == ("udp", "worker1", "server", 10**8)
    assert (plain.packet_bytes, plain.on_s, plain.pattern) == (1500, None, "fixed")
    assert (on_off.to, on_off.on_s, on_off.off_s, on_off.pattern) == ("worker1", 0.01, 0.03, "exponential")
    assert (tcp.packet_bytes, tcp.rate_bps, udp.packet_bytes) == (None, None, 1500)


def test_a_resolved_scenario_loads_to_the_same() -> None:
    spec = load_scenario_text(
        with_traffic(
            bursts=f"[{BURST}, {{at: 1 s, packets: 5, rate: 1 Gbit}}]",
            background="[{from: worker1, rate: 1 Mbit, on: 1 ms, off: 2 ms}, {kind: iperf3-tcp, from: worker2}]",
            queues="{at: [server], during: run, before: 1 ms}",
        )
    ).spec
    assert load_scenario_text(resolved_yaml(spec)).spec == spec


def test_gates_are_at_the_iterations_of_microbursts_and_at_the_start_where_time_counts() -> None:
    assert gates(load_scenario_text(with_traffic(bursts=f"[{BURST}]")).spec) == (4,)
    assert gates(load_scenario_text(with_traffic(bursts="[{at: 1 s, packets: 1}]")).spec) == (0,)
    assert gates(load_scenario_text(with_traffic(background="[{from: worker1, rate: 1 Mbit}]")).spec) == (0,)
    assert gates(load_scenario_text(with_traffic(bursts=f"[{BURST}, {{at: 1 s, packets: 1}}]")).spec) == (0, 4)
    both = load_scenario_text(with_traffic(bursts=f"[{BURST}]") + "bursts: [{iteration: 6, loss: 50%}]\n").spec
    assert gates(both) == (4, 6, 7)


@pytest.mark.parametrize(
    ("entry", "path", "words"),
    [
        ("{duration: 1 ms}", "microbursts.0", "either `iteration: 40` or `at: 2.5 s`"),
        ("{iteration: 1, at: 1 s, duration: 1 ms}", "microbursts.0", "either `iteration"),
        ("{iteration: 12, duration: 1 ms}", "microbursts.0.iteration", "after the last iteration, 11"),
        ("{at: 1 s, offset: 1 ms, duration: 1 ms}", "microbursts.0.offset", "belongs to `iteration`"),
        ("{iteration: 1}", "microbursts.0", "either `duration: 500 us` or `packets: 100`"),
        ("{iteration: 1, duration: 1 ms, packets: 5}", "microbursts.0", "either `duration"),
        ("{iteration: 1, duration: 11 s}", "microbursts.0.duration", "up to 10 s"),
        ("{iteration: 1, duration: 5}", "microbursts.0.duration", "has no unit"),
        ("{iteration: 1, packets: 0}", "microbursts.0.packets", "out of range"),
        (
            "{iteration: 1, packets: 5, packet: 9000 B}",
            "microbursts.0.packet",
            "do not fit the MTU of the links, 1500",
        ),
        ("{iteration: 1, packets: 5, packet: 20 B}", "microbursts.0.packet", "out of range"),
        ("{iteration: 1, packets: 5, to: sever}", "microbursts.0.to", "did you mean 'server'"),
        ("{iteration: 1, packets: 5, from: [worker9]}", "microbursts.0.from.0", "is not a host"),
        ("{iteration: 1, packets: 5, from: []}", "microbursts.0.from", "is empty"),
        ("{iteration: 1, packets: 5, from: '*'}", "microbursts.0.from", "is the receiver"),
        ("{iteration: 1, packets: 5, frm: server}", "microbursts.0.frm", "did you mean 'from'"),
    ],
)
def test_microbursts_that_are_refused(entry: str, path: str, words: str) -> None:
    error = refused(with_traffic(bursts=f"[{entry}]"))
    assert error.key == path
    assert words in str(error)
    assert error.line == 4


@pytest.mark.parametrize(
    ("entry", "path", "words"),
    [
        ("{rate: 1 Mbit}", "background.0.from", "is required"),
        ("{from: worker1}", "background.0.rate", "is required"),
        ("{from: server, rate: 1 Mbit}", "background.0.from", "is the receiver too"),
        ("{from: nobody, rate: 1 Mbit}", "background.0.from", "is not a host"),
        ("{from: worker1, rate: 1 Mbit, on: 1 ms}", "background.0", "belong together"),
        ("{from: worker1, rate: 1 Mbit, pattern: exponential}", "background.0.pattern", "needs the means"),
        ("{kind: iperf3-tcp, from: worker1, on: 1 ms, off: 1 ms}", "background.0.on", "on all the time"),
        ("{kind: iperf3-udp, from: worker1}", "background.0.rate", "is required"),
        ("{kind: iperf3-tcp, from: worker1, packet: 100 B}", "background.0.packet", "TCP sizes its packets"),
        ("{kind: iperf, from: worker1}", "background.0.kind", "allowed: udp, iperf3-tcp, iperf3-udp"),
    ],
)
def test_background_that_is_refused(entry: str, path: str, words: str) -> None:
    error = refused(with_traffic(background=f"[{entry}]"))
    assert error.key == path
    assert words in str(error)


def test_queues_without_anything_to_record() -> None:
    error = refused(with_traffic(queues="{at: [server]}"))
    assert (error.key, error.line) == ("queues.during", 4)
    assert "write during: run" in str(error)


def test_a_command_without_iterations_has_microbursts_by_time_only() -> None:
    command = "topology: {star: {workers: 2}}\nworkload: {kind: command, run: {worker1: [sleep, 1]}, until: worker1}\n"
    load_scenario_text(command + "microbursts: [{at: 1 s, packets: 5}]\n")
    error = refused(command + "microbursts: [{iteration: 1, packets: 5}]\n")
    assert error.key == "microbursts.0.iteration"
    assert "needs workload.iterations" in str(error)

"""From the traffic sections of a scenario to plans of sources, windows of recorders and sentences. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from netem.links.base import Flow, UnsupportedFeature
from netem.links.choose import Probe
from netem.spec import Background, Microburst, Scenario
from netem.spec.units import format_rate, format_time
from netem.traffic.plan import DISCARD_PORT, FRAME_BYTES, NS, Burst, Sent, Stream, due

MICROBURST_PORTS, BACKGROUND_PORTS, IPERF_PORTS = (20_000, 20_999), (21_000, 21_999), (5_301, 5_400)
SLOWEST_PACKET_NS = 20_000
"""A bound for the time of a packet as fast as the machine, to size windows with."""


def require_recorder(spec: Scenario, probes: Mapping[str, Probe]) -> None:
    """UnsupportedFeature (status 4) where queues are to be recorded and eBPF does not work."""
    if spec.queues.at and not ("bpf" in probes and probes["bpf"].ok):
        detail = probes["bpf"].detail if "bpf" in probes else "not tried"
        raise UnsupportedFeature("recording a queue", ("eBPF as root; or queues: {at: []}",), detail)


def describe_traffic(spec: Scenario) -> list[str]:
    """What generators will do, in sentences."""
    lines = []
    for burst in spec.microbursts:
        how_much = f"{burst.packets} packets" if burst.packets else f"{format_time(burst.duration_s or 0.0)}"
        rate = f"{format_rate(burst.rate_bps)} each" if burst.rate_bps else "as fast as the machine"
        if burst.at_s is not None:
            when = f"{format_time(burst.at_s)} after the start"
        else:
            when = f"with round {burst.iteration}" + (f" + {format_time(burst.offset_s)}" if burst.offset_s else "")
        lines.append(f"microburst {when}: {', '.join(burst.senders)} to {burst.to}, {how_much}, {rate}")
    for stream in spec.background:
        rate = format_rate(stream.rate_bps) if stream.rate_bps else "as fast as it gets"
        phases = (
            ""
            if stream.on_s is None or stream.off_s is None
            else (f", {format_time(stream.on_s)} on, {format_time(stream.off_s)} off, {stream.pattern}")
        )
        lines.append(f"background {stream.kind}: {stream.sender} to {stream.to}, {rate}{phases}")
    if spec.queues.at:
        lines.append(f"queues of the ports to {', '.join(spec.queues.at)} are recorded")
    return lines


def generated_flows() -> list[tuple[str, Flow]]:
    """How a queue recorder tells generated packets from others."""
    discard = (DISCARD_PORT, DISCARD_PORT)
    return [
        ("microburst", Flow("udp", dst_ports=discard, src_ports=MICROBURST_PORTS)),
        ("background", Flow("udp", dst_ports=discard, src_ports=BACKGROUND_PORTS)),
        ("background", Flow("udp", dst_ports=IPERF_PORTS)),
        ("background", Flow("tcp", dst_ports=IPERF_PORTS)),
    ]


def burst_plan(burst: Microburst) -> Burst:
    return Burst(
        senders=len(burst.senders),
        packet_bytes=burst.packet_bytes or 0,
        rate_bps=burst.rate_bps,
        duration_ns=None if burst.duration_s is None else round(burst.duration_s * NS),
        packets=burst.packets,
    )


def stream_plan(stream: Background, seed: int) -> Stream:
    return Stream(
        packet_bytes=stream.packet_bytes or 0,
        rate_bps=stream.rate_bps or 0,
        on_s=stream.on_s or 0.0,
        off_s=stream.off_s or 0.0,
        pattern=stream.pattern,
        seed=seed,
    )


def stream_event(stream: Background, sent: Sent) -> dict[str, Any]:
    """What a background stream has sent, beside what its rate allows over the same time."""
    seconds = (sent.ended_ns - sent.began_ns) / NS
    share = 1.0 if not stream.on_s or not stream.off_s else stream.on_s / (stream.on_s + stream.off_s)
    expected = due(sent.ended_ns - sent.began_ns, stream.rate_bps or 0, stream.packet_bytes or 0)
    return {
        "event": "background",
        "from": stream.sender,
        "to": stream.to,
        "packets": sent.packets[0],
        "planned_packets": round(expected * share),
        "refused": sent.refused,
        "skipped": sent.skipped,
        "seconds": round(seconds, 6),
    }


def burst_window(spec: Scenario, number: int, start_ns: int) -> tuple[int, int]:
    """When packets are recorded around a microburst."""
    plan, queues = burst_plan(spec.microbursts[number]), spec.queues
    if plan.duration_ns is not None:
        length = plan.duration_ns
    elif plan.rate_bps is not None:
        length = (plan.packets or 0) * 8 * NS * (plan.packet_bytes + FRAME_BYTES) // plan.rate_bps
    else:
        length = (plan.packets or 0) * plan.senders * SLOWEST_PACKET_NS
    return start_ns - round(queues.before_s * NS), start_ns + length + round(queues.after_s * NS)


def queue_limit(rate_bps: int | None, size_bytes: int | None, packets: int | None, mtu: int) -> int | None:
    """What a port's queue holds in bytes, where the topology says it."""
    if rate_bps is None:
        return None
    return size_bytes or (packets * (mtu + FRAME_BYTES) if packets else None)

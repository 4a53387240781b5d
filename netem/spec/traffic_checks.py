"""Names of hosts in the traffic sections, and what their keys demand of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from netem.spec.fields import did_you_mean
from netem.spec.source import Path_, Source
from netem.spec.traffic import LONGEST_BURST_S, Background, Microburst, Queues

if TYPE_CHECKING:
    from netem.spec.scenario import Scenario

NamesOf = Callable[[Sequence[str], Path_], tuple[str, ...]]
"""(names and wildcards, where they stand) -> hosts in the topology's order. Raises SpecError."""

MAX_SENDERS = 200
T = TypeVar("T", Microburst, Background)


def resolve_traffic(spec: Scenario, source: Source, names_of: NamesOf) -> Scenario:
    """With names for every default and wildcard, and packets of the MTU. Raises SpecError."""
    hosts = tuple(spec.topology.hosts)
    bursts = []
    for index, burst in enumerate(spec.microbursts):
        at: Path_ = ("microbursts", index)
        to = _receiver(burst, spec, source, at)
        if burst.senders == "all":
            senders = tuple(host for host in hosts if host != to)
        else:
            senders = names_of(burst.senders, (*at, "from"))
        if not senders:
            raise source.error((*at, "from"), "is empty; write all, or names of hosts")
        known = {"senders": senders, "to": to, "packet_bytes": burst.packet_bytes or spec.topology.mtu}
        bursts.append(burst.model_copy(update=known))
    streams = []
    for index, stream in enumerate(spec.background):
        at = ("background", index)
        _known(stream.sender, spec, source, (*at, "from"))
        size = stream.packet_bytes or (None if stream.kind == "iperf3-tcp" else spec.topology.mtu)
        to = _receiver(stream, spec, source, at)
        streams.append(stream.model_copy(update={"to": to, "packet_bytes": size}))
    receivers = {burst.to for burst in bursts}
    if spec.queues.at is None:
        watched = tuple(host for host in hosts if host in receivers)
    else:
        watched = names_of(spec.queues.at, ("queues", "at"))
    queues = spec.queues.model_copy(update={"at": watched})
    return spec.model_copy(update={"microbursts": tuple(bursts), "background": tuple(streams), "queues": queues})


def check_traffic(spec: Scenario, source: Source, iterations: int) -> None:
    """Raises SpecError. Names have been resolved before."""
    for index, burst in enumerate(spec.microbursts):
        _check_burst(burst, spec, source, ("microbursts", index), iterations)
    for index, stream in enumerate(spec.background):
        _check_stream(stream, spec, source, ("background", index))
    _check_queues(spec.queues, spec, source)


def _receiver(entry: T, spec: Scenario, source: Source, at: Path_) -> str:
    return _known(entry.to, spec, source, (*at, "to")) if entry.to is not None else spec.topology.server


def _known(name: str, spec: Scenario, source: Source, at: Path_) -> str:
    hosts = spec.topology.hosts
    if name not in hosts:
        raise source.error(at, f"{name!r} is not a host{did_you_mean(name, hosts)} (hosts: {', '.join(hosts)})")
    return name


def _check_burst(burst: Microburst, spec: Scenario, source: Source, at: Path_, iterations: int) -> None:
    if (burst.iteration is None) == (burst.at_s is None):
        raise source.error(at, "a microburst needs either `iteration: 40` or `at: 2.5 s`")
    if burst.iteration is not None and not iterations:
        message = "needs workload.iterations: programs that report their rounds and ask at gates; or write `at`"
        raise source.error((*at, "iteration"), message)
    if burst.iteration is not None and burst.iteration >= iterations:
        message = f"{burst.iteration} is after the last iteration, {iterations - 1} ({iterations} iterations, 0-based)"
        raise source.error((*at, "iteration"), message)
    if burst.at_s is not None and burst.offset_s:
        raise source.error((*at, "offset"), "belongs to `iteration`; with `at` the time says it all")
    if (burst.duration_s is None) == (burst.packets is None):
        raise source.error(at, "a microburst needs either `duration: 500 us` or `packets: 100` (of each sender)")
    if burst.duration_s is not None and burst.duration_s > LONGEST_BURST_S:
        message = f"is out of range; allowed: up to {LONGEST_BURST_S:.0f} s. What lasts longer is `background`"
        raise source.error((*at, "duration"), message)
    if burst.to in burst.senders:
        raise source.error((*at, "from"), f"{burst.to!r} is the receiver; it cannot be a sender too")
    if len(burst.senders) > MAX_SENDERS:
        raise source.error((*at, "from"), f"{len(burst.senders)} senders are out of range; allowed: 1 to {MAX_SENDERS}")
    _check_size(burst.packet_bytes, spec, source, at)


def _check_stream(stream: Background, spec: Scenario, source: Source, at: Path_) -> None:
    if stream.to == stream.sender:
        raise source.error((*at, "from"), f"{stream.sender!r} is the receiver too")
    if (stream.on_s is None) != (stream.off_s is None):
        raise source.error(at, "`on` and `off` belong together, such as on: 10 ms, off: 30 ms")
    if stream.pattern == "exponential" and stream.on_s is None:
        raise source.error((*at, "pattern"), "exponential needs the means `on` and `off`")
    if stream.kind != "udp" and stream.on_s is not None:
        raise source.error((*at, "on"), f"{stream.kind} is on all the time; only kind udp goes on and off")
    if stream.rate_bps is None and stream.kind != "iperf3-tcp":
        raise source.error((*at, "rate"), f"is required for background traffic of kind {stream.kind}")
    if stream.kind == "iperf3-tcp" and stream.packet_bytes is not None:
        raise source.error((*at, "packet"), "does not belong to iperf3-tcp: TCP sizes its packets itself")
    _check_size(stream.packet_bytes, spec, source, at)


def _check_size(size: int | None, spec: Scenario, source: Source, at: Path_) -> None:
    if size is not None and size > spec.topology.mtu:
        message = f"{size} bytes do not fit the MTU of the links, {spec.topology.mtu} bytes"
        raise source.error((*at, "packet"), message)


def _check_queues(queues: Queues, spec: Scenario, source: Source) -> None:
    if queues.during == "microbursts" and queues.at and not spec.microbursts:
        raise source.error(("queues", "during"), "there are no microbursts; write during: run")

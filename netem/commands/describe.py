"""A scenario or topology in a few readable lines. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from netem.spec import (
    Burst,
    Link,
    LinkShape,
    Replay,
    Scenario,
    Topology,
    TransportSpec,
    epoch_of,
    iterations_per_epoch,
    iterations_total,
)
from netem.spec.units import format_rate, format_ratio, format_size, format_time

WIDTH = 78
_LABEL = 12
MAX_ROWS = 8
MAX_BURSTS = 8


def topology_lines(topology: Topology) -> list[str]:
    """The star as a drawing; many workers with equal links share a row."""
    rows = _worker_rows(topology)
    stem = f"{topology.server} ── {topology.switches[0]} "
    middle = (len(rows) - 1) // 2
    lines = []
    for index, (name, rank) in enumerate(rows):
        prefix = f"{stem}─" if index == middle else " " * (len(stem) + 1)
        lines.append(f"{prefix}{_branch(index, len(rows), index == middle)} {name}   {rank}".rstrip())
    return lines + _link_lines(topology)


def _branch(index: int, rows: int, joined: bool) -> str:
    if rows == 1:
        return "─"
    if index == 0:
        return "┬─" if joined else "┌─"
    if index == rows - 1:
        return "└─"
    return "┼─" if joined else "├─"


def _worker_rows(topology: Topology) -> list[tuple[str, str]]:
    ranks = topology.ranks
    if len(topology.workers) <= MAX_ROWS:
        return [(name, f"rank {ranks[name]}") for name in topology.workers]
    groups: list[list[str]] = []
    for name in topology.workers:
        if groups and _properties(topology.link_of(groups[-1][0])) == _properties(topology.link_of(name)):
            groups[-1].append(name)
        else:
            groups.append([name])
    return [
        (f"{g[0]} … {g[-1]}", f"ranks {ranks[g[0]]} to {ranks[g[-1]]}") if len(g) > 1 else (g[0], f"rank {ranks[g[0]]}")
        for g in groups
    ]


def _link_lines(topology: Topology) -> list[str]:
    """What the links do, hosts with equal links together."""
    by_text: dict[str, list[str]] = {}
    for link in topology.links:
        by_text.setdefault(_properties(link), []).append(link.host)
    lines = [""]
    for text, hosts in by_text.items():
        who = "all links" if len(by_text) == 1 else f"link{'s' * (len(hosts) > 1)} of {_several(hosts)}"
        lines += textwrap.wrap(f"{who}: {text}", WIDTH, subsequent_indent="  ")
    return lines


def _properties(link: Link) -> str:
    up, down = _shape(link.up), _shape(link.down)
    both = up if up == down else f"up (to the switch) {up}; down (to the host) {down}"
    return f"{both}, MTU {link.mtu}" + (", reordering allowed" if link.reorder == "allow" else "")


def _shape(shape: LinkShape) -> str:
    parts = []
    if shape.rate_bps is not None:
        parts.append(format_rate(shape.rate_bps))
    if shape.delay_s:
        parts.append(f"{format_time(shape.delay_s)} delay")
    if shape.jitter_s:
        parts.append(f"{format_time(shape.jitter_s)} jitter")
    if shape.loss:
        parts.append(f"{format_ratio(shape.loss)} loss")
    if shape.queue is not None:
        packets = shape.queue_packets
        parts.append(f"queue {f'{packets} packets' if packets else format_size(shape.queue_bytes or 0)}")
    return ", ".join(parts) or "as fast as the machine"


def _several(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed) if len(listed) <= 4 else f"{listed[0]} … {listed[-1]}"


def scenario_lines(spec: Scenario) -> list[str]:
    """Topology drawing and what happens in the scenario, wrapped."""
    facts = [("workload", _workload(spec)), ("profile", _profile(spec))]
    facts += [("transports", f"{name}: {_transport(transport)}") for name, transport in spec.transports.items()]
    shown = spec.bursts[:MAX_BURSTS]
    facts += [("bursts", _burst(burst, spec)) for burst in shown]
    if len(spec.bursts) > len(shown):
        facts.append(("bursts", f"and {len(spec.bursts) - len(shown)} more"))
    if not spec.bursts:
        facts.append(("bursts", "none"))
    facts.append(("capture", _capture(spec)))
    if spec.repeats > 1:
        facts.append(("repeats", f"{spec.repeats}, each with a seed of its own"))
    facts += [("expect", text) for text in spec.expect]
    lines = [*topology_lines(spec.topology), ""]
    previous = ""
    for label, text in facts:
        head = "" if label == previous else label
        indent = " " * _LABEL
        lines += textwrap.wrap(text, WIDTH, initial_indent=head.ljust(_LABEL), subsequent_indent=indent)
        previous = label
    return lines


def _workload(spec: Scenario) -> str:
    work, total = spec.workload, iterations_total(spec)
    iterations = f"{total} iterations (0..{total - 1})"
    if isinstance(work, Replay):
        size = f"{work.chunks} full packets" if work.chunks is not None else f"{len(work.shapes or ())} tensors"
        pause = f", {format_time(work.compute_s)} of computing before each" if work.compute_s else ""
        return f"replay of gradients of {size}: {iterations}{pause}"
    epoch = iterations_per_epoch(spec)
    return f"train {work.model} on {work.data}: {work.epochs} epochs of {epoch} iterations, {iterations}"


def _profile(spec: Scenario) -> str:
    if isinstance(spec.profile, str):
        return spec.profile
    options = ", ".join(f"{key}: {value}" for key, value in spec.profile.items() if key != "base")
    return f"{spec.profile.get('base', 'recommended')}, but {options}" if options else str(spec.profile.get("base"))


def _transport(transport: TransportSpec) -> str:
    dtype = f"; {transport.wire_dtype} in packets" if transport.wire_dtype else ""
    return _tolerance(transport) + dtype


def _tolerance(transport: TransportSpec) -> str:
    if transport.reliable:
        return "everything arrives (TCP)"
    if transport.fixed is not None:
        return f"up to {format_ratio(transport.fixed)} may be missing"
    low, high = format_ratio(transport.low or 0.0), format_ratio(transport.high or 0.0)
    detector = transport.detector
    how = ""
    if detector is not None:
        options = {key: value for key, value in detector.config().items() if key not in ("kind", "critical")}
        options |= {"critical": ", ".join(f"{a}..{b}" for a, b in detector.critical)} if detector.critical else {}
        words = ", ".join(f"{key} {value}" for key, value in options.items())
        how = f"; detector {detector.kind}" + (f" ({words})" if words else "")
    return f"up to {low} may be missing in critical phases, {high} in normal ones{how}"


def _burst(burst: Burst, spec: Scenario) -> str:
    everyone = burst.workers == "all" or set(burst.workers) == set(spec.topology.workers)
    who = "all workers" if everyone else ", ".join(burst.workers)
    way = {"up": "workers to server", "down": "server to workers", "both": "both ways"}[burst.direction]
    what = "data packets" if burst.match == "data" else "all packets"
    length = "the whole round" if burst.for_s is None else f"{format_time(burst.for_s)} from its start"
    where = f"iteration {burst.iteration} (epoch {epoch_of(spec, burst.iteration)})"
    return f"{where}: {format_ratio(burst.loss)} of {what}, {way}, {who}, {length}"


def _capture(spec: Scenario) -> str:
    capture = spec.capture
    if not capture.enabled:
        return "none"
    ends = "before and after the loss" if capture.both else "after the loss"
    rounds = {"all": "all rounds", "bursts": "burst rounds"}[capture.rounds]
    return f"at the ports to {_several(capture.at)}, {ends}, {rounds}, {format_size(capture.snap_bytes)} of each packet"

"""A scenario or topology in a few readable lines. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from netem.commands.layout import Row, kinds, levels, rows, several, upper_ends
from netem.routing import METHOD, routes_of
from netem.spec import (
    Burst,
    Command,
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
from netem.spec.command import line
from netem.spec.loss import loss_text
from netem.spec.units import format_rate, format_ratio, format_size, format_time
from netem.spec.words import event_words

WIDTH = 78
MAX_WAYS = 16
_LABEL = 12
_PLAIN = "as fast as the machine"
MAX_BURSTS = 8


def topology_lines(topology: Topology) -> list[str]:
    """Levels of switches, each switch with its hosts, and what the links do."""
    found = levels(topology)
    below = rows(topology, link_words)
    lines = [] if len(topology.switches) == 1 else _level_lines(found)
    upper = upper_ends(topology)
    for switch in (name for level in found for name in level):
        if switch in below or upper[switch]:
            lines.append(f"{switch} ── {several(upper[switch], 6)}" if upper[switch] else switch)
            lines += _host_lines(below.get(switch, ()))
    if len(topology.switches) > 1:
        lines += ["", *_way_lines(topology)]
    return lines + _link_lines(topology)


def _way_lines(topology: Topology) -> list[str]:
    """How ways are chosen, and those of the gradients, by the switches that they pass."""
    lines = textwrap.wrap(f"ways: {METHOD}", WIDTH, subsequent_indent="  ")
    if not topology.ranks:
        return lines
    ways = routes_of(topology)
    for what, ends in (
        ("to the server", [(name, topology.server) for name in topology.workers]),
        ("from the server", [(topology.server, name) for name in topology.workers]),
    ):
        groups: dict[tuple[str, ...], list[str]] = {}
        for worker, (source, target) in zip(topology.workers, ends, strict=True):
            groups.setdefault(ways.path(source, target)[1:-1], []).append(worker)
        told = [f"  {', '.join(way)}: {several(workers)}" for way, workers in groups.items()]
        more = [f"  and {len(told) - MAX_WAYS} more"] if len(told) > MAX_WAYS else []
        lines += [f"{what}:", *told[:MAX_WAYS], *more]
    return lines


def _level_lines(found: list[list[str]]) -> list[str]:
    """The uppermost first, a level a line."""
    width = max(len(name) for level in found for name in level)
    lines = []
    for level in reversed(found):
        text = "  ".join(name.ljust(width) for name in level)
        lines += textwrap.wrap(text, WIDTH, break_on_hyphens=False) or [text]
    return [*(line.rstrip() for line in lines), ""]


def _host_lines(below: Sequence[Row]) -> list[str]:
    width = max((len(row.name) for row in below), default=0)
    return [
        f"  {'└─' if row is below[-1] else '├─'} {row.name.ljust(width)}   {row.words}"
        + (" (server)" if row.role == "server" and row.name != "server" else "")
        for row in below
    ]


def _link_lines(topology: Topology) -> list[str]:
    """What the links do, equal ones together; those between switches apart."""
    lines = [""]
    for links in (topology.host_links, topology.trunks):
        by_text = kinds(links, link_words)
        for text, group in by_text.items():
            trunks = links is topology.trunks or group[0].host not in topology.hosts
            names = [f"{link.host}–{link.switch}" if trunks else link.host for link in group]
            what = "links between switches" if trunks else "links of all hosts"
            if len(by_text) > 1:
                what = f"link{'s' * (len(group) > 1)} {'' if trunks else 'of '}{several(names)}"
            elif not topology.trunks:
                what = "all links"
            lines += textwrap.wrap(f"{what}: {text}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    if any(link.up != link.down for link in topology.links):
        lines.append("up: to the switch; between switches from the first named to the second")
    return lines


def link_words(link: Link) -> str:
    """What a link does. `up` is to the switch, or from the switch that is named first."""
    up, down = _shape(link.up), _shape(link.down)
    both = up if up == down else f"up {up}; down {down}"
    return f"{both}, MTU {link.mtu}" + (", reordering allowed" if link.reorder == "allow" else "")


def way_words(link: Link) -> tuple[str, str]:
    """What a link does up and down; empty where it is as fast as the machine."""
    return tuple("" if text == _PLAIN else text for text in (_shape(link.up), _shape(link.down)))  # type: ignore[return-value]


def _shape(shape: LinkShape) -> str:
    parts = []
    if shape.rate_bps is not None:
        parts.append(format_rate(shape.rate_bps))
    if shape.delay_s:
        parts.append(f"{format_time(shape.delay_s)} delay")
    if shape.jitter_s:
        parts.append(f"{format_time(shape.jitter_s)} jitter{_distribution(shape.distribution)}")
    if shape.loss:
        parts.append(f"{loss_text(shape.loss)} loss")
    parts += _rarer(shape)
    if shape.queue is not None:
        packets = shape.queue_packets
        parts.append(f"queue {f'{packets} packets' if packets else format_size(shape.queue_bytes or 0)}")
    return ", ".join(parts) or _PLAIN


def _distribution(distribution: str | tuple[int, ...]) -> str:
    if distribution == "uniform":
        return ""
    return f" ({distribution})" if isinstance(distribution, str) else f" (a table of {len(distribution)} values)"


def _rarer(shape: LinkShape) -> list[str]:
    """What only netem can do, in the words of tc-netem(8)."""
    parts = [
        f"{format_ratio(ratio)} {word}"
        for ratio, word in (
            (shape.duplicate, "duplicated"),
            (shape.corrupt, "corrupted"),
            (shape.reorder.ratio if shape.reorder else 0.0, "reordered"),
        )
        if ratio
    ]
    parts += ["overhead of packets"] if shape.overhead else []
    parts += ["in slots"] if shape.slot else []
    parts += ["marked by ECN"] if shape.ecn else []
    return parts + ([f"limit {shape.limit} packets"] if shape.limit else [])


def scenario_lines(spec: Scenario) -> list[str]:
    """Topology drawing and what happens in the scenario, wrapped."""
    facts = [("workload", _workload(spec))]
    if isinstance(spec.workload, Command):
        facts += [("variants", _variant(name, values)) for name, values in spec.workload.variants.items()]
    else:
        facts.append(("profile", _profile(spec)))
    facts += [("transports", f"{name}: {_transport(transport)}") for name, transport in spec.transports.items()]
    shown = spec.bursts[:MAX_BURSTS]
    facts += [("bursts", _burst(burst, spec)) for burst in shown]
    if len(spec.bursts) > len(shown):
        facts.append(("bursts", f"and {len(spec.bursts) - len(shown)} more"))
    if not spec.bursts and not spec.events:
        facts.append(("bursts", "none"))
    facts += [("events", event_words(event, spec.topology)) for event in spec.events[:MAX_BURSTS]]
    if len(spec.events) > MAX_BURSTS:
        facts.append(("events", f"and {len(spec.events) - MAX_BURSTS} more"))
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
    if isinstance(work, Command):
        return _command(work)
    if isinstance(work, Replay):
        size = f"{work.chunks} full packets" if work.chunks is not None else f"{len(work.shapes or ())} tensors"
        pause = f", {format_time(work.compute_s)} of computing before each" if work.compute_s else ""
        return f"replay of gradients of {size}: {iterations}{pause}"
    epoch = iterations_per_epoch(spec)
    return f"train {work.model} on {work.data}: {work.epochs} epochs of {epoch} iterations, {iterations}"


def _variant(name: str, values: dict[str, str]) -> str:
    return f"{name}: " + (", ".join(f"{key} {value}" for key, value in values.items()) or "as it is")


def _command(work: Command) -> str:
    """Hosts with the same program together."""
    by_program: dict[str, list[str]] = {}
    for host, program in work.run.items():
        by_program.setdefault(line(program.argv), []).append(host)
    programs = "; ".join(f"{several(hosts)}: {text}" for text, hosts in by_program.items())
    rounds = f", {work.iterations} iterations reported" if work.iterations else ""
    return f"{programs}; until {several(work.until)} ended, at most {format_time(work.limit_s)}{rounds}"


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
    return f"{where}: {loss_text(burst.loss)} of {what}, {way}, {who}, {length}"


def _capture(spec: Scenario) -> str:
    capture = spec.capture
    if not capture.enabled:
        return "none"
    ends = "before and after the loss" if capture.both else "after the loss"
    rounds = {"all": "all rounds", "bursts": "burst rounds"}[capture.rounds]
    return f"at the ports to {several(capture.at)}, {ends}, {rounds}, {format_size(capture.snap_bytes)} of each packet"

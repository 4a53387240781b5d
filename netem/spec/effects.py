"""What an event does while it is in force: loss for whose packets, and which link properties. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from netem.routing import routes_of
from netem.spec.command import Command
from netem.spec.events import Event
from netem.spec.scenario import Burst, Scenario
from netem.spec.source import Path_
from netem.spec.topology import LinkShape, Queue, Topology

Way = Literal["up", "down"]
LinkEnd = tuple[str, str]
"""A direction of a link: (host, "up": host to switch | "down": switch to host), or (switch, "to SWITCH")."""
TO = " to "


def end_of(text: str) -> LinkEnd:
    """`worker1.up`, or between switches `left to right`."""
    if TO in text:
        here, _, there = text.partition(TO)
        return here, f"to {there}"
    host, _, way = text.rpartition(".")
    return host, way


def end_name(here: str, way: str) -> str:
    return f"{here}.{way}" if way in ("up", "down") else f"{here} {way}"


def trunk_ends(topology: Topology) -> tuple[LinkEnd, ...]:
    """Both directions of every link between switches."""
    pairs = [link.between for link in topology.trunks]
    return tuple((here, f"to {there}") for pair in pairs for here, there in (pair, pair[::-1]))


def shape_at(topology: Topology, end: LinkEnd) -> LinkShape:
    """What the topology says of a link direction. Raises KeyError for one that it does not have."""
    here, way = end
    if way in ("up", "down"):
        link = topology.link_of(here)
        return link.up if way == "up" else link.down
    for link in topology.trunks:
        if (here, way) == (link.between[0], f"to {link.between[1]}"):
            return link.up
        if (here, way) == (link.between[1], f"to {link.between[0]}"):
            return link.down
    raise KeyError(end)


@dataclass(frozen=True)
class Shift:
    """Properties of one direction of one link, in place of the topology's; None leaves that one alone."""

    host: str
    """Or the switch that sends."""
    way: str
    rate_bps: int | None = None
    delay_s: float | None = None
    queue: Queue | None = None


@dataclass(frozen=True)
class Effect:
    """`at`: the place in the scenario, ("events", 2). `bursts`: the loss; its iteration means nothing here."""

    at: Path_
    bursts: tuple[Burst, ...] = ()
    shifts: tuple[Shift, ...] = ()


def link_ends(event: Event, topology: Topology) -> tuple[LinkEnd, ...]:
    """Of a loaded event, in the hosts' order, then between switches; made in Python without `on`: all workers (or
    hosts), up.
    """
    if not event.on:
        return tuple((host, "up") for host in topology.workers or topology.hosts)
    named = {end_of(entry) for entry in event.on}
    of_hosts = [(host, way) for host in topology.hosts for way in ("up", "down")]
    return tuple(end for end in (*of_hosts, *trunk_ends(topology)) if end in named)


def flows(ends: Iterable[LinkEnd], topology: Topology) -> dict[Way, tuple[str, ...]]:
    """Whose data passes these link directions. All workers share the server's link."""
    ends = set(ends)
    if not topology.ranks:
        return _named(ends, topology)
    found: dict[Way, tuple[str, ...]] = {"up": (), "down": ()}
    trunks = {end for end in ends if end[1] not in ("up", "down")}
    ways = routes_of(topology) if trunks else None
    for way, shared in (("up", (topology.server, "down")), ("down", (topology.server, "up"))):
        for worker in topology.workers:
            path = (worker, topology.server) if way == "up" else (topology.server, worker)
            hops = {(here, f"to {there}") for here, there in ways.hops(*path)} if ways else set()
            if shared in ends or (worker, way) in ends or hops & trunks:
                found[way] = (*found[way], worker)  # type: ignore[index]
    return found


def _named(ends: set[LinkEnd], topology: Topology) -> dict[Way, tuple[str, ...]]:
    """The hosts themselves: programs send to whom they want."""
    up: tuple[str, ...] = tuple(host for host in topology.hosts if (host, "up") in ends)
    return {"up": up, "down": tuple(host for host in topology.hosts if (host, "down") in ends)}


def effect(event: Event, index: int, spec: Scenario, **values: float | None) -> Effect:
    """`values`: loss, rate and delay of this moment, in place of the event's own (a ramp's, a trace's)."""
    ends = link_ends(event, spec.topology)
    ratio = 1.0 if event.down else values.get("loss", event.loss)
    rate = values.get("rate", event.rate_bps)
    delay_s = values.get("delay", event.delay_s)
    programs = isinstance(spec.workload, Command)
    whose = _named(set(ends), spec.topology) if programs else flows(ends, spec.topology)
    bursts = () if ratio is None else tuple(_losses(event, ratio, whose))
    shifts: tuple[Shift, ...] = ()
    if rate is not None or delay_s is not None or event.queue is not None:
        whole = None if rate is None else round(rate)
        shifts = tuple(Shift(host, way, whole, delay_s, event.queue) for host, way in ends)
    return Effect(("events", index), bursts, shifts)


def _losses(event: Event, ratio: float, whose: dict[Way, tuple[str, ...]]) -> Iterator[Burst]:
    match: Literal["data", "all"] = "all" if event.down else event.match
    if whose["up"] and whose["up"] == whose["down"]:
        yield Burst(iteration=0, loss=ratio, direction="both", match=match, workers=whose["up"])
        return
    for way, workers in whose.items():
        if workers:
            yield Burst(iteration=0, loss=ratio, direction=way, match=match, workers=workers)


def shifted_ends(spec: Scenario) -> frozenset[LinkEnd]:
    """Link directions whose rate, delay or queue some event changes."""
    return frozenset(end for event in spec.events if event.shapes for end in link_ends(event, spec.topology))


def needs_delay(spec: Scenario) -> bool:
    """Whether the topology or an event delays packets, which not every link backend can."""
    return spec.topology.needs_delay or any(event.delays for event in spec.events)


def shapes_uplinks(spec: Scenario) -> bool:
    """Whether hosts get a qdisc of their own: packets must then not reach it in bundles."""
    return spec.topology.shapes_uplinks or any(way == "up" for _, way in shifted_ends(spec))

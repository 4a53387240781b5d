"""What must hold between an event and itself, the other events, and the rest of the scenario."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

from netem.spec.command import Command
from netem.spec.effects import TO, end_name, flows, link_ends, shape_at, trunk_ends
from netem.spec.events import WHAT, WHEN, Event
from netem.spec.expand import matching
from netem.spec.fields import did_you_mean
from netem.spec.ranges import Ranges, range_text
from netem.spec.scenario import Scenario, iterations_per_epoch, iterations_total
from netem.spec.source import Path_, Source
from netem.spec.timeline import windows

_KEYS = {"while": "phase", "at": "at_s", "every": "every_s", "rate": "rate_bps", "delay": "delay_s"}
_REST = {"for": "length", "from": "from_s", "until": "until_s"}
_ALLOWED = {
    "iteration": ("for",), "epoch": (), "while": (), "at": ("for",), "every": ("for", "from", "until"),
    "random": ("for", "from", "until"), "trace": (), "replay": (),
}  # fmt: skip
"""Keys about time that go with each key that says when."""


def event_links(event: Event, index: int, spec: Scenario, source: Source) -> tuple[str, ...]:
    """`on` of a loaded event: HOST.up or HOST.down, in the hosts' order, and `SWITCH to SWITCH`; wildcards expanded.

    Raises SpecError.
    """
    at = ("events", index, "on")
    if event.replay is not None:
        if event.on:
            raise source.error(at, "does not go with `replay`, which names the workers itself")
        return ()
    hosts = tuple(spec.topology.hosts)
    found: list[str] = []
    for number, entry in enumerate(event.on):
        if TO in entry:
            found += _trunks(entry, spec, source, (*at, number))
            continue
        name, dot, way = entry.rpartition(".")
        if dot and way not in ("up", "down"):
            guess = did_you_mean(way, ("up", "down"))
            raise source.error((*at, number), f"{entry!r} is not HOST.up or HOST.down{guess}")
        pattern = name if dot else entry
        node = source.root.child("events")
        for key in (index, "on", number):
            node = node.child(key) if node is not None else None
        if node is None or not node.mark.file:
            raise source.error((*at, number), f"{pattern!r} is no host")
        matches = matching(type(node)(pattern, node.mark), hosts, "host")
        found += [f"{host}.{each}" for host in matches for each in ((way,) if dot else ("up", "down"))]
    for name, times in Counter(found).items():
        if times > 1:
            raise source.error(at, f"{name!r} is named {times} times")
    if not event.on:
        return tuple(f"{host}.up" for host in spec.topology.workers or hosts)
    every = [f"{host}.{way}" for host in hosts for way in ("up", "down")]
    return tuple(name for name in (*every, *(end_name(*end) for end in trunk_ends(spec.topology))) if name in found)


def _trunks(entry: str, spec: Scenario, source: Source, at: Path_) -> list[str]:
    """The directions of links between switches that `left to right` names. Raises SpecError."""
    known = [end_name(*end) for end in trunk_ends(spec.topology)]
    found = [name for name in known if fnmatchcase(name, entry)]
    if not found:
        there = ", ".join(known[:6]) + (" ..." if len(known) > 6 else "")
        raise source.error(at, f"{entry!r} is no link between switches ({there or 'this topology has none'})")
    return found


def check_events(spec: Scenario, source: Source) -> None:
    """Raises SpecError. The events' links have been checked before."""
    for index, event in enumerate(spec.events):
        at: Path_ = ("events", index)
        _check_when(event, source, at)
        _check_what(event, spec, source, at)
        _check_time(event, source, at)
        _check_iterations(event, spec, source, at)
    _check_matches(spec, source)


def _given(event: Event, keys: tuple[str, ...]) -> list[str]:
    fields = _KEYS | _REST
    values = {key: getattr(event, fields.get(key, key)) for key in keys}
    return [key for key, value in values.items() if value is not None and value is not False]


def _check_when(event: Event, source: Source, at: Path_) -> None:
    given = _given(event, WHEN)
    if not given:
        raise source.error(at, f"does not say when; give one of {', '.join(WHEN)}")
    if len(given) > 1:
        raise source.error((*at, given[1]), f"an event has one time: {' and '.join(given)} exclude each other")
    when = given[0]
    for key in _given(event, ("for", "from", "until")):
        if key not in _ALLOWED[when]:
            raise source.error((*at, key), f"does not go with `{when}`" + _hint(when, key))
    if event.random is not None and (event.random.per_second is None) == (event.random.per_iteration is None):
        raise source.error((*at, "random"), "expected either per_second or per_iteration, such as {per_second: 2}")
    if event.random is not None and event.random.per_iteration is not None:
        for key in _given(event, ("from", "until")):
            raise source.error((*at, key), "does not go with arrivals per iteration")


def _hint(when: str, key: str) -> str:
    if key == "for":
        return {"epoch": "; it lasts whole epochs", "while": "; it lasts as long as the phase"}.get(when, "")
    return "; use `every` or `random`" if when in ("at", "iteration", "epoch", "while") else ""


def _check_what(event: Event, spec: Scenario, source: Source, at: Path_) -> None:
    what = _given(event, WHAT)
    alone = "trace" if event.trace is not None else "replay" if event.replay is not None else ""
    if alone:
        for key in what:
            raise source.error((*at, key), f"does not go with `{alone}`, which says itself what happens")
    elif not what:
        raise source.error(at, f"does not say what happens; give at least one of {', '.join(WHAT)}")
    _check_trunks(event, spec, source, at)
    if event.down and (event.loss is not None or (event.ramp is not None and event.ramp.what == "loss")):
        raise source.error((*at, "down"), "`down` loses everything; leave out the loss")
    if event.match == "all" and not event.loses:
        raise source.error((*at, "match"), "says which packets are lost, and this event loses none")
    _check_queue(event, spec, source, at)
    _check_replay(event, spec, source, at)
    if event.ramp is not None:
        _check_ramp(event, what, source, at)


def _check_trunks(event: Event, spec: Scenario, source: Source, at: Path_) -> None:
    """Loss is made at the port that faces the receiver, for whose packets have passed the trunk: the transport's are
    known, those of any program are not.
    """
    named = [entry for entry in event.on if TO in entry]
    if named and event.loses and isinstance(spec.workload, Command):
        message = (
            f"{named[0]!r} joins switches, and there only rate, delay and queue can change with programs of your own; "
            "for loss name the links of the hosts, such as worker1.up"
        )
        raise source.error((*at, "on"), message)


def _check_queue(event: Event, spec: Scenario, source: Source, at: Path_) -> None:
    if event.queue is None or event.rate_bps is not None:
        return
    for end in link_ends(event, spec.topology):
        if shape_at(spec.topology, end).rate_bps is None:
            message = f"the link direction {end_name(*end)} has no rate, so nothing ever waits there; give a rate"
            raise source.error((*at, "queue"), message)


def _check_replay(event: Event, spec: Scenario, source: Source, at: Path_) -> None:
    if event.replay is None:
        return
    if not Path(event.replay.path).exists():
        raise source.error((*at, "replay"), f"{event.replay.path}: no such file or folder")
    for name, transport in spec.transports.items():
        if transport.reliable:
            message = f"transport {name!r} does not name its packets (tcp), so a recorded mask cannot hit them"
            raise source.error((*at, "replay"), message)


def _check_ramp(event: Event, what: list[str], source: Source, at: Path_) -> None:
    ramp = event.ramp
    assert ramp is not None
    if ramp.what in what:
        raise source.error((*at, "ramp"), f"is a ramp of {ramp.what}, which `{ramp.what}` sets as well")
    if event.when not in ("iteration", "epoch", "at"):
        raise source.error((*at, "ramp"), f"goes with iteration, epoch and at, not with `{event.when}`")
    if event.at_s is not None and ramp.over_s is None:
        raise source.error((*at, "ramp", "over"), "is required: how long the ramp takes, such as 2 s")
    if event.at_s is None:
        for key, given in (("over", ramp.over_s is not None), ("steps", "steps" in ramp.model_fields_set)):
            if given:
                raise source.error((*at, "ramp", key), f"does not go with `{event.when}`: each iteration is a step")
        if event.length is not None:
            raise source.error((*at, "for"), "does not go with a ramp over iterations")
    elif event.length is not None and event.length.kind == "fixed" and event.length.mean_s < (ramp.over_s or 0.0):
        raise source.error((*at, "for"), "the event would end before its ramp does")


def _check_time(event: Event, source: Source, at: Path_) -> None:
    if event.when == "every" or (event.random is not None and event.random.per_second is not None):
        if event.length is None:
            raise source.error((*at, "for"), f"is required with `{event.when}`: how long each of them lasts")
        if event.until_s is not None and event.until_s <= (event.from_s or 0.0):
            raise source.error((*at, "until"), "the event would end before it begins (from)")
    length = event.length
    if event.every_s is not None and length is not None and length.kind == "fixed" and length.mean_s >= event.every_s:
        message = f"lasts {length.words()} every time, so it never ends before the next one; use `at`"
        raise source.error((*at, "for"), message)
    for number, (before, after) in enumerate(pairwise(event.trace or ()), 1):
        if after.at_s <= before.at_s:
            raise source.error((*at, "trace", number), "the times of a trace rise from row to row")


def _check_iterations(event: Event, spec: Scenario, source: Source, at: Path_) -> None:
    total, each = iterations_total(spec), iterations_per_epoch(spec)
    epochs = -(-total // each)
    named: tuple[tuple[Ranges | None, str, int], ...]
    named = ((event.iteration, "iteration", total), (event.epoch, "epoch", epochs))
    for ranges, key, count in named:
        if ranges == ():
            raise source.error((*at, key), f"names no {key}")
        for ends in ranges or ():
            if ends[1] >= count:
                what = range_text(ends) if ends[0] != ends[1] else str(ends[0])
                message = f"{what} ends after the last {key}, {count - 1} ({count} {key}s, 0-based)"
                raise source.error((*at, key), message)


def _check_matches(spec: Scenario, source: Source) -> None:
    """A link direction loses data packets, or all packets of a sender, but not with two different ratios."""
    windowed: dict[Path_, list[tuple[int, int]]] = {}
    for each in windows(spec):
        windowed.setdefault(each.effect.at, []).append((each.first, each.last))
    places: list[tuple[Path_, Event | None]] = [(("bursts", i), None) for i in range(len(spec.bursts))]
    places += [(("events", i), event) for i, event in enumerate(spec.events) if event.loses and not event.down]
    for number, (later, event) in enumerate(places):
        if event is None:
            continue
        for earlier, other in places[:number]:
            one, two = _losses(earlier, other, spec), _losses(later, event, spec)
            if one[0] == two[0] or not one[1] & two[1]:
                continue
            if _may_meet(windowed.get(earlier), windowed.get(later), other, event):
                line = source.line(earlier)
                message = f"may meet the one in line {line}: one hits data, the other all of the same packets"
                raise source.error((*later, "match"), message)


def _losses(at: Path_, event: Event | None, spec: Scenario) -> tuple[str, set[tuple[str, str]]]:
    """(match, (worker, direction) that are hit)."""
    if event is None:
        burst = spec.bursts[int(at[1])]
        ways = ("up", "down") if burst.direction == "both" else (burst.direction,)
        workers = spec.topology.workers if burst.workers == "all" else burst.workers
        return burst.match, {(worker, way) for worker in workers for way in ways}
    whose = flows(link_ends(event, spec.topology), spec.topology)
    return event.match, {(worker, way) for way, workers in whose.items() for worker in workers}


def _may_meet(
    one: list[tuple[int, int]] | None, two: list[tuple[int, int]] | None, first: Event | None, second: Event
) -> bool:
    if one is None or two is None:  # one of them by time or phase: any round may be hit, but phases exclude each other
        phases = (first.phase if first else None, second.phase)
        return None in phases or phases[0] == phases[1]
    return any(a[0] <= b[1] and b[0] <= a[1] for a in one for b in two)

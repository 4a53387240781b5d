"""When events by time begin and end. A pure function of the scenario."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from netem.spec.events import Event
from netem.spec.expand import matching
from netem.spec.scenario import Burst, Scenario
from netem.spec.source import Source

WAYS: tuple[Literal["up", "down"], ...] = ("up", "down")


@dataclass(frozen=True)
class TimedStep:
    """What is in force from `at_s` on, seconds since the programs run; the whole state, but for bursts by iteration."""

    at_s: float
    bursts: tuple[Burst, ...]


def timed_steps(spec: Scenario) -> tuple[TimedStep, ...]:
    """In order, one for each moment at which something begins or ends."""
    spans = [(event.at_s, None if event.for_s is None else event.at_s + event.for_s, event) for event in spec.events]
    moments = sorted({moment for start, end, _ in spans for moment in (start, end) if moment is not None})
    return tuple(
        TimedStep(
            moment,
            tuple(
                burst
                for start, end, event in spans
                if start <= moment and (end is None or moment < end)
                for burst in event_bursts(event, spec)
            ),
        )
        for moment in moments
    )


def event_bursts(event: Event, spec: Scenario) -> tuple[Burst, ...]:
    """The loss of an event as bursts, of which the iteration means nothing."""
    on = event.on or tuple(f"{worker}.up" for worker in spec.topology.workers or spec.topology.hosts)
    found = []
    for way in WAYS:
        workers = tuple(name for name in spec.topology.hosts if f"{name}.{way}" in on)
        if workers:
            found.append(Burst(iteration=0, loss=event.loss, direction=way, match=event.match, workers=workers))
    return tuple(found)


def event_ends(spec: Scenario, index: int, source: Source) -> tuple[str, ...]:
    """`worker*.up` -> names of workers with their way. Raises SpecError."""
    found: list[str] = []
    for place, text in enumerate(spec.events[index].on):
        name, dot, way = text.rpartition(".")
        at = ("events", index, "on", place)
        if not dot:
            name, way = text, "up"
        if way not in WAYS:
            raise source.error(at, f"{text!r} is not HOST.up or HOST.down")
        node = source.root.child("events")
        for key in (index, "on", place):
            node = node.child(key) if node is not None else None
        assert node is not None
        found += [f"{host}.{way}" for host in matching(replace(node, value=name), spec.topology.hosts, "host")]
    return tuple(dict.fromkeys(found))

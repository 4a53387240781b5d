"""Scenarios and topologies: frozen, validated types, loaded from YAML with errors that name file, line and key.

`load_scenario("burst90")` gives a `Scenario` in which every default is explicit; `timeline` turns it into steps.
"""

from netem.spec.command import Command
from netem.spec.effects import Effect, Shift, needs_delay, shapes_uplinks, shifted_ends
from netem.spec.events import Event
from netem.spec.load import (
    Loaded,
    available,
    load_scenario,
    load_scenario_text,
    load_topology,
    load_topology_text,
    resolved_yaml,
)
from netem.spec.scenario import (
    Burst,
    Capture,
    Deadlines,
    Detector,
    LinkSettings,
    Replay,
    Scenario,
    Train,
    TransportSpec,
    epoch_of,
    iterations_per_epoch,
    iterations_total,
    profile_options,
)
from netem.spec.schema import schema
from netem.spec.source import Source, SpecError
from netem.spec.timeline import Span, Step, Window, gates, is_dynamic, phase_effects, spans, timeline, windows
from netem.spec.topology import HostSpec, Link, LinkShape, Topology, star
from netem.spec.traffic import Background, Microburst, Queues

__all__ = [
    "Background",
    "Burst",
    "Capture",
    "Command",
    "Deadlines",
    "Detector",
    "Effect",
    "Event",
    "HostSpec",
    "Link",
    "LinkSettings",
    "LinkShape",
    "Loaded",
    "Microburst",
    "Queues",
    "Replay",
    "Scenario",
    "Shift",
    "Source",
    "Span",
    "SpecError",
    "Step",
    "Topology",
    "Train",
    "TransportSpec",
    "Window",
    "available",
    "epoch_of",
    "gates",
    "is_dynamic",
    "iterations_per_epoch",
    "iterations_total",
    "load_scenario",
    "load_scenario_text",
    "load_topology",
    "load_topology_text",
    "needs_delay",
    "phase_effects",
    "profile_options",
    "resolved_yaml",
    "schema",
    "shapes_uplinks",
    "shifted_ends",
    "spans",
    "star",
    "timeline",
    "windows",
]

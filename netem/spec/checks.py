"""What types alone cannot say: names that must exist, numbers that depend on each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from netem.spec.arming import NEED, obstacle
from netem.spec.command import Command
from netem.spec.command_file import check_command
from netem.spec.expand import matching
from netem.spec.fields import did_you_mean, shown
from netem.spec.graph import check_graph, check_roles
from netem.spec.impairments import FourStateLoss
from netem.spec.link_checks import problems
from netem.spec.scenario import (
    PROFILE_UNITS,
    TRAIN_SAMPLES,
    Burst,
    Replay,
    Scenario,
    Train,
    TransportSpec,
    iterations_total,
)
from netem.spec.source import Path_, Source
from netem.spec.topology import Topology
from netem.spec.traffic_checks import check_traffic
from netem.spec.units import UnitError

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_TRANSPORT = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


def check_topology(topology: Topology, source: Source, at: Path_ = ()) -> None:
    """Raises SpecError. `at` is where the topology lies in the source."""
    _check_names(topology, source, at)
    check_roles(topology, source, at)
    check_graph(topology, source, at)
    for index, link in enumerate(topology.links):
        for direction in ("up", "down"):
            for below, message in problems(link, getattr(link, direction)):
                raise source.error((*at, "links", index, direction, *below), message)


def _check_names(topology: Topology, source: Source, at: Path_) -> None:
    for host in topology.hosts:
        if host == "all" or not _HOST.fullmatch(host):
            message = f"{host!r} is not a valid host name: letters, digits, - and _, at most 32, and not `all`"
            raise source.error((*at, "hosts", host), message)
    for index, switch in enumerate(topology.switches):
        if not _HOST.fullmatch(switch):
            message = f"{switch!r} is not a valid name: letters, digits, - and _, at most 32"
            raise source.error((*at, "switches", index), message)
        if switch in topology.hosts:
            raise source.error((*at, "switches", index), f"{switch!r} is the name of a host too")


def check_scenario(spec: Scenario, source: Source) -> None:
    """Raises SpecError. The topology has been checked, and bursts name their workers, before."""
    _check_workload(spec, source)
    _check_profile(spec, source)
    _check_transports(spec, source)
    for name, transport in spec.transports.items():
        if not _TRANSPORT.fullmatch(name):
            message = f"{name!r} is not a valid transport name: a letter, then letters, digits, - and _, at most 32"
            raise source.error(("transports", name), message)
        _check_transport(transport, spec, source, ("transports", name))
    _check_bursts(spec, source)
    _check_arming(spec, source)
    _check_four_states(spec, source)
    check_traffic(spec, source, iterations_total(spec))
    if spec.capture.rounds != "none" and not spec.capture.at:
        raise source.error(("capture", "at"), "names no host; write at: [server], or rounds: none")


def _check_transports(spec: Scenario, source: Source) -> None:
    if isinstance(spec.workload, Command):
        if spec.transports:
            raise source.error(("transports",), "programs bring their own; compare settings with workload.variants")
        _check_command_events(spec, source)
        if spec.capture.rounds == "bursts":
            raise source.error(("capture", "rounds"), "packets of a command do not say their round; allowed: all, none")
        return
    if not spec.transports:
        given = source.root.child("transports") is not None
        missing = "is empty; name at least one, such as mlt: {fixed: 0.8%}" if given else "is required"
        raise source.error(("transports",), missing)


def _check_command_events(spec: Scenario, source: Source) -> None:
    work = spec.workload
    for index, event in enumerate(spec.events):
        at = ("events", index)
        if not spec.topology.ranks:
            raise source.error(at, "needs a topology with a server and workers")
        if event.phase is not None or event.replay is not None:
            raise source.error(at, "packets and programs of a command know no phases and no recorded masks")
        if not event.by_time and isinstance(work, Command) and work.iterations is None:
            raise source.error(at, "needs workload.iterations: programs that report their rounds and ask at gates")


def _check_workload(spec: Scenario, source: Source) -> None:
    work = spec.workload
    if isinstance(work, Train | Replay) and not spec.topology.ranks:
        raise source.error(("topology", "hosts"), f"no host has a rank; a workload of kind {work.kind} needs a server")
    if isinstance(work, Command):
        check_command(work, spec.topology, source)
        return
    if isinstance(work, Train):
        if TRAIN_SAMPLES[work.data] < len(spec.topology.workers):
            raise source.error(("workload", "data"), f"{work.data} has fewer samples than there are workers")
        return
    if (work.chunks is None) == (work.shapes is None):
        raise source.error(("workload",), "a replay needs either `chunks` or `shapes`")
    if work.shapes is not None and not all(work.shapes):
        raise source.error(("workload", "shapes"), "expected at least one shape, each with at least one dimension")
    _check_epochs(work, source)


def _check_epochs(work: Replay, source: Source) -> None:
    if work.shapes == ():
        raise source.error(("workload", "shapes"), "expected at least one shape such as [1000, 364]")
    if work.iterations_per_epoch is not None and work.iterations_per_epoch > work.iterations:
        message = f"{work.iterations_per_epoch} is more than all {work.iterations} iterations"
        raise source.error(("workload", "iterations_per_epoch"), message)


def _check_profile(spec: Scenario, source: Source) -> None:
    """Units only: which options there are is the transport's business."""
    for key, value in spec.profile.items() if isinstance(spec.profile, dict) else ():
        for ours, (theirs, example, _) in PROFILE_UNITS.items():
            if key == theirs:
                raise source.error(("profile", key), f"unknown key; write {ours}: {example}")
        if key in PROFILE_UNITS:
            try:
                PROFILE_UNITS[key][2](value)
            except UnitError as error:
                raise source.error(("profile", key), str(error)) from error
        if key == "base" and not isinstance(value, str):
            raise source.error(("profile", key), f"expected the name of a profile, got {shown(value)}")


_KEYS = {"dblp": ("low", "high", "detector"), "mlt": ("fixed",), "tcp": ()}


def _check_transport(transport: TransportSpec, spec: Scenario, source: Source, at: Path_) -> None:
    wanted = _KEYS[transport.kind]
    for key in ("low", "high", "fixed", "detector"):
        given = getattr(transport, key) is not None
        if given and key not in wanted:
            allowed = ", ".join((*wanted, "wire_dtype"))
            message = f"does not belong to a transport of kind {transport.kind} (allowed: {allowed})"
            raise source.error((*at, key), message)
        if not given and key in wanted:
            raise source.error((*at, key), f"is required for a transport of kind {transport.kind}")
    for key in ("low", "high", "fixed"):
        if getattr(transport, key) == 1:
            message = "100% is out of range; allowed: 0% to less than 100%, some of a round has to arrive"
            raise source.error((*at, key), message)
    if transport.low is not None and transport.high is not None and transport.low > transport.high:
        raise source.error((*at, "low"), "the tolerance of critical phases (low) is above that of normal phases (high)")
    total = iterations_total(spec)
    for first, last in transport.detector.critical if transport.detector else ():
        if last >= total:
            message = f"{first}..{last} ends after the last iteration, {total - 1} ({total} iterations, 0-based)"
            raise source.error((*at, "detector", "schedule", "critical"), message)


def _check_bursts(spec: Scenario, source: Source) -> None:
    total = iterations_total(spec)
    for index, burst in enumerate(spec.bursts):
        if isinstance(spec.workload, Command) and spec.workload.iterations is None:
            message = "needs workload.iterations: programs that report their rounds and ask at gates"
            raise source.error(("bursts", index, "iteration"), message)
        if burst.iteration >= total:
            message = f"{burst.iteration} is after the last iteration, {total - 1} ({total} iterations, 0-based)"
            raise source.error(("bursts", index, "iteration"), message)
        for earlier in range(index):
            if _overlap(spec.bursts[earlier], burst):
                line = source.line(("bursts", earlier))
                message = (
                    f"overlaps with the burst in line {line}: both would set the loss of the same packets "
                    f"(iteration {burst.iteration}, direction {burst.direction}, match {burst.match})"
                )
                raise source.error(("bursts", index), message)


def _check_arming(spec: Scenario, source: Source) -> None:
    if spec.link.arm != "preloaded":
        return
    if isinstance(spec.workload, Command):
        raise source.error(("link", "arm"), f"{NEED}; packets of programs do not say their round: write arm: gate")
    for name, transport in spec.transports.items():
        if transport.reliable:
            raise source.error(("link", "arm"), f"{NEED}; a packet of {name} does not say its round: write arm: auto")
    problem = obstacle(spec)
    if problem is not None:
        path, why = problem
        raise source.error(("link", "arm"), f"{NEED}; {'.'.join(map(str, path))} cannot be loaded: {why}")


def _check_four_states(spec: Scenario, source: Source) -> None:
    """A burst comes on top of a link's own loss. On four states that has no form that netem knows."""
    for index, link in enumerate(spec.topology.links):
        if spec.bursts and link.host in spec.topology.ranks and isinstance(link.down.loss, FourStateLoss):
            message = "four_state cannot be combined with bursts; use gilbert_elliott"
            raise source.error(("topology", "links", index, "down", "loss"), message)


def _overlap(one: Burst, other: Burst) -> bool:
    """Whether both would set the loss of the same packets; `all` contains `data`, `both` contains up and down."""
    return (
        one.iteration == other.iteration
        and ("both" in (one.direction, other.direction) or one.direction == other.direction)
        and bool(set(one.workers) & set(other.workers))
    )


def burst_workers(spec: Scenario, index: int, source: Source) -> tuple[str, ...]:
    """The workers that a burst names, in rank order; wildcards expanded. Raises SpecError."""
    burst, workers = spec.bursts[index], spec.topology.workers
    if burst.workers == "all":
        return workers
    if not burst.workers:
        raise source.error(("bursts", index, "workers"), "is empty; write all, or names of workers")
    return _names(burst.workers, source, ("bursts", index, "workers"), workers, "worker")


def capture_hosts(spec: Scenario, source: Source) -> tuple[str, ...]:
    """The hosts that the capture names, wildcards expanded. Raises SpecError."""
    return _names(spec.capture.at, source, ("capture", "at"), tuple(spec.topology.ranks), "host")


def any_hosts(spec: Scenario, source: Source, given: Sequence[str], at: Path_) -> tuple[str, ...]:
    """The hosts of names and wildcards at a place, with or without a rank. Raises SpecError."""
    return _names(given, source, at, tuple(spec.topology.hosts), "host")


def _names(
    given: Sequence[str], source: Source, at: Path_, known: tuple[str, ...], what: Literal["host", "worker"]
) -> tuple[str, ...]:
    found: list[str] = []
    for index, pattern in enumerate(given):
        node = source.root
        for key in (*at, index):
            node = node.child(key) or node  # a single name stands for a list of it
        if node.value != pattern:
            raise source.error((*at, index), f"{pattern!r} is not a {what}{did_you_mean(pattern, known)}")
        found += matching(node, known, what)
    for name, times in Counter(found).items():
        if times > 1:
            raise source.error(at, f"{name!r} is named {times} times")
    return tuple(name for name in known if name in found)

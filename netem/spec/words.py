"""Events and the timeline in words, for `show` and `run --dry-run`. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from netem.spec.command import Command
from netem.spec.effects import Shift, end_name, link_ends
from netem.spec.events import Event
from netem.spec.loss import loss_text
from netem.spec.ranges import ranges_words
from netem.spec.scenario import Burst, Scenario
from netem.spec.timeline import Span, Step, gates, is_dynamic, phase_effects, spans, timeline
from netem.spec.topology import Queue, Topology
from netem.spec.units import format_rate, format_size, format_time

MAX_CHANGES = 12
"""Lines of each part of a timeline."""


def event_words(event: Event, topology: Topology) -> str:
    """One event: when, what, where."""
    where = "" if event.replay is not None else f", {_where(event, topology)}"
    return f"{_when(event)}: {_what(event)}{where}"


def _when(event: Event) -> str:
    length = "" if event.length is None else f" for {event.length.words()}"
    if event.iteration is not None:
        each = "" if event.length is None else f", from the start of each{length}"
        return f"iterations {ranges_words(event.iteration)}{each}"
    if event.epoch is not None:
        return f"epochs {ranges_words(event.epoch)}"
    if event.phase is not None:
        return f"while the phase is {event.phase}"
    if event.at_s is not None:
        after = event.ramp.over_s if event.ramp is not None else None
        rest = length or (f" for {format_time(after)}" if after else " until the end")
        return f"at {format_time(event.at_s)}{rest}"
    if event.every_s is not None:
        return f"every {format_time(event.every_s)}{length}{_limits(event)}"
    if event.random is not None:
        rate, what = event.random.per_second, "a second"
        if rate is None:
            rate, what = event.random.per_iteration or 0.0, "an iteration"
        whole = length or ", whole rounds"
        return f"at random, {rate:g} times {what}{whole}{_limits(event)}"
    if event.trace is not None:
        return f"trace of {len(event.trace)} rows from {format_time(event.trace[0].at_s)} on"
    return "recorded losses"


def _limits(event: Event) -> str:
    start = "" if event.from_s is None else f" from {format_time(event.from_s)} on"
    return start + ("" if event.until_s is None else f" until {format_time(event.until_s)}")


def _what(event: Event) -> str:
    parts = []
    if event.down:
        parts.append("cut")
    if event.loss is not None:
        parts.append(f"{loss_text(event.loss)} of {packets(event.match)} lost")
    parts += _properties(event.rate_bps, event.delay_s, event.queue)
    if event.ramp is not None:
        steps = f" in {event.ramp.steps} steps" if event.ramp.over_s is not None else ", a step an iteration"
        parts.append(event.ramp.words() + steps)
    if event.trace is not None:
        found = {"rate": "rate_bps", "delay": "delay_s", "loss": "loss"}
        parts.append(
            " and ".join(k for k, name in found.items() if any(getattr(r, name) is not None for r in event.trace))
        )
    if event.replay is not None:
        parts.append(f"what {event.replay.path} says")
    return ", ".join(parts)


def packets(match: str) -> str:
    return "data packets" if match == "data" else "all packets"


def _properties(rate_bps: int | None, delay_s: float | None, queue: Queue | None) -> list[str]:
    parts = [] if rate_bps is None else [format_rate(rate_bps)]
    if delay_s is not None:
        parts.append(f"{format_time(delay_s)} delay")
    if queue is not None:
        size = f"{queue.packets} packets" if queue.packets is not None else format_size(queue.size_bytes or 0)
        parts.append(f"queue {size}")
    return parts


def _where(event: Event, topology: Topology) -> str:
    ends = set(link_ends(event, topology))
    up = {(worker, "up") for worker in topology.workers}
    if ends == up:
        return "all workers to server"
    if ends == {(worker, "down") for worker in topology.workers}:
        return "server to all workers"
    both = sorted(host for host, _ in ends if {(host, "up"), (host, "down")} <= ends)
    words = [f"{host} both ways" for host in dict.fromkeys(both)]
    words += [end_name(host, way) for host, way in link_ends(event, topology) if host not in both]
    return ", ".join(words) if len(words) <= 4 else f"{', '.join(words[:3])} and {len(words) - 3} more"


def state_words(bursts: Iterable[Burst], shifts: Iterable[Shift]) -> str:
    """What is in force: every loss and every changed link."""
    parts = [
        f"{loss_text(b.loss)} {b.direction}, {b.match}, {b.workers if b.workers == 'all' else ', '.join(b.workers)}"
        for b in bursts
    ]
    by_text: dict[str, list[str]] = {}
    for shift in shifts:
        text = ", ".join(_properties(shift.rate_bps, shift.delay_s, shift.queue))
        by_text.setdefault(text, []).append(end_name(shift.host, shift.way))
    parts += [f"{text} at {', '.join(ends)}" for text, ends in by_text.items()]
    return "; ".join(parts) or "no loss"


def timeline_lines(spec: Scenario, seed: int) -> list[str]:
    """Every change that is known before the job; of what goes on for ever, the first ones."""
    steps = timeline(spec, seed)
    lines = [f"before round {step.round}: {_step(step)}" for step in steps[:MAX_CHANGES]]
    if len(steps) > MAX_CHANGES:
        lines.append(f"... and {len(steps) - MAX_CHANGES} more changes by round, up to round {steps[-1].round}")
    for phase, effect in phase_effects(spec):
        lines.append(f"in rounds that are {phase}: {state_words(effect.bursts, effect.shifts)}")
    lines += _span_lines(list(itertools.islice(spans(spec, seed), MAX_CHANGES + 1)))
    if isinstance(spec.workload, Command):
        timed = any(event.by_time for event in spec.events)
        return [*lines, "times are seconds since the programs run"] if timed else lines
    if is_dynamic(spec):
        lines.append("times are seconds since the first round is let go; the ranks ask before every round")
    elif asked := gates(spec, seed):
        shown = ", ".join(map(str, asked[:MAX_CHANGES])) + (", ..." if len(asked) > MAX_CHANGES else "")
        lines.append(f"the ranks ask before rounds {shown}")
    return lines


def _step(step: Step) -> str:
    words = state_words(step.bursts, step.shifts)
    limited = sorted({burst.for_s for burst in step.bursts if burst.for_s is not None})
    return words + (f" (for {', '.join(map(format_time, limited))})" if limited else "")


def _span_lines(found: Sequence[Span]) -> list[str]:
    lines = []
    for span in found[:MAX_CHANGES]:
        end = "until the end" if math.isinf(span.end_s) else f"to {span.end_s:.6g} s"
        lines.append(f"from {span.start_s:.6g} s {end}: {state_words(span.effect.bursts, span.effect.shifts)}")
    return [*lines, "... and so on"] if len(found) > MAX_CHANGES else lines

"""Whether all bursts of a job can be loaded before it, so that no round has to wait at a gate for its burst. Pure.

A rule that is loaded beforehand names the round that it is for. So it takes packets that say their round, and changes
that are nothing but loss in whole rounds.
"""

from __future__ import annotations

from netem.spec.scenario import Scenario
from netem.spec.source import Path_
from netem.spec.timeline import windows

NEED = "rules that are loaded before the run name the rounds that they are for"


def obstacle(spec: Scenario) -> tuple[Path_, str] | None:
    """The first impairment that needs gates, and why; None where all can be loaded before."""
    for index, event in enumerate(spec.events):
        if event.dynamic:
            return ("events", index), "its rounds are not known before the run"
        if event.shapes:
            return ("events", index), "it changes more than the loss"
    for window in windows(spec):
        if window.for_s is not None:
            return window.effect.at, "it ends within a round"
        if any(burst.match == "all" for burst in window.effect.bursts):
            return window.effect.at, "it hits packets that do not say their round (match: all)"
    return None


def preloaded(spec: Scenario, *, keyed: bool, repeatable: bool) -> bool:
    """Whether this job's bursts are loaded before it.

    `keyed`: its data packets say their round; `repeatable`: the loss is made by the eBPF program.
    """
    if spec.link.arm == "gate" or not keyed or not repeatable:
        return False
    return spec.link.arm == "preloaded" or obstacle(spec) is None

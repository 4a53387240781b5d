"""All bursts of a job as rules of their rounds, loaded before it: no gate, no change while it runs."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from netem.experiment.fabric import Fabric, Prepared
from netem.links.base import INDEX_MAX, LossRule, UnsupportedFeature
from netem.links.choose import BackendChoice
from netem.spec import Scenario, Step, timeline, windows
from netem.spec.loss import BurstyLoss


def check_engine(spec: Scenario, choice: BackendChoice) -> None:
    """Raises UnsupportedFeature for what only the eBPF program can do, where it does not make the loss."""
    have = ("bpf", "loss_engine: bpf")
    if choice.loss_engine == "bpf":
        return
    if spec.link.arm == "preloaded":
        raise UnsupportedFeature("link: {arm: preloaded}", have, "netem holds one loss for a sender at a time")
    bursts = (*spec.bursts, *(burst for window in windows(spec) for burst in window.effect.bursts))
    if any(isinstance(loss, BurstyLoss) for loss in (*(b.loss for b in bursts), *(e.loss for e in spec.events))):
        raise UnsupportedFeature("loss: {gilbert_elliott: ...} of a burst", have)
    if any(burst.duplicate or burst.corrupt for burst in bursts):
        raise UnsupportedFeature("duplicate and corrupt of a burst", have)


def preload(fabric: Fabric, spec: Scenario, seed: int) -> dict[str, Any]:
    """Puts the rules of all rounds in place, and returns what events.jsonl says of it. Raises LinkError."""
    began = time.monotonic()
    steps = timeline(spec, seed)
    found: dict[str, tuple[LossRule, ...]] = {}
    for step, following in zip(steps, (*steps[1:], None), strict=True):
        last = INDEX_MAX if following is None else following.round - 1
        for port, rules in fabric.prepare(step).losses:
            found[port] = (*found.get(port, ()), *(replace(r, first=step.round, last=last) for r in rules))
    fabric.put(Prepared(Step(0, "apply", (), seed), tuple(found.items()), ()))
    return {
        "event": "preloaded",
        "rules": sum(len(rules) for rules in found.values()),
        "bursts": [{"round": s.round, "bursts": [b.model_dump() for b in s.bursts]} for s in steps if s.bursts],
        "took_s": round(time.monotonic() - began, 6),
    }

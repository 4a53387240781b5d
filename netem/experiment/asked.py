"""What a scenario asks of the links, in the terms of the analysis."""

from __future__ import annotations

from pathlib import Path

from netem.analysis.merge import BurstLike, LossPlan, RoundsLike
from netem.analysis.recorded import Mask, MaskError, joined, read_mask
from netem.experiment.executor import touched
from netem.experiment.passages import base_loss, in_bursts
from netem.links.base import UnsupportedFeature
from netem.links.choose import BackendChoice
from netem.spec import Loaded, Scenario, phase_effects, windows
from netem.spec.effects import Effect


def recorded_mask(loaded: Loaded) -> Mask:
    """What the events `replay` lose, together. Raises SpecError."""
    masks = []
    workers = len(loaded.spec.topology.workers)
    for index, event in enumerate(loaded.spec.events):
        if event.replay is None:
            continue
        at = ("events", index, "replay")
        try:
            mask = read_mask(Path(event.replay.path), event.replay.transport, event.replay.repeat)
        except MaskError as error:
            raise loaded.source.error(at, str(error)) from error
        if not mask:
            raise loaded.source.error(at, f"{event.replay.path}: nothing was lost there")
        if (highest := max(flow.rank for flow in mask)) > workers:
            raise loaded.source.error(at, f"names worker {highest}, but there are {workers}")
        masks.append(mask)
    return joined(masks)


def check_recorded(mask: Mask, spec: Scenario, choice: BackendChoice) -> None:
    """Raises UnsupportedFeature where the links cannot lose single transmissions by name."""
    if mask and choice.loss_engine != "bpf":
        raise UnsupportedFeature("a recorded loss mask", ("bpf", "loss_engine: bpf"), "netem loses at random")
    if mask and spec.link.loss_at == "after_rate":
        raise UnsupportedFeature("a recorded loss mask behind the rate", ("loss_at: before_rate",))


def loss_plan(spec: Scenario, seed: int, mask: Mask | None = None) -> LossPlan:
    """Of one repeat: arrivals per iteration depend on its seed."""
    rounds: list[RoundsLike] = [
        (window.first, window.last, burst, window.for_s)
        for window in windows(spec, seed)
        for burst in _losses(window.effect, spec)
    ]
    phases = [(phase, burst) for phase, effect in phase_effects(spec) for burst in _losses(effect, spec)]
    recorded = frozenset((flow.round, flow.rank, flow.direction) for flow in mask or ())
    base = base_loss(spec.topology)
    return LossPlan((), spec.topology.ranks, base, tuple(rounds), tuple(phases), recorded, in_bursts(spec.topology))


def _losses(effect: Effect, spec: Scenario) -> tuple[BurstLike, ...]:
    return (*effect.bursts, *touched(effect, spec))

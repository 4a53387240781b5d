"""The timeline of a scenario: which bursts are in force from which round on. A pure function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from netem.spec.scenario import Burst, Scenario, iterations_total


@dataclass(frozen=True)
class Step:
    """What has to be in place before the first packet of `round`; the whole state, not a change.

    `apply`: exactly `bursts` are in force, and no other; `clear`: none. `seed` selects the loss mask.
    """

    round: int
    action: Literal["apply", "clear"]
    bursts: tuple[Burst, ...]
    seed: int


def timeline(spec: Scenario, seed: int | None = None) -> tuple[Step, ...]:
    """Steps in the order of their rounds, at most one per round; `seed` defaults to the scenario's.

    A burst at iteration N gives an `apply` at N and, unless another burst follows at once, a `clear` at N + 1. After a
    burst at the last iteration the clear's round never starts: it is due when the transport has finished.
    """
    seed = spec.seed if seed is None else seed
    by_round: dict[int, list[Burst]] = {}
    for burst in spec.bursts:
        by_round.setdefault(burst.iteration, []).append(_resolved(burst, spec))
    ends = {round_ + 1 for round_ in by_round} - by_round.keys()
    steps = [Step(round_, "apply", tuple(bursts), seed) for round_, bursts in by_round.items()]
    steps += [Step(round_, "clear", (), seed) for round_ in ends]
    return tuple(sorted(steps, key=lambda step: step.round))


def gates(spec: Scenario) -> tuple[int, ...]:
    """Rounds before which every rank asks the testbed: each burst's and the one after it, sorted."""
    total = iterations_total(spec)
    return tuple(sorted({b.iteration + i for b in spec.bursts for i in (0, 1) if b.iteration + i < total}))


def _resolved(burst: Burst, spec: Scenario) -> Burst:
    """With the names of its workers, as loading gives it: a scenario made in Python may still say `all`."""
    return burst.model_copy(update={"workers": spec.topology.workers}) if burst.workers == "all" else burst

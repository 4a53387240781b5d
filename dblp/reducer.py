"""Between a workload and its transport: what the one asks, and what the other answers. Neither knows the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class Reduced:
    """How an all-reduce ended. skipped: the round was given up, and no worker may use the vector."""

    skipped: bool
    phase: str
    tolerance: float


@dataclass(frozen=True)
class EpochRow:
    """One worker's epoch. train_loss: mean loss of its samples, None where it is not finite (training
    diverged). A replay has neither loss nor value.

    metric: "accuracy" (value in 0..1, on held-out data) or "none". wall_s: seconds from the first gradient
    to the end of the last step, without the evaluation. digest: sha256 of parameters and optimiser state
    (replay: of the last mean).
    """

    train_loss: float | None
    metric: str
    value: float | None
    wall_s: float
    digest: str


class Reducer(Protocol):
    """What a workload needs of a transport."""

    def all_reduce(self, flat: Vector, *, iteration: int, epoch: int, epoch_start_next: bool) -> Reduced:
        """Replace `flat` by the mean over the workers. Blocks. Iterations count up from 0 without a gap."""
        ...

    def report_epoch(self, epoch: int, row: EpochRow, state: Vector) -> None:
        """Tell the outcome of an epoch. `state` is lent for the call."""
        ...

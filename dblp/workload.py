"""What the workers do between two all-reduces: train a model, or replay gradients of a given size.

A workload knows no transport: it talks to a `Reducer`. It imports torch only when a model is trained.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from dblp.chunks import TensorSpec
from dblp.config import Config
from dblp.data import seed_words
from dblp.dtypes import DTYPES
from dblp.options import ReplayOptions, TrainOptions, options_from
from dblp.reducer import EpochRow, Reduced, Reducer, Vector
from dblp.wire import chunk_values

__all__ = [
    "EpochRow",
    "Reduced",
    "Reducer",
    "Replay",
    "Training",
    "Vector",
    "Workload",
    "array_digest",
    "workload_from",
]

Log = Callable[[str], None]


class Workload(Protocol):
    """A worker's job, ready to run: the tensors that it reduces, and the loop."""

    @property
    def tensors(self) -> Sequence[TensorSpec]: ...

    def run(self, reducer: Reducer, log: Log) -> None: ...


def workload_from(config: Config, rank: int, world_size: int) -> Workload:
    """Build the job of worker `rank`. Imports torch for training. Raises ConfigError."""
    options = options_from(config)
    if isinstance(options, ReplayOptions):
        values = chunk_values(config.mtu, dtype=DTYPES[config.profile.wire_dtype])
        return Replay(options, seed=config.seed, rank=rank, chunk_values=values)
    return Training(options, seed=config.seed, rank=rank, world_size=world_size)


class Training:
    """Data-parallel SGD: gradient, all-reduce, step; an evaluation on held-out data after each epoch.

    A skipped all-reduce means no step, on every worker alike, so the replicas stay equal.
    """

    def __init__(
        self,
        options: TrainOptions,
        *,
        seed: int,
        rank: int,
        world_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Here, because it loads torch, which a server and a replay can do without.
        from dblp.models import Learner, Sgd, configure_torch

        configure_torch()
        self._rank, self._epochs, self._clock = rank, options.epochs, clock
        self._learner = Learner(
            options.model,
            options.data,
            epochs=options.epochs,
            batch_size=options.batch_size,
            sgd=Sgd(options.learning_rate, options.momentum, options.decay),
            seed=seed,
            rank=rank,
            world_size=world_size,
        )

    @property
    def tensors(self) -> Sequence[TensorSpec]:
        return self._learner.buffer.specs

    def run(self, reducer: Reducer, log: Log) -> None:
        """Train to the end. Errors of the reducer pass through."""
        for epoch in range(self._epochs):
            began = self._clock()
            loss = self._epoch(epoch, reducer)
            wall_s = self._clock() - began
            state = self._learner.state()
            known_loss = loss if math.isfinite(loss) else None
            row = EpochRow(known_loss, "accuracy", self._learner.evaluate(), wall_s, array_digest(state))
            reducer.report_epoch(epoch, row, state)
            log(
                f"rank {self._rank} epoch {epoch}: loss {loss:.4f}, accuracy {row.value:.1%}, {wall_s:.2f} s, "
                f"replica {row.digest[:12]}"
            )

    def _epoch(self, epoch: int, reducer: Reducer) -> float:
        """One epoch of steps. Returns the mean loss of this worker's samples."""
        learner, total, samples = self._learner, 0.0, 0
        batches = learner.start_epoch(epoch)
        for index, batch in enumerate(batches):
            total += learner.gradient(batch) * len(batch)
            samples += len(batch)
            reduced = reducer.all_reduce(
                learner.buffer.flat,
                iteration=epoch * len(batches) + index,
                epoch=epoch,
                epoch_start_next=index == len(batches) - 1,
            )
            if not reduced.skipped:
                learner.apply()
        return total / samples


class Replay:
    """Gradients of a given size: seeded noise, made once; an iteration costs one scaled copy of it."""

    SCALES = 16
    """The scale runs through 1, 1 + 1/16 .. 31/16: exact in float32, and norms never look constant."""

    def __init__(
        self,
        options: ReplayOptions,
        *,
        seed: int,
        rank: int,
        chunk_values: int,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._options, self._rank, self._clock, self._wait = options, rank, clock, wait
        values = options.chunks * chunk_values
        generator = np.random.default_rng(seed_words(seed, rank))
        self._noise = generator.standard_normal(values, dtype=np.float32)
        self._flat = np.zeros(values, dtype=np.float32)
        self.tensors: Sequence[TensorSpec] = (TensorSpec("replay", (values,)),)

    def run(self, reducer: Reducer, log: Log) -> None:
        """Replay to the end. Errors of the reducer pass through."""
        total = self._options.iterations
        per_epoch = self._options.epoch_iterations or total
        for epoch, first in enumerate(range(0, total, per_epoch)):
            began = self._clock()
            for iteration in range(first, min(first + per_epoch, total)):
                self._fill(iteration)
                reducer.all_reduce(
                    self._flat,
                    iteration=iteration,
                    epoch=epoch,
                    epoch_start_next=(iteration + 1) % per_epoch == 0,
                )
            wall_s = self._clock() - began
            row = EpochRow(None, "none", None, wall_s, array_digest(self._flat))
            reducer.report_epoch(epoch, row, self._flat)
            log(
                f"rank {self._rank} epoch {epoch}: {iteration + 1} of {total} iterations, {wall_s:.2f} s, "
                f"replica {row.digest[:12]}"
            )

    def _fill(self, iteration: int) -> None:
        if self._options.compute_s:
            self._wait(self._options.compute_s)
        scale = np.float32(1.0 + iteration % self.SCALES / self.SCALES)
        np.multiply(self._noise, scale, out=self._flat)


def array_digest(vector: Vector) -> str:
    """sha256 of an array's bytes: equal digests mean bit-identical replicas (-0.0 and 0.0 differ)."""
    return hashlib.sha256(np.ascontiguousarray(vector).data).hexdigest()

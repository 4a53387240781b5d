"""Options of the workloads: the `workload` mapping of a configuration, checked. Pure, without torch or a clock."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dblp.config import Config, build
from dblp.errors import ConfigError


@dataclass(frozen=True)
class TrainOptions:
    """The `workload` mapping with kind "train". batch_size: samples of one worker in one iteration."""

    kind: Literal["train"]
    model: Literal["digits-cnn"] = "digits-cnn"
    data: Literal["digits"] = "digits"
    epochs: int = 8
    batch_size: int = 32
    learning_rate: float = 0.05
    momentum: float = 0.9
    decay: Literal["cosine", "none"] = "cosine"


@dataclass(frozen=True)
class ReplayOptions:
    """The `workload` mapping with kind "replay": gradients of `chunks` full chunks, without torch or data.

    compute_s: seconds that each worker waits in place of computing. epoch_iterations: iterations that count
    as one epoch; 0: all of them.
    """

    kind: Literal["replay"]
    chunks: int
    iterations: int
    compute_s: float = 0.0
    epoch_iterations: int = 0


def options_from(config: Config) -> TrainOptions | ReplayOptions:
    """The checked workload options of a configuration. Raises ConfigError with the key path."""
    path = ("workload",)
    raw = config.workload
    kind = raw.get("kind")
    options: TrainOptions | ReplayOptions
    if kind == "train":
        options = build(TrainOptions, raw, path)
        _at_least(options, {"epochs": 1, "batch_size": 1, "learning_rate": 0.0, "momentum": 0.0})
    elif kind == "replay":
        for key in ("chunks", "iterations"):
            if key not in raw:
                raise ConfigError((*path, key), "is required for a replay")
        options = build(ReplayOptions, raw, path)
        _at_least(options, {"chunks": 1, "iterations": 1, "compute_s": 0.0, "epoch_iterations": 0})
    else:
        raise ConfigError((*path, "kind"), f"{kind!r} is not one of train, replay")
    return options


def _at_least(options: object, limits: Mapping[str, float]) -> None:
    for key, limit in limits.items():
        value = getattr(options, key)
        if not limit <= value < math.inf:
            raise ConfigError(("workload", key), f"{value!r} is not at least {limit:g}")

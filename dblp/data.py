"""The data sets that the package ships, and how they are split over the workers.

numpy only. Every order comes from `numpy.random.RandomState`, whose streams numpy promises never to change
(NEP 19), so a split or a batch order is the same with every numpy version.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

import numpy as np
from numpy.typing import NDArray

SAMPLES = 1797
TRAIN_SAMPLES = 1437
SPLIT_SEED = 1998
"""Seed of the train/test split: fixed, so that runs with different seeds are tested on the same images."""


@dataclass(frozen=True)
class Digits:
    """Images float32 (n, 1, 8, 8) in 0..1, labels int64 (n,) in 0..9, already split and in split order."""

    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]


def load_digits() -> Digits:
    """Load the shipped handwritten digits: 1,437 images to train on and 360 to test on.

    Source and licence: `_data/LICENSE-digits.txt` (Alpaydin and Kaynak, CC BY 4.0).
    """
    source = resources.files("dblp").joinpath("_data/digits.npz")
    with source.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        images, labels = archive["images"], archive["labels"]
    order = np.random.RandomState(SPLIT_SEED).permutation(SAMPLES)
    scaled = (images[order].astype(np.float32) / np.float32(16.0)).reshape(SAMPLES, 1, 8, 8)
    classes = labels[order].astype(np.int64)
    return Digits(
        train_images=scaled[:TRAIN_SAMPLES],
        train_labels=classes[:TRAIN_SAMPLES],
        test_images=scaled[TRAIN_SAMPLES:],
        test_labels=classes[TRAIN_SAMPLES:],
    )


def shard(samples: int, rank: int, world_size: int) -> slice:
    """The training samples of one worker: contiguous, equally many for each worker, the remainder unused.

    Equal shards give every worker the same number of iterations an epoch, which an all-reduce needs.
    Workers are ranks 1..world_size - 1. Raises ValueError for another rank or for more workers than samples.
    """
    workers = world_size - 1
    if not 1 <= rank <= workers:
        raise ValueError(f"rank {rank} is not a worker of a world of {world_size} (workers are 1..{workers})")
    size = samples // workers
    if size == 0:
        raise ValueError(f"{workers} workers cannot share {samples} samples")
    return slice((rank - 1) * size, rank * size)


def batches_per_epoch(shard_samples: int, batch_size: int) -> int:
    """Iterations an epoch: the last batch may be smaller, none is left out."""
    return -(-shard_samples // batch_size)


def batches(shard_samples: int, batch_size: int, *, seed: int, epoch: int, rank: int) -> Iterator[NDArray[np.intp]]:
    """Yield each batch of an epoch as indices into the worker's shard, shuffled by (seed, epoch, rank)."""
    order = np.random.RandomState(seed_words(seed, epoch, rank)).permutation(shard_samples)
    for start in range(0, shard_samples, batch_size):
        yield order[start : start + batch_size]


def seed_words(*values: int) -> list[int]:
    """Pack non-negative integers of up to 64 bits as the 32-bit words that `RandomState` takes as a seed."""
    words: list[int] = []
    for value in values:
        if not 0 <= value < 2**64:
            raise ValueError(f"a seed is an integer from 0 to 2**64 - 1, not {value}")
        words += [value & 0xFFFFFFFF, value >> 32]
    return words

"""The shipped digits, their split, the workers' shards and the order of batches."""

from __future__ import annotations

import hashlib
from importlib import resources

import numpy as np
import pytest

from dblp.data import TRAIN_SAMPLES, batches, batches_per_epoch, load_digits, seed_words, shard


def test_digits_are_complete_and_scaled() -> None:
    digits = load_digits()
    assert digits.train_images.shape == (1437, 1, 8, 8)
    assert digits.test_images.shape == (360, 1, 8, 8)
    assert digits.train_images.dtype == np.float32
    assert (digits.train_images.min(), digits.train_images.max()) == (0.0, 1.0)
    labels = np.concatenate([digits.train_labels, digits.test_labels])
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert set(digits.test_labels.tolist()) == set(range(10))


def test_the_split_is_the_same_on_every_machine() -> None:
    labels = load_digits().test_labels.astype(np.uint8).tobytes()
    assert hashlib.sha256(labels).hexdigest().startswith("28e47edf93da4b4d")


def test_source_and_licence_are_shipped_with_the_data() -> None:
    text = resources.files("dblp").joinpath("_data/LICENSE-digits.txt").read_text(encoding="utf-8")
    for words in ("Alpaydin", "CC BY 4.0", "BSD 3-Clause", "scikit-learn"):
        assert words in text


@pytest.mark.parametrize("world_size", [2, 4, 8, 65])
def test_shards_are_equal_and_disjoint(world_size: int) -> None:
    parts = [range(TRAIN_SAMPLES)[shard(TRAIN_SAMPLES, rank, world_size)] for rank in range(1, world_size)]
    assert {len(part) for part in parts} == {TRAIN_SAMPLES // (world_size - 1)}
    assert len(set().union(*parts)) == sum(map(len, parts))


@pytest.mark.parametrize(("rank", "world_size"), [(0, 4), (4, 4), (1, 1)])
def test_a_rank_that_is_no_worker_has_no_shard(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="worker"):
        shard(TRAIN_SAMPLES, rank, world_size)


def test_more_workers_than_samples() -> None:
    with pytest.raises(ValueError, match="cannot share"):
        shard(3, 1, 5)


def test_three_workers_with_batches_of_32_have_15_iterations_an_epoch() -> None:
    assert batches_per_epoch(TRAIN_SAMPLES // 3, 32) == 15


@pytest.mark.parametrize("batch_size", [1, 7, 32, 479, 1000])
def test_batches_cover_the_shard_once(batch_size: int) -> None:
    parts = list(batches(479, batch_size, seed=7, epoch=0, rank=1))
    assert len(parts) == batches_per_epoch(479, batch_size)
    assert sorted(np.concatenate(parts).tolist()) == list(range(479))


def test_order_depends_on_seed_epoch_and_rank_only() -> None:
    def order(seed: int, epoch: int, rank: int) -> list[int]:
        return np.concatenate(list(batches(50, 8, seed=seed, epoch=epoch, rank=rank))).tolist()

    assert order(7, 0, 1) == order(7, 0, 1)
    assert len({tuple(order(*key)) for key in [(7, 0, 1), (8, 0, 1), (7, 1, 1), (7, 0, 2)]}) == 4


def test_seed_words_keep_large_seeds_apart() -> None:
    assert seed_words(2**32 + 1, 2) == [1, 1, 2, 0]
    for bad in (-1, 2**64):
        with pytest.raises(ValueError, match="seed"):
            seed_words(bad)

"""Workloads against an in-memory reducer: numbering, skipped rounds, equal replicas, and checked options."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from dblp.config import Config
from dblp.errors import ConfigError
from dblp.options import ReplayOptions, options_from
from dblp.workload import EpochRow, Reduced, Replay, Vector, array_digest, workload_from

TRAIN = {"kind": "train", "epochs": 2, "batch_size": 160}
REPLAY = {"kind": "replay", "chunks": 5, "iterations": 7}


def config(workload: Mapping[str, Any]) -> Config:
    return Config(token="t", transport={"name": "tcp", "kind": "tcp"}, workload=workload, seed=7)


class Recorder:
    """A reducer of one worker: keeps what it was asked, leaves the vector as it is, skips chosen iterations."""

    def __init__(self, skip: frozenset[int] = frozenset()) -> None:
        self.skip = skip
        self.calls: list[tuple[int, int, bool]] = []
        self.norms: list[float] = []
        self.rows: list[tuple[int, EpochRow]] = []

    def all_reduce(self, flat: Vector, *, iteration: int, epoch: int, epoch_start_next: bool) -> Reduced:
        self.calls.append((iteration, epoch, epoch_start_next))
        self.norms.append(float(np.linalg.norm(flat)))
        return Reduced(iteration in self.skip, "normal", 0.0)

    def report_epoch(self, epoch: int, row: EpochRow, state: Vector) -> None:
        assert row.digest == array_digest(state)
        self.rows.append((epoch, row))


class Averager:
    """Reducers of several workers in threads that average exactly, in rank order."""

    def __init__(self, workers: int) -> None:
        self._barrier = threading.Barrier(workers, timeout=60)
        self._vectors: dict[int, Vector] = {}
        self.digests: dict[int, list[str]] = {rank: [] for rank in range(1, workers + 1)}

    def exchange(self, rank: int, flat: Vector) -> None:
        self._vectors[rank] = flat.copy()
        self._barrier.wait()
        mean = sum(self._vectors[r] for r in sorted(self._vectors)) / np.float32(len(self._vectors))
        self._barrier.wait()
        flat[:] = mean


class Member:
    """One worker's reducer of an Averager."""

    def __init__(self, group: Averager, rank: int) -> None:
        self._group, self._rank = group, rank

    def all_reduce(self, flat: Vector, *, iteration: int, epoch: int, epoch_start_next: bool) -> Reduced:
        self._group.exchange(self._rank, flat)
        return Reduced(False, "normal", 0.0)

    def report_epoch(self, epoch: int, row: EpochRow, state: Vector) -> None:
        self._group.digests[self._rank].append(row.digest)


def test_training_numbers_iterations_and_epochs() -> None:
    recorder, lines = Recorder(), list[str]()
    workload_from(config({**TRAIN, "batch_size": 500}), 1, 2).run(recorder, lines.append)
    assert recorder.calls == [
        (0, 0, False), (1, 0, False), (2, 0, True), (3, 1, False), (4, 1, False), (5, 1, True)
    ]  # fmt: skip
    assert [epoch for epoch, _ in recorder.rows] == [0, 1]
    row = recorder.rows[-1][1]
    assert row.metric == "accuracy"
    assert row.value is not None
    assert 0.0 <= row.value <= 1.0
    assert len(lines) == 2
    assert lines[0].startswith("rank 1 epoch 0: loss ")


def test_a_skipped_round_makes_no_step() -> None:
    def digests(skip: frozenset[int]) -> list[str]:
        recorder = Recorder(skip)
        workload_from(config({**TRAIN, "batch_size": 1437}), 1, 2).run(recorder, lambda _: None)
        return [row.digest for _, row in recorder.rows]

    none, second, both = digests(frozenset()), digests(frozenset({1})), digests(frozenset({0, 1}))
    assert none[0] == second[0] == second[1] != none[1]
    assert both[0] == both[1] not in none


def test_replicas_of_three_workers_are_identical_after_every_epoch() -> None:
    group = Averager(3)
    workloads = {rank: workload_from(config(TRAIN), rank, 4) for rank in (1, 2, 3)}
    threads = [
        threading.Thread(target=workload.run, args=(Member(group, rank), lambda _: None), daemon=True)
        for rank, workload in workloads.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert group.digests[1] == group.digests[2] == group.digests[3]
    assert len(set(group.digests[1])) == 2


def test_replay_numbers_epochs_and_varies_the_norm() -> None:
    recorder = Recorder()
    replay = workload_from(config({**REPLAY, "epoch_iterations": 3}), 2, 4)
    replay.run(recorder, lambda _: None)
    assert [spec.size for spec in replay.tensors] == [5 * 364]
    assert recorder.calls == [
        (0, 0, False), (1, 0, False), (2, 0, True), (3, 1, False), (4, 1, False), (5, 1, True), (6, 2, False)
    ]  # fmt: skip
    assert len(set(recorder.norms)) == 7
    assert [(epoch, row.metric, row.value, row.train_loss) for epoch, row in recorder.rows] == [
        (epoch, "none", None, None) for epoch in range(3)
    ]


def test_replay_gradients_depend_on_seed_and_rank() -> None:
    def norms(rank: int) -> list[float]:
        recorder = Recorder()
        workload_from(config(REPLAY), rank, 4).run(recorder, lambda _: None)
        return recorder.norms

    assert norms(1) == norms(1) != norms(2)


def test_replay_waits_in_place_of_computing() -> None:
    waits: list[float] = []
    options = ReplayOptions("replay", chunks=1, iterations=3, compute_s=0.25)
    Replay(options, seed=0, rank=1, chunk_values=4, wait=waits.append).run(Recorder(), lambda _: None)
    assert waits == [0.25] * 3


def test_replay_and_options_do_not_load_torch() -> None:
    code = (
        "import sys\nfrom dblp.config import Config\n"
        "from dblp.options import options_from\nfrom dblp.workload import workload_from\n"
        f"workload_from(Config('t', {{}}, {REPLAY!r}), 1, 4)\noptions_from(Config('t', {{}}, {TRAIN!r}))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("workload", "path"),
    [
        ({}, "workload.kind"),
        ({"kind": "serve"}, "workload.kind"),
        ({**TRAIN, "model": "resnet50"}, "workload.model"),
        ({**TRAIN, "data": "cifar"}, "workload.data"),
        ({**TRAIN, "epochs": 0}, "workload.epochs"),
        ({**TRAIN, "batch_size": 0}, "workload.batch_size"),
        ({**TRAIN, "batch_size": 1.5}, "workload.batch_size"),
        ({**TRAIN, "learning_rate": -1}, "workload.learning_rate"),
        ({**TRAIN, "decay": "step"}, "workload.decay"),
        ({**TRAIN, "chunks": 3}, "workload.chunks"),
        ({"kind": "replay", "chunks": 3}, "workload.iterations"),
        ({"kind": "replay", "iterations": 3}, "workload.chunks"),
        ({**REPLAY, "chunks": 0}, "workload.chunks"),
        ({**REPLAY, "compute_s": -1.0}, "workload.compute_s"),
        ({**REPLAY, "compute_s": float("inf")}, "workload.compute_s"),
        ({**REPLAY, "epoch_iterations": -1}, "workload.epoch_iterations"),
        ({**REPLAY, "epoch_iterations": "all"}, "workload.epoch_iterations"),
    ],
)
def test_bad_options_name_the_key(workload: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options_from(config(workload))
    assert ".".join(map(str, caught.value.path)) == path


def test_a_diverged_epoch_reports_no_loss() -> None:
    class Spoiler(Recorder):
        def all_reduce(self, flat: Vector, **where: Any) -> Reduced:
            flat.fill(np.nan)
            return Reduced(False, "critical", 0.0)

    recorder = Spoiler()
    workload_from(config({**TRAIN, "batch_size": 720}), 1, 2).run(recorder, lambda _: None)
    assert [row.train_loss for _, row in recorder.rows] == [None, None]

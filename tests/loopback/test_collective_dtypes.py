"""All-reduce with 16 bits a value on the wire, over real sockets."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from dblp.chunks import TensorSpec
from dblp.config import PAPER, RECOMMENDED, Profile
from dblp.dtypes import DTYPES
from dblp.errors import HandshakeError
from tests.loopback.collective_world import (
    config_of,
    free_base,
    gradient,
    masked,
    rounds_body,
    run_world,
    tensors_of,
    with_loss,
)
from tests.loopback.test_collective import DBLP, EXACT, TCP, assert_replicas_equal, vectors

SHORT = ["float16", "bfloat16"]
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of a rounding, as far as the number is not subnormal."""
TENSORS = tensors_of(31, last_values=101)  # 15 full chunks of 728 values and one of 465, an odd number


def rounded(name: str, values: Any) -> Any:
    out = np.zeros(values.shape, DTYPES[name].storage)
    DTYPES[name].encode(values, out)
    return DTYPES[name].decode(out)


def mean_of(name: str, round_: int) -> Any:
    """The mean in the server's order: each contribution rounded, the sum in float32, the mean rounded."""
    total = rounded(name, gradient(1, round_, TENSORS)).copy()
    for rank in (2, 3):
        total += rounded(name, gradient(rank, round_, TENSORS))
    return rounded(name, total / np.float32(3))


def with_dtype(name: Any, profile: Profile = RECOMMENDED, **more: Any) -> Profile:
    return dataclasses.replace(profile, wire_dtype=name, **more)


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("transport", [EXACT, TCP], ids=["bounded", "tcp"])
@pytest.mark.parametrize("base", [RECOMMENDED, PAPER], ids=["recommended", "paper"])
def test_all_ranks_get_the_same_mean_within_rounding(name: str, transport: Any, base: Profile) -> None:
    outcome = run_world(config_of(transport, with_dtype(name, base)), rounds_body(TENSORS, 3), TENSORS)
    assert_replicas_equal(outcome)
    for round_, vector in enumerate(vectors(outcome)[1]):
        assert np.array_equal(vector, mean_of(name, round_))
        own = [gradient(rank, round_, TENSORS).astype(np.float64) for rank in (1, 2, 3)]
        size = sum(np.abs(one) for one in own) / 3
        assert (np.abs(vector - sum(own) / 3) <= 2.01 * UNIT[name] * size + 2.0**-24).all()
    (received,) = outcome.events[0].named("received", round=0, worker=2)
    assert received["chunks"] == 16


@pytest.mark.parametrize("name", SHORT)
def test_half_as_many_packets_under_loss_and_replicas_stay_equal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = free_base()
    with_loss(monkeypatch, base, masked(5, lambda *_: 0.6))
    outcome = run_world(config_of(DBLP, with_dtype(name)), rounds_body(TENSORS, 3), TENSORS, base=base)
    assert_replicas_equal(outcome)
    for round_ in range(3):
        (received,) = outcome.events[0].named("received", round=round_, worker=1)
        assert (received["chunks"], received["outcome"]) == (16, "ok")


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("lossy", [False, True], ids=["clean", "50%"])
def test_error_feedback_gives_back_what_was_rounded_and_what_was_lost(
    name: str, lossy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient that lies 3/8 of a unit beyond a number of the format: with feedback the sum of many rounds is right
    to half a unit, without it 3/8 of a unit is missing in each. One worker: its mean is what it has sent."""
    base, rounds, unit = free_base(), 12, 2 * UNIT[name]
    with_loss(monkeypatch, base, masked(3, lambda d, _, round_: 0.5 * (lossy and d == "up" and round_ < rounds - 1)))
    transport = {**DBLP, "low": 0.0, "detector": {"kind": "schedule", "critical": [[rounds - 1, rounds - 1]]}}
    size = sum(tensor.size for tensor in TENSORS)

    def body(worker: Any) -> Any:
        vectors = []
        for round_ in range(rounds):
            vector = np.full(size, 1 + 3 / 8 * unit, np.float32)
            worker.all_reduce(vector, iteration=round_, epoch=0, epoch_start_next=False)
            vectors.append(vector)
        return np.sum(vectors, axis=0, dtype=np.float64)

    for feedback in (True, False):
        profile = with_dtype(name, mean="all", error_feedback=feedback)
        total = run_world(config_of(transport, profile), body, TENSORS, workers=1, base=base).well().results[1]
        error = np.abs(total - rounds * (1 + 3 / 8 * unit)).max()
        if feedback:
            assert error <= (4 if lossy else 0.5) * unit  # after losses a chunk may hold eight gradients: coarser units
        else:
            assert error >= rounds * 3 / 8 * unit * 0.99


def test_values_that_float16_is_too_small_for_are_counted() -> None:
    def body(worker: Any) -> Any:
        vector = np.zeros(sum(tensor.size for tensor in TENSORS), np.float32)
        vector[[0, 5, -1]] = (1e6, -1e6, 65504.0)
        worker.all_reduce(vector, iteration=0, epoch=0, epoch_start_next=False)
        return vector[[0, 5, -1]].tolist()

    for name, count, expected in (("float16", 2, [65504.0, -65504.0, 65504.0]), ("bfloat16", 0, None)):
        outcome = run_world(config_of(EXACT, with_dtype(name)), body, TENSORS).well()
        assert [outcome.events[rank].named("sent")[0]["saturated"] for rank in (1, 2, 3)] == [count] * 3
        assert outcome.results[1] == outcome.results[3] == (expected or outcome.results[2])
    outcome = run_world(config_of(EXACT), body, TENSORS).well()
    assert "saturated" not in outcome.events[1].named("sent")[0]


@pytest.mark.parametrize("transport", [EXACT, TCP], ids=["bounded", "tcp"])
def test_a_worker_of_another_format_is_refused(transport: Any) -> None:
    configs = {0: config_of(transport), 1: config_of(transport, with_dtype("bfloat16"))}
    tensors = (TensorSpec("w", (1000,)),)
    outcome = run_world(configs, rounds_body(tensors, 1), tensors, workers=1)
    for rank in (0, 1):
        assert isinstance(outcome.errors[rank], HandshakeError)
        assert 'dtype: "float32" here, "bfloat16" there' in str(outcome.errors[rank])

"""All-reduce of one server and three workers over real sockets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from dblp import mmsg
from dblp.chunks import need
from dblp.collective import worker_flow
from dblp.collective.bounded import Sent
from dblp.config import PAPER, RECOMMENDED, Deadlines, Profile
from dblp.io import clock
from dblp.wire import Stop
from netem.analysis import oracle
from tests.loopback.collective_world import (
    Outcome,
    config_of,
    free_base,
    gradient,
    masked,
    mean_of,
    rounds_body,
    run_world,
    tensors_of,
    with_loss,
)

TENSORS = tensors_of(30, last_values=100)
DBLP = {
    "name": "dblp",
    "kind": "bounded",
    "low": 0.008,
    "high": 0.408,
    "detector": {"kind": "schedule", "critical": [[0, 0]]},
}
MLT = {"name": "mlt", "kind": "bounded", "fixed": 0.008}
EXACT = {"name": "exact", "kind": "bounded", "fixed": 0.0}
TCP = {"name": "tcp", "kind": "tcp"}
WAITING = dataclasses.replace(RECOMMENDED, probing="stop-and-wait", send_order="shuffle")


def vectors(outcome: Outcome) -> dict[int, list[Any]]:
    return {rank: [vector for _, vector in done] for rank, done in outcome.well().results.items()}


def assert_replicas_equal(outcome: Outcome) -> None:
    first, *others = vectors(outcome).values()
    for other in others:
        assert all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


# Exact means


@pytest.mark.parametrize(
    ("transport", "profile"),
    [(EXACT, RECOMMENDED), (EXACT, PAPER), (EXACT, WAITING), (TCP, RECOMMENDED), (TCP, PAPER)],
    ids=["recommended", "paper", "stop-and-wait", "tcp", "tcp-paper"],
)
def test_without_tolerance_everybody_gets_the_exact_mean(transport: Mapping[str, Any], profile: Profile) -> None:
    outcome = run_world(config_of(transport, profile), rounds_body(TENSORS, 3), TENSORS)
    for got in vectors(outcome).values():
        for round_, vector in enumerate(got):
            assert np.array_equal(vector, mean_of(TENSORS, round_))
    assert not any(reduced.skipped for done in outcome.results.values() for reduced, _ in done)


@pytest.mark.parametrize("profile", [RECOMMENDED, PAPER], ids=["recommended", "paper"])
@pytest.mark.parametrize("ratio", [0.0, 0.6], ids=["clean", "60%"])
def test_plain_path_gives_the_same_as_the_fast_one(
    profile: Profile, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under loss that the mask repeats, stop and wait delivers the same sets whatever the path."""
    results = []
    profile = dataclasses.replace(profile, probing="stop-and-wait")
    for fast in (True, False):
        base = free_base()
        with monkeypatch.context() as patch:
            if not fast:
                patch.setattr(mmsg, "available", lambda: False)
                patch.setattr("dblp.datagrams.UDP_SEGMENT", 9999)
            with_loss(patch, base, masked(1, lambda *_: ratio))
            outcome = run_world(config_of(MLT, profile), rounds_body(TENSORS, 2), TENSORS, base=base)
            results.append((vectors(outcome), digests(outcome)))
    assert results[0][1] == results[1][1]
    for rank, got in results[0][0].items():
        assert all(np.array_equal(a, b) for a, b in zip(got, results[1][0][rank], strict=True))


def digests(outcome: Outcome) -> dict[tuple[int, int], str]:
    return {(e["round"], e["worker"]): e["delivered_digest"] for e in outcome.events[0].named("received")}


# Bounded loss against the oracle


def test_packets_passes_and_sets_are_what_the_mask_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    base, chunks = free_base(), 30
    with_loss(monkeypatch, base, masked(5, lambda direction, *_: 0.8 if direction == "up" else 0.0))
    profile = dataclasses.replace(RECOMMENDED, probing="stop-and-wait", send_order="sequential")
    outcome = run_world(config_of(DBLP, profile), rounds_body(TENSORS, 2), TENSORS, base=base)
    outcome.well()
    for round_, tolerance, phase in ((0, 0.008, "critical"), (1, 0.408, "normal")):
        for rank in (1, 2, 3):
            predicted = oracle.predict(
                np.arange(chunks), need(chunks, tolerance), chunks, oracle.mask_drop(5, "up", rank, round_, 0.8)
            )
            (sent,) = outcome.events[rank].named("sent", round=round_)
            (got,) = outcome.events[0].named("received", round=round_, worker=rank)
            assert (sent["passes"], sent["packets_at_need"]) == (predicted.passes, predicted.packets_at_need)
            assert (got["completing_sequence"], got["completing_pass"]) == predicted.completing
            assert (got["phase"], got["delivered"], got["outcome"]) == (phase, need(chunks, tolerance), "ok")
            assert got["after_need"] <= sent["packets"] - sent["packets_at_need"]
    assert_replicas_equal(outcome)


def test_mean_is_over_the_workers_that_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    base = free_base()
    with_loss(monkeypatch, base, masked(3, lambda direction, *_: 0.5 if direction == "up" else 0.0))
    outcome = run_world(
        config_of({"kind": "bounded", "fixed": 0.5}, WAITING), rounds_body(TENSORS, 1), TENSORS, base=base
    )
    own = [gradient(rank, 0, TENSORS) for rank in (1, 2, 3)]
    mean = vectors(outcome)[1][0]
    assert_replicas_equal(outcome)
    kinds = set()
    for chunk in range(30):
        part = slice(chunk * 364, min((chunk + 1) * 364, len(mean)))
        candidates = {}
        for chosen in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2), ()):
            total = np.zeros(len(mean[part]), np.float32)
            for index in chosen:
                total = total + own[index][part]
            candidates[chosen] = total / np.float32(max(1, len(chosen)))
        matching = [chosen for chosen, value in candidates.items() if np.array_equal(value, mean[part])]
        assert matching, f"chunk {chunk} is no mean of any set of workers"
        kinds.add(len(matching[0]))
    assert kinds >= {1, 2, 3}


@pytest.mark.parametrize("fill", ["stale", "zero"])
def test_bounded_broadcast_fills_what_is_missing(fill: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round 0 arrives whole, round 1 with 60 % loss down: stale keeps round 0's mean, zero clears it."""
    base = free_base()
    with_loss(monkeypatch, base, masked(3, lambda direction, _, round_: 0.6 * (direction == "down" and round_ == 1)))
    profile = dataclasses.replace(RECOMMENDED, broadcast="bounded", broadcast_fill=fill, send_order="shuffle")
    transport = {**DBLP, "low": 0.0}
    outcome = run_world(config_of(transport, profile), rounds_body(TENSORS, 2), TENSORS, base=base)
    means = [np.resize(mean_of(TENSORS, 0), 30 * 364).reshape(30, 364), None]
    seen = []
    for rank, got in vectors(outcome).items():
        assert np.array_equal(got[0], mean_of(TENSORS, 0))
        (received,) = outcome.events[rank].named("received", round=1)
        assert received["delivered"] == received["need"] == need(30, 0.408)
        kept = sum(
            np.array_equal(got[1][364 * c : 364 * c + 364], means[0][c] if fill == "stale" else np.zeros(364))
            for c in range(29)
        )
        assert kept >= 30 - received["delivered"] - 1
        seen.append(got[1])
    assert not np.array_equal(seen[0], seen[1])  # each worker misses others: the replicas diverge


def test_error_feedback_gives_back_what_was_not_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round 0 loses 41 % of every gradient, round 1 nothing: both sums together are then exact."""
    base = free_base()
    with_loss(monkeypatch, base, masked(3, lambda direction, _, round_: 0.5 * (direction == "up" and round_ == 0)))
    transport = {**DBLP, "low": 0.0, "detector": {"kind": "schedule", "critical": [[1, 1]]}}
    profile = dataclasses.replace(RECOMMENDED, mean="all", error_feedback=True)
    got = vectors(run_world(config_of(transport, profile), rounds_body(TENSORS, 2), TENSORS, base=base))[2]
    exact = mean_of(TENSORS, 0).astype(np.float64) + mean_of(TENSORS, 1)
    assert not np.allclose(got[0], mean_of(TENSORS, 0))
    assert np.allclose(got[0].astype(np.float64) + got[1], exact, atol=1e-5)


def test_always_reliable_tensors_arrive_whatever_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    base = free_base()
    with_loss(monkeypatch, base, masked(3, lambda direction, *_: 0.6 if direction == "up" else 0.0))
    profile = dataclasses.replace(RECOMMENDED, always_reliable=("bias",), send_order="sequential")
    outcome = run_world(
        config_of({"kind": "bounded", "fixed": 0.408}, profile), rounds_body(TENSORS, 3), TENSORS, base=base
    )
    for round_, vector in enumerate(vectors(outcome)[1]):
        assert np.array_equal(vector[-10:], mean_of(TENSORS, round_)[-10:])


# Deadlines


SHORT = Deadlines(connect_s=8.0, round_s=0.4, step_s=8.0)


@pytest.mark.parametrize("profile", [RECOMMENDED, PAPER], ids=["recommended", "paper"])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_round_that_misses_its_deadline_is_skipped_by_all(
    profile: Profile, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = free_base()
    with_loss(monkeypatch, base, masked(3, lambda d, rank, round_: float((d, rank, round_) == (direction, 2, 1))))
    config = config_of(EXACT, profile, deadlines=SHORT)
    outcome = run_world(config, rounds_body(TENSORS, 3), TENSORS, base=base)
    for rank, got in vectors(outcome).items():
        assert [reduced.skipped for reduced, _ in outcome.results[rank]] == [False, True, False]
        assert np.array_equal(got[0], mean_of(TENSORS, 0))
        assert np.array_equal(got[1], gradient(rank, 1, TENSORS))  # untouched
        assert np.array_equal(got[2], mean_of(TENSORS, 2))
    sender = outcome.events[2 if direction == "up" else 0]
    worst = [e for e in sender.named("sent", round=1, direction=direction) if e["worker"] == 2]
    assert [e["outcome"] for e in worst] == ["deadline"]
    assert all(e["outcome"] == "ok" for e in sender.named("sent", round=2))


def test_deadline_may_accept_what_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    base = free_base()
    with_loss(monkeypatch, base, masked(3, lambda d, rank, round_: float((d, rank, round_) == ("up", 2, 0))))
    profile = dataclasses.replace(RECOMMENDED, on_deadline="accept")
    outcome = run_world(config_of(EXACT, profile, deadlines=SHORT), rounds_body(TENSORS, 2), TENSORS, base=base)
    expected = (gradient(1, 0, TENSORS) + gradient(3, 0, TENSORS)) / np.float32(2)
    for got in vectors(outcome).values():
        assert np.array_equal(got[0], expected)
        assert np.array_equal(got[1], mean_of(TENSORS, 1))


def test_stream_that_misses_its_deadline_is_censored_and_connects_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 2's values of round 1 never leave it; the others skip the step too, and round 2 is exact again."""
    genuine = worker_flow.send_stream

    def mark(which: Any) -> Any:
        which.link.own_rank = which.rank
        return rounds_body(TENSORS, 3)(which)

    def held_back(link: Any, sock: Any, session: int, round_: int, direction: int, values: Any, deadline: float) -> Any:
        if round_ == 1 and link.own_rank == 2:
            return only_wait_for_stop(link, round_, deadline)
        return genuine(link, sock, session, round_, direction, values, deadline)

    monkeypatch.setattr(worker_flow, "send_stream", held_back)
    outcome = run_world(config_of(TCP, deadlines=SHORT), mark, TENSORS)
    for rank, got in vectors(outcome).items():
        assert [reduced.skipped for reduced, _ in outcome.results[rank]] == [False, True, False]
        assert np.array_equal(got[2], mean_of(TENSORS, 2))
    assert [e["outcome"] for e in outcome.events[2].named("sent")] == ["ok", "censored", "ok"]


def only_wait_for_stop(link: Any, round_: int, deadline: float) -> Any:
    sent = Sent(began_s=clock())
    stop = link.wait_for(Stop, lambda frame: frame.round == round_, deadline - clock(), "testing")
    sent.ended_s = clock()
    return sent, stop


def test_error_feedback_keeps_the_whole_gradient_of_a_skipped_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 2 delivers nothing in round 0, the others everything: none of it was applied, so all of it comes later."""
    base = free_base()
    with_loss(monkeypatch, base, masked(3, lambda d, rank, round_: float((d, rank, round_) == ("up", 2, 0))))
    profile = dataclasses.replace(RECOMMENDED, error_feedback=True)
    config = config_of(EXACT, profile, deadlines=SHORT)
    outcome = run_world(config, rounds_body(TENSORS, 2), TENSORS, base=base)
    exact = mean_of(TENSORS, 0).astype(np.float64) + mean_of(TENSORS, 1)
    for got in vectors(outcome).values():
        assert np.allclose(got[1], exact, atol=1e-5)

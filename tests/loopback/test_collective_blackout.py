"""Rounds in which nothing gets through, not even TCP, and that no worker may end otherwise than the others."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from dblp.collective import Server, server_flow, worker_flow
from dblp.collective.bounded import Sent
from dblp.collective.link import Link
from dblp.config import PAPER, RECOMMENDED, Deadlines, Profile
from dblp.datagrams import DataSocket
from dblp.io import Control, Hints, clock, wait
from dblp.wire import End, Frame
from tests.loopback.collective_world import (
    Outcome,
    Recorder,
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

TENSORS = tensors_of(12)
EXACT = {"name": "exact", "kind": "bounded", "fixed": 0.0}
TCP = {"name": "tcp", "kind": "tcp"}
ROUND_S = 0.4
SHORT = Deadlines(connect_s=8.0, round_s=ROUND_S, step_s=12.0)


class Blackout:
    """While it is on, datagrams are lost and control frames wait in the sender, as with TCP on a dead path."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = False
        self._lock = threading.RLock()
        self._held: list[tuple[Control, Frame]] = []
        self._send = Control.send
        lost = self

        def control_send(control: Control, frame: Frame, deadline: float, round_: int = 0) -> None:
            with lost._lock:
                if lost.on:
                    lost._held.append((control, frame))
                    return
            lost._send(control, frame, deadline, round_)

        for kind in (Hints, DataSocket):
            monkeypatch.setattr(kind, "send", self._losing(kind.send))
        monkeypatch.setattr(Control, "send", control_send)
        for flow in (server_flow, worker_flow):
            monkeypatch.setattr(flow, "send_stream", self._stalling(flow.send_stream))

    def _stalling(self, genuine: Any) -> Any:
        def send_stream(*args: Any) -> Any:
            if not self.on:
                return genuine(*args)
            sent = Sent(began_s=clock())
            wait([], args[-1] - clock())
            sent.ended_s = clock()
            return sent, None

        return send_stream

    def _losing(self, genuine: Any) -> Any:
        return lambda sock, *rest: 0 if self.on else genuine(sock, *rest)

    def off(self) -> None:
        with self._lock:
            self.on = False
            for control, frame in self._held:
                self._send(control, frame, clock() + 5.0)
            self._held.clear()


class Gated(Recorder):
    """A worker's testbed: a gate opens when all workers stand before it; the last one switches the blackout."""

    def __init__(self, barrier: threading.Barrier, switch: Mapping[int, Any]) -> None:
        super().__init__(frozenset(switch))
        self.barrier, self.switch = barrier, switch

    def gate(self, round_: int) -> None:
        if self.barrier.wait(15.0) == 0:
            self.switch[round_]()
        self.barrier.wait(15.0)


def skips(outcome: Outcome) -> list[list[bool]]:
    return [[reduced.skipped for reduced, _ in done] for done in outcome.well().results.values()]


def assert_exact(outcome: Outcome) -> None:
    for rank, done in outcome.results.items():
        for round_, (reduced, vector) in enumerate(done):
            expected = gradient(rank, round_, TENSORS) if reduced.skipped else mean_of(TENSORS, round_)
            assert np.array_equal(vector, expected), f"worker {rank}, round {round_}"


def blacked_out(
    monkeypatch: pytest.MonkeyPatch, transport: Mapping[str, Any], profile: Profile, since: str, rounds: int = 4
) -> Outcome:
    """A run whose round 1 is dark from its start, or from its broadcast, until all workers stand before round 2."""
    blackout = Blackout(monkeypatch)
    reduce = Server.reduce

    def dark(server: Server, round_: int, uplinks: Any) -> bool:
        skipped = reduce(server, round_, uplinks)
        blackout.on = blackout.on or (since == "broadcast" and round_ == 1)
        return skipped

    monkeypatch.setattr(Server, "reduce", dark)
    barrier = threading.Barrier(3)
    switch = {1: lambda: setattr(blackout, "on", since == "start"), 2: blackout.off}
    config = config_of(transport, profile, deadlines=SHORT)
    recorders = {rank: Gated(barrier, switch) for rank in (1, 2, 3)}
    return run_world(config, rounds_body(TENSORS, rounds), TENSORS, recorders=recorders)


ACCEPT = dataclasses.replace(RECOMMENDED, on_deadline="accept")


@pytest.mark.parametrize("since", ["start", "broadcast"])
@pytest.mark.parametrize(
    ("transport", "profile"),
    [(EXACT, RECOMMENDED), (EXACT, PAPER), (EXACT, ACCEPT), (TCP, RECOMMENDED)],
    ids=["recommended", "paper", "accept", "tcp"],
)
def test_round_in_which_nothing_gets_through_is_left_by_all_in_bounded_time(
    transport: Mapping[str, Any], profile: Profile, since: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    outcome = blacked_out(monkeypatch, transport, profile, since)
    assert skips(outcome) == [[False, True, False, False]] * 3
    assert_exact(outcome)
    assert time.monotonic() - began < SHORT.step_s / 2


def test_worker_that_is_cut_off_costs_a_deadline_and_not_the_time_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks and frames of worker 2 stay away in round 1, those of the others start the deadline."""
    base = free_base()
    with_loss(monkeypatch, base, masked(3, lambda d, rank, round_: float((d, rank, round_) == ("up", 2, 1))))
    tell, hint, send = Link.tell, Link.hint, Control.send

    def cut(link: Link) -> bool:
        return link.round == 1 and getattr(link, "rank", 0) == 2

    def control_send(control: Control, frame: Frame, deadline: float, round_: int = 0) -> None:
        if not (getattr(control, "rank", 0) == 2 and getattr(frame, "round", 0) == 1):
            send(control, frame, deadline, round_)

    def body(worker: Any) -> Any:
        worker.link.rank = worker.link.control.rank = worker.rank
        return rounds_body(TENSORS, 4)(worker)

    monkeypatch.setattr(Link, "tell", lambda link, *rest: None if cut(link) else tell(link, *rest))
    monkeypatch.setattr(Link, "hint", lambda link, *rest: None if cut(link) else hint(link, *rest))
    monkeypatch.setattr(Control, "send", control_send)
    began = time.monotonic()
    outcome = run_world(config_of(EXACT, deadlines=SHORT), body, TENSORS, base=base)
    assert skips(outcome) == [[False, True, False, False]] * 3
    assert_exact(outcome)
    assert time.monotonic() - began < SHORT.step_s / 2


@pytest.mark.parametrize("transport", [EXACT, TCP], ids=["bounded", "tcp"])
def test_worker_that_has_confirmed_its_broadcast_waits_for_the_verdict(
    transport: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of round 1, which counts, comes late to worker 1. Leaving the round would make its replica differ."""
    genuine = Link.end

    def late(link: Link, end: End, deadline: float) -> None:
        if end.round == 1 and link.peer.startswith("worker 1"):
            threading.Timer(4 * ROUND_S, genuine, (link, end, deadline + 4 * ROUND_S)).start()
        else:
            genuine(link, end, deadline)

    monkeypatch.setattr(Link, "end", late)
    outcome = run_world(config_of(transport, deadlines=SHORT), rounds_body(TENSORS, 9), TENSORS)
    first, *others = skips(outcome)
    assert first[:2] == [False, False]
    assert all(other == first for other in others)
    assert_exact(outcome)

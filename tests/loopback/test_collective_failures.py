"""What goes wrong between server and workers: every side gets an error that names the cause, in bounded time."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dblp import wire
from dblp.chunks import TensorSpec
from dblp.collective import Server, Worker
from dblp.collective.admission import HELLO_LIMIT_S, HELLO_MAX_BYTES
from dblp.collective.handshake import Terms, hello
from dblp.config import PAPER, RECOMMENDED, Config, Deadlines
from dblp.errors import ConnectError, HandshakeError, PeerLost
from dblp.reducer import EpochRow
from dblp.wire import Epoch, Hello, Probe, Start, Welcome, encode
from tests.loopback.collective_world import (
    LIMIT_S,
    Outcome,
    config_of,
    free_base,
    gradient,
    mean_of,
    rounds_body,
    run_world,
    tensors_of,
)

TENSORS = tensors_of(6)
EXACT = {"name": "exact", "kind": "bounded", "fixed": 0.0}
TCP = {"name": "tcp", "kind": "tcp"}
QUICK = Deadlines(connect_s=1.5, round_s=2.0, step_s=4.0)
GOOD = config_of(EXACT)


def message(outcome: Outcome, rank: int, kind: type[BaseException]) -> str:
    error = outcome.errors.get(rank)
    assert isinstance(error, kind), f"rank {rank}: {error!r}"
    return str(error)


# The handshake


MISMATCHES: dict[str, tuple[Config, tuple[TensorSpec, ...], str]] = {
    "tensor name": (GOOD, (TensorSpec("other", (TENSORS[0].size,)), TENSORS[1]), "tensors"),
    "tensor shape": (GOOD, (TENSORS[0], TensorSpec("bias", (2, 5))), "tensors"),
    "tensor size": (GOOD, tensors_of(7), "chunks: "),
    "profile": (config_of(EXACT, PAPER), TENSORS, "profile"),
    "tolerance": (config_of({**EXACT, "fixed": 0.008}), TENSORS, "transport"),
    "seed": (config_of(EXACT, seed=8), TENSORS, "seed: 7 here, 8 there"),
    "mtu": (config_of(EXACT, mtu=1400), TENSORS, "chunk_values: 364 here, 339 there"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatch_is_told_to_everybody(case: str) -> None:
    config, tensors, words = MISMATCHES[case]
    good, other = (dataclasses.replace(c, deadlines=QUICK) for c in (GOOD, config))
    outcome = run_world(
        {0: good, 1: good, 2: other, 3: good}, rounds_body(TENSORS, 1), {1: TENSORS, 2: tensors, 3: TENSORS}
    )
    assert not outcome.hanging
    for rank in (0, 2):
        assert words in message(outcome, rank, HandshakeError)
        assert "does not agree" in message(outcome, rank, HandshakeError)
    for rank in (1, 3):  # connected already, or turned away
        assert isinstance(outcome.errors[rank], HandshakeError | ConnectError | PeerLost)


def test_other_token_is_refused_and_the_server_names_who_is_missing() -> None:
    config = config_of(EXACT, deadlines=QUICK)
    outcome = run_world(
        {0: config, 1: config, 2: dataclasses.replace(config, token="beef"), 3: config},
        rounds_body(TENSORS, 1),
        TENSORS,
    )
    assert "the token is that of another run" in message(outcome, 2, HandshakeError)
    assert "worker(s) [2] did not connect within 1.5 s" in message(outcome, 0, ConnectError)
    for rank in (1, 3):
        assert "worker(s) [2] did not connect" in message(outcome, rank, HandshakeError)


def test_second_worker_of_a_rank_is_refused_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    base = free_base()
    refused: list[bytes] = []
    first_is_in = threading.Event()
    genuine = Server._agree

    def agree(server: Server, control: Any, terms: Terms) -> None:
        genuine(server, control, terms)
        if "worker 1" in control.peer:
            first_is_in.set()

    def impostor() -> None:
        assert first_is_in.wait(5.0)
        with socket.create_connection(("127.0.0.1", base)) as sock:
            sock.settimeout(5.0)
            sock.sendall(encode(hello(GOOD, 1, 0, Terms.of(GOOD, TENSORS))))
            refused.append(sock.recv(1000))

    monkeypatch.setattr(Server, "_agree", agree)
    outcome = run_world(GOOD, rounds_body(TENSORS, 1), TENSORS, base=base, before={3: impostor}).well()
    assert b"rank 1 is already connected" in refused[0]
    assert np.array_equal(outcome.results[3][0][1], mean_of(TENSORS, 0))


def wait_for_port(base: int) -> None:
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", base), timeout=1.0).close()
        except OSError:
            continue
        return


STRANGERS = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "other version": b"\0\0\0\x14\x02\x01" + bytes(20),
    "no hello": encode(Start(0, 1.0, 0)),
    "rank 0": encode(Hello(bytes(16), 0, 0, b"")),
    "closes": b"",
}


@pytest.mark.parametrize("case", STRANGERS)
def test_stranger_on_the_port_does_not_count(case: str) -> None:
    base = free_base()

    def stranger() -> None:
        wait_for_port(base)
        with socket.create_connection(("127.0.0.1", base)) as sock:
            sock.sendall(STRANGERS[case])
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(5.0)
            try:
                while sock.recv(1000):
                    continue
            except ConnectionResetError:
                return

    outcome = run_world(GOOD, rounds_body(TENSORS, 1), TENSORS, base=base, before={2: stranger})
    assert np.array_equal(outcome.well().results[2][0][1], mean_of(TENSORS, 0))


def test_silent_strangers_hold_nobody_up() -> None:
    """Each would cost the server its time for a Hello, one after the other."""
    base = free_base()
    strangers: list[socket.socket] = []

    def connect() -> None:
        wait_for_port(base)
        strangers.extend(socket.create_connection(("127.0.0.1", base)) for _ in range(8))

    began = time.monotonic()
    outcome = run_world(GOOD, rounds_body(TENSORS, 1), TENSORS, base=base, before={1: connect, 2: connect, 3: connect})
    assert np.array_equal(outcome.well().results[2][0][1], mean_of(TENSORS, 0))
    assert time.monotonic() - began < HELLO_LIMIT_S
    for sock in strangers:
        sock.close()


def test_frame_of_a_stranger_is_limited_before_it_is_read() -> None:
    base = free_base()
    closed = []

    def flood() -> None:
        wait_for_port(base)
        with socket.create_connection(("127.0.0.1", base)) as sock:
            sock.settimeout(5.0)
            sock.sendall((HELLO_MAX_BYTES + 1).to_bytes(4, "big") + b"\x01\x01")
            closed.append(sock.recv(100))

    run_world(GOOD, rounds_body(TENSORS, 1), TENSORS, base=base, before={2: flood}).well()
    assert closed == [b""]


def test_thread_that_accepts_data_connections_does_not_fail_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(server: Server, control: Any, hello: Hello) -> None:
        control.close()
        raise RuntimeError("unexpected")

    monkeypatch.setattr(Server, "_take_data", broken)
    outcome = run_world(config_of(TCP, deadlines=QUICK), rounds_body(TENSORS, 1), TENSORS)
    assert not outcome.hanging
    assert "RuntimeError: unexpected" in str(outcome.errors[0])
    for rank in (1, 2, 3):
        assert "RuntimeError: unexpected" in message(outcome, rank, HandshakeError)


def test_unusable_metadata_is_a_clear_error_for_all() -> None:
    base = free_base()

    def garbage() -> None:
        wait_for_port(base)
        frame = dataclasses.replace(hello(GOOD, 2, 0, None), metadata=b'{"tensors": 5}')
        with socket.create_connection(("127.0.0.1", base)) as sock:
            sock.settimeout(5.0)
            sock.sendall(encode(frame))
            assert b"unusable metadata" in sock.recv(1000)
        raise HandshakeError("told")

    config = config_of(EXACT, deadlines=QUICK)
    outcome = run_world(config, rounds_body(TENSORS, 1), TENSORS, base=base, before={2: garbage})
    assert "worker 2 (127.0.0.1) sent unusable metadata" in str(outcome.errors[0])
    assert str(outcome.errors[2]) == "told"
    assert set(outcome.errors) == {0, 1, 2, 3}
    assert not outcome.hanging


def test_no_server_is_a_connect_error_with_address_and_limit() -> None:
    base = free_base()
    config = config_of(EXACT, deadlines=dataclasses.replace(QUICK, connect_s=0.3))

    def no_server() -> None:
        raise HandshakeError("never started")

    outcome = run_world(config, rounds_body(TENSORS, 1), TENSORS, base=base, workers=1, before={0: no_server})
    assert f"no connection to the server at 127.0.0.1:{base} within 0.3 s" in message(outcome, 1, ConnectError)


def test_port_in_use_is_a_connect_error_with_the_port() -> None:
    base = free_base()
    with socket.create_server(("127.0.0.1", base)):
        outcome = run_world(config_of(EXACT, deadlines=QUICK), rounds_body(TENSORS, 1), TENSORS, base=base, workers=1)
    assert f"TCP port {base}: Address already in use" in message(outcome, 0, ConnectError)
    assert isinstance(outcome.errors[1], ConnectError)


def test_late_worker_and_late_server_are_waited_for() -> None:
    base, pause = free_base(), threading.Event()
    outcome = run_world(
        GOOD,
        rounds_body(TENSORS, 1),
        TENSORS,
        base=base,
        before={0: lambda: pause.wait(0.2), 3: lambda: pause.wait(0.5)},
    )
    assert np.array_equal(outcome.well().results[3][0][1], mean_of(TENSORS, 0))


# A worker that dies


class Died(Exception):
    """Stands for the end of the process: the kernel closes its connections."""


def dies_before_sending(worker: Worker) -> None:
    raise Died


def dies_while_sending(worker: Worker) -> None:
    worker.all_reduce(gradient(2, 0, TENSORS), iteration=0, epoch=0, epoch_start_next=False)
    worker.link.advance(1)
    worker.link.tell(Start(1, 1.0, 0), time.monotonic() + 1.0)
    if worker.link.data is not None:
        worker.link.control.send(Probe(1, 0, 0, 0), time.monotonic() + 1.0)
    raise Died


def dies_before_the_broadcast(worker: Worker) -> None:
    genuine = worker.flow.receive

    def receive(round_: int) -> Any:
        if round_ == 1:
            raise Died
        return genuine(round_)

    worker.flow.receive = receive  # type: ignore[method-assign]
    rounds_body(TENSORS, 2)(worker)


@pytest.mark.parametrize("transport", [EXACT, TCP], ids=["bounded", "tcp"])
@pytest.mark.parametrize("profile", [RECOMMENDED, PAPER], ids=["recommended", "paper"])
@pytest.mark.parametrize("death", [dies_before_sending, dies_while_sending, dies_before_the_broadcast])
def test_worker_that_dies_is_named_to_everybody(
    transport: dict[str, Any], profile: Any, death: Callable[[Worker], Any]
) -> None:
    config, began = config_of(transport, profile, deadlines=QUICK), time.monotonic()
    body = rounds_body(TENSORS, 3)
    outcome = run_world(config, {1: body, 2: death, 3: body}, TENSORS)
    assert time.monotonic() - began < QUICK.step_s + 2 * QUICK.round_s
    assert not outcome.hanging
    assert "lost worker 2 (127.0.0.1) in round" in message(outcome, 0, PeerLost)
    for rank in (1, 3):
        assert "lost worker 2 (127.0.0.1) in round" in message(outcome, rank, HandshakeError)


def test_server_that_dies_is_named_by_every_worker() -> None:
    base = free_base()
    config = config_of(EXACT, deadlines=QUICK)

    def false_server() -> None:
        with socket.create_server(("127.0.0.1", base)) as listener:
            listener.settimeout(5.0)
            welcome = encode(Welcome(5, json.dumps({"phase": "normal", "tolerance": 0.0, "window": 8}).encode()))
            held = []
            for _ in range(3):
                sock, _ = listener.accept()
                sock.sendall(welcome)
                held.append(sock)
            for sock in held:
                sock.settimeout(5.0)
                sock.recv(100)
                sock.close()
        raise Died

    outcome = run_world(config, rounds_body(TENSORS, 1), TENSORS, base=base, before={0: false_server})
    assert not outcome.hanging
    for rank in (1, 2, 3):
        assert "lost server (127.0.0.1) in round 0" in message(outcome, rank, PeerLost)


def test_workers_that_are_not_at_the_same_point_are_told_so() -> None:
    config = config_of(EXACT, deadlines=QUICK)
    body = rounds_body(TENSORS, 2)
    outcome = run_world(config, {1: body, 2: rounds_body(TENSORS, 1), 3: body}, TENSORS)
    assert not outcome.hanging
    assert "not at the same point" in str(outcome.errors[0])
    assert "not at the same point" in message(outcome, 1, HandshakeError)


# Replicas


def epochs_body(digest: Callable[[int], str], state: Callable[[int], Any]) -> Callable[[Worker], None]:
    def body(worker: Worker) -> None:
        for epoch in range(2):
            vector = gradient(worker.rank, epoch, TENSORS)
            worker.all_reduce(vector, iteration=epoch, epoch=epoch, epoch_start_next=True)
            worker.report_epoch(epoch, EpochRow(0.5, "none", None, 0.1, digest(worker.rank)), state(worker.rank))

    return body


@pytest.mark.parametrize("transport", [EXACT, TCP], ids=["bounded", "tcp"])
def test_equal_replicas_are_compared_by_digest_alone(transport: dict[str, Any]) -> None:
    outcome = run_world(
        config_of(transport), epochs_body(lambda rank: "ab" * 32, lambda rank: np.ones(4, np.float32)), TENSORS
    ).well()
    assert outcome.events[0].named("replicas") == [
        {"event": "replicas", "epoch": epoch, "identical": True, "divergence": 0.0} for epoch in (0, 1)
    ]
    assert [e["epoch"] for e in outcome.events[3].named("epoch", digest="ab" * 32, worker=3)] == [0, 1]


def test_unequal_replicas_send_their_state_and_the_divergence_is_measured() -> None:
    def state(rank: int) -> Any:
        return np.array([3.0, 4.0, 0.0, 1.0 * (rank == 2)], np.float32)

    outcome = run_world(GOOD, epochs_body(lambda rank: f"{rank:02x}" * 32, state), TENSORS).well()
    mean = np.array([3.0, 4.0, 0.0, 1 / 3])
    expected = (2 / 3) / np.linalg.norm(mean)
    for event in outcome.events[0].named("replicas"):
        assert event["identical"] is False
        assert event["divergence"] == pytest.approx(expected)


def test_digest_that_is_no_hexadecimal_is_the_callers_mistake() -> None:
    config = config_of(EXACT, deadlines=QUICK)
    outcome = run_world(
        config, epochs_body(lambda rank: "no digest", lambda rank: np.ones(1)), TENSORS, limit_s=LIMIT_S
    )
    assert "is not hexadecimal: 'no digest'" in str(outcome.errors[1])
    assert not outcome.hanging


def test_frame_of_the_epoch_carries_the_first_32_bytes_of_the_digest() -> None:
    assert wire.encode(Epoch(1, 5, b"\xab" * 32))[-32:] == b"\xab" * 32

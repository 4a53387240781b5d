"""A server and its workers as threads of one process on loopback, with loss decided by the repeatable mask.

Loss is taken at the receiving socket, after the kernel: no privileges needed, and what arrives is what a lossy
link would have let through. Every wait is limited; a thread that is still alive at the limit fails the test.
"""

from __future__ import annotations

import functools
import itertools
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from dblp.chunks import IntArray, Layout, TensorSpec
from dblp.collective import Server, Worker
from dblp.config import Config, Deadlines, Env, Profile
from dblp.datagrams import DataSocket, Received
from dblp.wire import chunk_values
from netem.links import mask

LIMIT_S = 20.0
DEADLINES = Deadlines(connect_s=8.0, round_s=5.0, step_s=8.0)
BASES = 24
"""Worlds of three workers that a block of ports has room for, 4 apart."""
_slots = itertools.count()


@functools.cache
def _block() -> tuple[int, socket.socket]:
    """A block of 500 ports that no other test process uses: its last port is held as long as this process lives."""
    for block in range(10500, 20500, 500):
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", block + 499))
        except OSError:
            claim.close()
            continue
        return block, claim
    raise RuntimeError("no free block of ports in 10500..20500")


def free_base() -> int:
    """A control port whose companions (data, hints, data connection) of three workers are free too."""
    block, _ = _block()
    for _ in range(BASES):
        base = block + 4 * (next(_slots) % BASES)
        if all(_free(base + offset) for offset in (0, 1, 101, 102, 103, 201, 202, 203, 301, 302, 303, 401, 402, 403)):
            return base
    raise RuntimeError(f"no free ports in {block}..{block + 499}")


def _free(port: int) -> bool:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as probe:
            if kind == socket.SOCK_STREAM:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True


def config_of(transport: Mapping[str, Any], profile: Profile | None = None, **more: Any) -> Config:
    return Config(
        **{
            "token": "00ff",
            "transport": transport,
            "workload": {"kind": "replay", "chunks": 1, "iterations": 1},
            "seed": 7,
            "profile": profile or Profile(),
            "deadlines": DEADLINES,
            **more,
        }
    )


def tensors_of(chunks: int, last_values: int = 364) -> tuple[TensorSpec, ...]:
    """Tensors that fill `chunks` chunks at MTU 1500, the last one with `last_values` numbers."""
    total = (chunks - 1) * chunk_values(1500) + last_values
    return (TensorSpec("first", (total - 10,)), TensorSpec("bias", (10,)))


def gradient(rank: int, round_: int, tensors: Sequence[TensorSpec]) -> Any:
    size = sum(tensor.size for tensor in tensors)
    return np.random.default_rng([rank, round_]).standard_normal(size, dtype=np.float32)


class Recorder:
    """Events in memory."""

    def __init__(self, gates: frozenset[int] = frozenset()) -> None:
        self.gates = gates
        self.events: list[dict[str, Any]] = []

    def emit(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def gate(self, round_: int) -> None:
        self.events.append({"event": "gate", "round": round_})

    def socket(self, kind: str, rcvbuf: int, sndbuf: int) -> socket.socket | None:
        return None

    def close(self) -> None:
        return

    def named(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event and all(e.get(k) == v for k, v in fields.items())]


Loss = Callable[[str, int, int, IntArray, IntArray], Any]
"""(direction, rank of the worker, round, sequences, passes) -> which datagrams are lost."""


def masked(seed: int, ratio: Callable[[str, int, int], float]) -> Loss:
    """The mask with a loss ratio that depends on (direction, rank, round)."""

    def lost(direction: str, rank: int, round_: int, sequences: IntArray, passes: IntArray) -> Any:
        limit = mask.threshold(ratio(direction, rank, round_))
        return mask.drops(mask.port_state(seed, direction, rank), (round_, sequences, passes << 16), limit)

    return lost


def with_loss(monkeypatch: pytest.MonkeyPatch, base: int, loss: Loss) -> None:
    """Every data socket of this world loses on receiving what `loss` says; its port tells direction and rank."""
    genuine = DataSocket.receive

    def receive(self: DataSocket, round_: int) -> Received | None:
        got = genuine(self, round_)
        if got is None or not len(got.rows):
            return got
        offset = self.sock.getsockname()[1] - base
        direction = "up" if offset < 200 else "down"
        kept = ~loss(direction, offset % 100, round_, got.sequences, got.passes)
        return Received(got.rows[kept], got.sequences[kept], got.passes[kept])

    monkeypatch.setattr(DataSocket, "receive", receive)


@dataclass
class Outcome:
    """By rank: what the body returned, what was raised, and the events."""

    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    events: dict[int, Recorder] = field(default_factory=dict)
    hanging: list[int] = field(default_factory=list)

    def well(self) -> Outcome:
        """Itself, after making sure that nobody failed or hangs."""
        assert not self.hanging, f"ranks {self.hanging} hang; errors {self.errors}"
        if self.errors:
            raise AssertionError(f"{self.errors}") from next(iter(self.errors.values()))
        return self


Body = Callable[[Worker], Any]


def run_world(
    config: Config | Mapping[int, Config],
    body: Body | Mapping[int, Body],
    tensors: Sequence[TensorSpec] | Mapping[int, Sequence[TensorSpec]],
    *,
    base: int | None = None,
    workers: int = 3,
    limit_s: float = LIMIT_S,
    before: Mapping[int, Callable[[], Any]] | None = None,
    recorders: Mapping[int, Any] | None = None,
) -> Outcome:
    """Server and workers to their end. `before[rank]` runs in the rank's thread before it connects."""
    base = base or free_base()
    outcome = Outcome()

    def of(value: Any, rank: int) -> Any:
        return value[rank] if isinstance(value, Mapping) and rank in value else value

    def rank_main(rank: int) -> None:
        env, events = Env(rank, workers + 1, "127.0.0.1", base), outcome.events[rank]
        try:
            if before and rank in before:
                before[rank]()
            if rank == 0:
                Server(env, of(config, rank), events).run()
                return
            with Worker.connect(env, of(config, rank), of(tensors, rank), events) as worker:
                outcome.results[rank] = of(body, rank)(worker)
        except BaseException as error:
            outcome.errors[rank] = error

    threads = {}
    for rank in range(workers + 1):
        outcome.events[rank] = (recorders or {}).get(rank) or Recorder()
        threads[rank] = threading.Thread(target=rank_main, args=(rank,), daemon=True)
    for thread in threads.values():
        thread.start()
    for rank, thread in threads.items():
        thread.join(limit_s)
        if thread.is_alive():
            outcome.hanging.append(rank)
    return outcome


def rounds_body(tensors: Sequence[TensorSpec], rounds: int, *, epoch_end: bool = False) -> Body:
    """A worker that reduces `rounds` seeded gradients and returns [(Reduced, vector)]."""

    def body(worker: Worker) -> list[Any]:
        done = []
        for round_ in range(rounds):
            vector = gradient(worker.rank, round_, tensors)
            reduced = worker.all_reduce(vector, iteration=round_, epoch=0, epoch_start_next=epoch_end)
            done.append((reduced, vector))
        return done

    return body


def mean_of(tensors: Sequence[TensorSpec], round_: int, workers: int = 3) -> Any:
    """The exact mean in the server's order of summation."""
    total = gradient(1, round_, tensors).copy()
    for rank in range(2, workers + 1):
        total += gradient(rank, round_, tensors)
    return total / np.float32(workers)


def layout_of(tensors: Sequence[TensorSpec]) -> Layout:
    return Layout(sum(tensor.size for tensor in tensors), chunk_values(1500))

"""Guest side: rounds of the real transport, server and worker a process each, over 5 ms of sch_netem each way."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from guest_network import RECEIVER, SO_RCVBUFFORCE, Network, Traffic

from dblp.chunks import TensorSpec
from dblp.collective import Server, Worker
from dblp.config import Config, Deadlines, Env, profile_from
from dblp.wire import chunk_values
from netem.kernel import netns
from netem.links.base import Flow, Key, LossRule, Shape
from netem.links.mask import port_state
from netem.links.netem import NetemPort

WORKER = "10.77.0.2"
DELAY_US = 5_000
MTU = 1500
CLEAN_CHUNKS, CLEAN_ROUNDS = 240, 5
"""Rounds without loss and pace, which say what the machine carries."""
JUDGED_HZ, PACE_HZ, HELD = 10_000.0, 5_000.0, 0.17
"""A machine that carries so many packets a second plays at the pace; a round trip holds this share of a round, as at
the 600 Mbit/s of the main job. A slower one (an emulated processor) plays few rounds, at a share of what it carries."""
SLOW_SHARE, SLOW_CHUNKS, SLOW_ROUNDS, ROUNDS, WARM = 0.4, 240, 1, 5, 2
LOSSES = (0.0, 0.6, 0.7, 0.8, 0.9)
"""In turns, so that what the host does beside hits all alike; before them rounds without loss that do not count."""
TOLERANCES = (0.008, 0.408)
LIMIT_S = 120.0
REPORTED = ("latency_s", "packets", "packets_at_need", "outcome")


class Recorder:
    """What the transport reports, in memory; sockets with the buffers it asks for, as a testbed hands them in; gates
    before `rounds` rounds, through `asks`."""

    def __init__(self, rounds: int = 0, asks: Connection | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gates, self._asks = frozenset(range(rounds)), asks

    def emit(self, event: str, **fields: Any) -> None:
        if event == "sent":
            self.sent.append(fields)

    def gate(self, round_: int) -> None:
        assert self._asks is not None
        self._asks.send(round_)
        self._asks.recv()

    def socket(self, kind: str, rcvbuf: int, sndbuf: int) -> socket.socket | None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, rcvbuf)
        return sock

    def close(self) -> None:
        return


@contextmanager
def long_path() -> Iterator[tuple[NetemPort, Network]]:
    """The port is the worker's, where the loss is."""
    with Network([WORKER], MTU) as network, ExitStack() as stack:
        ports = []
        for end, source in ((network.near, WORKER), (network.far, RECEIVER)):
            ports.append(NetemPort(end.ifname, end.netns, end.ifname))
            stack.callback(ports[-1].close)
            flow, key = Flow("udp", dst_ports=(29600, 29699)), Key(((4, 14),), index=(4, 8))
            ports[-1].install(Shape(delay_us=DELAY_US), flow, key, [source])
        yield ports[0], network


def config_of(tolerance: float, chunks: int, pace_bps: float = 0.0) -> Config:
    return Config(
        token="00ff",
        transport={"kind": "bounded", "fixed": tolerance},
        workload={"kind": "replay", "chunks": chunks, "iterations": 1},
        seed=7,
        profile=profile_from({"base": "recommended", "pace_bps": pace_bps}),
        mtu=MTU,
        offload=False,  # netem decides once for all packets of a super-packet that is not cut yet
        deadlines=Deadlines(connect_s=120.0, round_s=90.0),
    )


def serve(network: Network, config: Config) -> None:
    netns.enter(network.far.netns)
    Server(Env(0, 2, RECEIVER), config, Recorder()).run()


def work(network: Network, config: Config, rounds: int, parent: Connection) -> None:
    """Asks `parent` before each round, and ends with the reports."""
    netns.enter(network.near.netns)
    recorder, values = Recorder(rounds, parent), config.workload["chunks"] * chunk_values(MTU)
    with Worker.connect(Env(1, 2, RECEIVER), config, [TensorSpec("replay", (values,))], recorder) as worker:
        for round_ in range(rounds):
            worker.all_reduce(np.ones(values, np.float32), iteration=round_, epoch=0, epoch_start_next=False)
    parent.send(recorder.sent)


def play(port: NetemPort, network: Network, config: Config, losses: Sequence[float]) -> list[dict[str, Any]]:
    """One round up for each loss of data; what the worker reports of them.

    Raises EOFError when it fails, TimeoutError when a round takes too long.
    """
    forked = multiprocessing.get_context("fork")
    here, there = forked.Pipe()
    server = forked.Process(target=serve, args=(network, config), daemon=True)
    worker = forked.Process(target=work, args=(network, config, len(losses), there), daemon=True)
    for process in (server, worker):
        process.start()
    there.close()
    try:
        while here.poll(LIMIT_S):
            said: Any = here.recv()
            if isinstance(said, list):
                return said
            port.set_loss([LossRule(WORKER, port_state(7, "up", 1), losses[said])])
            here.send("go")
        raise TimeoutError(f"a round took more than {LIMIT_S:g} s")
    finally:
        for process in (worker, server):
            process.join(20)
            process.kill()


def measure() -> dict[str, Any]:
    """The round trip, the rate without loss and pace, and by tolerance the rounds under each loss at the pace."""
    with long_path() as (port, network):
        with Traffic(network, WORKER) as traffic:
            traffic.round_trips_s(5)
            rtt_s = statistics.median(traffic.round_trips_s(50))
        clean = play(port, network, config_of(TOLERANCES[0], CLEAN_CHUNKS), [0.0] * CLEAN_ROUNDS)
        clean_hz = CLEAN_CHUNKS / (min(one["latency_s"] for one in clean) - rtt_s)
        judged = clean_hz >= JUDGED_HZ
        pace_hz = PACE_HZ if judged else SLOW_SHARE * clean_hz
        chunks = round(PACE_HZ * rtt_s / HELD) if judged else SLOW_CHUNKS
        losses = LOSSES * (ROUNDS if judged else SLOW_ROUNDS)
        rounds = []
        for p in TOLERANCES:
            played = play(port, network, config_of(p, chunks, pace_hz * 8 * MTU), [0.0] * WARM + list(losses))[WARM:]
            rounds += [
                {"tolerance": p, "loss": loss, **{key: one[key] for key in REPORTED}}
                for loss, one in zip(losses, played, strict=True)
            ]
    return {
        "rtt_s": rtt_s, "clean_hz": clean_hz, "pace_hz": pace_hz, "chunks": chunks, "judged": judged, "rounds": rounds,
    }  # fmt: skip

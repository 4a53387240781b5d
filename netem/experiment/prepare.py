"""From a loaded scenario to what one transport's processes get: configuration, flows and keys. Pure.

This is where the names of the transport (profile options, detectors) meet the scenario that uses them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from dblp import wire
from dblp.chunks import send_order
from dblp.config import DEFAULT_PORT, Config, Deadlines, Profile, profile_from
from dblp.dtypes import DTYPES, WireDtype
from dblp.errors import ConfigError
from dblp.options import options_from
from dblp.tolerance import policy_from
from netem.analysis.expect import check_all
from netem.analysis.oracle import IntArray
from netem.analysis.run import OrderFn
from netem.experiment.command import check_command_scenario
from netem.links.base import Flow, Key
from netem.spec import (
    Command,
    Loaded,
    Replay,
    Scenario,
    TransportSpec,
    iterations_per_epoch,
    profile_options,
    shapes_uplinks,
)

PORT = DEFAULT_PORT
RANKS_PER_KIND = wire.WORKER_DATA_OFFSET - wire.SERVER_DATA_OFFSET
UP_PORTS = (PORT + wire.SERVER_DATA_OFFSET, PORT + wire.SERVER_DATA_OFFSET + RANKS_PER_KIND - 1)
DOWN_PORTS = (PORT + wire.WORKER_DATA_OFFSET, PORT + wire.WORKER_DATA_OFFSET + RANKS_PER_KIND - 1)
TCP_PORT = PORT + wire.TCP_DATA_OFFSET
UDP_KEY = Key(ranges=(wire.KEY_RANGE,), index=wire.ROUND_RANGE, place=wire.SEQUENCE_RANGE)


@dataclass(frozen=True)
class Job:
    """One transport, one repeat."""

    name: str
    spec: TransportSpec
    repeat: int
    config: Config

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def label(self) -> str:
        """For file names."""
        return f"{self.name}-r{self.repeat}"

    def flow(self, direction: str) -> Flow:
        """The data packets of this transport in one direction."""
        if self.spec.reliable:
            ports = {"dst_ports" if direction == "up" else "src_ports": (TCP_PORT, TCP_PORT)}
            return Flow("tcp", **ports)
        return Flow("udp", dst_ports=UP_PORTS if direction == "up" else DOWN_PORTS)

    @property
    def key(self) -> Key | None:
        """Where a data packet says which transmission it is; a TCP segment does not."""
        return None if self.spec.reliable else UDP_KEY

    @property
    def stop_and_wait(self) -> bool:
        return not self.spec.reliable and self.config.profile.probing == "stop-and-wait"

    @property
    def reliable_broadcast(self) -> bool:
        return self.spec.reliable or self.config.profile.broadcast == "reliable"

    def order(self) -> OrderFn:
        """The send order of a round, as the transport computes it."""
        kind, seed = self.config.profile.send_order, self.config.seed

        def order(round_: int, worker: int, direction: str, chunks: int) -> IntArray:
            number = wire.DIRECTIONS.index(direction)
            return send_order(kind, chunks, seed=seed, round_=round_, rank=worker, direction=number)

        return order


def check(loaded: Loaded) -> None:
    """Raises SpecError, with file and line, for what only the transport or the analysis can judge."""
    if isinstance(loaded.spec.workload, Command):
        check_command_scenario(loaded)
        return
    profile_of(loaded)
    for name in loaded.spec.transports:
        try:
            job = make_job(loaded, name, 0, token="")
            policy_from(job.config.transport)
            options_from(job.config)
        except ConfigError as error:
            at = ("workload", *error.path[1:]) if error.path[:1] == ("workload",) else ("transports", name)
            raise loaded.source.error(at, str(error)) from error
    check_all(
        loaded.spec.expect,
        list(loaded.spec.transports),
        loaded.source.error,
        trains=not isinstance(loaded.spec.workload, Replay),
        bursts=bool(loaded.spec.bursts or loaded.spec.events),
        queues=bool(loaded.spec.queues.at),
    )


def profile_of(loaded: Loaded, transport: TransportSpec | None = None) -> Profile:
    """The scenario's, with what a transport has of its own. Raises SpecError at the option that is not allowed."""
    try:
        profile = profile_from(profile_options(loaded.spec))
    except ConfigError as error:
        key = str(error.path[-1]) if error.path else "profile"
        path: tuple[str | int, ...] = (
            ("profile",) if key in ("profile", "base") else ("profile", key.removesuffix("_s").removesuffix("_bps"))
        )
        raise loaded.source.error(path, error.message) from error
    return replace(profile, wire_dtype=transport.wire_dtype) if transport and transport.wire_dtype else profile


def gradient_bytes(loaded: Loaded) -> int:
    """Bytes of the largest gradient of a replay, float32; of a model 0: those that are shipped fit anywhere."""
    spec = loaded.spec
    if not isinstance(spec.workload, Replay):
        return 0
    dtypes = {DTYPES[profile_of(loaded, transport).wire_dtype] for transport in spec.transports.values()}
    return max(
        int(_workload(spec, dtype)["chunks"]) * 4 * wire.chunk_values(spec.topology.mtu, dtype=dtype)
        for dtype in dtypes
    )


def make_jobs(loaded: Loaded, seed: int, token: str) -> list[Job]:
    """Transports one after another, all of them in every repeat; a repeat has a seed of its own."""
    spec = loaded.spec
    return [make_job(loaded, name, repeat, token, seed) for repeat in range(spec.repeats) for name in spec.transports]


def make_job(loaded: Loaded, name: str, repeat: int, token: str, seed: int | None = None) -> Job:
    spec = loaded.spec
    transport = spec.transports[name]
    profile = profile_of(loaded, transport)
    config = Config(
        token=token,
        transport=_transport(name, transport),
        workload=_workload(spec, DTYPES[profile.wire_dtype]),
        seed=(spec.seed if seed is None else seed) + repeat,
        profile=profile,
        mtu=spec.topology.mtu,
        offload=not shapes_uplinks(spec),
        deadlines=Deadlines(connect_s=spec.deadlines.connect_s, round_s=spec.deadlines.round_s),
    )
    return Job(name, transport, repeat, config)


def _transport(name: str, spec: TransportSpec) -> dict[str, Any]:
    if spec.reliable:
        return {"name": name, "kind": "tcp"}
    if spec.fixed is not None:
        return {"name": name, "kind": "bounded", "fixed": spec.fixed}
    detector = spec.detector.config() if spec.detector else None
    return {"name": name, "kind": "bounded", "low": spec.low, "high": spec.high, "detector": detector}


def _workload(spec: Scenario, dtype: WireDtype) -> dict[str, Any]:
    work = spec.workload
    assert not isinstance(work, Command)
    if not isinstance(work, Replay):
        return {**work.model_dump()}
    values = wire.chunk_values(spec.topology.mtu, dtype=dtype)
    chunks = work.chunks
    if chunks is None:
        chunks = -(-sum(math.prod(shape) for shape in work.shapes or ()) // values)
    return {
        "kind": "replay",
        "chunks": chunks,
        "iterations": work.iterations,
        "compute_s": work.compute_s,
        "epoch_iterations": iterations_per_epoch(spec),
    }


def first_phase(job: Job) -> str:
    """The phase of round 0: the workload reports the later ones."""
    return policy_from(job.config.transport).first().phase


def facts(job: Job) -> dict[str, Any]:
    """What summary.json says of a transport's settings."""
    return {"transport": dict(job.config.transport), "profile": asdict(job.config.profile)}


def saturated(events: Iterable[Mapping[str, Any]]) -> int:
    """Numbers that the number format on the wire was too small for, as the workers have counted them."""
    return sum(event.get("saturated", 0) for event in events if event["event"] == "sent")

"""Runs one job in a lab: captures, processes, gates, until every rank has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import psutil

import dblp
from netem.analysis.delays import DelayReport, When
from netem.analysis.run import CaptureCount
from netem.experiment.executor import Executor
from netem.experiment.fabric import Fabric
from netem.experiment.folder import RunFolder
from netem.experiment.hub import SOCKET_NAME, Event, Hub
from netem.experiment.preload import preload
from netem.experiment.prepare import DOWN_PORTS, PORT, TCP_PORT, UP_PORTS, Job, first_phase
from netem.experiment.record import Recorder
from netem.experiment.traffic import Traffic, TrafficResults
from netem.kernel.capture import Capture
from netem.kernel.packet_filter import Direction, PacketFilter, ranges_of
from netem.kernel.priority import prompt
from netem.kernel.process import Child
from netem.kernel.user import User
from netem.lab import Lab
from netem.spec import Scenario, gates, is_dynamic, windows
from netem.spec.arming import preloaded
from netem.spec.timeline import has_times, traffic_gates

POLL_S = 0.25
GRACE_S = 10.0
END_LIMIT_S = 2.0
MEMORY_EVERY_S = 0.5
NEAR_S = 0.02
LOG_TAIL_LINES, LOG_TAIL_BYTES = 5, 1 << 14


class RunFailed(Exception):
    """A rank ended with an error, or did not end; the message has its last words."""


@dataclass
class Memory:
    """Peak of the resident memory of testbed and workload together, sampled."""

    peak_bytes: int = 0
    _next: float = 0.0

    def sample(self, pids: list[int]) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + MEMORY_EVERY_S
        total = 0
        for pid in (os.getpid(), *pids):
            try:
                total += psutil.Process(pid).memory_info().rss
            except psutil.Error:
                continue
        self.peak_bytes = max(self.peak_bytes, total)


class Conductor:
    """One job. `run` returns when all ranks have ended well."""

    def __init__(
        self, lab: Lab, fabric: Fabric, spec: Scenario, job: Job, folder: RunFolder, recorder: Recorder, memory: Memory
    ) -> None:
        self.lab, self.fabric, self.spec, self.job = lab, fabric, spec, job
        self.folder, self.recorder, self.memory = folder, recorder, memory
        self.preloaded = preloaded(spec, keyed=job.key is not None, repeatable=fabric.choice.loss_engine == "bpf")
        asked = () if self.preloaded else gates(spec, job.seed)
        self.gates = tuple(sorted({*asked, *traffic_gates(spec)}))
        self.executor = Executor(spec, job.seed, fabric, recorder, time.monotonic, first_phase=first_phase(job))
        self.traffic = self._make_traffic()
        self.traffic_results = TrafficResults()
        self.delays: list[DelayReport] = []
        self.captures: list[tuple[str, Capture]] = []
        self.children: dict[int, Child] = {}
        self.logs: dict[int, BinaryIO] = {}
        self.hosts = {host.rank: host for host in lab.hosts.values() if host.rank is not None}

    def run(self) -> None:
        """Raises RunFailed, and what the links raise when an impairment is not as asked."""
        self._install()
        if self.fabric.recorded:
            lost = sum(len(keys) for keys in self.fabric.mask.values())
            self.recorder({"event": "mask", "flows": len(self.fabric.mask), "transmissions": lost})
        if self.preloaded:
            self.recorder(preload(self.fabric, self.spec, self.job.seed))
        with self.traffic:
            self.traffic.start()
            with self.fabric.delays.watching(self.recorder.events, self.recorder.began, self.delays):
                self._run_ranks()
            self.traffic.finish()
            self.traffic_results = self.traffic.results()
        self._probe("after the last round")  # a recorder of queues would take the time stamps off

    def _install(self) -> None:
        """The steady state of the links; probes on their way through it are gone from the counters."""
        self.fabric.install(self.job)
        if self.fabric.delays.paths:
            self._probe("before the first round")
            self.fabric.install(self.job)

    def _probe(self, when: When) -> None:
        fabric = self.fabric
        self.delays += fabric.delays.probe(when, fabric.delays_in_place(), lossy=fabric.loses_anything)

    def _make_traffic(self) -> Traffic:
        ranks = self.spec.topology.ranks
        return Traffic(
            self.lab,
            self.fabric,
            self.spec,
            self.job,
            self.folder,
            self.recorder,
            self.recorder.began,
            seed=self.job.config.seed,
            data_to=lambda host: self.job.flow("down" if ranks.get(host) else "up"),
        )

    def _run_ranks(self) -> None:
        user = self.folder.user
        hub = Hub(
            self.folder.descriptor,
            uid=user.uid,
            workers=len(self.hosts) - 1,
            gates=self.gates,
            open_gate=lambda round_: self._open_gate(hub, round_),
            make_socket=self._make_socket,
            sink=self._sink,
        )
        try:
            self._start_captures()
            self._start(user)
            with prompt(has_times(self.spec)) as self.executor.history.real_time:
                self._attend(hub)
            self.executor.finish()
        finally:
            hub.close()
            self._end()
            for log in self.logs.values():
                log.close()

    def _end(self) -> None:
        """SIGTERM to all at once, SIGKILL to those that do not listen. The lab ends what is left even then."""
        for child in self.children.values():
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + END_LIMIT_S
        for child in self.children.values():
            with contextlib.suppress(TimeoutError):
                child.terminate(max(0.0, deadline - time.monotonic()))

    def _start(self, user: User) -> None:
        config = self.folder.write(f"config/{self.job.label}.json", self.job.config.to_json(), mode=0o600)
        for rank, host in sorted(self.hosts.items()):
            log = self.logs[rank] = self.folder.open_new(f"logs/{self.job.label}-{host.name}.log")
            self.children[rank] = self.lab.spawn(
                host.name,
                [sys.executable, "-m", "dblp.train"],
                env=workload_environment(rank, len(self.hosts), self.hosts[0].address, config),
                log=log,
                user=user,
                cwd=self.folder.path,
            )

    def _attend(self, hub: Hub) -> None:
        """Serves the hub until every process has ended. One that fails ends the job."""
        running = dict(self.children)
        first: int | None = None
        give_up_at: float | None = None
        while running:
            hub.step(POLL_S)
            self.traffic.step()
            if not self._change_is_near():
                self.memory.sample([child.pid for child in running.values()])
            for rank, child in list(running.items()):
                status = child.poll()
                if status is None:
                    continue
                del running[rank]
                if status != 0 and first is None:
                    first = rank
                    give_up_at = time.monotonic() + GRACE_S  # the others are told by the transport, and say why
            if give_up_at is not None and time.monotonic() > give_up_at:
                break
        hub.step(0.0)
        if first is not None:
            self.recorder.lost(first)
            raise RunFailed(self._failure(first))

    def _change_is_near(self) -> bool:
        """A sample takes milliseconds, by which a change by time would be late."""
        due = self.executor.next_s
        return due is not None and due - time.monotonic() < NEAR_S

    def _failure(self, rank: int) -> str:
        """Why the rank that ended first did: its own words, else its end and its log. The others only lost it."""
        host = self.hosts[rank].name
        if rank in self.recorder.failures:
            return f"{self.job.name}: {host}: {self.recorder.failures[rank]}"
        status = self.children[rank].returncode or 0
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        log = self.folder.path / "logs" / f"{self.job.label}-{host}.log"
        tail = " | ".join(_end_of(self.logs[rank]).strip().splitlines()[-LOG_TAIL_LINES:])
        return f"{self.job.name}: {host} {how}: {tail or 'no output'} ({log})"

    # Gates

    def _open_gate(self, hub: Hub, round_: int) -> None:
        """All workers have ended the round before: put this round's impairments in place."""
        began = time.monotonic()
        self.executor.open_gate(round_)
        self._set_alarm(hub)
        self.traffic.open_gate(round_)
        self.recorder.gate_s += time.monotonic() - began

    def _set_alarm(self, hub: Hub) -> None:
        def ring() -> None:
            self.executor.ring()
            self._set_alarm(hub)

        hub.alarm(self.executor.next_s, ring)

    def _sink(self, event: Event) -> None:
        self.recorder(event)
        if event["event"] == "phase":
            self.executor.phase(int(event["round"]), str(event["phase"]))

    def _make_socket(self, rank: int, kind: str, rcvbuf: int, sndbuf: int) -> socket.socket:
        family: Literal["udp", "tcp"] = "tcp" if kind == "tcp" else "udp"
        return self.lab.socket(self.hosts[rank].name, family, rcvbuf, sndbuf)

    # Captures

    def _start_captures(self) -> None:
        wanted = self.spec.capture
        if not wanted.enabled:
            return
        packets = self._filter()
        places: list[tuple[str, Direction]]
        if wanted.place == "host":
            places = [(host, "both") for host in wanted.at]
        else:
            places = [(host, "egress") for host in wanted.at]
        if wanted.both:
            places += [(host.name, "ingress") for host in self.hosts.values()]
        for host, direction in places:
            name = f"captures/{self.job.label}-{host}-{direction}.pcapng"
            with self.folder.open_new(name) as file:
                capture = self.lab.capture(
                    host if direction == "both" else ("port", host),
                    self.folder.path / name,
                    snap_bytes=wanted.snap_bytes,
                    packets=packets,
                    direction=direction,
                    user=self.folder.user,
                    file=file,
                )
            self.captures.append((name, capture))

    def _filter(self) -> PacketFilter | None:
        """`bursts`: data of the burst rounds and their neighbours; a stream does not say its round, so all of it."""
        if self.spec.capture.rounds == "all" or is_dynamic(self.spec):
            return None
        if self.job.spec.reliable:
            return PacketFilter(tcp_ports=((TCP_PORT, TCP_PORT),))
        hit = windows(self.spec, self.job.config.seed)
        rounds = {round_ for each in hit for round_ in range(each.first - 1, each.last + 2)}
        kept = ranges_of([round_ for round_ in rounds if round_ >= 0])
        return PacketFilter(udp_ports=(UP_PORTS, DOWN_PORTS), values=kept)

    def finish(self) -> list[CaptureCount]:
        """Stops the captures and returns their counts."""
        found = []
        for name, capture in self.captures:
            stats = capture.stop()
            found.append(CaptureCount(name, self.job.name, stats.received, stats.missed_by_kernel, stats.tool))
        return found


def _end_of(log: BinaryIO) -> str:
    """The end of a log by the file that was opened for it, whatever has its name by now."""
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), LOG_TAIL_BYTES, max(0, size - LOG_TAIL_BYTES)).decode(errors="replace")


def workload_environment(rank: int, world_size: int, master: str, config: Path) -> dict[str, str]:
    """The environment of one rank: what torchrun users set, the configuration, and one thread a process."""
    dropped = ("SUDO_", "DBLP_")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    own: dict[str, Any] = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": master,
        "MASTER_PORT": PORT,
        "DBLP_CONFIG": config,
        "DBLP_EVENTS": SOCKET_NAME,
        "OMP_NUM_THREADS": 1,
        "PYTHONPATH": Path(dblp.__file__).resolve().parents[1],
        "PYTHONDONTWRITEBYTECODE": 1,
    }
    return {**inherited, **{key: str(value) for key, value in own.items()}}

"""Runs one job of a command workload: programs, impairments by time or by gate, until those that end it have ended."""

from __future__ import annotations

import math
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from netem.analysis.command import Cell, CommandRun, ProgramEnd, Report
from netem.experiment.command import CommandJob, command_environment
from netem.experiment.command_timeline import CommandTimeline
from netem.experiment.conductor import Conductor, Memory, RunFailed
from netem.experiment.folder import RunFolder
from netem.experiment.hub import Event, Hub
from netem.experiment.open_fabric import OpenFabric
from netem.experiment.record import Recorder
from netem.experiment.traffic import Traffic, TrafficResults
from netem.kernel.capture import Capture
from netem.kernel.packet_filter import PacketFilter
from netem.kernel.priority import prompt
from netem.kernel.process import Child
from netem.kernel.sockets import is_bound
from netem.lab import Lab
from netem.spec import Scenario
from netem.spec.command import filled
from netem.spec.command_file import first_host
from netem.spec.timeline import has_times
from netem.spec.units import format_time

READY_POLL_S = 0.02
END_LIMIT_S = 2.0
MEMORY_POLL_S = 0.5


class CommandConductor(Conductor):
    """One job. `run` returns when all programs have ended; `result` says what happened, also after an error."""

    job: CommandJob  # type: ignore[assignment]  # another kind of job, the same purpose
    fabric: OpenFabric

    def __init__(
        self,
        lab: Lab,
        fabric: OpenFabric,
        spec: Scenario,
        job: CommandJob,
        folder: RunFolder,
        recorder: Recorder,
        memory: Memory,
    ) -> None:
        # Not super().__init__: that plans the rounds of a training.
        self.lab, self.fabric, self.spec, self.job = lab, fabric, spec, job
        self.folder, self.recorder, self.memory = folder, recorder, memory
        self.delays = []
        self._cells: list[Cell] | None = None
        self.captures: list[tuple[str, Capture]] = []
        self.children: dict[int, Child] = {}
        self.logs: dict[int, BinaryIO] = {}
        self.work = job.work
        self.timeline = CommandTimeline(spec, job.seed, fabric, recorder)
        self.hosts = {rank: lab.hosts[name] for name, rank in self.work.ranks.items()}
        self._argv: dict[int, tuple[str, ...]] = {}
        self._began: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        self._by_testbed: set[int] = set()
        self.traffic = self._make_traffic()
        self.traffic_results = TrafficResults()
        self._zero: float | None = None
        self._wall_s: float | None = None

    def run(self) -> None:
        """Raises RunFailed, and what the links raise when an impairment is not as asked."""
        self._install()
        with self.traffic:
            self.traffic.start()
            self._run_programs()
            self.traffic.finish()
            self.traffic_results = self.traffic.results()
            self._cells = self.fabric.cells()  # without the probes that follow
        self._probe("after the last round")

    def _run_programs(self) -> None:
        hub = Hub(
            self.folder.descriptor,
            uid=self.folder.user.uid,
            workers=len(self.work.until),
            gates=self._gates(),
            open_gate=lambda round_: self._open_gate(hub, round_),
            make_socket=self._make_socket,
            sink=self.recorder,
        )
        try:
            self._start_captures()
            self._attend(hub)
        finally:
            hub.close()
            self._end()
            for log in self.logs.values():
                log.close()

    def _gates(self) -> tuple[int, ...]:
        """Of events, and the rounds of microbursts; programs that report none are not asked."""
        rounds = {burst.iteration for burst in self.spec.microbursts if burst.iteration is not None}
        return tuple(sorted({*self.timeline.gates, *rounds}))

    def _make_traffic(self) -> Traffic:
        job: CommandJob = self.job
        return Traffic(
            self.lab,
            self.fabric,
            self.spec,
            job,
            self.folder,
            self.recorder,
            self.recorder.began,
            seed=job.seed,
            data_to=job.flow_to,
        )

    # Programs

    def _attend(self, hub: Hub) -> None:
        """Until the job is over. Who asks something of the hub before it is ready gets an answer."""
        with ExitStack() as stack:
            first = [host for host in self.work.run if self.work.run[host].ready is not None]
            for host in first:
                self._launch(host, hub, stack)
            for host in first:
                self._await_ready(host, hub)
            for host in self.work.run:
                if host not in first:
                    self._launch(host, hub, stack)
            self._zero = time.monotonic()
            self.timeline.start(self._zero)
            self._set_alarm(hub)
            self.traffic.begin()
            with prompt(has_times(self.spec)):  # not earlier: the programs would be as well
                self._await_end(hub)
            self._wall_s = time.monotonic() - self._zero
            self.fabric.end()
            self._end_rest(hub)

    def _launch(self, host: str, hub: Hub, stack: ExitStack) -> None:
        rank = self.work.ranks[host]
        addresses = {name: each.address for name, each in self.lab.hosts.items()}
        place = self.job.place(host, first_host(self.spec.topology), addresses)
        argv, own = filled(self.work, place)
        log = self.logs[rank] = self.folder.open_new(f"logs/{self.job.label}-{host}.log")
        self._argv[rank], self._began[rank] = argv, time.monotonic()
        child = self.children[rank] = self.lab.spawn(
            host,
            argv,
            env=command_environment(self.job, place, own),
            log=log,
            user=self.folder.user,
            cwd=self.folder.path,
        )
        descriptor = os.pidfd_open(child.pid)
        stack.callback(os.close, descriptor)
        hub.watch(descriptor, lambda: self._note_end(rank))

    def _note_end(self, rank: int) -> None:
        self._ended.setdefault(rank, time.monotonic())

    def _await_ready(self, host: str, hub: Hub) -> None:
        ready = self.work.run[host].ready
        assert ready is not None
        proto, port = ready.port
        rank = self.work.ranks[host]
        limit_s = self.spec.deadlines.connect_s
        deadline = time.monotonic() + limit_s
        while not is_bound(self.children[rank].pid, proto, port):
            hub.step(READY_POLL_S)
            if rank in self._ended:
                self._check(rank)
                raise RunFailed(f"{self._failure(rank)}; it was to listen on {proto} port {port}")
            if time.monotonic() > deadline:
                raise RunFailed(f"{self.job.name}: {host} does not listen on {proto} {port} after {limit_s:g} s")

    def _await_end(self, hub: Hub) -> None:
        """Until the programs that end the job have ended. One that fails ends it at once, and so does the limit."""
        assert self._zero is not None
        waiting = {self.work.ranks[host] for host in self.work.until}
        deadline = self._zero + self.work.limit_s
        while True:
            for rank in list(self._ended):
                self._check(rank)
            if waiting <= self._ended.keys():
                return
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise RunFailed(self._overdue(waiting - self._ended.keys()))
            hub.step(min(MEMORY_POLL_S, left_s))
            self.traffic.step()
            self.memory.sample([child.pid for rank, child in self.children.items() if rank not in self._ended])

    def _check(self, rank: int) -> None:
        """RunFailed when a program has ended otherwise than expected."""
        status = self.children[rank].poll()
        if status is None:
            status = self.children[rank].wait(END_LIMIT_S)  # its descriptor was readable: it is about to be reaped
        expected = self.work.run[self.hosts[rank].name].status
        if expected != "any" and status != expected:
            wanted = f" instead of {expected}" if expected else ""
            raise RunFailed(f"{self._failure(rank)}{wanted}")

    def _overdue(self, ranks: set[int]) -> str:
        names = ", ".join(self.hosts[rank].name for rank in sorted(ranks))
        limit = format_time(self.work.limit_s)
        return f"{self.job.name}: {names} still running after the limit of {limit} (workload.limit)"

    def _end_rest(self, hub: Hub) -> None:
        """The job is over: end those that it does not wait for, and what any of them left running."""
        rest = {rank: child for rank, child in self.children.items() if rank not in self._ended}
        self._by_testbed |= rest.keys()
        self._end()
        for rank in rest:
            self._ended.setdefault(rank, time.monotonic())
        hub.step(0.0)
        self.lab.end_sessions(list(self.children.values()))

    def _end(self) -> None:
        """Also after an error: who still runs is ended by the testbed."""
        self._by_testbed |= {rank for rank in self.children if rank not in self._ended}
        super()._end()

    # Impairments

    def _open_gate(self, hub: Hub, round_: int) -> None:
        self.timeline.open_gate(round_)
        self._set_alarm(hub)
        self.traffic.open_gate(round_)

    def _set_alarm(self, hub: Hub) -> None:
        def ring() -> None:
            self.timeline.ring()
            self._set_alarm(hub)

        hub.alarm(self.timeline.next_s, ring)

    def _filter(self) -> PacketFilter | None:
        return None

    # Results

    def result(self) -> CommandRun:
        """What there is of it."""
        ends = [self._program_end(rank) for rank in sorted(self.children)]
        wall_s = self._wall_s
        if wall_s is None:
            wall_s = time.monotonic() - self._zero if self._zero is not None else 0.0
        health = [port.health() for port in self.fabric.ports.values()]
        return CommandRun(
            name=self.job.name,
            repeat=self.job.repeat,
            wall_s=round(wall_s, 6),
            programs=tuple(ends),
            cells=tuple(self.fabric.cells() if self._cells is None else self._cells),
            impairments=tuple(self.timeline.impairments),
            reports=tuple(self._reports()),
            drops=self.fabric.drops(),
            doubts={
                key: sum(getattr(each, key) for each in health) for key in ("fragments", "gso_seen", "overflow_seen")
            },
            unreached=tuple(self.timeline.unreached(self._wall_s)),
            microbursts=self.traffic_results.bursts,
            queues=self.traffic_results.queues,
            delays=tuple(self.delays),
        )

    def _program_end(self, rank: int) -> ProgramEnd:
        host = self.hosts[rank].name
        ended = self._ended.get(rank)
        return ProgramEnd(
            host=host,
            rank=rank,
            argv=self._argv[rank],
            status=self.children[rank].returncode,
            ended_by="testbed" if rank in self._by_testbed else "itself",
            wall_s=None if ended is None else round(ended - self._began[rank], 6),
            log=str(Path("logs") / f"{self.job.label}-{host}.log"),
        )

    def _reports(self) -> list[Report]:
        bursts = {(burst.iteration, worker) for burst in self.spec.bursts for worker in burst.workers}
        found = []
        for event in self.recorder.events:
            if event["event"] == "round":
                rank, round_, latency_s = _read_round(event)
                host = self.hosts[rank].name if rank in self.hosts else str(rank)
                found.append(Report(round_, rank, host, latency_s, (round_, host) in bursts))
        return found


def _read_round(event: Event) -> tuple[int, int, float | None]:
    """(rank, round, latency) of a report."""
    latency: Any = event.get("latency_s")
    return int(event["rank"]), int(event["round"]), None if latency is None else float(latency)


def check_report(event: Event) -> None:
    """Raises KeyError, TypeError or ValueError for a report of a round that is not as agreed."""
    if event["event"] == "round":
        _, round_, latency_s = _read_round(event)
        if round_ < 0 or (latency_s is not None and not (math.isfinite(latency_s) and latency_s >= 0)):
            raise ValueError("round or latency_s out of range")


def words(end: ProgramEnd) -> str:
    """How a program ended: `status 0`, `killed by SIGKILL`, `ended by the testbed`."""
    if end.ended_by == "testbed":
        return "ended by the testbed"
    if end.status is None:
        return "running"
    return f"killed by {signal.Signals(-end.status).name}" if end.status < 0 else f"status {end.status}"

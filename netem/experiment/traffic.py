"""Microbursts, background traffic and the queues that are recorded meanwhile, for one job."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from netem.analysis import queues as analysis
from netem.analysis.queues import BurstReport, FlowDrops, QueueReport
from netem.experiment.fabric import Fabric
from netem.experiment.folder import RunFolder
from netem.experiment.generators import (
    BACKGROUND_PORTS,
    IPERF_PORTS,
    MICROBURST_PORTS,
    burst_plan,
    burst_window,
    generated_flows,
    queue_limit,
    stream_event,
    stream_plan,
)
from netem.experiment.iperf import Iperf
from netem.kernel.qdisc import Stats
from netem.lab import Lab
from netem.links import root_queue
from netem.links.base import Flow
from netem.links.queue_recorder import QueueReading, QueueRecorder
from netem.spec import Scenario, shapes_uplinks
from netem.traffic.plan import DISCARD_PORT, NS, Burst, Sent, Stream
from netem.traffic.process import PacketSource

SNDBUF_BYTES, SINK_BYTES = 8 << 20, 4096
LEAD_NS = 300_000
"""A source needs this long to hear that it is to begin."""
LOOK_AHEAD_NS = NS
REPORT_LIMIT_S, DRAIN_LIMIT_S = 5.0, 1.0

clock = time.monotonic_ns


@dataclass(frozen=True)
class TrafficResults:
    """What was sent, and what the queues did."""

    bursts: tuple[BurstReport, ...] = ()
    queues: tuple[QueueReport, ...] = ()


class AnyJob(Protocol):
    """What is needed of a job of any workload."""

    @property
    def label(self) -> str: ...


class Traffic:
    """Use as a context around a job; everything that it opened goes with it."""

    def __init__(
        self,
        lab: Lab,
        fabric: Fabric,
        spec: Scenario,
        job: AnyJob,
        folder: RunFolder,
        record: Callable[[dict[str, Any]], None],
        began_s: float,
        *,
        seed: int,
        data_to: Callable[[str], Flow | None],
    ) -> None:
        """`data_to`: the workload's data packets on their way to a host; None: none are marked as such."""
        self.lab, self.fabric, self.spec, self.job, self.folder = lab, fabric, spec, job, folder
        self._record, self._seed, self._data_to = record, seed, data_to
        self._began_ns = round(began_s * NS)
        self._stack = ExitStack()
        self._recorders: dict[str, QueueRecorder] = {}
        self._before: dict[str, Stats] = {}
        self._bursts: PacketSource | None = None
        self._streams: PacketSource | None = None
        self._iperf: list[Iperf] = []
        self._start_ns: dict[int, int] = {}  # of the bursts that were released
        self._to_arm: list[int] = []
        self._sent: dict[int, Sent] = {}
        self._origin_ns: int | None = None

    def start(self) -> None:
        """Before the workload's processes: sources wait for their moment, recorders count."""
        self._install_recorders()
        self._start_sources()

    def _install_recorders(self) -> None:
        for host in self.spec.queues.at or ():
            place, behind = self.lab.port_of(host), self.lab.hosts[host]
            recorder = QueueRecorder(
                f"port to {host}",
                (place.netns, place.ifname),
                (behind.netns, behind.ifname),
                records=self.spec.queues.packets,
            )
            self._stack.callback(recorder.close)
            data = self._data_to(host)
            recorder.install([*([("data", data)] if data is not None else []), *generated_flows()])
            self._recorders[host] = recorder
            self._before[host] = root_queue.read(place.netns, place.ifname)

    def _start_sources(self) -> None:
        receivers = {burst.to for burst in self.spec.microbursts}
        streams = [stream for stream in self.spec.background if stream.kind == "udp"]
        for host in dict.fromkeys([*receivers, *(stream.to for stream in streams)]):
            if host is not None:
                self._sink(host)
        if self.spec.microbursts:
            self._bursts = self._source("microbursts", self.spec.microbursts[0].senders[0], realtime=True)
            for number, burst in enumerate(self.spec.microbursts):
                self._add(self._bursts, burst_plan(burst), burst.senders, str(burst.to), MICROBURST_PORTS[0] + number)
            self._bursts.wait_ready()
        if streams:
            self._streams = self._source("background", streams[0].sender, realtime=False)
            for number, stream in enumerate(streams):
                plan = stream_plan(stream, self._seed + number)
                self._add(self._streams, plan, [stream.sender], str(stream.to), BACKGROUND_PORTS[0] + number)
            self._streams.wait_ready()
        for number, stream in enumerate(s for s in self.spec.background if s.kind != "udp"):
            log = [self._log(f"iperf3-{number}-{end}") for end in ("server", "client")]
            self._iperf.append(Iperf(self.lab, stream, IPERF_PORTS[0] + number, self.folder.user, *log))

    def _sink(self, host: str) -> None:
        """Somebody has to own the port, or ICMP answers every packet; what is not read costs next to nothing."""
        sink = self._stack.enter_context(self.lab.socket(host, "udp", SINK_BYTES, SINK_BYTES))
        sink.bind((self.lab.hosts[host].address, DISCARD_PORT))

    def _log(self, name: str) -> Any:
        return self._stack.enter_context(self.folder.open_new(f"logs/{self.job.label}-{name}.log"))

    def _source(self, name: str, host: str, *, realtime: bool) -> PacketSource:
        source = PacketSource(self.lab, host, user=self.folder.user, log=self._log(name), realtime=realtime)
        return self._stack.enter_context(source)

    def _add(self, source: PacketSource, plan: Burst | Stream, senders: Sequence[str], to: str, port: int) -> None:
        with ExitStack() as handed_in:
            sockets = [handed_in.enter_context(self._sender(host, to, port)) for host in senders]
            source.add(plan, sockets, segment=not shapes_uplinks(self.spec))

    def _sender(self, host: str, to: str, port: int) -> socket.socket:
        sock = self.lab.socket(host, "udp", SINK_BYTES, SNDBUF_BYTES)
        sock.bind((self.lab.hosts[host].address, port))
        sock.connect((self.lab.hosts[to].address, DISCARD_PORT))
        return sock

    def open_gate(self, round_: int) -> None:
        """All workers wait for this round, and are let go when this returns."""
        self.begin()
        now = clock()
        for number, burst in enumerate(self.spec.microbursts):
            if burst.iteration == round_:
                self._release(number, now + round(burst.offset_s * NS))

    def begin(self) -> None:
        """At the first gate, or earlier: what counts its time from here begins. Later calls do nothing."""
        if self._origin_ns is not None:
            return
        now = self._origin_ns = clock()
        for number, burst in enumerate(self.spec.microbursts):
            if burst.at_s is not None:
                self._release(number, now + round(burst.at_s * NS))
        if self._streams is not None:
            for plan in range(sum(stream.kind == "udp" for stream in self.spec.background)):
                self._streams.fire(plan, now + LEAD_NS)
        for iperf in self._iperf:
            iperf.begin()
        if self.spec.queues.during == "run":
            for recorder in self._recorders.values():
                recorder.arm(now, 2**63)

    def _release(self, number: int, start_ns: int) -> None:
        """Recorders first: they have to be ready before the first packet."""
        if self._bursts is not None:
            self._start_ns[number] = start_ns
            self._to_arm.append(number)
            self._arm(clock())
            start_ns = self._start_ns[number] = max(start_ns, clock() + LEAD_NS)
            self._bursts.fire(number, start_ns)

    def _arm(self, now: int) -> None:
        """Windows of the bursts that come soon; a recorder keeps a few at a time."""
        for number in list(self._to_arm):
            start = self._start_ns[number]
            if start - round(self.spec.queues.before_s * NS) > now + LOOK_AHEAD_NS:
                continue
            self._to_arm.remove(number)
            window = burst_window(self.spec, number, start)
            for recorder in self._recorders.values():
                recorder.arm(*window)

    def step(self) -> None:
        """Now and then, at least twice a second. LabError when a source has ended."""
        if self._bursts is not None:
            self._take(self._bursts.reports())
            self._arm(clock())

    def _take(self, reports: Sequence[Sent]) -> None:
        for sent in reports:
            self._sent[sent.plan] = sent
            content = self._burst_report(sent.plan)
            self._record(
                {
                    "event": "microburst",
                    "number": content.number,
                    "to": content.to,
                    "planned_t": content.planned_s,
                    "began_t": content.began_s,
                    "ended_t": content.ended_s,
                    "packets": list(sent.packets),
                    "refused": sent.refused,
                }
            )

    def finish(self) -> None:
        """The workload has ended: what was released and is due is waited for, the rest never came."""
        if self._bursts is not None:
            self._take(self._bursts.reports())
            due_now = [n for n, start in self._start_ns.items() if start <= clock() and n not in self._sent]
            self._take(self._bursts.reports(len(due_now), REPORT_LIMIT_S))
        if self._streams is not None and self._origin_ns is not None:
            plans = [stream for stream in self.spec.background if stream.kind == "udp"]
            for number in range(len(plans)):
                self._streams.stop(number)
            for sent in self._streams.reports(len(plans), REPORT_LIMIT_S):
                self._record(stream_event(plans[sent.plan], sent))
        for iperf in self._iperf:
            iperf.end()

    def results(self) -> TrafficResults:
        """After `finish`, before the links are closed."""
        bursts = tuple(self._burst_report(number) for number in range(len(self.spec.microbursts)))
        found = []
        for host, recorder in self._recorders.items():
            self._await_empty(host)
            found.append(self._queue(host, recorder.read()))
        return TrafficResults(bursts, tuple(found))

    def _await_empty(self, host: str) -> None:
        """What still waits in the queue would look dropped. A queue that does not drain is left as it is."""
        deadline = time.monotonic() + DRAIN_LIMIT_S
        while self._root(host).waiting and time.monotonic() < deadline:
            time.sleep(0.005)

    def _root(self, host: str) -> Stats:
        """Of the port that faces a host, since `start`."""
        place = self.lab.port_of(host)
        return root_queue.read(place.netns, place.ifname).since(self._before[host])

    def _counted_drops(self, host: str) -> int | None:
        """By the queueing discipline itself. On netem its number is that of delay, loss and queue together."""
        return self._root(host).dropped if self.fabric.choice.name == "bpf" else None

    def _queue(self, host: str, reading: QueueReading) -> QueueReport:
        shape = self.spec.topology.link_of(host).down
        limit = queue_limit(shape.rate_bps, shape.queue_bytes, shape.queue_packets, self.spec.topology.mtu)
        windows = [
            (sent.began_ns, sent.ended_ns)
            for number, sent in self._sent.items()
            if self.spec.microbursts[number].to == host
        ]
        name = f"stats/{self.job.label}-queue-{host}.csv"
        self.folder.write(name, analysis.csv_text(reading.records, reading.kinds, self._began_ns))
        return analysis.report(
            host,
            reading.records,
            reading.kinds,
            flows=tuple(FlowDrops(flow.kind, flow.packets_in, flow.packets_out) for flow in reading.flows),
            counted_drops=self._counted_drops(host),
            unrecorded=reading.overflow,
            limit_bytes=limit,
            rate_bps=shape.rate_bps,
            bursts_ns=windows,
        )

    def _burst_report(self, number: int) -> BurstReport:
        burst = self.spec.microbursts[number]
        plan, sent = burst_plan(burst), self._sent.get(number)
        asked = BurstReport(
            number=number,
            to=str(burst.to),
            senders=plan.senders,
            planned_packets=None if plan.planned is None else plan.planned * plan.senders,
            planned_duration_s=burst.duration_s,
            iteration=burst.iteration,
        )
        if sent is None:
            return asked
        times = {
            "planned_s": (sent.planned_ns - self._began_ns) / NS,
            "began_s": (sent.began_ns - self._began_ns) / NS,
            "ended_s": (sent.ended_ns - self._began_ns) / NS,
        }
        return BurstReport(**{**vars(asked), **times, "packets": sum(sent.packets), "refused": sent.refused})

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None:
        for iperf in self._iperf:
            with contextlib.suppress(TimeoutError):
                iperf.end()
        self._stack.close()

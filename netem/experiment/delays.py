"""Whether a run's paths are as long as asked: probes before its first round, after its last one, and beside events.

Before and after, nothing else is on its way: queues are empty, the processor is idle, and the packets of the workload
are counted without the probes. Beside the workload probes are sent only where an event changes a delay, for there is no
other time at which that can be seen; see `DelayReport.quantiles` for what is asked of them.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from netem.analysis.delays import ENOUGH, DelayReport, Jitter, Requested, When, median
from netem.experiment.hub import Event
from netem.lab import Lab
from netem.links import root_queue
from netem.routing import routes_of
from netem.spec import LinkShape, Scenario, Topology, shifted_ends
from netem.spec.effects import LinkEnd, end_of
from netem.spec.impairments import table_of
from netem.traffic.probe import BUFFER_BYTES, NS, ProbePath, await_all, exchange, warm_up

FIRST_PORT = 22_000
PROBES, FEWEST_PROBES = 150, 25
INTERVAL_S, APART_S = 0.0015, 0.0001
LONGEST_S = 3.0
"""What probing may take, before it makes do with fewer probes."""
IN_ORDER_JITTERS = 4
"""With a rate jitter does not reorder: a probe so soon after another would have to wait for it."""
WATCH_INTERVAL_S = 0.02
DRAIN_LIMIT_S, ARRIVAL_LIMIT_S = 1.0, 0.25
UNTOUCHED_S = 0.001
"""For so long, and twice its delay, nothing may change behind a probe."""

Delays = Mapping[LinkEnd, float]
"""One-way delays that are in force in place of the topology's, in seconds."""


@dataclass(frozen=True)
class Hop:
    """One direction of a link. `shifted`: events change it."""

    shape: LinkShape
    end: LinkEnd
    shifted: bool

    @cached_property
    def jitter_table(self) -> tuple[int, ...] | None:
        return table_of(self.shape.distribution)

    @property
    def in_order(self) -> bool:
        return bool(self.shape.jitter_s) and (self.shape.rate_bps is not None or self.shifted)


@dataclass(frozen=True)
class ProbedPath:
    """The way from one host to another."""

    source: str
    destination: str
    hops: tuple[Hop, ...]

    @property
    def name(self) -> str:
        return f"{self.source} to {self.destination}"

    @property
    def changes(self) -> bool:
        """Whether an event changes something on it."""
        return any(hop.shifted for hop in self.hops)

    @property
    def queued(self) -> bool:
        """Whether packets wait for a rate."""
        return self.changes or any(hop.shape.rate_bps is not None for hop in self.hops)

    @property
    def asked(self) -> bool:
        """Whether it is to hold packets back."""
        return self.queued or any(hop.shape.delay_s or hop.shape.jitter_s for hop in self.hops)

    @property
    def in_order_s(self) -> float:
        """How far probes have to be apart."""
        return max((IN_ORDER_JITTERS * hop.shape.jitter_s for hop in self.hops if hop.in_order), default=0.0)

    def requested(self, delays: Delays) -> Requested:
        constant, jitters = 0.0, []
        for hop in self.hops:
            delay_s = delays.get(hop.end, hop.shape.delay_s)
            if hop.shape.jitter_s:
                jitters.append(Jitter(delay_s, hop.shape.jitter_s, hop.jitter_table))
            else:
                constant += delay_s
        return Requested(constant, tuple(jitters))

    @property
    def doubt(self) -> str:
        """Why a probe's delay is not what the link's delay and jitter say; empty where it is."""
        for hop in self.hops:
            shape = hop.shape
            if shape.slot is not None:
                return "a link sends in slots"
            if shape.reorder is not None:
                return "a link reorders packets"
            if shape.overhead is not None:
                return "with an overhead the rate delays every packet"
            if shape.duplicate and shape.jitter_s:
                return "of a packet and its copy the first one arrives"
        return ""


def probed_paths(topology: Topology, shifted: Iterable[LinkEnd]) -> tuple[ProbedPath, ...]:
    """Every path of the gradients that is to hold packets back; without ranks those to the first host and from it."""
    ranks = topology.ranks
    first = topology.server if ranks else next(iter(topology.hosts))
    others = [name for name in (ranks or topology.hosts) if name != first]
    pairs = [pair for other in others for pair in ((other, first), (first, other))]
    ways, ends = routes_of(topology), frozenset(shifted)
    shapes = {link.between: link.up for link in topology.links}
    shapes |= {link.between[::-1]: link.down for link in topology.links}

    def hop(here: str, there: str) -> Hop:
        end: LinkEnd = (here, f"to {there}")
        if here in topology.hosts:
            end = (here, "up")
        elif there in topology.hosts:
            end = (there, "down")
        return Hop(shapes[here, there], end, end in ends)

    found = (ProbedPath(*pair, tuple(itertools.starmap(hop, itertools.pairwise(ways.path(*pair))))) for pair in pairs)
    return tuple(path for path in found if path.asked)


def pace(paths: Sequence[ProbedPath]) -> tuple[int, float]:
    """(probes of each path, seconds between two of one path)."""
    apart = max(APART_S, *(path.in_order_s for path in paths))
    interval_s = max(INTERVAL_S, apart * len(paths))
    return max(FEWEST_PROBES, min(PROBES, int(LONGEST_S / interval_s))), interval_s


@dataclass
class DelayProbes:
    """Of one lab. Make it before anything is installed: what a path takes without impairments is measured then."""

    lab: Lab
    spec: Scenario
    base_s: dict[str, float] = field(default_factory=dict)
    late_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self.paths = probed_paths(self.spec.topology, shifted_ends(self.spec))
        self.watched = tuple(path for path in self.paths if path.changes) if self._delays_change else ()
        if not self.paths:
            return
        with self._open(self.paths) as paths:
            warm_up(paths, ARRIVAL_LIMIT_S)
            self.late_s = tuple(exchange(paths, FEWEST_PROBES, INTERVAL_S, ARRIVAL_LIMIT_S))
            self.base_s = {path.name: median(_arrived(path)) for path in paths}

    @property
    def _delays_change(self) -> bool:
        return any(event.delays for event in self.spec.events)

    def probe(self, when: When, delays: Delays, *, lossy: bool = False) -> list[DelayReport]:
        """Nothing else is on its way. `lossy`: an impairment is in force that probes do not survive."""
        if not self.paths:
            return []
        self._await_empty()
        count, interval_s = pace(self.paths)
        limit_s = ARRIVAL_LIMIT_S + 2 * max(path.requested(delays).longest_s for path in self.paths)
        with self._open(self.paths) as paths:
            warm_up(paths, limit_s)
            late_s = exchange(paths, count, interval_s, limit_s)
            arrived = [_arrived(path) for path in paths]
        return [
            self._report(path, when, path.requested(delays), count, found, late_s=late_s, lossy=lossy)
            for path, found in zip(self.paths, arrived, strict=True)
        ]

    def _report(
        self,
        path: ProbedPath,
        when: When,
        asked: Requested,
        sent: int,
        delays: Sequence[float],
        *,
        late_s: Sequence[float] = (),
        lossy: bool = False,
    ) -> DelayReport:
        doubt = path.doubt
        if lossy and len(delays) < ENOUGH:
            doubt = doubt or "what is in force loses the probes as well"
        base_s = self.base_s[path.name]
        less_base = tuple(delay - base_s for delay in delays)
        return DelayReport(path.name, when, asked, sent, less_base, base_s, tuple(late_s), doubt=doubt)

    @contextmanager
    def _open(self, paths: Sequence[ProbedPath]) -> Iterator[list[ProbePath]]:
        """Sockets of each path. They are there only as long as probes are sent."""
        with ExitStack() as stack:
            found = []
            for port, path in enumerate(paths, FIRST_PORT):
                ends = [
                    self.lab.socket(host, "udp", BUFFER_BYTES, BUFFER_BYTES) for host in (path.source, path.destination)
                ]
                for sock, host in zip(ends, (path.source, path.destination), strict=True):
                    stack.enter_context(sock)
                    sock.bind((self.lab.hosts[host].address, port))
                ends[0].connect((self.lab.hosts[path.destination].address, port))
                found.append(ProbePath(path.name, ends[0], ends[1]))
            yield found

    def _await_empty(self) -> None:
        """What the workload has left in the queues goes first. A queue that does not drain is left as it is."""
        deadline = time.monotonic() + DRAIN_LIMIT_S
        hosts = dict.fromkeys(host for path in self.paths for host in (path.source, path.destination))
        places = [(place.netns, place.ifname) for place in (self.lab.port_of(host) for host in hosts)]
        places += [(self.lab.hosts[host].netns, self.lab.hosts[host].ifname) for host in hosts]
        trunks = {hop.end for path in self.paths for hop in path.hops if hop.end[1] not in ("up", "down")}
        between = [self.lab.port_between(here, way.removeprefix("to ")) for here, way in sorted(trunks)]
        places += [(place.netns, place.ifname) for place in between]
        for place in places:
            while root_queue.read(*place).waiting and time.monotonic() < deadline:
                time.sleep(0.005)

    @contextmanager
    def watching(self, events: Sequence[Event], began_s: float, found: list[DelayReport]) -> Iterator[None]:
        """Sends probes meanwhile, where an event changes a delay. `events`: the recorder's, with `began_s` as zero."""
        if not self.watched:
            yield
            return
        with self._open(self.watched) as paths:
            warm_up(paths, ARRIVAL_LIMIT_S)
            to_monotonic_ns = time.monotonic_ns() - time.clock_gettime_ns(time.CLOCK_REALTIME)
            with _sending(paths):
                yield
            await_all(paths, ARRIVAL_LIMIT_S)
            states = states_of(events)
            rated = any(shift["rate_bps"] for event in events for shift in event.get("shifts", ()))
            for path, probes in zip(self.watched, paths, strict=True):
                seen = [((probe.sent_ns + to_monotonic_ns) / NS - began_s, probe.delay_s) for probe in probes.probes()]
                found += self._during(path, states, seen, rated)

    def _during(
        self, path: ProbedPath, states: Sequence[State], probes: Sequence[tuple[float, float | None]], rated: bool
    ) -> list[DelayReport]:
        """One report for each delay that was asked for, of the probes that were on their way while it held."""
        groups = by_request(path, states, probes)
        queued = rated or any(hop.shape.rate_bps is not None for hop in path.hops)
        found, short = [], 0
        for asked, delays in groups.items():
            if len(delays) < ENOUGH:
                short += 1
                continue
            arrived = [delay - self.base_s[path.name] for delay in delays if delay is not None]
            doubt = path.doubt or ("with a rate jitter does not reorder" if path.in_order_s else "")
            if path.destination in (self.spec.queues.at or ()):
                doubt = doubt or "the recorder of the queue there takes the time stamps off"
            if len(arrived) < ENOUGH:
                doubt = doubt or "an event may lose the probes as well"
            found.append(
                DelayReport(
                    path.name, "during the run", asked, len(delays), tuple(arrived), self.base_s[path.name],
                    self.late_s, queued, doubt,
                )
            )  # fmt: skip
        if short:
            doubt = f"{short} delays were in force too briefly for {ENOUGH} probes each"
            found.append(self._report(path, "during the run", path.requested({}), 0, ()).doubted(doubt))
        return found


def _arrived(path: ProbePath) -> list[float]:
    return [probe.delay_s for probe in path.probes() if probe.delay_s is not None]


@contextmanager
def _sending(paths: Sequence[ProbePath]) -> Iterator[None]:
    """A thread that sends a probe on each path now and then: the kernel keeps the times, so it may be late."""
    over = threading.Event()

    def send() -> None:
        while not over.wait(WATCH_INTERVAL_S):
            for path in paths:
                path.send()
                path.collect()

    thread = threading.Thread(target=send, name="probes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@dataclass(frozen=True)
class State:
    """From `since_s` on exactly these delays are in force; from `until_s` on others may be."""

    since_s: float
    until_s: float
    delays: Delays


def states_of(events: Iterable[Event]) -> list[State]:
    """From the `impairment` events of a run; each is written when the change has been read back."""
    changes: list[tuple[float, float, Delays]] = [(-math.inf, -math.inf, {})]
    for event in events:
        if event["event"] == "impairment":
            delays: dict[LinkEnd, float] = {}
            for shift in event["shifts"]:
                if shift["delay_s"] is not None:
                    delays[end_of(shift["link"])] = shift["delay_s"]
            changes.append((event["t"] - event["took_s"], event["t"], delays))
    ends = [begin for begin, _, _ in changes[1:]] + [math.inf]
    return [State(since, until, delays) for (_, since, delays), until in zip(changes, ends, strict=True)]


def by_request(
    path: ProbedPath, states: Sequence[State], probes: Iterable[tuple[float, float | None]]
) -> dict[Requested, list[float | None]]:
    """Delays (None: lost) of the probes that nothing changed around, by what was asked for. `probes`: (sent, delay)."""
    found: dict[Requested, list[float | None]] = {}
    asked = [path.requested(state.delays) for state in states]
    on_the_way_s = [2.0 * each.longest_s + UNTOUCHED_S for each in asked]
    for sent_s, delay_s in probes:
        number = bisect.bisect_right(states, sent_s, key=lambda state: state.since_s) - 1
        if sent_s + on_the_way_s[number] <= states[number].until_s:
            found.setdefault(asked[number], []).append(delay_s)
    return found

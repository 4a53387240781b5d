"""The links of a lab while a scenario runs: which port loses which packets of whom, and what each has counted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field

from netem.analysis.records import LinkCount
from netem.experiment.prepare import Job
from netem.experiment.wiring import Wiring
from netem.kernel.netns import open_netlink
from netem.kernel.veth import tx_dropped
from netem.lab import Lab
from netem.links import mask
from netem.links.base import LossRule, Match, PortHealth
from netem.links.choose import BackendChoice
from netem.spec import Burst, Scenario, Step, Topology


def base_loss(topology: Topology) -> dict[tuple[int, str], float]:
    """Steady loss of each worker's path, by (worker's rank, direction), where there is any."""
    found: dict[tuple[int, str], float] = {}
    server = topology.link_of(topology.server)
    for name, rank in topology.ranks.items():
        own = topology.link_of(name)
        for direction, ratio in (
            ("up", 1 - (1 - own.up.loss) * (1 - server.down.loss)),
            ("down", 1 - (1 - server.up.loss) * (1 - own.down.loss)),
        ):
            if rank and ratio > 0:
                found[rank, direction] = ratio
    return found


def rules_for(
    step: Step, direction: str, ranks: Iterable[int], sources: Mapping[int, str], names: Mapping[int, str], seed: int
) -> tuple[LossRule, ...]:
    """The loss rules of one port: `ranks` are the workers whose packets pass it in this direction.

    Of several bursts on the same packets the highest loss holds. Going down all workers' packets have one source, but
    each passes a port of its own.
    """
    rules: dict[int, LossRule] = {}
    for rank in ranks:
        for burst in step.bursts:
            if not _hits(burst, direction, names[rank]):
                continue
            known = rules.get(rank)
            match: Match = "all" if "all" in (burst.match, known.match if known else "") else "data"
            loss = max(burst.loss, known.loss_ratio if known else 0.0)
            state = mask.port_state(seed, direction, rank)
            rules[rank] = LossRule(sources[rank], state, loss, match, step.round, step.round)
    return tuple(rules.values())


def _hits(burst: Burst, direction: str, worker: str) -> bool:
    return burst.direction in (direction, "both") and (burst.workers == "all" or worker in burst.workers)


FlowRound = tuple[str, int, int | None]
"""(direction, worker's rank, round)"""
Count = tuple[int, int, int]
"""(seen, dropped, bytes)"""


@dataclass
class Fabric:
    """The ports of one lab, for one job after another. Use as a context: `close` releases what it holds."""

    lab: Lab
    spec: Scenario
    choice: BackendChoice
    seed: int = 0
    _dropped_before: dict[str, int] = field(default_factory=dict)
    _queues_before: dict[str, int] = field(default_factory=dict)
    _uplinks_before: dict[str, int] = field(default_factory=dict)
    _keyless: bool = False
    """Packets do not say their round: what was counted between two gates tells it."""
    _round: int | None = None
    _last: dict[FlowRound, Count] = field(default_factory=dict)
    _tally: dict[FlowRound, Count] = field(default_factory=dict)

    def __post_init__(self) -> None:
        topology = self.spec.topology
        self.names = {rank: name for name, rank in topology.ranks.items()}
        self.address = {rank: self.lab.hosts[name].address for rank, name in self.names.items()}
        self.workers = [rank for rank in self.names if rank]
        self.wiring = Wiring(self.lab, topology, self.choice, self.spec.link.loss_at)
        self.ports = self.wiring.ports

    def install(self, job: Job) -> None:
        """Steady state of every port for a job; counters start at zero."""
        self.seed = job.config.seed
        for name, rank in self.spec.topology.ranks.items():
            flow = job.flow("down" if rank else "up")
            self.ports[name].install(self.wiring.down(name), flow, job.key, self._sources(rank))
            self.ports[name].set_label(0)
        self.wiring.install_uplink_losses(job.flow("up"), job.key)
        self._dropped_before = self._device_drops()
        self._queues_before, self._uplinks_before = self._queue_drops(), self._uplink_drops()
        self._keyless = job.key is None
        self._round, self._last, self._tally = None, {}, {}

    def _sources(self, rank: int) -> list[str]:
        """Who sends data through the port that faces a host."""
        return [self.address[0]] if rank else [self.address[worker] for worker in self.workers]

    def apply(self, step: Step) -> None:
        """Put a step's bursts, and nothing else, in place at every port. Raises LinkError when one is not as asked."""
        for name, rank in self.spec.topology.ranks.items():
            if rank:
                rules = rules_for(step, "down", [rank], {rank: self.address[0]}, self.names, self.seed)
            else:
                rules = rules_for(step, "up", self.workers, self.address, self.names, self.seed)
            self.ports[name].set_loss(rules)

    def label(self, round_: int) -> None:
        """From now on it is this round. Packets that do not say their round are counted under it."""
        if self._keyless:
            self._attribute()
            self._round = round_
        for port in self.ports.values():
            port.set_label(round_)
        for loss in self.wiring.uplink_losses.values():
            loss.set_label(round_)

    def counts(self, job: Job, certain: Collection[int]) -> list[LinkCount]:
        """Data packets of the job since `install`, uplink and port together.

        Of a transport without a key only `certain` rounds are known: those that begin and end with a gate.
        """
        self._attribute()
        found = []
        for (direction, worker, index), (seen, dropped, size) in sorted(self._tally.items(), key=str):
            known = index is not None and (job.key is not None or index in certain)
            found.append(LinkCount(direction, worker, index if known else None, seen, dropped, size))
        return found

    def _attribute(self) -> None:
        """Takes what was counted since the last time. A count without a round belongs to the one that ends here."""
        now = self._read()
        for (direction, worker, index), values in now.items():
            before = self._last.get((direction, worker, index), (0, 0, 0))
            grown = tuple(new - old for new, old in zip(values, before, strict=True))
            if any(grown):
                key = (direction, worker, self._round if index is None else index)
                total = self._tally.get(key, (0, 0, 0))
                self._tally[key] = (total[0] + grown[0], total[1] + grown[1], total[2] + grown[2])
        self._last = now

    def _read(self) -> dict[FlowRound, Count]:
        """Seen, dropped and bytes of each flow and round, from the ports and the uplinks in front of them."""
        found: dict[FlowRound, Count] = {}
        by_address = {self.address[rank]: rank for rank in self.workers}
        for name, rank in self.spec.topology.ranks.items():
            for counter in self.ports[name].counters():
                worker = rank or by_address.get(counter.source)
                if counter.kind == "data" and worker:  # netem may not know the sender: then the books do not close
                    key = ("down" if rank else "up", worker, counter.index)
                    found[key] = (counter.seen, counter.dropped, counter.bytes_seen)
        for name, loss in self.wiring.uplink_losses.items():
            for counter in loss.counters():
                if counter.kind == "data":
                    key = ("up", self.spec.topology.ranks[name], counter.index)
                    _, dropped, _ = found.get(key, (0, 0, 0))
                    found[key] = (counter.seen, counter.dropped + dropped, counter.bytes_seen)
        return found

    def queue_drops(self) -> dict[str, int]:
        """Packets behind the loss that a link's queue had no room for, since `install`, by direction."""
        return {way: 0 if self._queues_first else count for way, count in self._since_install("queue").items()}

    def _queue_drops(self) -> dict[str, int]:
        drops = {"up": 0, "down": 0}
        for name, rank in self.spec.topology.ranks.items():
            drops["down" if rank else "up"] += self.ports[name].health().queue_dropped
        return drops

    def uplink_drops(self) -> dict[str, int]:
        """Packets in front of the loss that a queue had no room for, since `install`, by direction."""
        drops = self._since_install("uplink")
        if self._queues_first:
            drops = {way: count + self._since_install("queue")[way] for way, count in drops.items()}
        return drops

    @property
    def _queues_first(self) -> bool:
        """The loss sits behind the port's queue."""
        return self.spec.link.loss_at == "after_rate"

    def _since_install(self, what: str) -> dict[str, int]:
        now = self._queue_drops() if what == "queue" else self._uplink_drops()
        before = self._queues_before if what == "queue" else self._uplinks_before
        return {way: count - before[way] for way, count in now.items()}

    def _uplink_drops(self) -> dict[str, int]:
        drops = {"up": 0, "down": 0}
        for name, port in self.wiring.uplinks.items():
            drops["up" if self.spec.topology.ranks[name] else "down"] += port.health().queue_dropped
        return drops

    def device_drops(self) -> dict[str, int]:
        """Packets behind the loss that a receiver's device had no room for, since `install`, by direction."""
        return {way: count - self._dropped_before[way] for way, count in self._device_drops().items()}

    def _device_drops(self) -> dict[str, int]:
        drops = {"up": 0, "down": 0}
        place = self.lab.port_of(self.names[0])
        with closing(open_netlink(place.netns)) as netlink:
            for name, rank in self.spec.topology.ranks.items():
                drops["down" if rank else "up"] += tx_dropped(netlink, self.lab.port_of(name).ifname)
        return drops

    def health(self) -> dict[str, PortHealth]:
        return {name: port.health() for name, port in self.ports.items()}

    def __enter__(self) -> Fabric:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.wiring.close()

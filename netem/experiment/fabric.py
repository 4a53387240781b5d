"""The links of a lab while a scenario runs: which port loses which packets of whom, and what each has counted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Self

from netem.analysis.altered import Altered
from netem.analysis.recorded import Mask, names_of
from netem.analysis.records import LinkCount
from netem.experiment.altering import altered, refused_by_direction
from netem.experiment.delays import DelayProbes
from netem.experiment.passages import Passage
from netem.experiment.prepare import Job
from netem.experiment.tally import Counted, Tally, by_known_rounds
from netem.experiment.wiring import Wiring, chain_of
from netem.kernel.netns import open_netlink
from netem.kernel.refused import Refused
from netem.kernel.veth import tx_dropped
from netem.lab import Lab, PortPlace
from netem.links import mask
from netem.links.base import INDEX_MAX, LossRule, Match, Port, PortHealth, Shape
from netem.links.choose import BackendChoice
from netem.links.loss_filter import LossFilter
from netem.links.recorded import RecordedLoss
from netem.spec import Burst, Scenario, Step, iterations_total, shifted_ends
from netem.spec.effects import LinkEnd


def rules_for(
    step: Step, direction: str, ranks: Iterable[int], sources: Mapping[int, str], names: Mapping[int, str], seed: int
) -> tuple[LossRule, ...]:
    """The loss rules of one port: `ranks` are the workers whose packets pass it in this direction.

    Of several bursts on the same packets the one with the highest mean loss holds, of equal ones the first, and the
    highest shares of duplicates and of damage. Going down all workers' packets have one source, but
    each passes a port of its own.
    """
    rules: dict[int, LossRule] = {}
    for rank in ranks:
        for index, burst in enumerate(step.bursts):
            if not _hits(burst, direction, names[rank]):
                continue
            known = rules.get(rank)
            match: Match = "all" if "all" in (burst.match, known.match if known else "") else "data"
            loss, twice, corrupt = burst.loss, burst.duplicate, burst.corrupt
            chain = chain_of(loss)
            if known is not None:
                twice, corrupt = max(twice, known.duplicate_ratio), max(corrupt, known.corrupt_ratio)
                if known.loss_ratio >= loss:
                    loss, chain = known.loss_ratio, known.chain
            state = mask.port_state(seed, direction, rank)
            first, last = step.window(index)
            if known is not None:
                first, last = min(first, known.first), max(last, known.last)
            rules[rank] = LossRule(sources[rank], state, float(loss), match, first, last, chain, twice, corrupt)
    return tuple(rules.values())


def _hits(burst: Burst, direction: str, worker: str) -> bool:
    return burst.direction in (direction, "both") and (burst.workers == "all" or worker in burst.workers)


FlowRound = tuple[str, int, int | None]
"""(direction, worker's rank, round)"""


@dataclass(frozen=True)
class Prepared:
    """A step in the terms of the links: what is to be written where, without what is there already."""

    step: Step
    losses: tuple[tuple[str, tuple[LossRule, ...]], ...]
    shapes: tuple[tuple[LinkEnd, Shape], ...]


@dataclass
class Fabric:
    """The ports of one lab, for one job after another. Use as a context: `close` releases what it holds."""

    lab: Lab
    spec: Scenario
    choice: BackendChoice
    seed: int = 0
    mask: Mask = field(default_factory=dict)
    """Transmissions that are lost again."""
    _dropped_before: dict[str, int] = field(default_factory=dict)
    _queues_before: dict[str, int] = field(default_factory=dict)
    _uplinks_before: dict[str, int] = field(default_factory=dict)
    _trunks_before: dict[str, int] = field(default_factory=dict)
    _refused_before: dict[str, Refused] = field(default_factory=dict)
    _keyless: bool = False
    """Packets do not say their round: what was counted between two gates tells it."""
    _round: int | None = None
    _in_place: dict[str, tuple[LossRule, ...]] = field(default_factory=dict)
    _shapes: dict[LinkEnd, Shape] = field(default_factory=dict)
    """What is in place."""
    _last: dict[FlowRound, Tally] = field(default_factory=dict)
    _tally: dict[FlowRound, Tally] = field(default_factory=dict)

    def __post_init__(self) -> None:
        topology = self.spec.topology
        self.names = {rank: name for name, rank in topology.ranks.items()}
        self.address = {rank: self.lab.hosts[name].address for rank, name in self.names.items()}
        self.workers = [rank for rank in self.names if rank]
        self.delays = DelayProbes(self.lab, self.spec)  # before there is anything to delay a packet
        at, shifted = self.spec.link.loss_at, shifted_ends(self.spec)
        self.wiring = Wiring(self.lab, topology, self.choice, at, shifted, netem_seed=self.spec.seed)
        self.ports = self.wiring.ports
        self.recorded: dict[str, RecordedLoss] = {}
        # A round that no job of this scenario reaches. netem needs a filter for each power of two in a window.
        netem = self.choice.loss_engine == "netem"
        self._horizon = (1 << iterations_total(self.spec).bit_length()) - 1 if netem else INDEX_MAX

    def install(self, job: Job) -> None:
        """Steady state of every port for a job; counters start at zero."""
        self.seed = self.wiring.seed = job.config.seed
        self.wiring.seed_ports(self.seed)
        for name, rank in self.spec.topology.ranks.items():
            flow = job.flow("down" if rank else "up")
            self.ports[name].install(self.wiring.down(name), flow, job.key, self._sources(rank))
            self.ports[name].set_label(0)
        self._in_place, self._shapes = {}, {}
        for host, way in self.wiring.shifted:
            port, shape = self.wiring.port_and_shape(host, way, None)
            if way != "down" or host not in self.ports:
                port.set_shape(shape)  # the others have just been installed
            self._shapes[host, way] = shape
        self.wiring.install_losses({way: job.flow(way) for way in ("up", "down")}, job.key)
        self._install_mask(job)
        self._dropped_before = self._device_drops()
        self._queues_before, self._uplinks_before = self._queue_drops(), self._uplink_drops()
        self._trunks_before = self._trunk_drops()
        self._refused_before = refused_by_direction(self.lab, self.spec.topology)
        self._keyless = job.key is None or (bool(self.spec.events) and self.choice.loss_engine != "bpf")
        self._round, self._last, self._tally = None, {}, {}

    def _install_mask(self, job: Job) -> None:
        """A recorded mask is in place for the whole job: it names rounds."""
        if not self.mask or job.key is None:
            return
        for name, rank in self.spec.topology.ranks.items():
            direction = "down" if rank else "up"
            senders = {rank: self.address[0]} if rank else {worker: self.address[worker] for worker in self.workers}
            lost = [
                (source, name_) for each, source in senders.items() for name_ in names_of(self.mask, direction, each)
            ]
            if lost:
                place = self.lab.port_of(name)
                self.recorded.setdefault(name, RecordedLoss(place.netns, place.ifname))
                self.recorded[name].install(job.flow(direction), job.key, lost, len(lost))

    def _sources(self, rank: int) -> list[str]:
        """Who sends through the port that faces a host: data, and whatever hosts without a rank send."""
        others = [host.address for host in self.lab.hosts.values() if host.rank is None]
        return [*([self.address[0]] if rank else [self.address[worker] for worker in self.workers]), *others]

    def apply(self, step: Step) -> None:
        """Put a step's impairments, and nothing else, in place. Raises LinkError when one is not as asked."""
        self.put(self.prepare(step))

    def prepare(self, step: Step) -> Prepared:
        """What a step changes at which port, seen from what is in place now."""
        wanted = self._losses(step)
        losses = [(name, rules) for name, rules in wanted.items() if rules != self._in_place.get(name, ())]
        for name, rules in losses:
            self.ports[name].prepare(rules)
        shifts = {(shift.host, shift.way): shift for shift in step.shifts}
        shapes = []
        for host, way in sorted(self.wiring.shifted):
            _, shape = self.wiring.port_and_shape(host, way, shifts.get((host, way)))
            if shape != self._shapes.get((host, way)):
                shapes.append(((host, way), shape))
        return Prepared(step, tuple(losses), tuple(shapes))

    def _losses(self, step: Step) -> dict[str, tuple[LossRule, ...]]:
        """The loss rules of each port."""
        found = {}
        for name, rank in self.spec.topology.ranks.items():
            if rank:
                rules = rules_for(step, "down", [rank], {rank: self.address[0]}, self.names, self.seed)
            else:
                rules = rules_for(step, "up", self.workers, self.address, self.names, self.seed)
            found[name] = tuple(replace(rule, last=min(rule.last, self._horizon)) for rule in rules)
        return found

    def put(self, prepared: Prepared) -> None:
        """Write what was prepared, and read it back. Raises LinkError when something is not as asked."""
        for name, rules in prepared.losses:
            self.ports[name].set_loss(rules)
            self._in_place[name] = rules
        for (host, way), shape in prepared.shapes:
            port, _ = self.wiring.port_and_shape(host, way, None)
            port.set_shape(shape)
            self._shapes[host, way] = shape

    def delays_in_place(self) -> dict[LinkEnd, float]:
        """Of the link directions that events change, in seconds."""
        return {end: shape.delay_us / 1e6 for end, shape in self._shapes.items()}

    @property
    def loses_anything(self) -> bool:
        """Whether impairments are in force that hit more than data."""
        return any(rule.match == "all" for rules in self._in_place.values() for rule in rules)

    def label(self, round_: int) -> None:
        """From now on it is this round. Packets that do not say their round are counted under it."""
        if self._keyless:
            self._attribute()
            self._round = round_
        for port in self.ports.values():
            port.set_label(round_)
        for loss in self.wiring.losses.values():
            loss.set_label(round_)

    def counts(self, job: Job, certain: Collection[int]) -> list[LinkCount]:
        """Data packets of the job since `install`, uplink and port together.

        Where packets do not say their round only `certain` rounds are known: those that begin and end with a gate.
        """
        self._attribute()
        found = []
        for (direction, worker, index), tally in sorted(self._tally.items(), key=str):
            known = index is not None and (not self._keyless or index in certain)
            found.append(LinkCount(direction, worker, index if known else None, *tally))
        return found

    def _attribute(self) -> None:
        """Takes what was counted since the last time. A count without a round belongs to the one that ends here."""
        now = self._read()
        for (direction, worker, index), values in now.items():
            grown = values.minus(self._last.get((direction, worker, index), Tally()))
            if any(grown):
                key = (direction, worker, self._round if index is None else index)
                self._tally[key] = self._tally.get(key, Tally()).plus(grown)
        self._last = now

    def _read(self) -> dict[FlowRound, Tally]:
        """Seen, dropped and bytes of each flow and round, from the ports and the links in front of them."""
        found: dict[FlowRound, Tally] = {}
        by_address = {self.address[rank]: rank for rank in self.workers}
        for name, rank in self.spec.topology.ranks.items():
            for counter in self.ports[name].counters():
                if rank:
                    worker = rank if counter.source == self.address[0] else None
                else:
                    worker = by_address.get(counter.source)
                if counter.kind == "data" and worker:  # netem may not know the sender: then the books do not close
                    key = ("down" if rank else "up", worker, counter.index)
                    both = Tally.of(counter.seen, counter.dropped, counter.bytes_seen)
                    found[key] = both._replace(duplicated=counter.duplicated, corrupted=counter.corrupted)
        for name, recorded in self.recorded.items():
            rank = self.spec.topology.ranks[name]
            for hit in recorded.hits():
                key = ("down" if rank else "up", rank or by_address[hit.source], hit.position)
                last = found.get(key, Tally())
                found[key] = last._replace(dropped=last.dropped + hit.dropped, hits=last.hits + hit.dropped)
        losses = {place: self._by_rank(loss, by_address) for place, loss in self.wiring.losses.items()}
        for (way, rank), places in self.wiring.passages.of_flow.items():
            for place in reversed(places):  # the first link of a way is the one that sees all that was sent
                known = {index for here, worker, index in found if (here, worker) == (way, rank)}
                counted = losses.get((place.here, place.there), {}).get(rank, {})
                for index, (seen, dropped, size) in by_known_rounds(counted, known).items():
                    found[way, rank, index] = found.get((way, rank, index), Tally()).behind(seen, dropped, size)
        return found

    @staticmethod
    def _by_rank(loss: LossFilter, ranks: Mapping[str, int]) -> dict[int, dict[int | None, Counted]]:
        """Data that a link in front of the last has counted: worker's rank -> round -> seen, dropped, bytes."""
        found: dict[int, dict[int | None, Counted]] = {}
        for each in loss.counters():
            if each.kind == "data" and each.source in ranks:
                found.setdefault(ranks[each.source], {})[each.index] = (each.seen, each.dropped, each.bytes_seen)
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
        """Packets in front of the loss that a queue had no room for, or that a host's own netem lost, since `install`,
        by direction.
        """
        drops = self._since_install("uplink")
        if self._queues_first:
            drops = {way: count + self._since_install("queue")[way] for way, count in drops.items()}
        return drops

    @property
    def _queues_first(self) -> bool:
        """The loss sits behind the port's queue."""
        return self.spec.link.loss_at == "after_rate"

    def _since_install(self, what: str) -> dict[str, int]:
        now, before = {
            "queue": (self._queue_drops, self._queues_before),
            "uplink": (self._uplink_drops, self._uplinks_before),
            "trunk": (self._trunk_drops, self._trunks_before),
        }[what]
        return {way: count - before[way] for way, count in now().items()}

    def _uplink_drops(self) -> dict[str, int]:
        drops = {"up": 0, "down": 0}
        for name, port in self.wiring.uplinks.items():
            if name in self.spec.topology.ranks:
                way = "up" if self.spec.topology.ranks[name] else "down"
                drops[way] += port.health().queue_dropped + _lost(port)
        return drops

    def trunk_drops(self) -> dict[str, int]:
        """Packets that queues and devices between switches had no room for, or that a model of loss there lost, since
        `install`, by direction.
        """
        return self._since_install("trunk")

    def _trunk_drops(self) -> dict[str, int]:
        drops = {"up": 0, "down": 0}
        for passage, port in self._trunks():
            if passage.direction:
                drops[passage.direction] += port.health().queue_dropped + _lost(port)
        for way, count in self._tx_dropped(self._trunk_places()).items():
            drops[way] += count
        return drops

    def _trunk_places(self) -> list[tuple[str, PortPlace]]:
        """The ports between switches that gradients pass, with their direction."""
        return [
            (each.direction, self.lab.port_between(each.here, each.there))
            for each in self.wiring.passages.all
            if each.direction and not each.from_host
        ]

    def _trunks(self) -> list[tuple[Passage, Port]]:
        every = {(each.here, each.there): each for each in self.wiring.passages.all}
        return [(every[place], port) for place, port in self.wiring.trunks.items()]

    def device_drops(self) -> dict[str, int]:
        """Packets that a receiver's device, or one between switches, had no room for, since `install`, by direction."""
        return {way: count - self._dropped_before[way] for way, count in self._device_drops().items()}

    def altered(self) -> Altered:
        """What links have damaged and copied since `install`, as far as anybody counts it."""
        topology = self.spec.topology
        return altered(topology, self._refused_before, refused_by_direction(self.lab, topology))

    def _device_drops(self) -> dict[str, int]:
        ranks = self.spec.topology.ranks
        places = [("down" if rank else "up", self.lab.port_of(name)) for name, rank in ranks.items()]
        return self._tx_dropped([*places, *self._trunk_places()])

    @staticmethod
    def _tx_dropped(places: Iterable[tuple[str, PortPlace]]) -> dict[str, int]:
        drops = {"up": 0, "down": 0}
        by_netns: dict[str, list[tuple[str, PortPlace]]] = {}
        for way, place in places:
            by_netns.setdefault(place.netns, []).append((way, place))
        for netns, here in by_netns.items():
            with closing(open_netlink(netns)) as netlink:
                for way, place in here:
                    drops[way] += tx_dropped(netlink, place.ifname)
        return drops

    def health(self) -> dict[str, PortHealth]:
        return {
            **{name: port.health() for name, port in self.ports.items()},
            **{passage.name: port.health() for passage, port in self._trunks()},
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for recorded in self.recorded.values():
            recorded.close()
        self.wiring.close()


def _lost(port: Port) -> int:
    """Packets that a port in front of the last has lost by a model: there are no senders to tell apart."""
    return sum(counter.dropped for counter in port.counters())

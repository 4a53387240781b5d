"""The links of a lab under programs of any kind: every host may send to every other, and nothing says a round.

Packets are counted by window: the time between two changes of the impairments. What passes while a change is made
belongs to no window, so that in each every packet was subject to the same loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from netem.analysis.command import Cell
from netem.experiment.command import CommandJob
from netem.experiment.fabric import Fabric, Prepared
from netem.kernel.netns import open_netlink
from netem.kernel.veth import tx_dropped
from netem.links import mask
from netem.links.base import LossRule, Match, Port
from netem.links.loss_filter import LossFilter
from netem.spec import Burst, Step

Place = tuple[str, str, str, int | None]
"""(port: the host that it faces, or `_name(here, there)` for a link in front of it; sender; kind; label)"""
Count = tuple[int, int, int]
"""(seen, dropped, bytes)"""
UPLINK = "^"


@dataclass
class Window:
    """`loss`: (port, sender) -> what the bursts in force ask for, of the data packets alone or of all."""

    label: int
    bursts: tuple[Burst, ...]
    loss: Mapping[tuple[str, str], tuple[float, Match]] = field(default_factory=dict)


@dataclass
class OpenFabric(Fabric):
    """For one `CommandJob` after another."""

    windows: list[Window] = field(default_factory=list)
    _labels: int = 0
    _current: int = 0
    _latest: dict[Place, Count] = field(default_factory=dict)
    _sums: dict[Place, Count] = field(default_factory=dict)
    _queues_before: dict[str, int] = field(default_factory=dict)
    _devices_before: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.addresses = {name: host.address for name, host in self.lab.hosts.items()}
        self.ports = {**self.wiring.ports, **self.wiring.side_ports}
        self.passages = {(each.here, each.there): each for each in self.wiring.passages.all}

    def install(self, job: CommandJob) -> None:  # type: ignore[override]  # another kind of job, the same purpose
        """Steady state of every port for a job; counters start at zero."""
        self.seed = job.seed
        self._job = job
        self.wiring.seed_ports(self.seed)
        for name, port in self.ports.items():
            port.install(self.wiring.down(name), job.flow_to(name), job.key, self._senders(name))
        self.wiring.install_losses({}, None)
        self._latest, self._sums, self._current, self._labels = {}, {}, 0, 0
        self._latest = self._counters()
        self.windows = []
        self._in_place, self._shapes = {}, {}
        for host, way in self.wiring.shifted:
            port, shape = self.wiring.port_and_shape(host, way, None)
            if way != "down":
                port.set_shape(shape)  # those that face hosts have just been installed
            self._shapes[host, way] = shape
        self._open(())
        self._queues_before = self._queues()
        self._devices_before = self._devices()

    def _senders(self, host: str) -> list[str]:
        return [address for name, address in self.addresses.items() if name != host]

    def label(self, round_: int) -> None:
        """Packets are counted by window, not by round."""

    def apply(self, step: Step) -> None:
        """Put a step's bursts, and nothing else, in place at every port. Raises LinkError when one is not as asked."""
        self.put(self.prepare(step))

    def put(self, prepared: Prepared) -> None:
        self._mark()
        super().put(prepared)
        self._open(prepared.step.bursts)

    def end(self) -> None:
        """The programs have ended: what is counted from here on belongs to no window."""
        self._mark()

    def _losses(self, step: Step) -> dict[str, tuple[LossRule, ...]]:
        found: dict[str, list[LossRule]] = {name: [] for name in self.ports}
        for (port, sender), (ratio, match) in self._loss(step.bursts).items():
            found[port].append(LossRule(self.addresses[sender], self._state(step, port, sender), ratio, match))
        return {name: tuple(rules) for name, rules in found.items()}

    def _state(self, step: Step, port: str, sender: str) -> int:
        """Of the mask, for packets that have a key."""
        up = any(burst.direction != "down" and sender in burst.workers for burst in step.bursts)
        rank = list(self.lab.hosts).index(sender if up else port)
        return mask.port_state(self.seed, "up" if up else "down", rank)

    def _loss(self, bursts: Sequence[Burst]) -> dict[tuple[str, str], tuple[float, Match]]:
        """Up: what a worker sends, to whomever; down: what is sent to it. Of several bursts the highest loss holds."""
        found: dict[tuple[str, str], tuple[float, Match]] = {}
        for port in self.ports:
            for sender in self.ports:
                hit = [burst for burst in bursts if sender != port and _hits(burst, sender, port)]
                if hit:
                    every = self._job.work.flow is None or any(burst.match == "all" for burst in hit)
                    found[port, sender] = (max(burst.loss for burst in hit), "all" if every else "data")
        return found

    # Counting

    def _mark(self) -> None:
        """Close the window: from here on packets belong to none."""
        self._set_label(0)

    def _open(self, bursts: Sequence[Burst]) -> None:
        self._labels += 1
        self.windows.append(Window(self._labels, tuple(bursts), self._loss(bursts)))
        self._set_label(self._labels)

    def _set_label(self, label: int) -> None:
        for port in self._counting().values():
            port.set_label(label)
        self._settle()
        self._current = label

    def _settle(self) -> None:
        """Backends that keep no label: what was counted since the last change belongs to the current one."""
        now = self._counters()
        for (port, sender, kind, label), values in now.items():
            if label is not None:
                self._sums[port, sender, kind, label] = values
                continue
            earlier = self._latest.get((port, sender, kind, None), (0, 0, 0))
            place = (port, sender, kind, self._current)
            total = self._sums.get(place, (0, 0, 0))
            self._sums[place] = _plus(total, values, earlier)
        self._latest = now

    def _counting(self) -> dict[str, Port | LossFilter]:
        """Every place that counts, by its name in the results."""
        return {**self.ports, **{self._name(*place): loss for place, loss in self.wiring.losses.items()}}

    def _name(self, here: str, there: str) -> str:
        """What a link in front of the last is called in results: `^worker1`, or `^leaf1 spine1` between switches."""
        return f"{UPLINK}{here}" if here in self.lab.hosts else f"{UPLINK}{here} {there}"

    def _counters(self) -> dict[Place, Count]:
        names = {address: name for name, address in self.addresses.items()}
        return {
            (at, names.get(counter.source, counter.source), counter.kind, counter.index): (
                counter.seen,
                counter.dropped,
                counter.bytes_seen,
            )
            for at, port in self._counting().items()
            for counter in port.counters()
        }

    def cells(self) -> list[Cell]:
        """What each port counted of each sender in each window, beside what was asked for there."""
        self._settle()
        windows = {window.label: window for window in self.windows}
        found = []
        for (port, sender, kind, label), (seen, dropped, size) in sorted(self._sums.items(), key=str):
            window = windows.get(label or 0)
            burst = self._burst_loss(window, port, sender, kind)
            base = self._base_loss(port)
            number = None if window is None else self.windows.index(window)
            found.append(Cell(port, sender, kind, number, burst, base, seen, dropped, size))
        return found

    def _burst_loss(self, window: Window | None, port: str, sender: str, kind: str) -> float | None:
        if window is None or (port, sender) not in window.loss:
            return None
        ratio, match = window.loss[port, sender]
        return ratio if match == "all" or kind == "data" else None

    def _base_loss(self, port: str) -> float:
        if port in self.ports:
            return self.spec.topology.link_of(port).down.loss
        return next(each.shape.loss for place, each in self.passages.items() if self._name(*place) == port)

    def drops(self) -> dict[str, dict[str, int]]:
        """Packets that something else than the loss dropped since `install`, by reason and port."""
        devices = {name: count - self._devices_before[name] for name, count in self._devices().items()}
        queues = {name: dropped - self._queues_before.get(name, 0) for name, dropped in self._queues().items()}
        return {"device": devices, "queue": queues}

    def _queues(self) -> dict[str, int]:
        """Of ports, of hosts' own queues and of those between switches."""
        found = {name: port.health().queue_dropped for name, port in self.ports.items()}
        for name, port in self.wiring.uplinks.items():
            found[self._name(name, "")] = port.health().queue_dropped
        return found | {self._name(*place): port.health().queue_dropped for place, port in self.wiring.trunks.items()}

    def _devices(self) -> dict[str, int]:
        found = {}
        for name in self.ports:
            place = self.lab.port_of(name)
            with closing(open_netlink(place.netns)) as netlink:
                found[name] = tx_dropped(netlink, place.ifname)
        return found


def _hits(burst: Burst, sender: str, port: str) -> bool:
    return (burst.direction != "down" and sender in burst.workers) or (
        burst.direction != "up" and port in burst.workers
    )


def _plus(total: Count, now: Count, before: Count) -> Count:
    return (total[0] + now[0] - before[0], total[1] + now[1] - before[1], total[2] + now[2] - before[2])

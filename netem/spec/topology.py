"""The topology: a graph of hosts and switches, and what each link between them does to packets."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationInfo, WithJsonSchema

from netem.spec.fields import Delay, Jitter, Name, Rate, Spec, from_file, refuse
from netem.spec.impairments import Impairments, LinkLoss
from netem.spec.units import SIZE, UnitError, format_size, parse_size_bytes

MAX_WORKERS = 64
MAX_HOSTS = 128
MAX_SWITCHES = 128
MAX_LINKS = 1000
SHAPES = ("star", "dumbbell", "leaf_spine", "two_site", "fat_tree")
"""Short forms: what `netem.spec.shapes` expands."""
Role = Literal["server", "worker", "host"]
"""`host`: an address and no rank, for commands and for traffic that is not the training's."""

DEFAULT_MTU = 1500

SHAPE_KEYS = (
    "delay", "jitter", "distribution", "rate", "overhead", "loss", "queue", "limit", "duplicate", "corrupt", "reorder",
    "slot", "ecn",
)  # fmt: skip
"""Keys of a link that may stand for both directions, or inside `up:` or `down:` for one."""


class Queue(Spec):
    """How much a port holds before it drops: bytes or packets, one of the two."""

    size_bytes: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None
    packets: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None


def _read_queue(value: Any, info: ValidationInfo) -> Any:
    if value is None or isinstance(value, Queue) or (isinstance(value, dict) and not from_file(info)):
        return value
    if isinstance(value, str):
        number, _, unit = value.strip().partition(" ")
        if unit.strip() in ("packets", "packet") and number.isascii() and number.isdigit():
            return Queue.model_construct(packets=_at_least_one(int(number)))
    try:
        return Queue.model_construct(size_bytes=_at_least_one(parse_size_bytes(value)))
    except UnitError as error:
        raise UnitError(f"{error}; a queue is a size ({', '.join(SIZE.units)}) or a number of `packets`") from error


def _at_least_one(amount: int) -> int:
    if not 1 <= amount < 2**32:
        raise refuse(f"a queue of {amount} is out of range; allowed: 1 to {2**32 - 1}")
    return amount


def _write_queue(queue: Queue, info: Any) -> Any:
    if not (info.context and info.context.get("with_units")):
        return {"size_bytes": queue.size_bytes, "packets": queue.packets}
    return f"{queue.packets} packets" if queue.packets is not None else format_size(queue.size_bytes or 0)


QueueField = Annotated[
    Queue,
    BeforeValidator(_read_queue),
    PlainSerializer(_write_queue),
    WithJsonSchema({"type": "string", "examples": ["64 KiB", "1000 packets"]}),
]


class LinkShape(Impairments):
    """What one direction of a link does to every packet, all the time (bursts come on top)."""

    delay_s: Annotated[Delay, Field(alias="delay")] = 0.0
    """One way, in seconds."""
    jitter_s: Annotated[Jitter, Field(alias="jitter")] = 0.0
    """Spread of the delay, in seconds. Without a rate it reorders packets: see Link.reorder."""
    rate_bps: Annotated[Rate | None, Field(alias="rate")] = None
    """Bits per second; None: as fast as the machine."""
    loss: LinkLoss = 0.0
    """Share of packets dropped, 0..1: each by itself, in bursts by a Gilbert-Elliott chain, or by four states."""
    queue: QueueField | None = None
    """None: sized by the link backend."""

    @property
    def delay_us(self) -> int:
        return round(self.delay_s * 1e6)

    @property
    def jitter_us(self) -> int:
        return round(self.jitter_s * 1e6)

    @property
    def queue_bytes(self) -> int | None:
        return self.queue.size_bytes if self.queue else None

    @property
    def queue_packets(self) -> int | None:
        return self.queue.packets if self.queue else None


class Link(Spec):
    """The cable between a host and a switch, or between two switches."""

    shorthand_keys: ClassVar[frozenset[str]] = frozenset(SHAPE_KEYS)

    between: tuple[str, str]
    """(host, switch), or two switches, of which the first is the lower end of `up`."""
    mtu: Annotated[int, Field(ge=576, le=65535)] = DEFAULT_MTU
    """Largest IP packet in bytes, both directions."""
    reorder: Literal["refuse", "allow"] = "refuse"
    """Whether jitter may reorder packets, which it does where no rate is set."""
    up: LinkShape = LinkShape()
    """From the host to the switch; between switches from the first to the second."""
    down: LinkShape = LinkShape()
    """The other way."""

    @property
    def host(self) -> str:
        """The host, or the first switch."""
        return self.between[0]

    @property
    def switch(self) -> str:
        return self.between[1]


class HostSpec(Spec):
    role: Role


class Topology(Spec):
    """Hosts, switches and links. Ranks: the server 0, the workers 1..n in the file's order; other hosts have none.

    Where there are workers there is one server. Every host has one link, to a switch, and reaches every other.
    """

    shorthand_keys: ClassVar[frozenset[str]] = frozenset({"extends", "workers", "defaults", *SHAPES})

    name: Name
    hosts: dict[str, HostSpec]
    switches: tuple[str, ...]
    links: tuple[Link, ...]
    """One for each host, in the hosts' order, and then those between switches."""

    @property
    def server(self) -> str:
        """Raises LookupError for a topology without ranks."""
        for name, host in self.hosts.items():
            if host.role == "server":
                return name
        raise LookupError(f"topology {self.name} has no server")

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(name for name, host in self.hosts.items() if host.role == "worker")

    @property
    def ranks(self) -> dict[str, int]:
        """Host name -> rank, in rank order; empty where nobody has one."""
        if not any(host.role == "server" for host in self.hosts.values()):
            return {}
        return {name: rank for rank, name in enumerate((self.server, *self.workers))}

    @property
    def host_links(self) -> tuple[Link, ...]:
        return tuple(link for link in self.links if link.host in self.hosts)

    @property
    def trunks(self) -> tuple[Link, ...]:
        """Links between switches."""
        return tuple(link for link in self.links if link.host not in self.hosts)

    @property
    def shapes_uplinks(self) -> bool:
        """Whether hosts have a qdisc of their own: packets must then not reach it in bundles."""
        return any(link.up.rate_bps or any(link.up.asked(link.up.ONLY_NETEM)) for link in self.host_links)

    def link_of(self, host: str) -> Link:
        """Raises KeyError for a host that the topology does not have."""
        for link in self.host_links:
            if link.host == host:
                return link
        raise KeyError(host)

    @property
    def mtu(self) -> int:
        """What every packet of the workload must fit: the smallest of all links."""
        return min(link.mtu for link in self.links)

    @property
    def needs_netem(self) -> tuple[str, ...]:
        """What only the link backend netem can do, with the links that ask for it: `delay (worker1 down)`."""
        return self._asking(self.links, LinkShape.ONLY_NETEM, ("up", "down"))

    @property
    def needs_one_netem(self) -> tuple[str, ...]:
        """Of these, what the ports that make bursts can do only where they need no bands for them."""
        return self._asking(self._last_links, LinkShape.ONE_NETEM, ("down",))

    @property
    def four_state_losses(self) -> tuple[str, ...]:
        """Ports that make bursts and lose by four states: netem has to make both."""
        return self._asking(self._last_links, ("loss",), ("down",))

    @property
    def needs_delay(self) -> bool:
        """Whether some link needs the backend netem."""
        return bool(self.needs_netem)

    @property
    def _last_links(self) -> tuple[Link, ...]:
        """Of the hosts that have a rank: the last ones that gradients pass."""
        return tuple(link for link in self.host_links if self.hosts[link.host].role != "host")

    def _asking(self, links: tuple[Link, ...], keys: tuple[str, ...], directions: tuple[str, ...]) -> tuple[str, ...]:
        places: dict[str, list[str]] = {}
        for link in links:
            end = link.host if link.host in self.hosts else f"{link.host} to {link.switch}"
            for direction in directions:
                for key in getattr(link, direction).asked(keys):
                    places.setdefault(key, []).append(f"{end} {direction}")
        return tuple(f"{key} ({_listed(where)})" for key, where in places.items())


def _listed(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]} and {len(names) - 2} more"


def star(workers: int, *, name: str | None = None, **link: Any) -> Topology:
    """The star that `{star: {workers: n}}` describes. `link` are fields of Link for every link (mtu, up, down)."""
    if not 1 <= workers <= MAX_WORKERS:
        raise ValueError(f"{workers} workers: a star has 1 to {MAX_WORKERS}")
    roles: dict[str, Role] = {"server": "server"}
    roles |= {f"worker{rank}": "worker" for rank in range(1, workers + 1)}
    return Topology(
        name=name or f"star{workers}",
        hosts={host: HostSpec(role=role) for host, role in roles.items()},
        switches=("sw",),
        links=tuple(Link(between=(host, "sw"), **link) for host in roles),
    )

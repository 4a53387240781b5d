"""Which links a gradient passes: every direction of every link but the last, and the way of each worker. Pure.

The last link, from a switch to the host that receives, is where bursts are made; see `wiring`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce

from netem.routing import METHOD, routes_of
from netem.spec import LinkShape, Topology
from netem.spec.impairments import FourStateLoss
from netem.spec.loss import together

Flow = tuple[str, int]
"""(direction, worker's rank)"""


@dataclass(frozen=True)
class Passage:
    """One direction of a link, from a host to its switch or from a switch to another.

    direction: of the gradients that pass here, "up" or "down"; never both, for on the way up every link leads nearer
        to the server and on the way down away from it. None: none passes.
    """

    here: str
    there: str
    shape: LinkShape
    from_host: bool
    direction: str | None = None

    @property
    def name(self) -> str:
        return f"{self.here} to {self.there}"


@dataclass(frozen=True)
class Passages:
    """`all` of a topology, and the ones each worker's gradient takes, from the sender on."""

    all: tuple[Passage, ...]
    of_flow: Mapping[Flow, tuple[Passage, ...]]


def passages(topology: Topology) -> Passages:
    """The links of a lab as its packets take them."""
    known: dict[tuple[str, str], Passage] = {}
    for link in topology.links:
        first, second = link.between
        from_host = first in topology.hosts
        known[first, second] = Passage(first, second, link.up, from_host)
        if not from_host:
            known[second, first] = Passage(second, first, link.down, from_host)
    flows = _flows(topology)
    for (direction, _), places in flows.items():
        known |= {place: replace(known[place], direction=direction) for place in places}
    found = {flow: tuple(known[place] for place in places) for flow, places in flows.items()}
    return Passages(tuple(known.values()), found)


def _flows(topology: Topology) -> dict[Flow, tuple[tuple[str, str], ...]]:
    """(here, there) of the links on each worker's ways to and from the server, without the last."""
    ways, server = routes_of(topology), topology.server if topology.ranks else ""
    found: dict[Flow, tuple[tuple[str, str], ...]] = {}
    for name, rank in topology.ranks.items():
        if rank:
            found["up", rank] = ((name, ways.switch_of[name]), *ways.hops(name, server))
            found["down", rank] = ((server, ways.switch_of[server]), *ways.hops(server, name))
    return found


def base_loss(topology: Topology) -> dict[tuple[int, str], float]:
    """Steady loss of each worker's path, by (worker's rank, direction), where there is any.

    A loss by four states in front of the last link is not in it: netem loses those packets there
    (`Fabric.uplink_drops`, `trunk_drops`), and nobody counts them by flow.
    """
    found: dict[tuple[int, str], float] = {}
    names = {rank: name for name, rank in topology.ranks.items()}
    for (direction, rank), places in passages(topology).of_flow.items():
        last = topology.link_of(topology.server if direction == "up" else names[rank]).down
        losses = (*(place.shape.loss for place in places), last.loss)
        # Four states in front of the last link are netem's: see above.
        counted = [loss for loss in losses[:-1] if not isinstance(loss, FourStateLoss)]
        own = float(losses[-1]) if isinstance(losses[-1], FourStateLoss) else losses[-1]
        lost = reduce(together, (*counted, own))
        if lost:
            found[rank, direction] = lost
    return found


def in_bursts(topology: Topology) -> frozenset[tuple[int, str]]:
    """(worker's rank, direction) of the paths whose last link loses packets by four states: not each by itself."""
    names = {rank: name for name, rank in topology.ranks.items()}
    return frozenset(
        (rank, direction)
        for direction, rank in passages(topology).of_flow
        if isinstance(topology.link_of(topology.server if direction == "up" else names[rank]).down.loss, FourStateLoss)
    )


def routing_facts(topology: Topology) -> dict[str, object]:
    """For the manifest: how ways are chosen, and the nodes on those of every worker."""
    ways = routes_of(topology)
    workers = topology.workers
    return {
        "method": METHOD,
        "up": {name: list(ways.path(name, topology.server)) for name in workers},
        "down": {name: list(ways.path(topology.server, name)) for name in workers},
    }

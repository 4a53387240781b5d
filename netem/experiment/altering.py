"""What links between the ranks damage and copy, and what the receivers' kernels have refused."""

from __future__ import annotations

from collections.abc import Mapping

from netem.analysis.altered import Altered, Ratios, one_of
from netem.experiment.passages import passages
from netem.kernel.refused import Refused, refused
from netem.lab import Lab
from netem.spec import Topology


def ratios(topology: Topology) -> dict[tuple[int, str], Ratios]:
    """By (worker's rank, direction); flows of which nothing is damaged or copied are left out."""
    found: dict[tuple[int, str], Ratios] = {}
    names = {rank: name for name, rank in topology.ranks.items()}
    for (direction, rank), places in passages(topology).of_flow.items():
        before = [place.shape for place in places]
        last = topology.link_of(topology.server if direction == "up" else names[rank]).down
        one = Ratios(
            (sum(shape.duplicate for shape in before), last.duplicate),
            (one_of([shape.corrupt for shape in before]), last.corrupt),
        )
        if one:
            found[rank, direction] = one
    return found


def refused_by_direction(lab: Lab, topology: Topology) -> dict[str, Refused]:
    """Since the lab was built; nothing is read where no link damages packets."""
    if not any(any(one.damaged) for one in ratios(topology).values()):
        return {}
    found = {"up": Refused(0, 0), "down": Refused(0, 0)}
    for name, rank in topology.ranks.items():
        more = refused(lab.hosts[name].netns, lab.hosts[name].ifname)
        way = "down" if rank else "up"
        found[way] = Refused(*map(sum, zip(found[way], more, strict=True)))
    return found


def altered(topology: Topology, before: Mapping[str, Refused], now: Mapping[str, Refused]) -> Altered:
    return Altered(
        ratios(topology),
        {way: each.damaged - before[way].damaged for way, each in now.items()},
        {way: each.overflowed - before[way].overflowed for way, each in now.items()},
    )

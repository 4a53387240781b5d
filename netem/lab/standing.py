"""What the links of a lab that stands by itself (`up`) do: kept in its state file, in the terms of a topology file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from netem.links.choose import Backend, BackendChoice
from netem.spec import LinkShape, Topology
from netem.spec.checks import check_topology
from netem.spec.fields import FROM_FILE, WITH_UNITS, explain
from netem.spec.source import Mark, Source, SpecError, make

Way = Literal["up", "down"]
Lost = Mapping[str, Mapping[str, int]]
"""Link direction (`worker1.up`) -> reason (injected, queue) -> packets."""
WAYS: tuple[Way, ...] = ("up", "down")


@dataclass(frozen=True)
class Standing:
    """choice: None while no link has any property. placed: link directions (`worker1.up`) that a port object holds."""

    built: Topology
    now: Topology
    choice: BackendChoice | None = None
    placed: frozenset[str] = frozenset()
    lost: Lost = field(default_factory=dict)
    """What programs and queues had dropped that were replaced since."""

    def to_json(self) -> dict[str, Any]:
        choice = self.choice
        return {
            "built": _written(self.built),
            "now": _written(self.now),
            "choice": None if choice is None else [choice.name, choice.loss_engine, choice.reason],
            "placed": sorted(self.placed),
            "lost": {end: dict(drops) for end, drops in self.lost.items()},
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Standing:
        """Raises KeyError, TypeError or ValueError (pydantic's too) for another shape."""
        choice = raw["choice"]
        engines: tuple[Backend, Backend, str] | None = tuple(choice) if choice else None
        return cls(
            _read(raw["built"]),
            _read(raw["now"]),
            BackendChoice(*engines) if engines else None,
            frozenset(raw["placed"]),
            raw["lost"],
        )


def _written(topology: Topology) -> dict[str, Any]:
    return topology.model_dump(mode="json", by_alias=True, context=WITH_UNITS)


def _read(raw: Mapping[str, Any]) -> Topology:
    return Topology.model_validate(_tuples(raw), context=FROM_FILE)


def _tuples(value: Any) -> Any:
    """JSON's lists, as files are read."""
    if isinstance(value, Mapping):
        return {key: _tuples(each) for key, each in value.items()}
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


def built(topology: Topology, choice: BackendChoice | None) -> Standing:
    """After `Wiring.install_steady` with this choice; None: nothing was installed."""
    placed = frozenset[str]()
    if choice is not None:
        placed = frozenset(f"{host}.down" for host in topology.hosts)
        placed |= {f"{host}.up" for host in topology.hosts if queued(topology.link_of(host).up)}
    return Standing(topology, topology, choice, placed)


def queued(shape: LinkShape) -> bool:
    """Whether a host needs a qdisc of its own for it: its loss is made where its packets enter the switch."""
    return bool(shape.rate_bps) or any(shape.asked(LinkShape.ONLY_NETEM))


def changed(shape: LinkShape, changes: Mapping[str, Any], what: str) -> LinkShape:
    """With some keys as a topology file has them; None takes one away. Raises SpecError, `what` in place of a file."""
    given = {**shape.model_dump(by_alias=True, context=WITH_UNITS), **changes}
    kept = {key: value for key, value in given.items() if value is not None}
    try:
        return LinkShape.model_validate(kept, context=FROM_FILE)
    except ValidationError as error:
        at, below, text = explain(error.errors(include_url=False)[0])
        key = ".".join(str(each) for each in (*_written_keys(kept, at), *below))
        raise SpecError(what, None, key, text) from error


def _written_keys(given: Any, location: Sequence[Any]) -> list[Any]:
    """A location of pydantic's without the names of union members that it puts in between."""
    found = []
    for key in location:
        if isinstance(given, Mapping) and key in given:
            found.append(key)
            given = given[key]
    return found


def words(shape: LinkShape) -> str:
    """What it does, in the words of a file."""
    given = shape.model_dump(by_alias=True, context=WITH_UNITS)
    plain = LinkShape().model_dump(by_alias=True, context=WITH_UNITS)
    shown = [f"{key} {_short(value)}" for key, value in given.items() if value != plain.get(key)]
    return ", ".join(shown) or "as fast as the machine"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key} {_short(each)}" for key, each in value.items() if each is not None)
    return str(value)


def with_shapes(topology: Topology, shapes: Mapping[tuple[str, Way], LinkShape], what: str) -> Topology:
    """The topology with other properties of some link directions. Raises SpecError, as for a file."""
    links = tuple(
        link.model_copy(update={way: shapes[link.host, way] for way in WAYS if (link.host, way) in shapes})
        for link in topology.links
    )
    new = topology.model_copy(update={"links": links})
    check_topology(new, Source(what, make(_written(new), Mark(what))))
    return new

"""What happened to each transmission, from the captures before and after the loss; and whether two runs agree.

A transmission is named by (direction, rank, round, sequence, pass). Its fate is repeatable when the links decide by
that name alone: then every transmission that occurs in two runs, or under two transports of one run, has one fate.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dblp import wire
from dblp.config import DEFAULT_PORT
from netem.analysis.pcapng import read_frames

Keys = NDArray[np.uint64]
"""sequence << 16 | pass, sorted, each once."""

_ETHERNET, _IP, _UDP = 14, 20, 8
_PAYLOAD_AT = _ETHERNET + _IP + _UDP
_WIDTH = _PAYLOAD_AT + wire.HEADER_BYTES
_RANKS = wire.WORKER_DATA_OFFSET - wire.SERVER_DATA_OFFSET
_FIRST_PORT = {
    "up": DEFAULT_PORT + wire.SERVER_DATA_OFFSET,
    "down": DEFAULT_PORT + wire.WORKER_DATA_OFFSET,
}
EXAMPLES = 5


class Flow(NamedTuple):
    """One round of one worker in one direction."""

    direction: str
    rank: int
    round: int


@dataclass(frozen=True)
class Tap:
    """The chunks that passed one place. missed: packets that the capture had no room for."""

    flows: Mapping[Flow, Keys]
    missed: int = 0


@dataclass(frozen=True)
class Fate:
    """Of one flow: what was sent, and which of it arrived (`arrived[i]` belongs to `keys[i]`)."""

    keys: Keys
    arrived: NDArray[np.bool_]


@dataclass(frozen=True)
class Fates:
    """Of one transport in one repeat. `missed` > 0: some packets look dropped, or unsent, that were not."""

    flows: Mapping[Flow, Fate]
    missed: int = 0

    @property
    def transmissions(self) -> int:
        return sum(len(fate.keys) for fate in self.flows.values())

    @property
    def dropped(self) -> int:
        return sum(int(np.count_nonzero(~fate.arrived)) for fate in self.flows.values())


class Example(NamedTuple):
    """A transmission with two fates."""

    flow: Flow
    sequence: int
    pass_: int
    arrived: tuple[bool, bool]


@dataclass(frozen=True)
class Agreement:
    """Of two sets of fates. compared: transmissions that occur in both. only: those in the first, the second alone."""

    compared: int = 0
    different: int = 0
    only: tuple[int, int] = (0, 0)
    dropped: int = 0
    """Of the compared ones, in the first."""
    examples: tuple[Example, ...] = field(default=())


def read_tap(path: Path) -> Tap:
    """The chunks in a capture file. Raises CaptureError, OSError."""
    frames = read_frames(path, _WIDTH)
    data = frames.data
    if not len(data):
        return Tap({}, frames.missed)
    udp = (data[:, 12] == 8) & (data[:, 13] == 0) & (data[:, 14] == 0x45) & (data[:, 23] == 17)
    data = data[udp & ((data[:, 20] & 0x3F) == 0) & (data[:, 21] == 0)]  # no fragments
    port, length = _u16(data, 36), _u16(data, 38)
    header = wire.headers_of(np.ascontiguousarray(data[:, _PAYLOAD_AT:]))
    whole = length == _UDP + wire.HEADER_BYTES + header["length"].astype(np.int64)
    flows: dict[Flow, Keys] = {}
    for direction, first in _FIRST_PORT.items():
        mine = whole & (port >= first) & (port < first + _RANKS)
        flows |= _split(direction, port[mine] - first, header[mine])
    return Tap(flows, frames.missed)


def _u16(data: NDArray[np.uint8], at: int) -> NDArray[np.int64]:
    """Big-endian numbers at a byte of each row."""
    return data[:, at].astype(np.int64) << 8 | data[:, at + 1]


def _split(direction: str, ranks: NDArray[np.int64], header: NDArray[np.void]) -> dict[Flow, Keys]:
    """Keys by rank and round."""
    place = ranks.astype(np.uint64) << np.uint64(32) | header["round"].astype(np.uint64)
    keys = header["sequence"].astype(np.uint64) << np.uint64(16) | header["pass"].astype(np.uint64)
    order = np.argsort(place, kind="stable")
    places, starts = np.unique(place[order], return_index=True)
    parts = np.split(keys[order], starts[1:]) if len(places) else []
    return {
        Flow(direction, int(at) >> 32, int(at) & 0xFFFFFFFF): np.unique(part)
        for at, part in zip(places, parts, strict=True)
    }


def fates(sent: Iterable[Tap], arrived: Iterable[Tap], ends: Iterable[tuple[str, int]]) -> Fates:
    """Join captures before (`sent`) and after the loss (`arrived`).

    `ends`: (direction, rank) for which both captures exist; of others nothing is known. What arrived was sent, even
    where the capture before the loss has not seen it.
    """
    before, after = list(sent), list(arrived)
    known = set(ends)
    flows = {flow for tap in (*before, *after) for flow in tap.flows if (flow.direction, flow.rank) in known}
    found: dict[Flow, Fate] = {}
    for flow in sorted(flows):
        there = _union(after, flow)
        keys = np.union1d(_union(before, flow), there)
        found[flow] = Fate(keys, np.isin(keys, there, assume_unique=True))
    return Fates(found, sum(tap.missed for tap in (*before, *after)))


def _union(taps: Iterable[Tap], flow: Flow) -> Keys:
    parts = [tap.flows[flow] for tap in taps if flow in tap.flows]
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.uint64)


def compare(one: Fates, other: Fates) -> Agreement:
    """Whether every transmission that occurs in both had the same fate."""
    compared = different = dropped = 0
    examples: list[Example] = []
    for flow in sorted(one.flows.keys() & other.flows.keys()):
        a, b = one.flows[flow], other.flows[flow]
        keys, left, right = np.intersect1d(a.keys, b.keys, assume_unique=True, return_indices=True)
        arrived_a, arrived_b = a.arrived[left], b.arrived[right]
        unequal = np.flatnonzero(arrived_a != arrived_b)
        compared += len(keys)
        different += len(unequal)
        dropped += int(np.count_nonzero(~arrived_a))
        for at in unequal[: EXAMPLES - len(examples)]:
            sequence, pass_ = divmod(int(keys[at]), 1 << 16)
            examples.append(Example(flow, sequence, pass_, (bool(arrived_a[at]), bool(arrived_b[at]))))
    only = (one.transmissions - compared, other.transmissions - compared)
    return Agreement(compared, different, only, dropped, tuple(examples))


def captured(folder: Path, transports: Iterable[str], ranks: Mapping[str, int]) -> Iterator[tuple[str, int, Fates]]:
    """(transport, repeat, fates) of a run's captures, in order. `ranks`: host name -> rank, the server 0.

    Raises CaptureError, OSError.
    """
    hosts = "|".join(map(re.escape, ranks))
    for transport in transports:
        pattern = re.compile(rf"{re.escape(transport)}-r(\d+)-({hosts})-(ingress|egress)\.pcapng")
        matches = [match for path in sorted(folder.glob("*.pcapng")) if (match := pattern.fullmatch(path.name))]
        for repeat in sorted({int(match[1]) for match in matches}):
            places = {(ranks[m[2]], m[3]): folder / m[0] for m in matches if int(m[1]) == repeat}
            yield transport, repeat, _join(places)


def _join(places: Mapping[tuple[int, str], Path]) -> Fates:
    ingress = {rank for rank, end in places if end == "ingress"}
    egress = {rank for rank, end in places if end == "egress"}
    ends = [("up", rank) for rank in ingress if rank and 0 in egress]
    ends += [("down", rank) for rank in egress if rank and 0 in ingress]
    if not ends:
        return Fates({})
    taps = {place: read_tap(path) for place, path in places.items()}
    return fates(
        (tap for (_, end), tap in taps.items() if end == "ingress"),
        (tap for (_, end), tap in taps.items() if end == "egress"),
        ends,
    )

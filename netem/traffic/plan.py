"""What a packet source sends and when: plain values and arithmetic. Standard library only, also read by the source.

A rate is that of link-layer frames, as queues and rate limiters count them: a packet of 1,500 bytes takes up 1,514.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

HEADERS_BYTES = 28  # IPv4 and UDP
FRAME_BYTES = 14  # Ethernet
MIN_PACKET_BYTES = HEADERS_BYTES + 1
TRAIN_PACKETS = 8
"""Packets of one call, where senders take turns: what they send is interleaved this finely."""
DISCARD_PORT = 9
"""Where generated packets go (RFC 863)."""
NS = 10**9


@dataclass(frozen=True)
class Burst:
    """One packet source's burst: every sender sends `packets`, or for `duration_ns`, each at `rate_bps` (None: as fast
    as the machine can).
    """

    senders: int
    packet_bytes: int
    rate_bps: int | None = None
    duration_ns: int | None = None
    packets: int | None = None

    def __post_init__(self) -> None:
        if (self.duration_ns is None) == (self.packets is None):
            raise ValueError("a burst has either a duration or a number of packets")
        if self.senders < 1 or self.packet_bytes < MIN_PACKET_BYTES:
            raise ValueError(f"a burst has at least one sender and packets of {MIN_PACKET_BYTES} bytes or more")

    @property
    def planned(self) -> int | None:
        """Packets of each sender; None where only the clock ends the burst."""
        if self.packets is not None:
            return self.packets
        if self.rate_bps is None:
            return None
        return max(1, self.due(self.duration_ns or 0))

    def due(self, elapsed_ns: int) -> int:
        """Packets of each sender that a rate has let go within this time; the first one goes at once."""
        return due(elapsed_ns, self.rate_bps or 0, self.packet_bytes)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "burst", **asdict(self)}


@dataclass(frozen=True)
class Stream:
    """Background traffic of one sender: a rate, all the time, or on and off in turn.

    on_s, off_s: lengths, or with `random` their means (exponential, from `seed`). off_s 0: never off.
    """

    packet_bytes: int
    rate_bps: int
    on_s: float = 0.0
    off_s: float = 0.0
    pattern: Literal["fixed", "exponential"] = "fixed"
    seed: int = 0

    senders = 1

    def to_json(self) -> dict[str, Any]:
        return {"kind": "stream", **asdict(self)}


def from_json(raw: dict[str, Any]) -> Burst | Stream:
    """What `to_json` gave. TypeError, KeyError or ValueError for anything else."""
    values = {key: value for key, value in raw.items() if key != "kind"}
    return Burst(**values) if raw["kind"] == "burst" else Stream(**values)


def due(elapsed_ns: int, rate_bps: int, packet_bytes: int) -> int:
    """Packets that a rate has let go after `elapsed_ns`: one at the start, then one every frame's time."""
    if elapsed_ns < 0:
        return 0
    return elapsed_ns * rate_bps // (NS * 8 * (packet_bytes + FRAME_BYTES)) + 1


def on_off(stream: Stream) -> Iterator[tuple[float, float]]:
    """(on, off) lengths in seconds, without end; the same for the same seed."""
    if not stream.off_s or not stream.on_s:
        while True:
            yield 3600.0, 0.0
    source = random.Random(stream.seed)
    while True:
        if stream.pattern == "fixed":
            yield stream.on_s, stream.off_s
        else:
            yield source.expovariate(1 / stream.on_s), source.expovariate(1 / stream.off_s)


@dataclass(frozen=True)
class Sent:
    """What a source says of one burst or stream. Times are CLOCK_MONOTONIC in nanoseconds.

    packets: of each sender. refused: packets that a sender's own buffer had no room for. skipped: packets of a rate
    that the source was too late for.
    """

    plan: int
    planned_ns: int
    began_ns: int
    ended_ns: int
    packets: tuple[int, ...]
    refused: int = 0
    skipped: int = 0

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Sent:
        return cls(**{**raw, "packets": tuple(raw["packets"])})

"""The interface of a link: what a switch port that faces one host can do to the packets on their way to it.

A port is installed once (`install`) and afterwards only changed in place. Loss hits packets by their sender
(IPv4 source) at the port that faces the receiver, so TCP senders see it as loss in the network. Backends:
`netem` (sch_netem), `bpf` (clsact + eBPF, loss as a repeatable mask, see `mask`), `fake` (in memory, for
tests).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Protocol

from netem.kernel.loss_models import FourState
from netem.kernel.netem_options import Overhead, Slot
from netem.links.chain import GilbertElliott

INDEX_MAX = 2**32 - 1
WINDOWS_MAX = 1 << 14
"""Rounds of one sender that may have a rule of their own at the same time."""

Match = Literal["data", "all"]
Kind = Literal["data", "other"]


class LinkError(Exception):
    """A link could not be put into the state asked for; the message names what was attempted."""


class UnsupportedFeature(LinkError):
    """This kernel or backend lacks a feature that was asked for (exit status 4)."""

    exit_status = 4

    def __init__(self, feature: str, backends_that_have_it: Sequence[str], detail: str = "") -> None:
        self.feature, self.detail = feature, detail
        self.backends_that_have_it = tuple(backends_that_have_it)
        have = ", ".join(self.backends_that_have_it) or "nothing here"
        why = f": {detail}" if detail else ""
        super().__init__(f"{feature} is not available{why} (available with: {have})")


@dataclass(frozen=True)
class Flow:
    """Which packets are data. A packet matches when protocol and every given port window (inclusive) match.

    Ports alone decide: a pure acknowledgement of a matching TCP connection is data too.
    """

    proto: Literal["udp", "tcp"]
    dst_ports: tuple[int, int] | None = None
    src_ports: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.proto not in ("udp", "tcp"):
            raise ValueError(f"flow protocol {self.proto!r}: expected udp or tcp")
        for first, last in filter(None, (self.dst_ports, self.src_ports)):
            if not 0 <= first <= last <= 65535:
                raise ValueError(f"port window {first}..{last}: expected 0 <= first <= last <= 65535")


@dataclass(frozen=True)
class Key:
    """Where a data packet's identity lies in its UDP payload: half-open byte ranges, hashed in this order.

    `index` is the half-open range of the 4-byte big-endian number that counters are kept by (for DBLP the
    round), `place` that of the number along which a chain of losses runs (for DBLP the sequence number): one of
    the key's 32-bit words, as a whole.
    """

    ranges: tuple[tuple[int, int], ...]
    index: tuple[int, int] | None = None
    place: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not self.ranges:
            raise ValueError("a key needs at least one byte range")
        for start, stop in (*self.ranges, *((self.index,) if self.index else ())):
            if not 0 <= start < stop:
                raise ValueError(f"byte range {start}..{stop}: expected 0 <= start < stop")
        if self.index is not None and self.index[1] - self.index[0] != 4:
            raise ValueError(f"index range {self.index}: expected four bytes")
        if self.place is not None and self.place_word is None:
            raise ValueError(f"place {self.place}: expected the four bytes of one of the key's words")

    @property
    def place_word(self) -> int | None:
        """Which of the key's words is the place, counted from 0."""
        if self.place is None:
            return None
        key = [at for start, stop in self.ranges for at in range(start, stop)]
        wanted = list(range(*self.place))
        words = [key[at : at + 4] for at in range(0, len(key), 4)]
        return words.index(wanted) if len(wanted) == 4 and wanted in words else None

    @property
    def payload_bytes(self) -> int:
        """The shortest payload that holds the whole key and index."""
        return max(stop for _, stop in (*self.ranges, *((self.index,) if self.index else ())))


@dataclass(frozen=True)
class Extras:
    """What only sch_netem can do to packets, beside delay and jitter; the terms are those of `NetemOptions`.

    table: the distribution of the jitter. loss: in place of the shape's ratio or chain. overhead: the shape's rate is
    netem's own, with these overheads. limit_packets: netem's limit, whatever else it would be.
    """

    table: tuple[int, ...] | None = None
    loss: FourState | None = None
    overhead: Overhead | None = None
    limit_packets: int | None = None
    duplicate_ratio: float = 0.0
    corrupt_ratio: float = 0.0
    reorder_ratio: float = 0.0
    reorder_gap: int = 0
    slot: Slot | None = None
    ecn: bool = False

    @property
    def alone(self) -> tuple[str, ...]:
        """What several netems side by side would each do by themselves, or kernels refuse (duplicate)."""
        asked = {"duplicate": self.duplicate_ratio, "overhead": self.overhead, "slot": self.slot}
        return tuple(name for name, value in asked.items() if value)


@dataclass(frozen=True)
class Shape:
    """The steady state of a port. `queue_bytes` sizes the rate limiter's queue, `limit_packets` netem's.

    `loss_ratio` is the link's base loss: constant, random, whatever the packet, for all known senders. (A
    base loss that a seed repeats is a `LossRule`.) `chain` is a base loss in bursts instead: the port has one chain,
    which every packet of a known sender advances that no rule has lost, and `chain_state` (`mask.port_state`) says
    what it does. `loss_at` says whether packets are lost before they take up room in the rate limiter's queue, or
    after it.
    """

    delay_us: int = 0
    jitter_us: int = 0
    rate_bps: int | None = None
    loss_ratio: float = 0.0
    limit_packets: int | None = None
    chain: GilbertElliott | None = None
    chain_state: int = 0
    queue_bytes: int | None = None
    loss_at: Literal["before_rate", "after_rate"] = "before_rate"
    extras: Extras = field(default_factory=Extras)

    def __post_init__(self) -> None:
        if min(self.delay_us, self.jitter_us) < 0:
            raise ValueError(f"delay {self.delay_us} us, jitter {self.jitter_us} us: expected >= 0")
        if not 0.0 <= self.loss_ratio <= 1.0:
            raise ValueError(f"loss ratio {self.loss_ratio}: expected 0..1")
        if self.chain is not None and self.loss_ratio:
            raise ValueError("a base loss is either a ratio or a chain")
        for name in ("rate_bps", "limit_packets", "queue_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} {value}: expected > 0")


@dataclass(frozen=True)
class LossRule:
    """Loss for the packets of one sender. `state` is `mask.port_state(...)`.

    `first..last` is an inclusive window of the index field: only data packets inside it are subject to the
    loss. It counts where the key has an index and `match` is "data". A sender may have several rules with windows
    that do not overlap. With `match` "all" the sender's other packets (control connections, ICMP) are lost as well,
    by a random process that no seed repeats.

    With `chain` losses come in bursts, and `loss_ratio` is the chain's mean. The chain runs
    along the key's `place`; where there is none, along the sender's data packets of one index as they arrive at the
    port. Other packets under `match` "all" are lost independently at the mean.

    `duplicate_ratio`, `corrupt_ratio`: share of the data packets that get through twice or with a wrong checksum, as
    repeatable as the loss; not with `all`. A copy is always intact.
    """

    source: str
    state: int
    loss_ratio: float
    match: Match = "data"
    first: int = 0
    last: int = INDEX_MAX
    chain: GilbertElliott | None = None
    duplicate_ratio: float = 0.0
    corrupt_ratio: float = 0.0

    def __post_init__(self) -> None:
        ipaddress.IPv4Address(self.source)
        if not 0 <= self.state < 2**64:
            raise ValueError(f"state {self.state}: expected 0..2**64-1")
        for name in ("loss_ratio", "duplicate_ratio", "corrupt_ratio"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name.replace('_', ' ')} {getattr(self, name)}: expected 0..1")
        if self.match not in ("data", "all"):
            raise ValueError(f"match {self.match!r}: expected data or all")
        if not 0 <= self.first <= self.last <= INDEX_MAX:
            raise ValueError(f"index window {self.first}..{self.last}: expected 0 <= first <= last < 2**32")


def check_windows(by_source: Mapping[str, Sequence[LossRule]], *, keyed: bool) -> None:
    """LinkError where rules of one sender hit the same packets. `keyed`: packets say their index."""
    for source, rules in by_source.items():
        if len(rules) < 2:
            continue
        if not keyed or any(rule.match == "all" for rule in rules):
            raise LinkError(
                f"two rules for one sender, {source}: only rules for data packets of different rounds may be"
            )
        windows = sorted((rule.first, rule.last) for rule in rules)
        for (_, end), (start, _) in pairwise(windows):
            if start <= end:
                raise LinkError(f"two rules for one sender, {source}: both for round {start}")
        if sum(last - first + 1 for first, last in windows) > WINDOWS_MAX:
            raise LinkError(f"rules for more than {WINDOWS_MAX} rounds of one sender, {source}")


@dataclass(frozen=True)
class Counter:
    """Packets of one sender seen at the port, and how many of them the link dropped.

    `index` is the packet's index field, or the label (`Port.set_label`) for packets without one; None where
    the backend cannot tell (netem). `seen` includes `dropped`; bytes are those of link-layer frames.
    """

    source: str
    index: int | None
    seen: int
    dropped: int
    bytes_seen: int
    kind: Kind = "data"
    duplicated: int = 0
    """How many of those that got through did so twice."""
    corrupted: int = 0
    """How many of those that got through did so damaged: the receiver's kernel throws them away."""


@dataclass(frozen=True)
class PortHealth:
    """What makes counters or decisions doubtful: all zero on a faithful port, but for the queue of a rate.

    fragments       IPv4 fragments, passed undecided
    short           data packets too short for the key, treated as "other"
    overflow_seen   packets that found no room in the counter map (`overflow_dropped` of them dropped)
    gso_seen        super-packets of several segments that shared one decision
    queue_dropped   packets that the rate limiter (or netem's limit) dropped, not part of `Counter.dropped`
    """

    fragments: int = 0
    short: int = 0
    overflow_seen: int = 0
    overflow_dropped: int = 0
    gso_seen: int = 0
    queue_dropped: int = 0


class Port(Protocol):
    """The switch port that faces one host."""

    @property
    def name(self) -> str: ...

    @property
    def backend(self) -> str: ...

    def install(self, shape: Shape, flow: Flow | None, key: Key | None, sources: Sequence[str]) -> None:
        """Put the port into its steady state: no loss rules. Called again, it replaces the state in place."""

    def adopt(self, shape: Shape, sources: Sequence[str]) -> None:
        """Take over what another process installed with this shape and no flow: `install` then changes it in place.

        LinkError when something else is in place.
        """

    def prepare(self, rules: Sequence[LossRule]) -> None:
        """Say that these rules come next: what can be worked out before `set_loss` is. It may be left out."""

    def set_loss(self, rules: Sequence[LossRule]) -> None:
        """Replace all loss rules (`()`: none) and read them back; LinkError if anything else is in place."""

    def set_shape(self, shape: Shape) -> None:
        """Change rate, delay and queue in place: nothing that waits is lost, counters and loss stay as they are.

        A port that is to get a rate later has to be installed with one. Raises LinkError when it is not as asked.
        """

    def set_label(self, index: int) -> None:
        """Set the counter index for packets without an index field: the current round."""

    def counters(self) -> list[Counter]:
        """All counters since `install`, sorted by source, index and kind."""

    def health(self) -> PortHealth:
        """Events since `install` that a fidelity check must look at."""

    def close(self) -> None:
        """Release what the port holds. Idempotent; kernel objects go with their namespace at the latest."""

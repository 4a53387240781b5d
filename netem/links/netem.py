"""The `netem` backend: loss, delay and jitter by sch_netem, rate by sch_tbf.

The qdiscs at the egress of the switch port, steady from `install` on and only changed in place:

    [tbf 1: rate] - prio 10: - band 0: netem 100:  everything that no rule names: base loss only
                             - band 1: netem 101:  one band for each loss rule (two for match "all"): base loss
                             - ...                 and the rule's; equal delay, jitter and limit in all bands

u32 filters steer a rule's packets (sender, protocol, ports and, where the rule has a window, the index field) into
its band. When there are more rules than bands (at most 15), those of one loss ratio share a band. Other filters leave
the data of known senders in band 0 and count it.

What this backend cannot do, or does differently from `bpf`:
- Loss is random, not repeatable by a seed. Base loss hits ARP and unknown senders as well.
- With a rate, bands are served in strict order: during a burst, control packets overtake impaired data packets that
  wait for the rate limiter. One queue for both: `loss_engine: bpf`.
- Jitter reorders packets, except with a rate.
- Delay comes before the rate: packets that wait for either count against one limit, that of their band.
- A counter has an index where the rule's window is a single one. Drops of several senders in one band (many rules;
  base loss) are shared out among them in proportion to their packets. Other packets are sender "*", kind "other".
- The kernel counts injected loss and overflow of the limit in one number; `split_drops` says how they are told
  apart.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from pyroute2 import IPRoute

from netem.kernel import qdisc, u32, veth
from netem.kernel.errors import KernelError, attempting
from netem.kernel.netns import open_netlink
from netem.kernel.qdisc import Netem, Prio, Tbf, Tree, handle
from netem.links.base import (
    INDEX_MAX,
    Counter,
    Flow,
    Key,
    LinkError,
    LossRule,
    Port,
    PortHealth,
    Shape,
    UnsupportedFeature,
)
from netem.links.ledger import Ledger, Part, Reading, Stretch
from netem.links.steering import Steering, steer, watch

TBF_HANDLE = handle(1)
PRIO_HANDLE = handle(0x10)
WATCH_PRIORITY = 3  # after the two that rules take in turn
UNLIMITED_BPS = 10 * 10**9  # what the limit is sized for where no rate is set: a veth pair reaches no more
RATED_LIMIT_MIN = 1_000
UNRATED_LIMIT_MIN = 10_000


def netem_handle(band: int) -> int:
    return handle(0x100 + band)


def limit_packets(shape: Shape, mtu: int) -> int:
    """netem's limit: 1.5 x rate x delay in packets of `mtu` bytes, and the room that the rate limiter's queue takes.

    At least 1,000 packets (10,000 without a rate), except where `queue_bytes` asks for a short queue.
    """
    if shape.limit_packets is not None:
        return shape.limit_packets
    rate_bps = shape.rate_bps or UNLIMITED_BPS
    delayed = math.ceil(1.5 * rate_bps * (shape.delay_us + shape.jitter_us) / 8e6 / mtu)
    if shape.rate_bps is not None and shape.queue_bytes is not None:
        wanted = delayed + math.ceil(shape.queue_bytes / mtu)
    else:
        wanted = max(delayed, UNRATED_LIMIT_MIN if shape.rate_bps is None else RATED_LIMIT_MIN)
    return min(wanted, qdisc.U32_MAX)


def tree(shape: Shape, mtu: int, losses: Sequence[float]) -> Tree:
    """The qdiscs for a shape with one band for each loss ratio; a single one needs no bands."""
    parts: list[qdisc.Qdisc] = []
    parent = qdisc.ROOT
    if shape.rate_bps is not None:
        burst = qdisc.burst_bytes(shape.rate_bps, mtu, shape.queue_bytes)
        parts.append(Tbf(TBF_HANDLE, parent, shape.rate_bps, burst, limit_bytes=shape.queue_bytes or burst))
        parent = TBF_HANDLE | 1
    if len(losses) > 1:
        parts.append(Prio(PRIO_HANDLE, parent, len(losses)))
    limit = limit_packets(shape, mtu)
    in_order = shape.jitter_us > 0 and shape.rate_bps is not None
    for band, loss in enumerate(losses):
        place = PRIO_HANDLE | band + 1 if len(losses) > 1 else parent
        parts.append(Netem(netem_handle(band), place, limit, shape.delay_us, shape.jitter_us, loss, in_order))
    return tuple(parts)


def _find(ipr: IPRoute, ifname: str) -> tuple[int, int]:
    """Index and MTU of an interface."""
    index = veth.index_of(ipr, ifname)
    with attempting(f"read the MTU of {ifname}"):
        return index, int(ipr.link("get", index=index)[0].get("mtu"))


def combined(base_ratio: float, rule_ratio: float) -> float:
    """The loss of two independent processes."""
    return 1.0 - (1.0 - base_ratio) * (1.0 - rule_ratio)


class NetemPort:
    """A switch port of backend `netem`. With `classifier` (a `bpf` port on the same interface: `loss_engine: bpf`)
    that port makes and counts the loss, before the qdiscs, and netem and tbf make delay and rate.

    Not for use by several threads at once.
    """

    backend = "netem"

    def __init__(self, name: str, netns: str | None, ifname: str, *, classifier: Port | None = None) -> None:
        self.name = name
        self._netns = netns
        self._ifname = ifname
        self._ifindex = 0  # this and the MTU are found out by `install`
        self._mtu = 0
        self._classifier = classifier
        self._shape = Shape()
        self._flow: Flow | None = None
        self._key: Key | None = None
        self._sources: tuple[str, ...] = ()
        self._tree: Tree = ()
        self._steering = Steering()
        self._watch = Steering()
        self._ledger = Ledger()

    @property
    def loss_engine(self) -> str:
        return "netem" if self._classifier is None else self._classifier.backend

    def install(self, shape: Shape, flow: Flow | None, key: Key | None, sources: Sequence[str]) -> None:
        if self._classifier is not None:
            loss_only = Shape(
                loss_ratio=shape.loss_ratio, chain=shape.chain, chain_state=shape.chain_state, loss_at=shape.loss_at
            )
            self._classifier.install(loss_only, flow, key, sources)
        elif shape.rate_bps is not None and shape.loss_at == "after_rate":
            have = ("loss_engine: bpf",)
            raise UnsupportedFeature("loss_at: after_rate", have, "netem loses packets before the rate")
        elif shape.chain is not None:
            raise UnsupportedFeature("a link's loss in bursts", ("bpf", "loss_engine: bpf"))
        self._shape, self._flow, self._key, self._sources = shape, flow, key, tuple(dict.fromkeys(sources))
        with self._kernel("install") as ipr:
            self._ifindex, self._mtu = _find(ipr, self._ifname)
            wanted = tree(shape, self._mtu, self._losses(Steering()))
            commands = qdisc.plan(self._tree, wanted)
            if any(c.verb == "add" for c in commands):
                self._tree, self._steering, self._watch = (), Steering(), Steering()
            self._execute(ipr, commands)
            self._tree = wanted
            self._replace_filters(ipr, Steering())
            self._replace_watch(ipr)
            reading = self._verified(ipr)
        self._ledger = Ledger()
        self._open_stretches(reading, reading)

    def adopt(self, shape: Shape, sources: Sequence[str]) -> None:
        self._shape, self._sources = shape, tuple(dict.fromkeys(sources))
        with self._kernel("find what is installed") as ipr:
            self._ifindex, self._mtu = _find(ipr, self._ifname)
            wanted = tree(shape, self._mtu, self._losses(Steering()))
            qdisc.verify(qdisc.dump(ipr, self._ifindex), wanted)
            self._tree = wanted

    def set_loss(self, rules: Sequence[LossRule]) -> None:
        if not self._tree:
            raise LinkError(f"port {self.name}: loss was asked for before the port was installed")
        if self._classifier is not None:
            self._classifier.set_loss(rules)
            return
        if any(rule.chain is not None or rule.duplicate_ratio or rule.corrupt_ratio for rule in rules):
            raise UnsupportedFeature("loss in bursts, duplicates and damage of a burst", ("bpf", "loss_engine: bpf"))
        steering = self._steer(rules)
        wanted = tree(self._shape, self._mtu, self._losses(steering))
        with self._kernel("set the loss") as ipr:
            before = self._verified(ipr)
            qdisc.execute(ipr, self._ifindex, qdisc.plan(self._tree, wanted))
            self._tree = wanted
            self._replace_filters(ipr, steering)
            after = self._verified(ipr)
        self._open_stretches(before, after)

    def set_shape(self, shape: Shape) -> None:
        """See `Port.set_shape`. The base loss stays."""
        shape = replace(shape, loss_ratio=self._shape.loss_ratio)
        wanted = tree(shape, self._mtu, self._losses(self._steering))
        commands = qdisc.plan(self._tree, wanted)
        if any(command.verb != "change" for command in commands):
            raise LinkError(f"port {self.name}: it has to be installed with a rate before that can be changed")
        with self._kernel("set rate and delay") as ipr:
            qdisc.execute(ipr, self._ifindex, commands)
            self._tree, self._shape = wanted, shape
            self._verified(ipr)

    def _execute(self, ipr: IPRoute, commands: Sequence[qdisc.Command]) -> None:
        """Send commands; a tree that cannot be completed is removed again."""
        for done, command in enumerate(commands):
            try:
                qdisc.execute(ipr, self._ifindex, [command])
            except KernelError:
                added = [c.qdisc for c in commands[:done] if c.verb == "add"]
                with suppress(KernelError):
                    qdisc.execute(ipr, self._ifindex, [qdisc.Command("delete", part) for part in added[:1]])
                raise

    def _steer(self, rules: Sequence[LossRule]) -> Steering:
        """Filters under the priority not in use; those in place where they would be the same."""
        priority = 3 - self._steering.priority if self._steering.filters else 1
        place = (self._flow, self._key, self._sources, self._bands, PRIO_HANDLE)
        same = steer(rules, *place, self._steering.priority)
        return same if same.filters == self._steering.filters else steer(rules, *place, priority)

    def _replace_filters(self, ipr: IPRoute, steering: Steering) -> None:
        """The new group first, then the old one goes; a group that cannot be completed goes as well."""
        old = self._steering
        if steering.filters != old.filters:
            try:
                u32.add(ipr, self._ifindex, steering.filters)
            except KernelError:
                with suppress(KernelError):
                    u32.remove(ipr, self._ifindex, PRIO_HANDLE, steering.priority)
                raise
            if old.filters:
                u32.remove(ipr, self._ifindex, PRIO_HANDLE, old.priority)
        self._steering = steering

    def _replace_watch(self, ipr: IPRoute) -> None:
        """Called with no rules in place. Without bands there is nothing to steer: a classifier counts."""
        if self._watch.filters:
            u32.remove(ipr, self._ifindex, PRIO_HANDLE, WATCH_PRIORITY)
        self._watch = Steering()
        if self._bands:
            watching = watch(self._flow, self._sources, PRIO_HANDLE, WATCH_PRIORITY)
            u32.add(ipr, self._ifindex, watching.filters)
            self._watch = watching

    def set_label(self, index: int) -> None:
        """netem counts by sender only; a `bpf` classifier keeps the label."""
        if not 0 <= index <= INDEX_MAX:
            raise LinkError(f"port {self.name}: label {index}: expected 0..{INDEX_MAX}")
        if self._classifier is not None:
            self._classifier.set_label(index)

    def counters(self) -> list[Counter]:
        if self._classifier is not None:
            return self._classifier.counters()
        return self._ledger.counters(self._reading())

    def health(self) -> PortHealth:
        """`queue_dropped` is what `split_drops` calls overflow; the rest a `bpf` classifier's."""
        queue_dropped = self._ledger.queue_dropped(self._reading())
        if self._classifier is None:
            return PortHealth(queue_dropped=queue_dropped)
        seen = self._classifier.health()
        return PortHealth(
            fragments=seen.fragments,
            short=seen.short,
            overflow_seen=seen.overflow_seen,
            overflow_dropped=seen.overflow_dropped,
            gso_seen=seen.gso_seen,
            queue_dropped=seen.queue_dropped + queue_dropped,
        )

    def close(self) -> None:
        """Remove the qdiscs, and with them what waits in them."""
        if self._classifier is not None:
            self._classifier.close()
        if self._tree:
            root = self._tree[0]
            self._tree, self._steering, self._watch = (), Steering(), Steering()
            try:
                with open_netlink(self._netns) as ipr:
                    qdisc.execute(ipr, self._ifindex, [qdisc.Command("delete", root)])
            except KernelError as error:
                # Interface or namespace are gone, and the qdiscs with them.
                if error.code not in (errno.ENOENT, errno.ENODEV, errno.EINVAL):
                    raise LinkError(f"port {self.name}: {error}") from error

    @property
    def _bands(self) -> int:
        """Bands for senders under a rule."""
        if self._classifier is not None:
            return 0
        return max(1, min(2 * len(self._sources), qdisc.BANDS_MAX - 1))

    def _losses(self, steering: Steering) -> list[float]:
        base = 0.0 if self._classifier is not None else self._shape.loss_ratio
        rules = (steering.ratios.get(band, 0.0) for band in range(1, self._bands + 1))
        return [base, *(combined(base, ratio) for ratio in rules)]

    def _open_stretches(self, before: Reading, after: Reading) -> None:
        bands = [part for part in self._tree if isinstance(part, Netem)]
        for band, part in enumerate(bands):
            parts = self._steering.parts.get(band, ()) if band else self._watch.parts.get(0, ())
            stretch = Stretch(part.loss_ratio, parts, rest="data" if band else "other")
            self._ledger.start(band, stretch, before, after)

    def _verified(self, ipr: IPRoute) -> Reading:
        """The counters, once the kernel's state has been found to be as wanted."""
        found = qdisc.dump(ipr, self._ifindex)
        qdisc.verify(found, self._tree)
        bands = sum(isinstance(part, Netem) for part in self._tree)
        stats = {band: qdisc.stats(found[netem_handle(band)]) for band in range(bands)}
        return Reading(stats, self._hits(ipr) if bands > 1 else {})

    def _hits(self, ipr: IPRoute) -> dict[tuple[int, Part], int]:
        filters = (*self._steering.filters, *self._watch.filters)
        counts = u32.verify(ipr, self._ifindex, PRIO_HANDLE, filters)
        hits: dict[tuple[int, Part], int] = {}
        for label, count in zip((*self._steering.labels, *self._watch.labels), counts, strict=True):
            hits[label] = hits.get(label, 0) + count
        return hits

    def _reading(self) -> Reading:
        if not self._tree:
            return Reading()
        with self._kernel("read the counters") as ipr:
            return self._verified(ipr)

    @contextmanager
    def _kernel(self, what: str) -> Generator[IPRoute, None, None]:
        """A netlink socket for one operation (about 1 ms: pyroute2's belong to one thread), errors translated."""
        try:
            with open_netlink(self._netns) as ipr:
                yield ipr
        except KernelError as error:
            if error.code == errno.ENOENT and not self._tree:
                detail = "this kernel has no sch_netem, sch_prio or sch_tbf"
                raise UnsupportedFeature("backend netem", ("bpf", "fake"), detail) from error
            raise LinkError(f"port {self.name}: cannot {what}: {error}") from error

"""The `netem` backend: loss, delay and jitter by sch_netem, rate by sch_tbf.

The qdiscs at the egress of the switch port, steady from `install` on and only changed in place:

    [tbf 1: rate] - prio 10: - band 0: netem 100:  everything that no rule names: base loss only
                             - band 1: netem 101:  one band for each loss rule (two for match "all"): base loss
                             - ...                 and the rule's; equal delay, jitter and limit in all bands

A netem with ECN has a prio of two bands above it: it counts drops alone, netem marks as well (`tree.stats_of`).

A change is one batch of netlink messages, which the kernel does in one system call (see `change`).

u32 filters steer a rule's packets (sender, protocol, ports and, where the rule has a window, the index field) into
its band. When there are more rules than bands (at most 15), those of one loss ratio share a band. Other filters leave
the data of known senders in band 0 and count it.

What this backend cannot do, or does differently from `bpf`:
- Loss is random. Linux 6.6 and later take a seed for it (`seeding`): then the same packets in the same order meet the
  same fate. Base loss hits ARP and unknown senders as well.
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
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from netem.kernel import qdisc, u32
from netem.kernel.errors import KernelError
from netem.kernel.netns import open_rtnetlink
from netem.kernel.rtnetlink import Batch, Rtnetlink
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
from netem.links.change import Change, State, change, read, read_after, read_before, reading
from netem.links.ledger import Ledger, Reading, Stretch
from netem.links.seeding import can_seed, seeded
from netem.links.steering import Steering, steer, watch
from netem.links.tree import PRIO_HANDLE, combined, own_loss, tree

WATCH_PRIORITY = 3  # after the two that rules take in turn
_GONE = (errno.ENOENT, errno.ENODEV, errno.EINVAL)


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
        self._mtu = 0  # found out by `install`
        self._classifier = classifier
        self._shape = Shape()
        self._flow: Flow | None = None
        self._key: Key | None = None
        self._sources: tuple[str, ...] = ()
        self._netlink: Rtnetlink | None = None
        self._state = State()
        self._doubtful = False  # a change failed half-way
        self.seed: int | None = None
        """Of the netems' random numbers, from the next `install` on; None: the kernel's own."""
        self.seeded: bool | None = None  # whether the kernel takes it, once that is known
        self._changes = 0  # since `install`
        self._prepared: tuple[tuple[LossRule, ...], Change, list[Batch]] | None = None
        self._ledger = Ledger()

    @property
    def loss_engine(self) -> str:
        return "netem" if self._classifier is None else self._classifier.backend

    def install(self, shape: Shape, flow: Flow | None, key: Key | None, sources: Sequence[str]) -> None:
        self._check(shape, sources)
        if self._classifier is not None:
            loss_only = Shape(
                loss_ratio=shape.loss_ratio, chain=shape.chain, chain_state=shape.chain_state, loss_at=shape.loss_at
            )
            self._classifier.install(loss_only, flow, key, sources)
        elif shape.rate_bps is not None and shape.loss_at == "after_rate":
            have = ("loss_engine: bpf",)
            raise UnsupportedFeature("loss_at: after_rate", have, "netem loses packets before the rate")
        self._shape, self._flow, self._key, self._sources = shape, flow, key, tuple(dict.fromkeys(sources))
        with self._kernel("install") as netlink:
            link = netlink.find(self._ifname)
            self._mtu = link.mtu_bytes
            if self._doubtful:
                self._remove(netlink)
            self._changes = 0
            wanted = self._with_seed(self._tree(Steering()), 0)
            commands = qdisc.plan(self._state.tree, wanted)
            if any(command.verb == "add" for command in commands):
                self._state = State()
            self._doubtful = True
            self._execute(netlink, link.index, commands)
            if self.seed is not None and self.seeded is None:
                self.seeded = can_seed(qdisc.dump(netlink, link.index))
                with_seed = self._with_seed(wanted, 0)
                self._execute(netlink, link.index, qdisc.plan(wanted, with_seed))
                wanted = with_seed
            self._state = State(link.index, wanted, self._state.steering, self._state.watch)
            self._replace_watch(netlink)
            counts = self._verified(netlink)
            self._doubtful = False
        self._ledger = Ledger()
        self._open_stretches(counts, counts)

    def adopt(self, shape: Shape, sources: Sequence[str]) -> None:
        self._shape, self._sources = shape, tuple(dict.fromkeys(sources))
        with self._kernel("find what is installed") as netlink:
            link = netlink.find(self._ifname)
            self._mtu = link.mtu_bytes
            wanted = self._tree(Steering())
            qdisc.verify(qdisc.dump(netlink, link.index), wanted)
            self._state = State(link.index, wanted)

    def _check(self, shape: Shape, sources: Sequence[str]) -> None:
        if shape.extras.loss is not None and self._classifier is not None:
            raise UnsupportedFeature("four_state", ("loss_engine: netem",), "the mask has no such model")
        if shape.extras.alone and sources and self._classifier is None:
            detail = f"port {self.name} has a netem for each band of loss, and needs to have a single one"
            raise UnsupportedFeature(", ".join(shape.extras.alone), ("loss_engine: bpf",), detail)

    def prepare(self, rules: Sequence[LossRule]) -> None:
        """Lay out the change to these rules, so that `set_loss` has only to send it."""
        if self._classifier is None and self._state.tree and not self._doubtful:
            self._prepared = self._laid_out(tuple(rules))

    def set_loss(self, rules: Sequence[LossRule]) -> None:
        if not self._state.tree:
            raise LinkError(f"port {self.name}: loss was asked for before the port was installed")
        if self._classifier is not None:
            self._classifier.set_loss(rules)
            return
        if any(rule.chain is not None or rule.duplicate_ratio or rule.corrupt_ratio for rule in rules):
            raise UnsupportedFeature("loss in bursts, duplicates and damage of a burst", ("bpf", "loss_engine: bpf"))
        if self._doubtful:
            raise LinkError(f"port {self.name}: an earlier change failed half-way; install the port again")
        prepared = self._prepared
        if prepared is None or prepared[0] != tuple(rules) or prepared[1].before is not self._state:
            prepared = self._laid_out(tuple(rules))
        self._prepared = None
        _, wanted, batches = prepared
        with self._kernel("set the loss") as netlink:
            self._doubtful = True
            answers = netlink.run(batches)
            before = read_before(wanted, answers)
            after, self._state = read_after(wanted, answers)
            self._doubtful = False
        self._changes += 1
        self._open_stretches(before, after)

    def set_shape(self, shape: Shape) -> None:
        """See `Port.set_shape`. The base loss stays."""
        shape = replace(shape, loss_ratio=self._shape.loss_ratio, chain=self._shape.chain)
        steering = self._state.steering
        wanted = self._with_seed(self._tree(steering, shape), self._changes + 1)
        if any(command.verb != "change" for command in qdisc.plan(self._state.tree, wanted)):
            raise LinkError(f"port {self.name}: it has to be installed with a rate before that can be changed")
        made = change(self._state, wanted, steering)
        with self._kernel("set rate and delay") as netlink:
            self._doubtful = True
            answers = netlink.run(netlink.lay_out(made.requests))
            read_before(made, answers)
            _, self._state = read_after(made, answers)
            self._shape, self._doubtful = shape, False
        self._changes += 1

    def _laid_out(self, rules: tuple[LossRule, ...]) -> tuple[tuple[LossRule, ...], Change, list[Batch]]:
        steering = self._steer(rules)
        wanted = change(self._state, self._with_seed(self._tree(steering), self._changes + 1), steering)
        with self._kernel("set the loss") as netlink:
            return rules, wanted, netlink.lay_out(wanted.requests)

    def _execute(self, netlink: Rtnetlink, ifindex: int, commands: Sequence[qdisc.Command]) -> None:
        """Send commands; a tree that cannot be completed is removed again."""
        for done, command in enumerate(commands):
            try:
                qdisc.execute(netlink, ifindex, [command])
            except KernelError:
                added = [c.qdisc for c in commands[:done] if c.verb == "add"]
                with suppress(KernelError):
                    qdisc.execute(netlink, ifindex, [qdisc.Command("delete", part) for part in added[:1]])
                self._doubtful = not any(c.verb == "add" for c in commands)
                raise

    def _steer(self, rules: Sequence[LossRule]) -> Steering:
        """Filters under the priority not in use; those in place where they would be the same."""
        now = self._state.steering
        priority = 3 - now.priority if now.filters else 1
        place = (self._flow, self._key, self._sources, self._bands, PRIO_HANDLE)
        same = steer(rules, *place, now.priority)
        return same if same.filters == now.filters else steer(rules, *place, priority)

    def _replace_watch(self, netlink: Rtnetlink) -> None:
        """No rules, and filters that count. Without bands there is nothing to steer: a classifier counts."""
        state = self._state
        requests = [
            u32.remove(state.ifindex, PRIO_HANDLE, group.filters[0].priority)
            for group in (state.steering, state.watch)
            if group.filters
        ]
        watching = Steering()
        if self._bands:
            watching = watch(self._flow, self._sources, PRIO_HANDLE, WATCH_PRIORITY)
            requests += [u32.add(state.ifindex, item) for item in watching.filters]
        netlink.ask(requests)
        self._state = State(state.ifindex, state.tree, Steering(), watching)

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
        netlink, self._netlink = self._netlink, None
        try:
            if netlink is not None and self._state.tree:
                self._remove(netlink)
        except KernelError as error:
            # Interface or namespace are gone, and the qdiscs with them.
            if error.code not in _GONE:
                raise LinkError(f"port {self.name}: {error}") from error
        finally:
            self._state, self._prepared = State(), None
            if netlink is not None:
                netlink.close()

    def _remove(self, netlink: Rtnetlink) -> None:
        """The qdiscs, and their filters with them."""
        state, self._state = self._state, State()
        if state.tree:
            qdisc.execute(netlink, state.ifindex, [qdisc.Command("delete", state.tree[0])])

    @property
    def _bands(self) -> int:
        """Bands for senders under a rule. At a host's uplink there are no senders to tell apart."""
        if self._classifier is not None or not self._sources:
            return 0
        return max(1, min(2 * len(self._sources), qdisc.BANDS_MAX - 1))

    def _tree(self, steering: Steering, shape: Shape | None = None) -> qdisc.Tree:
        """The qdiscs with these rules: a band for each, its loss on top of the link's own."""
        shape = shape or self._shape
        base = own_loss(shape) if self._classifier is None else 0.0
        rules = [steering.ratios.get(band, 0.0) for band in range(1, self._bands + 1)]
        try:
            return tree(shape, self._mtu, [base, *(combined(base, ratio) for ratio in rules)])
        except ValueError as error:
            raise LinkError(f"port {self.name}: {error}") from error

    def _with_seed(self, wanted: qdisc.Tree, number: int) -> qdisc.Tree:
        if self.seed is None or not self.seeded:
            return wanted
        return seeded(wanted, self._state.tree, self.seed, number)

    def _open_stretches(self, before: Reading, after: Reading) -> None:
        steering, watching = self._state.steering, self._state.watch
        held = any(isinstance(part, qdisc.Tbf) for part in self._state.tree)
        for band, part in enumerate(self._state.netems):
            parts = steering.parts.get(band, ()) if band else watching.parts.get(0, ())
            options = part.options
            stretch = Stretch(options.loss_ratio, parts, "data" if band else "other", options.clustering, held)
            self._ledger.start(band, stretch, before, after)

    def _verified(self, netlink: Rtnetlink) -> Reading:
        """The counters, once the kernel's state has been found to be as wanted."""
        state = self._state
        counts, handles = read(state, netlink.run(netlink.lay_out(reading(state))))
        if handles != state.handles:
            self._state = State(state.ifindex, state.tree, state.steering, state.watch, handles)
        return counts

    def _reading(self) -> Reading:
        if not self._state.tree:
            return Reading()
        with self._kernel("read the counters") as netlink:
            return self._verified(netlink)

    @contextmanager
    def _kernel(self, what: str) -> Generator[Rtnetlink, None, None]:
        """The port's netlink socket, opened once; errors translated."""
        try:
            if self._netlink is None:
                self._netlink = open_rtnetlink(self._netns)
            yield self._netlink
        except KernelError as error:
            if error.code == errno.ENOENT and not self._state.tree:
                detail = "this kernel has no sch_netem, sch_prio or sch_tbf"
                raise UnsupportedFeature("backend netem", ("bpf", "fake"), detail) from error
            raise LinkError(f"port {self.name}: cannot {what}: {error}") from error

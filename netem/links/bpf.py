"""The `bpf` backend: loss by an eBPF program at the switch port, rate by tbf, no delay.

The program (`loss_filter`) sits on clsact, beside the qdiscs: loss and rate are independent. `loss_at:
before_rate` puts it on the egress of the switch port that faces the receiver, so a lost packet takes no
room in the rate limiter. `loss_at: after_rate` puts it on the ingress of the receiver's own interface,
which has to be named and have GRO off: GRO comes before the program, and what it merged would be lost as
one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from netem.kernel import offload, qdisc
from netem.kernel.clsact import Hook
from netem.kernel.netns import open_rtnetlink
from netem.kernel.rtnetlink import Rtnetlink
from netem.links.base import (
    Counter,
    Extras,
    Flow,
    Key,
    LinkError,
    LossRule,
    PortHealth,
    Shape,
    UnsupportedFeature,
)
from netem.links.bucket import QUEUE_BYTES, bucket_bytes
from netem.links.loss_filter import LossFilter, translated

_NO_DELAY = "eBPF cannot hold packets back; use link backend netem on a kernel with sch_netem"
_QUEUE_PACKETS = 20_000


class BpfPort:
    """A switch port of the `bpf` backend. `receiver` is the (namespace, interface) behind it, for `after_rate`.

    `queues` False: qdiscs are somebody else's (a netem port's), this port only loses and counts.
    """

    backend = "bpf"

    def __init__(
        self,
        name: str,
        netns: str | None,
        ifname: str,
        *,
        mtu: int = 1500,
        receiver: tuple[str, str] | None = None,
        counter_entries: int | None = None,
        queues: bool = True,
    ) -> None:
        self.name = name
        self._queues = queues
        self._mtu = mtu
        self._port = (netns, ifname)
        self._receiver = receiver
        self._entries = counter_entries
        self._loss: LossFilter | None = None
        self._tree: qdisc.Tree = ()
        self._netlink: Rtnetlink | None = None
        self._index = 0  # of the interface, once the socket is open

    def install(self, shape: Shape, flow: Flow | None, key: Key | None, sources: Sequence[str]) -> None:
        """See `Port.install`. UnsupportedFeature for delay and jitter, and for `after_rate` without `receiver`."""
        place = self._check(shape)
        self._install_rate(shape)
        if self._loss is not None and self._loss.place != place:
            self._loss.close()
            self._loss = None
        if self._loss is None:
            self._loss = LossFilter(*place, counter_entries=self._entries)
        self._loss.install(flow, key, sources, shape.loss_ratio, shape.chain, shape.chain_state)

    def adopt(self, shape: Shape, sources: Sequence[str]) -> None:
        """See `Port.adopt`. The loss program is replaced in any case, which takes no moment without one."""
        wanted = rate_tree(shape, self._mtu) if self._queues else ()
        with translated(f"find the queue of {self.name}"):
            qdisc.verify(qdisc.dump(self._opened(), self._index), wanted)
        self._tree = wanted

    def prepare(self, rules: Sequence[LossRule]) -> None:
        """Nothing to work out: maps are written."""

    def set_loss(self, rules: Sequence[LossRule]) -> None:
        self._filter.set_loss(rules)

    def set_shape(self, shape: Shape) -> None:
        """See `Port.set_shape`. UnsupportedFeature for delay and jitter."""
        self._check(shape)
        if self._queues:
            self._change_tree(rate_tree(shape, self._mtu))

    def set_label(self, index: int) -> None:
        self._filter.set_label(index)

    def counters(self) -> list[Counter]:
        return self._filter.counters()

    def health(self) -> PortHealth:
        return PortHealth(**self._filter.events(), queue_dropped=self._queue_dropped())

    def close(self) -> None:
        """Remove program and rate limiter. The interface or its namespace may be gone already."""
        if self._loss is not None:
            self._loss.close()
            self._loss = None
        with contextlib.suppress(LinkError):
            self._set_tree(())
        self._tree = ()
        if self._netlink is not None:
            self._netlink.close()
            self._netlink = None

    @property
    def _filter(self) -> LossFilter:
        if self._loss is None:
            raise LinkError(f"port {self.name}: nothing is installed")
        return self._loss

    def _check(self, shape: Shape) -> tuple[str | None, str, Hook]:
        if shape.delay_us or shape.jitter_us:
            raise UnsupportedFeature("delay", ("netem",), _NO_DELAY)
        if shape.extras != Extras():
            raise UnsupportedFeature("what only sch_netem can do to packets", ("netem",), _NO_DELAY)
        if shape.loss_at == "before_rate":
            return (*self._port, "egress")
        if self._receiver is None:
            raise UnsupportedFeature("loss_at: after_rate", (), f"receiver behind {self.name} is not known")
        if offload.read(*self._receiver).get(offload.GRO):
            why = f"GRO at {self._receiver[1]} merges packets before each can be lost alone; turn it off"
            raise UnsupportedFeature("loss_at: after_rate", (), why)
        return (*self._receiver, "ingress")

    def _install_rate(self, shape: Shape) -> None:
        self._set_tree(rate_tree(shape, self._mtu) if self._queues else ())

    def _change_tree(self, wanted: qdisc.Tree) -> None:
        if any(command.verb != "change" for command in qdisc.plan(self._tree, wanted)):
            raise LinkError(f"rate at port {self.name}: it has to be installed with one before it can be changed")
        self._set_tree(wanted)

    def _set_tree(self, wanted: qdisc.Tree) -> None:
        if not wanted and not self._tree:
            return
        with translated(f"rate at port {self.name}"):
            netlink = self._opened()
            qdisc.execute(netlink, self._index, qdisc.plan(self._tree, wanted))
            qdisc.verify(qdisc.dump(netlink, self._index), wanted)
        self._tree = wanted

    def _queue_dropped(self) -> int:
        if not self._tree:
            return 0
        with translated(f"statistics of port {self.name}"):
            found = qdisc.dump(self._opened(), self._index)
        return found[self._tree[0].handle].stats.dropped

    def _opened(self) -> Rtnetlink:
        """The port's netlink socket. Kept: to open one takes milliseconds, which a change by time would be late."""
        if self._netlink is None:
            netns, ifname = self._port
            netlink = open_rtnetlink(netns)
            try:
                self._index = netlink.find(ifname).index
            except BaseException:
                netlink.close()
                raise
            self._netlink = netlink
        return self._netlink


def rate_tree(shape: Shape, mtu: int) -> qdisc.Tree:
    """tbf as root; a queue of `queue_bytes`, else of `limit_packets` full frames, else 1 MiB.

    Without a rate a plain queue: nothing but the rules may lose packets, whatever the receiver's ring holds.
    """
    if shape.rate_bps is None:
        return (qdisc.Pfifo(qdisc.handle(1), qdisc.ROOT, shape.limit_packets or _QUEUE_PACKETS),)
    queue = shape.queue_bytes or (shape.limit_packets or 0) * (mtu + 14) or QUEUE_BYTES
    burst = bucket_bytes(shape.rate_bps, mtu, queue, shape.queue_bytes)
    try:
        return (qdisc.Tbf(qdisc.handle(1), qdisc.ROOT, shape.rate_bps, burst, queue),)
    except ValueError as error:
        raise LinkError(str(error)) from error

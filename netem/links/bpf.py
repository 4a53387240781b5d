"""The `bpf` backend: loss by an eBPF program at the switch port, rate by tbf, no delay.

The program (`program`) sits on clsact, beside the qdiscs: loss and rate are independent. `loss_at:
before_rate` puts it on the egress of the switch port that faces the receiver, so a lost packet takes no
room in the rate limiter. `loss_at: after_rate` puts it on the ingress of the receiver's own interface,
which has to be named and have GRO off: GRO comes before the program, and what it merged would be lost as
one.

Changing the loss is one write for each sender plus one that switches all of them together; nothing is
detached or reinstalled, and counters go on. A sender may have a rule for each of many rounds at once.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from ctypes import c_uint32
from typing import Literal

import numpy as np
from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from netem.kernel import bpf, offload, qdisc, veth
from netem.kernel.errors import KernelError, attempting
from netem.kernel.netns import open_netlink, open_rtnetlink
from netem.links import mask, program
from netem.links import program_layout as layout
from netem.links.base import (
    WINDOWS_MAX,
    Counter,
    Extras,
    Flow,
    Key,
    Kind,
    LinkError,
    LossRule,
    PortHealth,
    Shape,
    UnsupportedFeature,
    check_windows,
)
from netem.links.chain import GilbertElliott
from netem.links.program_decide import Chained
from netem.links.program_records import COUNTER, Control, Rule

Hook = Literal["egress", "ingress"]

_PARENTS = {"egress": 0xFFFFFFF3, "ingress": 0xFFFFFFF2}  # TC_H_CLSACT with TC_H_MIN_EGRESS, TC_H_MIN_INGRESS
_PRIORITY, _HANDLE, _DIRECT_ACTION, _ETH_P_ALL = 10, 1, 1, 0x0003
_NAME = "dblp_loss"
_NO_DELAY = "eBPF cannot hold packets back; use link backend netem on a kernel with sch_netem"
_QUEUE_BYTES = 1 << 20
_QUEUE_PACKETS = 20_000
_BUCKET_MS = 4
_KINDS: tuple[Kind, Kind] = ("data", "other")


class LossFilter:
    """The loss program on one hook of one interface, with its maps. Also usable beside a netem qdisc.

    `counter_entries` bounds the (sender, index, kind) combinations that are counted apart; what finds no
    room is still decided, and counted in `events()`. The default has room for 16,384 rounds of every
    sender. With `by` "destination" all that is said of sources here, in rules and in counters, is meant of
    the packets' destinations: for a place that many receivers' packets of one sender pass.
    """

    def __init__(
        self,
        netns: str | None,
        ifname: str,
        hook: Hook = "egress",
        *,
        counter_entries: int | None = None,
        by: program.By = "source",
    ) -> None:
        self.place = (netns, ifname, hook)
        self.by: program.By = by
        self._entries = counter_entries
        self._lock = threading.Lock()  # the maps' buffers are shared, and system calls let other threads run
        self._owned: ExitStack | None = None
        self._adopted = False
        self._sources: dict[str, bytes] = {}
        self._control = Control()

    def install(
        self,
        flow: Flow | None,
        key: Key | None,
        sources: Sequence[str],
        base_ratio: float = 0.0,
        chain: GilbertElliott | None = None,
        chain_state: int = 0,
    ) -> None:
        """Load a program for this flow and key and attach it, replacing an earlier one in place.

        Counters start at zero, without loss but for the base loss: a ratio or a chain (`Shape`).
        """
        base = Rule.of(chain_state, base_ratio, chain)
        with self._lock, ExitStack() as stack:
            self._flow, self._key = flow, key
            self._sources = {source: ipaddress.IPv4Address(source).packed for source in sources}
            self._control = Control(0, 0, base)
            self._windows: dict[int, list[bytes]] = {0: [], 1: []}
            self._make_maps(stack)
            for number, (source, packed) in enumerate(self._sources.items()):
                self._write("sources", packed, bytes(c_uint32(number)), f"sender {source}")
            self._write_rules(0, {})
            self._write_control()
            self._chained: Chained = {"base"} if chain is not None else frozenset()
            loaded = stack.enter_context(self._load(self._chained))
            self._attach(loaded)
            self._release()
            self._owned, self._adopted = stack.pop_all(), False
        self.program = loaded

    def adopt(self, sources: Sequence[str]) -> bool:
        """Take over the program that another process attached here, to read its counters; False: there is none.

        It is left where it is when this object is closed.
        """
        with self._lock, ExitStack() as stack:
            number = _attached(*self.place)
            if number is None:
                return False
            self._maps = {name: stack.enter_context(each) for name, each in bpf.maps_of(number).items()}
            self._sources = {source: ipaddress.IPv4Address(source).packed for source in sources}
            self._release()
            self._owned, self._adopted = stack.pop_all(), True
        return True

    def _load(self, chained: Chained) -> bpf.Program:
        ingress = self.place[2] == "ingress"
        text = program.loss_program(self._flow, self._key, self.by, ingress=ingress, chained=chained)
        return bpf.Program(_NAME, text.assemble({name: each.fd for name, each in self._maps.items()}))

    def _learn_chains(self) -> None:
        """The first time that a rule has a chain: a program that knows them, over the same maps."""
        if self._owned is None or "rules" in self._chained:
            return
        chained: Chained = {*self._chained, "rules"}
        with ExitStack() as stack:
            loaded = stack.enter_context(self._load(chained))
            self._attach(loaded)
            stack.pop_all()
        self.program.close()
        self._owned.push(loaded)
        self.program, self._chained = loaded, chained

    def set_loss(self, rules: Sequence[LossRule]) -> None:
        """Replace all rules: write the bank that is not in use, read it back, switch."""
        with self._lock:
            by_source = self._checked(rules)
            if any(rule.chain is not None for rule in rules):
                self._learn_chains()
            bank = 1 - self._control.bank
            self._write_rules(bank, by_source)
            self._control.bank = bank
            self._write_control()

    def set_label(self, index: int) -> None:
        """The counter index of packets without an index field."""
        if not 0 <= index < 2**32:
            raise ValueError(f"label {index}: expected 0..2**32-1")
        with self._lock:
            self._require_installed()
            self._control.label = index
            self._write_control()

    def counters(self) -> list[Counter]:
        """All counters since `install`, sorted by source, index and kind."""
        with self._lock:
            self._require_installed()
            raw = b"".join(key + value for key, value in self._maps["counters"].items())
        rows = np.frombuffer(raw, COUNTER)
        rows = rows[np.lexsort((rows["kind"], rows["index"], rows["source"]))]
        names = {int.from_bytes(packed, "big"): source for source, packed in self._sources.items()}
        return [
            Counter(names[source], index, seen, dropped, size, _KINDS[kind], duplicated, corrupted)
            for source, index, kind, seen, dropped, size, _, duplicated, corrupted in rows.tolist()
        ]

    def events(self) -> dict[str, int]:
        """Counts of what makes numbers doubtful, by `layout.EVENTS`."""
        with self._lock:
            self._require_installed()
            raw = self._maps["events"].lookup(bytes(4)) or bytes(layout.EVENTS_BYTES)
        return dict(zip(layout.EVENTS, np.frombuffer(raw, "u8").tolist(), strict=False))

    def close(self) -> None:
        """Detach the program. The interface or its namespace may be gone already."""
        with self._lock:
            if self._owned is not None and not self._adopted:
                self._detach()
            self._release()

    def _release(self) -> None:
        if self._owned is not None:
            self._owned.close()
            self._owned = None

    def _require_installed(self) -> None:
        if self._owned is None:
            raise LinkError(f"loss at {self._where()}: nothing is installed")

    def _make_maps(self, stack: ExitStack) -> None:
        senders = max(1, len(self._sources))
        counters = self._entries or min(1 << 20, 2 * 16_384 * senders)
        maps = (
            bpf.Map("control", bpf.ARRAY, 4, layout.CONTROL_BYTES, 1),
            bpf.Map("sources", bpf.HASH, 4, 4, senders),
            bpf.Map("rules", bpf.ARRAY, 4, layout.RULE_BYTES, 2 * senders),
            bpf.Map(
                "windows",
                bpf.HASH,
                layout.WINDOW_KEY_BYTES,
                layout.RULE_BYTES,
                2 * WINDOWS_MAX * senders,
                bpf.NO_PREALLOC,
            ),
            bpf.Map("counters", bpf.HASH, layout.COUNTER_KEY_BYTES, layout.COUNTER_BYTES, counters, bpf.NO_PREALLOC),
            bpf.Map("events", bpf.ARRAY, 4, layout.EVENTS_BYTES, 1),
        )
        self._maps = {each.name: stack.enter_context(each) for each in maps}

    def _checked(self, rules: Sequence[LossRule]) -> dict[str, list[LossRule]]:
        """Rules by sender. Raises LinkError."""
        self._require_installed()
        by_source: dict[str, list[LossRule]] = {}
        for rule in rules:
            by_source.setdefault(rule.source, []).append(rule)
        unknown = by_source.keys() - self._sources.keys()
        if unknown:
            raise LinkError(f"loss at {self._where()}: no such sender {', '.join(sorted(unknown))}")
        if self._flow is None and any(rule.match == "data" for rule in rules):
            raise LinkError(f"loss at {self._where()}: match data, but no data flow is installed")
        more = [rule for rule in rules if rule.duplicate_ratio or rule.corrupt_ratio]
        if any(rule.match == "all" or self._key is None for rule in more):
            raise LinkError(f"loss at {self._where()}: only data packets with a key can be duplicated or corrupted")
        try:
            check_windows(by_source, keyed=self._key is not None and self._key.index is not None)
        except LinkError as error:
            raise LinkError(f"loss at {self._where()}: {error}") from error
        return by_source

    def _write_rules(self, bank: int, by_source: dict[str, list[LossRule]]) -> None:
        for key in self._windows[bank]:
            with _translated(f"remove a rule at {self._where()}"):
                self._maps["windows"].delete(key)
        self._windows[bank] = []
        for number, source in enumerate(self._sources):
            rules = by_source.get(source, [])
            if len(rules) > 1:
                self._write_windows(bank, source, rules)
                only = Rule.of(0, 0.0, None, flags=layout.BY_INDEX)
            else:
                only = self._rule(rules[0]) if rules else Rule.of(0, 0.0, None)
            self._write("rules", bytes(c_uint32(2 * number + bank)), bytes(only), f"loss of {source}")

    def _write_windows(self, bank: int, source: str, rules: Sequence[LossRule]) -> None:
        """One element for each index: the program finds it with one look-up, however many there are."""
        for rule in rules:
            value = bytes(self._rule(rule))
            for index in range(rule.first, rule.last + 1):
                key = self._sources[source] + bytes(c_uint32(index)) + bytes(c_uint32(bank))
                self._write("windows", key, value, f"loss of {source} in round {index}")
                self._windows[bank].append(key)

    def _rule(self, rule: LossRule) -> Rule:
        windowed = rule.match == "data" and self._key is not None and self._key.index is not None
        window = (rule.first, rule.last) if windowed else (0, mask.U32)
        flags = layout.MATCH_ALL if rule.match == "all" else 0
        return Rule.of(rule.state, rule.loss_ratio, rule.chain, window, flags, rule.duplicate_ratio, rule.corrupt_ratio)

    def _write_control(self) -> None:
        self._write("control", bytes(4), bytes(self._control), "switch rules")

    def _write(self, name: str, key: bytes, value: bytes, what: str) -> None:
        with _translated(f"{what} at {self._where()}"):
            self._maps[name].update(key, value)
            found = self._maps[name].lookup(key)
        if found != value:
            held = "nothing" if found is None else found.hex()
            raise LinkError(f"{what} at {self._where()}: wrote {value.hex()}, the kernel holds {held}")

    def _attach(self, loaded: bpf.Program) -> None:
        netns, ifname, hook = self.place
        # The name is what a dump gives back of a program, so it carries the program's number.
        name = f"{_NAME}:{loaded.id}"
        what = f"attach the loss program at {self._where()}"
        with _translated(what), closing(open_netlink(netns)) as netlink:
            index = veth.index_of(netlink, ifname)
            _add_clsact(netlink, index)
            with attempting("add the filter"):
                netlink.tc(
                    "replace-filter", "bpf", index, handle=_HANDLE, fd=loaded.fd, name=name,
                    parent=_PARENTS[hook], prio=_PRIORITY, protocol=_ETH_P_ALL, flags=_DIRECT_ACTION,
                )  # fmt: skip
                filters = netlink.get_filters(index=index, parent=_PARENTS[hook])
            found = {each.get_nested("TCA_OPTIONS", "TCA_BPF_NAME") for each in filters}
            if name not in found:
                raise LinkError(f"{what}: it is not in the filter list")

    def _detach(self) -> None:
        netns, ifname, hook = self.place
        try:
            with closing(open_netlink(netns)) as netlink:
                index = veth.index_of(netlink, ifname)
                with attempting("remove the filter"):
                    netlink.tc(
                        "del-filter", "bpf", index, handle=_HANDLE, parent=_PARENTS[hook], prio=_PRIORITY,
                        protocol=_ETH_P_ALL,
                    )  # fmt: skip
        except KernelError:
            pass  # gone with its interface or namespace

    def _where(self) -> str:
        netns, ifname, hook = self.place
        return f"{netns or 'this namespace'}/{ifname} {hook}"


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
        netns, ifname = self._port
        with _translated(f"find the queue of {self.name}"), closing(open_rtnetlink(netns)) as netlink:
            qdisc.verify(qdisc.dump(netlink, netlink.find(ifname).index), wanted)
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
        netns, ifname = self._port
        with _translated(f"rate at port {self.name}"), closing(open_rtnetlink(netns)) as netlink:
            index = netlink.find(ifname).index
            qdisc.execute(netlink, index, qdisc.plan(self._tree, wanted))
            qdisc.verify(qdisc.dump(netlink, index), wanted)
        self._tree = wanted

    def _queue_dropped(self) -> int:
        if not self._tree:
            return 0
        netns, ifname = self._port
        with _translated(f"statistics of port {self.name}"), closing(open_rtnetlink(netns)) as netlink:
            found = qdisc.dump(netlink, netlink.find(ifname).index)
        return found[self._tree[0].handle].stats.dropped


def rate_tree(shape: Shape, mtu: int) -> qdisc.Tree:
    """tbf as root; a queue of `queue_bytes`, else of `limit_packets` full frames, else 1 MiB.

    Without a rate a plain queue: nothing but the rules may lose packets, whatever the receiver's ring holds.
    """
    if shape.rate_bps is None:
        return (qdisc.Pfifo(qdisc.handle(1), qdisc.ROOT, shape.limit_packets or _QUEUE_PACKETS),)
    queue = shape.queue_bytes or (shape.limit_packets or 0) * (mtu + 14) or _QUEUE_BYTES
    burst = bucket_bytes(shape.rate_bps, mtu, queue, shape.queue_bytes)
    try:
        return (qdisc.Tbf(qdisc.handle(1), qdisc.ROOT, shape.rate_bps, burst, queue),)
    except ValueError as error:
        raise LinkError(str(error)) from error


def _attached(netns: str | None, ifname: str, hook: Hook) -> int | None:
    """The number of the loss program at a hook, None where there is none."""
    where = f"{netns or 'this namespace'}/{ifname} {hook}"
    with _translated(f"look for the loss program at {where}"), closing(open_netlink(netns)) as netlink:
        index = veth.index_of(netlink, ifname)
        with attempting("read the filters"):
            try:
                filters = netlink.get_filters(index=index, parent=_PARENTS[hook])
            except NetlinkError as error:
                if error.code in (errno.EINVAL, errno.ENOENT):  # no clsact, so no filters
                    return None
                raise
        for each in filters:
            name = str(each.get_nested("TCA_OPTIONS", "TCA_BPF_NAME") or "")
            if name.startswith(f"{_NAME}:"):
                return int(name.partition(":")[2])
    return None


def bucket_bytes(rate_bps: int, mtu: int, queue_bytes: int, asked_bytes: int | None = None) -> int:
    """tbf's bucket: 4 ms at the rate, but at most a quarter of the queue, and at least 1 ms and four frames
    (less for a short queue that was asked for: `qdisc.burst_bytes`).

    A link that has been idle sends that much at once. A timer that comes later than the bucket is deep loses the
    rest for good: on busy cores they come up to some milliseconds late.
    """
    wanted = min(rate_bps * _BUCKET_MS // 8000, queue_bytes // 4)
    return max(qdisc.burst_bytes(rate_bps, mtu, asked_bytes), wanted)


def _add_clsact(netlink: IPRoute, index: int) -> None:
    try:
        with attempting("add clsact"):
            netlink.tc("add", "clsact", index)
    except KernelError as error:
        if error.code != errno.EEXIST:
            raise


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except KernelError as error:
        raise LinkError(f"{what}: {error}") from error

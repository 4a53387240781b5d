"""A change of a `netem` port as one batch of netlink messages, and what its answers say (pure).

One system call reads all counters, changes what differs, adds the new filters and removes the old ones, and reads
everything back: the kernel does the messages of a batch in their order, and answers each. The one dump that a batch
may have, its last, lists the filters, so a foreign one shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from netem.kernel import qdisc, u32
from netem.kernel.qdisc import Netem, Prio, Stats, Tree
from netem.kernel.rtnetlink import Answer, Request
from netem.kernel.u32 import Filter
from netem.links.ledger import Part, Reading
from netem.links.steering import Steering
from netem.links.tree import PRIO_HANDLE, stats_of

Label = tuple[int, Part]


@dataclass(frozen=True)
class State:
    """What is in place at a port. `handles`: the kernel's, of the filters of `steering` and `watch`, in this order."""

    ifindex: int = 0
    tree: Tree = ()
    steering: Steering = field(default_factory=Steering)
    watch: Steering = field(default_factory=Steering)
    handles: tuple[int, ...] = ()

    @property
    def filters(self) -> tuple[Filter, ...]:
        return (*self.steering.filters, *self.watch.filters)

    @property
    def labels(self) -> tuple[Label, ...]:
        return (*self.steering.labels, *self.watch.labels)

    @property
    def netems(self) -> tuple[Netem, ...]:
        return tuple(part for part in self.tree if isinstance(part, Netem))

    @property
    def bands(self) -> bool:
        return any(isinstance(part, Prio) and part.handle == PRIO_HANDLE for part in self.tree)


@dataclass(frozen=True)
class Change:
    """From one state to another: `requests`, of which the first `reads` read `before` and those from `written` on read
    `after`.
    """

    before: State
    after: State
    requests: tuple[Request, ...]
    reads: int
    written: int


def change(before: State, tree: Tree, steering: Steering) -> Change:
    """The batch that leads from a state to another one with the same qdiscs and other parameters and filters.

    `after` lacks the handles of its filters, which the kernel chooses: `read_after` gives them.
    """
    index = before.ifindex
    tree = tuple(old if old == new else new for old, new in zip(before.tree, tree, strict=True))  # keeps its `reported`
    after = State(index, tree, steering, before.watch)
    for part in after.netems:
        part.reported  # noqa: B018  # worked out now, and not when the answers are to be compared with it
    first = [qdisc.get(index, part) for part in before.tree]
    if before.bands:
        first += [u32.get(index, f, h) for f, h in zip(before.filters, before.handles, strict=True)]
    write = [qdisc.request(index, command) for command in qdisc.plan(before.tree, tree)]
    if steering.filters != before.steering.filters:
        write += [u32.add(index, item) for item in steering.filters]
        if before.steering.filters:
            write.append(u32.remove(index, PRIO_HANDLE, before.steering.priority))
    requests = (*first, *write, *reading(after))
    return Change(before, after, requests, len(first), len(first) + len(write))


def reading(state: State) -> list[Request]:
    """Everything about a state, with one dump at the end."""
    requests = [qdisc.get(state.ifindex, part) for part in state.tree]
    return [*requests, u32.dump(state.ifindex, PRIO_HANDLE)] if state.bands else requests


def read_before(change: Change, answers: Sequence[Answer]) -> Reading:
    """The counters just before the change. KernelError unless the state was as `change.before` says."""
    reading, _ = read(change.before, (answer for answer in answers if answer.of < change.reads))
    return reading


def read_after(change: Change, answers: Sequence[Answer]) -> tuple[Reading, State]:
    """The counters just after the change, and the state with its handles. KernelError unless it is as wanted."""
    reading, handles = read(change.after, (answer for answer in answers if answer.of >= change.written))
    state = change.after
    return reading, State(state.ifindex, state.tree, state.steering, state.watch, handles)


def read(state: State, answers: Iterable[Answer]) -> tuple[Reading, tuple[int, ...]]:
    """Counters and handles from the answers about a state. KernelError unless it is what the kernel has."""
    qdiscs, filters = [], []
    for answer in answers:
        if answer.kind == qdisc.NEWQDISC:
            qdiscs.append(answer.body)
        elif (found := u32.decode(answer.body)) is not None:
            filters.append(found)
    there = qdisc.by_handle(qdiscs)
    qdisc.verify(there, state.tree)
    stats: dict[int, Stats] = {band: stats_of(there, part) for band, part in enumerate(state.netems)}
    matched = u32.verify(filters, state.filters)
    hits: dict[Label, int] = {}
    for label, entry in zip(state.labels, matched, strict=True):
        hits[label] = hits.get(label, 0) + entry.hits
    return Reading(stats, hits), tuple(entry.handle for entry in matched)

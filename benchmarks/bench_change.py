"""(g) Time from the trigger of an impairment until it is in place, and what a gate costs a round.

Change: `Port.set_loss` at the switch port that faces the server, on and off in turns, for three workers. When it
returns the new state of all senders has been written, read back and switched to. `bpf`: writes to maps; `switch` is
the last of them, the one that makes the packets see it. `netem`: one batch of netlink messages, laid out before
(`prepare`) as changes by time are: qdiscs changed in place, filters replaced, all read back. Where the kernel has no
sch_netem that line is missing, and an equal batch stands beside it: as many messages of the same kinds for qdiscs that
are here (a chain of sch_tbf, u32 filters at clsact), sent, read and compared by the same code. The whole step of a
scenario (the ports of all hosts) is shown beside it.

Gates: the same replay with a gate before every round (bursts of loss 0 at every iteration, so nothing is lost) and
without any; milliseconds between two iterations. A round's latency never includes the gate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from statistics import median

from benchmarks.harness import Context, Line, Spread, alternate
from benchmarks.labs import Star, built
from benchmarks.processes import Work
from benchmarks.testbed import Testbed, replay, standing
from netem.experiment.conductor import Conductor
from netem.experiment.hub import Event
from netem.experiment.prepare import UP_PORTS
from netem.kernel import qdisc, u32
from netem.kernel.netns import open_rtnetlink
from netem.kernel.rtnetlink import CREATE, EXCLUSIVE, Answer, Request, Rtnetlink, encode
from netem.links import mask
from netem.links.base import Flow, Key, LinkError, LossRule, Port, Shape
from netem.links.bpf import BpfPort
from netem.links.netem import NetemPort
from netem.links.steering import steer
from netem.preflight import probe

TITLE = "(g) change of an impairment, and the gate"
WORKERS, CHUNKS, ITERATIONS = 3, 1000, 60
FLOW, KEY = Flow("udp", dst_ports=UP_PORTS), Key(ranges=((4, 14),), index=(4, 8))
BPF_LIMIT_MS, NETEM_LIMIT_MS = 0.1, 1.0
LOSS = 0.9
CLSACT, EGRESS = 0xFFFFFFF1, 0xFFFFFFF3  # TC_H_CLSACT, and its TC_H_MIN_EGRESS


def measure(context: Context) -> list[Line]:
    turns = context.repeats(2000, 200)
    with built(WORKERS) as star:
        lines = _bpf(context, star, turns)
        lines.append(_netem(context, star, turns // 4))
        lines.append(_equal_batch(context, star, turns // 4))
    return lines + _gates(context)


def _rules(star: Star) -> list[LossRule]:
    """Three senders, each with a loss of its own seed."""
    return [
        LossRule(star.address(f"worker{rank}"), mask.port_state(7, "up", rank), LOSS) for rank in range(1, WORKERS + 1)
    ]


def _changes(port: Port, star: Star, turns: int) -> list[float]:
    """Seconds of each change: the burst on, and off."""
    port.install(Shape(), FLOW, KEY, [star.address(f"worker{rank}") for rank in range(1, WORKERS + 1)])
    rules, took = _rules(star), []
    for turn in range(turns + 10):
        wanted = rules if turn % 2 == 0 else ()
        if isinstance(port, NetemPort):
            port.prepare(wanted)
        began = time.perf_counter()
        port.set_loss(wanted)
        took.append(time.perf_counter() - began)
    return took[10:]


def _bpf(context: Context, star: Star, turns: int) -> list[Line]:
    place = star.lab.port_of("server")
    with closing(BpfPort("server", place.netns, place.ifname)) as port:
        found = _changes(port, star, turns)
        switches = _switches(port, turns)
    context.record("bpf_change_s", found)
    context.record("bpf_switch_s", switches)
    change, switch = Spread.of(found), Spread.of(switches)
    return [
        Line("bpf: change of a port", 1e3 * change.median, BPF_LIMIT_MS, unit="ms", detail=change.shown(1e3, "ms")),
        Line("bpf: the switch alone", 1e3 * switch.median, BPF_LIMIT_MS, unit="ms", detail=switch.shown(1e3, "ms")),
    ]


def _switches(port: BpfPort, turns: int) -> list[float]:
    """Seconds of each write of one map entry, read back: `set_label` writes the entry that switches the banks."""
    took = []
    for turn in range(turns):
        began = time.perf_counter()
        port.set_label(turn)
        took.append(time.perf_counter() - began)
    return took


def _netem(context: Context, star: Star, turns: int) -> Line:
    place = star.lab.port_of("server")
    name = "netem: change of a port"
    if not probe()["netem"].ok:
        return Line.absent(name, "this kernel has no sch_netem", NETEM_LIMIT_MS, unit="ms")
    try:
        with closing(NetemPort("server", place.netns, place.ifname)) as port:
            found = _changes(port, star, turns)
    except LinkError as error:
        return Line.absent(name, str(error), NETEM_LIMIT_MS, unit="ms")
    context.record("netem_change_s", found)
    spread = Spread.of(found)
    return Line(name, 1e3 * spread.median, NETEM_LIMIT_MS, unit="ms", detail=spread.shown(1e3, "ms"))


def _equal_batch(context: Context, star: Star, turns: int) -> Line:
    """The messages of a change of a netem port with three senders, at a port of the lab that has none."""
    place = star.lab.port_of("worker1")
    with closing(open_rtnetlink(place.netns)) as netlink:
        index = netlink.find(place.ifname).index
        _add_clsact(netlink, index)
        states = [_chain(rate_bps) for rate_bps in (10**9, 2 * 10**9)]
        qdisc.execute(netlink, index, qdisc.plan((), states[0]))
        took, filters, handles = [], _filters(star, 1), []
        netlink.ask([u32.add(index, item) for item in filters])
        handles, _ = _read(netlink.run(netlink.lay_out(_reading(index, states[0]))), states[0], filters)
        for turn in range(turns + 10):
            old, new = states[turn % 2], states[1 - turn % 2]
            others = _filters(star, 2 - turn % 2)
            reads = [*_reading(index, old)[:-1], *(u32.get(index, f, h) for f, h in zip(filters, handles, strict=True))]
            writes = [qdisc.request(index, command) for command in qdisc.plan(old, new)]
            writes += [u32.add(index, item) for item in others]
            writes.append(u32.remove(index, EGRESS, filters[0].priority))
            batches = netlink.lay_out([*reads, *writes, *_reading(index, new)])
            began = time.perf_counter()
            answers = netlink.run(batches)
            _read((a for a in answers if a.of < len(reads)), old, filters)
            handles, _ = _read((a for a in answers if a.of >= len(reads) + len(writes)), new, others)
            took.append(time.perf_counter() - began)
            filters = others
    context.record("equal_batch_s", took[10:])
    spread = Spread.of(took[10:])
    messages = sum(len(batch.requests) for batch in batches)
    detail = f"{spread.shown(1e3, 'ms')}; {messages} messages in {len(batches)} system call"
    return Line("netem: an equal batch on sch_tbf", 1e3 * spread.median, NETEM_LIMIT_MS, unit="ms", detail=detail)


def _add_clsact(netlink: Rtnetlink, index: int) -> None:
    body = qdisc.TCMSG.pack(0, index, qdisc.handle(0xFFFF), CLSACT, 0) + encode({qdisc.KIND: "clsact"})
    netlink.ask([Request("add clsact", qdisc.NEWQDISC, CREATE | EXCLUSIVE, body)])


def _chain(rate_bps: int) -> qdisc.Tree:
    """As many qdiscs as the netem port of three senders has; the first three differ by the rate."""
    rates = [rate_bps] * WORKERS + [10**9] * (WORKERS + 2)
    parents = [qdisc.ROOT, *(qdisc.handle(number, 1) for number in range(1, len(rates)))]
    return tuple(
        qdisc.Tbf(qdisc.handle(number), parent, rate, 1 << 20, 1 << 20)
        for number, (parent, rate) in enumerate(zip(parents, rates, strict=True), 1)
    )


def _filters(star: Star, priority: int) -> tuple[u32.Filter, ...]:
    """Those of a rule for each sender, as the port has them, to a class of clsact."""
    rules = [LossRule(rule.source, rule.state, rule.loss_ratio, first=7, last=7) for rule in _rules(star)]
    steering = steer(rules, FLOW, KEY, [rule.source for rule in rules], 2 * WORKERS, EGRESS, priority)
    return tuple(u32.Filter(EGRESS, priority, qdisc.handle(1, 1), item.matches) for item in steering.filters)


def _reading(index: int, tree: qdisc.Tree) -> list[Request]:
    return [*(qdisc.get(index, part) for part in tree), u32.dump(index, EGRESS)]


def _read(
    answers: Iterable[Answer], tree: qdisc.Tree, filters: Sequence[u32.Filter]
) -> tuple[list[int], dict[int, qdisc.Found]]:
    """Handles of the filters and the qdiscs, once both are as wanted."""
    found = list(answers)
    there = qdisc.by_handle(answer.body for answer in found if answer.kind == qdisc.NEWQDISC)
    qdisc.verify(there, tree)
    decoded = [entry for a in found if a.kind != qdisc.NEWQDISC and (entry := u32.decode(a.body)) is not None]
    return [entry.handle for entry in u32.verify(decoded, filters)], there


def _gates(context: Context) -> list[Line]:
    """Both labs stand at the same time; their jobs take turns."""
    iterations = ITERATIONS // 3 if context.quick else ITERATIONS
    bursts = ", ".join(f"{{iteration: {i}, loss: 0%}}" for i in range(iterations))
    transports = "{dblp: {fixed: 0.8%}}"
    steps: list[float] = []
    with (
        standing(replay(WORKERS, CHUNKS, iterations, transports, f"[{bursts}]"), context.scratch()) as gated,
        standing(replay(WORKERS, CHUNKS, iterations, transports), context.scratch()) as free,
    ):
        contestants: dict[str, Callable[[], float]] = {
            "gated": lambda: _iteration_s(gated, steps),
            "free": lambda: _iteration_s(free),
        }
        found = alternate(contestants, context.repeats(7))
    context.record("iteration_s", found)
    context.record("step_s", steps)
    extra_ms = 1e3 * (median(found["gated"]) - median(found["free"]))
    spread = Spread.of(steps)
    detail = ", ".join(f"{name} {Spread.of(each).shown(1e3, 'ms')}" for name, each in found.items())
    return [
        Line("whole step, ports of all hosts", 1e3 * spread.median, unit="ms", detail=spread.shown(1e3, "ms")),
        Line("a gate's cost a round", extra_ms, unit="ms", detail=f"an iteration: {detail}"),
    ]


def _iteration_s(bed: Testbed, steps: list[float] | None = None) -> float:
    """Seconds between two iterations of a job; `steps` collects how long its changes took."""
    work = Work()

    def watch(conductor: Conductor, event: Event) -> None:
        work(conductor, event)
        if steps is not None and event["event"] == "impairment":
            steps.append(event["took_s"])

    bed.run("dblp", watch)
    return work.per_iteration()[0]

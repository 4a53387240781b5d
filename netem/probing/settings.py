"""The settings that are tried, one a row: what is put on a port, what is sent through it, who judges what arrives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from netem.kernel import distributions
from netem.kernel.loss_models import FourState
from netem.kernel.loss_models import GilbertElliott as NetemChain
from netem.kernel.netem_options import Overhead, Slot
from netem.links import mask, predict
from netem.links.base import Extras, LossRule, Shape
from netem.links.bucket import bucket_bytes
from netem.links.chain import GilbertElliott
from netem.links.predict import Fates
from netem.probing.judges import (
    Accounted,
    Bursts,
    Delay,
    Jitter,
    Judge,
    Limit,
    Loss,
    Marked,
    Ordered,
    Predicted,
    Reordered,
    Slots,
    Speed,
    Twice,
)
from netem.probing.probe import ROUND, Sending
from netem.traffic.plan import FRAME_BYTES

Backend = Literal["bpf", "netem"]

PACKETS = 100_000
SEED = 7
MTU = 1500
FRAME = MTU + FRAME_BYTES
MS, S = 1_000_000, 1_000_000_000
_ETHERNET_SOURCE_BITS, _GROUP_BIT = 48, 1
_EVEN = 4096


@dataclass(frozen=True)
class Put:
    """What is put on the port. ratio and the others: of a rule for the sender, as a burst of a scenario makes it."""

    shape: Shape = field(default_factory=Shape)
    ratio: float | None = None
    chain: GilbertElliott | None = None
    duplicate_ratio: float = 0.0
    corrupt_ratio: float = 0.0

    def rule(self, source: str) -> LossRule | None:
        if self.ratio is None:
            return None
        more = {"chain": self.chain, "duplicate_ratio": self.duplicate_ratio, "corrupt_ratio": self.corrupt_ratio}
        return LossRule(source, mask.port_state(SEED, "up", 1), self.ratio, **more)  # type: ignore[arg-type]

    def predicted(self, packets: int) -> Fates | None:
        """Where a seed decides, that is on backend bpf; None where chance does."""
        rule = self.rule("10.0.0.1")
        if rule is not None and not self.shape.loss_ratio and self.shape.chain is None:
            return predict.by_rule(rule, ROUND, packets)
        if rule is None and self.shape.chain is not None:
            return predict.by_port(self.shape.chain, self.shape.chain_state, packets)
        return None


@dataclass(frozen=True)
class Setting:
    """A row. `on_bpf`: what stands for the same on backend bpf, where that is something else, and its own judges.

    pilot: the same without jitter, sent first: how late this machine's timers let packets go.
    """

    name: str
    put: Put
    sending: Sending
    judges: tuple[Judge, ...]
    on_bpf: tuple[Put, tuple[Judge, ...]] | None = None
    pilot: Put | None = None

    def put_on(self, backend: Backend) -> Put:
        return self.on_bpf[0] if self.on_bpf is not None and backend == "bpf" else self.put

    def judges_on(self, backend: Backend) -> tuple[Judge, ...]:
        judges = self.on_bpf[1] if self.on_bpf is not None and backend == "bpf" else self.judges
        fates = self.put_on(backend).predicted(self.sending.packets) if backend == "bpf" else None
        return judges if fates is None else (*judges, Predicted(fates))


def settings(packets: int = PACKETS) -> tuple[Setting, ...]:
    """All rows; `packets` of each row that counts losses, other rows send in proportion."""
    return (*_losses(packets), *_delays(packets), *_rates(packets), *_others(packets))


def base(packets: int = PACKETS) -> Setting:
    """The path as it is: no loss, and the time that a packet takes."""
    sending = replace(_paced(packets // 50, 0), linger_ns=0)
    return Setting("nothing", Put(), sending, (Loss(0.0), Ordered(), Accounted()))


def chosen(names: Sequence[str], packets: int = PACKETS) -> tuple[Setting, ...]:
    """The rows of these names. ValueError for a name that there is not."""
    found = {each.name: each for each in settings(packets)}
    for name in names:
        if name not in found:
            raise ValueError(f"setting {name!r}: expected one of {', '.join(found)}")
    return tuple(found[name] for name in names)


def _percent(ratio: float) -> str:
    return f"{100 * ratio:g} %"


def _losses(packets: int) -> tuple[Setting, ...]:
    plain = Sending(packets)
    rules = [
        Setting(f"loss {_percent(ratio)}", Put(ratio=ratio), plain, (Loss(ratio), Accounted()))
        for ratio in (0.001, 0.01, 0.1, 0.4, 0.9)
    ]
    steady = Setting("steady loss 2 %", Put(Shape(loss_ratio=0.02)), plain, (Loss(0.02), Accounted()))
    both = 1 - 0.98 * 0.5
    on_top = Setting(
        "steady 2 % and loss 50 %", Put(Shape(loss_ratio=0.02), ratio=0.5), plain, (Loss(both), Accounted())
    )
    return (
        Setting("no loss", Put(ratio=0.0), plain, (Loss(0.0), Ordered(), Accounted())),
        *rules,
        Setting("loss 100 %", Put(ratio=1.0), plain, (Loss(1.0), Accounted())),
        steady,
        on_top,
        *_chains(packets),
    )


def _chains(packets: int) -> tuple[Setting, ...]:
    """Losses that depend on each other, and what else a burst or a link may do to each packet."""
    plain = Sending(packets)
    uneven = GilbertElliott(0.02, 0.1, 0.2, 0.99)
    scatter = NetemChain(uneven.p, uneven.r, uneven.h, uneven.k).clustering
    four = FourState(0.02, 0.3, 0.2, 0.5, 0.01)
    short = GilbertElliott.of_bursts(0.6, 2.0)
    of_rule = (Loss(0.6, NetemChain(short.p, short.r).clustering), Bursts(short.p, short.r), Accounted())
    several = Put(ratio=0.2, duplicate_ratio=0.1, corrupt_ratio=0.05)
    missing = 0.2 + 0.8 * 0.05 * 0.9  # lost, or damaged and without a copy
    marking = Put(Shape(loss_ratio=0.1, extras=Extras(ecn=True)))
    return (
        *(_bursts(packets, ratio, length) for ratio, length in ((0.2, 3.0), (0.3, 5.0))),
        Setting("burst: 60 % in bursts of 2", Put(ratio=0.6, chain=short), plain, of_rule),
        Setting("burst: 20 %, twice 10 %, corrupt 5 %", several, plain, (Loss(missing, what="not arrived"),)),
        Setting("gilbert_elliott p q h k", _chained(uneven), plain, (Loss(uneven.mean_ratio, scatter), Accounted())),
        Setting(
            "four_state",
            Put(Shape(extras=Extras(loss=four))),
            plain,
            (Loss(four.mean_ratio, four.clustering), Accounted()),
        ),
        # sch_netem.c counts a packet that it marks as dropped
        Setting("ecn, loss 10 %", marking, replace(plain, ecn=True), (Marked(0.1), Loss(0.0))),
    )


def _chained(model: GilbertElliott) -> Put:
    return Put(Shape(chain=model, chain_state=mask.port_state(SEED, "down", 0)))


def _bursts(packets: int, ratio: float, length: float) -> Setting:
    model = GilbertElliott.of_bursts(ratio, length)
    scatter = NetemChain(model.p, model.r).clustering
    judges = (Loss(ratio, scatter), Bursts(model.p, model.r), Accounted())
    return Setting(f"loss {_percent(ratio)} in bursts of {length:g}", _chained(model), Sending(packets), judges)


def _paced(packets: int, delay_us: int, jitter_us: int = 0, interval_ns: int = MS // 2) -> Sending:
    """One by one."""
    return Sending(packets, batch=1, interval_ns=interval_ns, linger_ns=1000 * (delay_us + 5 * jitter_us))


def _delays(packets: int) -> tuple[Setting, ...]:
    singles = packets // 50
    fixed = [
        Setting(f"delay {ms} ms", Put(Shape(delay_us=1000 * ms)), _paced(singles, 1000 * ms),
                (Delay(ms / 1000), Loss(0.0), Ordered(), Accounted()))
        for ms in (1, 5, 50)
    ]  # fmt: skip
    together = Sending(packets, batch=22, interval_ns=550_000, linger_ns=10 * MS)
    lossy = Setting(
        "delay 10 ms, loss 10 %", Put(Shape(delay_us=10_000), ratio=0.1), together,
        (Loss(0.1), Delay(0.01), Accounted()),
    )  # fmt: skip
    jitters = [_jitter(packets // 20, name) for name in ("uniform", *distributions.NAMES)]
    kept = Shape(delay_us=10_000, jitter_us=8_000, rate_bps=10**9)
    return (
        *fixed,
        lossy,
        *jitters,
        Setting(
            "jitter 8 ms behind a rate", Put(kept), _paced(singles, 10_000, 8_000), (Ordered(), Loss(0.0), Accounted())
        ),
    )


def _jitter(packets: int, name: str) -> Setting:
    delay_us, jitter_us = 12_000, 2_000
    if name == "uniform":
        steps, extras = [2 * (n + 0.5) / _EVEN - 1 for n in range(_EVEN)], Extras()
    else:
        table = distributions.table(name)
        steps, extras = [each / distributions.SCALE for each in sorted(table)], Extras(table=table)
    delays = tuple((delay_us + jitter_us * step) / 1e6 for step in steps)
    shape = Shape(delay_us=delay_us, jitter_us=jitter_us, extras=extras)
    sending = _paced(packets, delay_us, jitter_us, interval_ns=400_000)
    judges = (Jitter(delays), Loss(0.0), Accounted())
    return Setting(f"jitter 2 ms {name}, delay 12 ms", Put(shape), sending, judges, pilot=Put(Shape(delay_us=delay_us)))


def _rates(packets: int) -> tuple[Setting, ...]:
    found = []
    for rate_bps in (1_000_000, 10_000_000, 100_000_000):
        shape, sending = _queued(rate_bps, packets, FRAME)
        judges = (Speed(rate_bps, FRAME), Loss(0.0), Ordered(), Accounted())
        found.append(Setting(f"rate {rate_bps // 10**6} Mbit/s", Put(shape), sending, judges))
    shape, sending = _queued(10_000_000, packets, FRAME)
    own = replace(shape, extras=Extras(overhead=Overhead(24)))
    judges = (Speed(10_000_000, FRAME + 24), Loss(0.0), Ordered(), Accounted())
    shape, sending = _queued(20_000_000, packets, FRAME)
    lossy = Setting(
        "rate 20 Mbit/s, loss 30 %", Put(shape, ratio=0.3), sending, (Speed(2e7, FRAME), Loss(0.3), Accounted())
    )
    shape, sending = _queued(10_000_000, packets, FRAME)
    return (*found, lossy, Setting("rate 10 Mbit/s, overhead 24 B", Put(own), sending, judges))


def _queued(rate_bps: int, packets: int, frame_bytes: int) -> tuple[Shape, Sending]:
    """A second of frames (less of fewer packets) that all wait in the queue."""
    seconds = max(0.2, min(1.5, 1.5 * packets / PACKETS))
    count = max(100, math.ceil(seconds * rate_bps / 8 / frame_bytes))
    linger_ns = round(2 * count * frame_bytes * 8 / rate_bps * S)
    return Shape(rate_bps=rate_bps, queue_bytes=(count + 10) * FRAME), Sending(count, MTU, linger_ns=linger_ns)


def _others(packets: int) -> tuple[Setting, ...]:
    plain = Sending(packets)
    # netem flips a bit of the headers alone where a datagram of UDP_SEGMENT was cut, as the rest lies elsewhere.
    large = Sending(packets // 4, packet_bytes=528, segment=False)
    bits = 8 * (large.packet_bytes + FRAME_BYTES)
    seen = 1 - (_ETHERNET_SOURCE_BITS + _GROUP_BIT) / bits  # one flipped bit there keeps no packet from arriving
    double, damage, early = (
        Extras(duplicate_ratio=0.1),
        Extras(corrupt_ratio=0.05),
        Extras(reorder_ratio=0.25, reorder_gap=5),
    )
    # A slot begins with a packet that came after the one before: on average half an interval between packets later.
    slot = Extras(slot=Slot(5 * MS, 5 * MS))
    return (
        Setting("duplicate 10 %", Put(Shape(extras=double)), plain, (Twice(0.1), Loss(0.0), Accounted()),
                (Put(ratio=0.0, duplicate_ratio=0.1), (Twice(0.1), Loss(0.0), Accounted()))),
        Setting("corrupt 5 %", Put(Shape(extras=damage)), large, (Loss(0.05 * seen, what="damaged"),),
                (Put(ratio=0.0, corrupt_ratio=0.05), (Loss(0.05, what="damaged"),))),
        Setting("reorder 25 %, gap 5, delay 10 ms", Put(Shape(delay_us=10_000, extras=early)),
                Sending(packets // 4, batch=4, interval_ns=200_000, linger_ns=10 * MS),
                (Reordered(0.25, 5, 0.01), Loss(0.0), Accounted())),
        Setting("slot 5 ms", Put(Shape(extras=slot)), _paced(packets // 20, 5_000, interval_ns=200_000),
                (Slots(0.0051), Loss(0.0), Accounted())),
        Setting("limit 100, delay 400 ms", Put(Shape(delay_us=400_000, limit_packets=100)),
                Sending(300, linger_ns=400 * MS), (Limit(100), Accounted())),
        _shallow(),
    )  # fmt: skip


def _shallow() -> Setting:
    """300 full frames at once into a queue of 64 KiB behind a rate."""
    rate_bps, queue_bytes = 10_000_000, 65_536
    sending = Sending(300, MTU, linger_ns=S)

    bucket = bucket_bytes(rate_bps, MTU, queue_bytes, queue_bytes)

    def limit(room_frames: int) -> tuple[Judge, ...]:
        return Limit(room_frames + bucket // FRAME, rate_bps, FRAME), Ordered(), Accounted()

    put = Put(Shape(rate_bps=rate_bps, queue_bytes=queue_bytes))
    netem, bpf = limit(math.ceil(queue_bytes / MTU)), limit(queue_bytes // FRAME)
    return Setting("queue 64 KiB, rate 10 Mbit/s", put, sending, netem, (put, bpf))

"""Puts every setting on a switch port of a small lab, sends packets through it, and has judged what arrives."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from netem.analysis.intervals import false_alarm_each
from netem.lab import Lab
from netem.links.base import Flow, Key, Port, UnsupportedFeature
from netem.links.bpf import BpfPort
from netem.links.netem import NetemPort
from netem.probing.judges import LOST_ELSEWHERE, Context, Measure
from netem.probing.probe import Inlet, Samples, Sending, exchange
from netem.probing.settings import Backend, Put, Setting, base, settings
from netem.spec.topology import star

FLOW, KEY = Flow("udp", dst_ports=(29600, 29699)), Key(((4, 14),), (4, 8), (8, 12))
DATA_PORT = 29601
RECEIVE_BYTES, SEND_BYTES = 64 << 20, 64 << 20
TRIES = 3
"""How often a row is measured at most: again where the machine itself got in the way, whatever was measured."""
LATE_S = 0.0005
"""Timers of a machine that is not busy with something else are late by less (root mean square)."""

Verdict = Literal["held", "failed", "disturbed", "elsewhere"]


@dataclass(frozen=True)
class Row:
    """A setting on this backend. backends: where it is to be had, if not here. late_s: how late this machine's
    timers were meanwhile, root mean square.
    """

    setting: str
    verdict: Verdict
    packets: int = 0
    measures: tuple[Measure, ...] = ()
    backends: tuple[str, ...] = ()
    late_s: float = 0.0
    took_s: float = 0.0
    tries: int = 0


@dataclass(frozen=True)
class Table:
    """All rows, and what the machine does by itself: base_*_s, a packet's way without delay."""

    backend: Backend
    kernel: str
    cores: int
    rows: tuple[Row, ...]
    base_s: float
    base_p95_s: float
    false_alarm: float
    took_s: float

    @property
    def failed(self) -> tuple[str, ...]:
        return tuple(row.setting for row in self.rows if row.verdict == "failed")

    @property
    def disturbed(self) -> tuple[str, ...]:
        return tuple(row.setting for row in self.rows if row.verdict == "disturbed")

    def to_json(self) -> dict[str, Any]:
        """Plain values; null where a number is not finite."""
        found = asdict(self)
        for row, plain in zip(self.rows, found["rows"], strict=True):
            plain["measures"] = [
                {key: _plain(value) for key, value in asdict(each).items()} | {"ok": each.ok} for each in row.measures
            ]
        return {"ok": not self.failed and not self.disturbed, **found}


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Bench:
    """A lab of two hosts and a switch, the port that faces the receiver, and a socket at each host."""

    def __init__(self, lab: Lab, backend: Backend, stack: ExitStack) -> None:
        self.backend: Backend = backend
        place = lab.port_of("server")
        make: Callable[[str, str, str], Port] = BpfPort if backend == "bpf" else NetemPort
        self.port = make("server", place.netns, place.ifname)
        stack.callback(self.port.close)
        self.source = lab.hosts["worker1"].address
        address = (lab.hosts["server"].address, DATA_PORT)
        inlet = stack.enter_context(lab.socket("server", "udp", RECEIVE_BYTES, 1 << 20))
        inlet.bind(address)
        self.inlet = Inlet(inlet)
        self.out = stack.enter_context(lab.socket("worker1", "udp", 1 << 20, SEND_BYTES))
        self.out.bind((self.source, 0))
        self.out.connect(address)

    def apply(self, put: Put) -> None:
        """UnsupportedFeature where this backend lacks it."""
        alone = self.backend == "netem" and put.shape.extras.alone
        self.port.install(put.shape, FLOW, KEY, () if alone else (self.source,))
        rule = put.rule(self.source)
        if rule is not None:
            self.port.set_loss([rule])

    def dropped(self) -> int:
        return sum(each.dropped for each in self.port.counters()) + self.port.health().queue_dropped

    def send(self, sending: Sending) -> Samples:
        return exchange(self.out, self.inlet, sending, self.dropped)


@contextmanager
def bench(backend: Backend, state_dir: Path) -> Generator[Bench, None, None]:
    with Lab.build(star(1, name="fidelity"), state_dir=state_dir) as lab, ExitStack() as stack:
        yield Bench(lab, backend, stack)


def measure(
    backend: Backend,
    state_dir: Path,
    rows: Sequence[Setting] | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Table:
    """Some 30 s for all of `settings()`. Errors: LabError, LinkError, and what building a lab raises."""
    rows = settings() if rows is None else rows
    began = time.monotonic()
    checks = sum(judge.statistical for row in rows for judge in row.judges_on(backend))
    false_alarm = false_alarm_each(checks)
    with bench(backend, state_dir) as place:
        ways = _base_s(place)
        context = Context(false_alarm, ways[0])
        found = []
        for setting in rows:
            row = _row(place, setting, context)
            on_row(row)
            found.append(row)
    return Table(
        backend,
        platform.release(),
        len(os.sched_getaffinity(0)),
        tuple(found),
        *ways,
        false_alarm=false_alarm,
        took_s=time.monotonic() - began,
    )


def _base_s(place: Bench) -> tuple[float, float]:
    """Median and 95 % quantile of the way of single packets without a delay."""
    setting = base()
    place.apply(setting.put)
    ways = place.send(setting.sending).one_way_s
    return float(np.median(ways)), float(np.quantile(ways, 0.95))


def _row(place: Bench, setting: Setting, context: Context) -> Row:
    began = time.monotonic()
    row = Row(setting.name, "failed")
    while row.tries < TRIES:
        try:
            row = _try(place, setting, context, row.tries + 1)
        except UnsupportedFeature as error:
            return Row(setting.name, "elsewhere", backends=error.backends_that_have_it)
        if row.verdict != "disturbed":
            break
    return replace(row, took_s=time.monotonic() - began)


def _try(place: Bench, setting: Setting, context: Context, tries: int) -> Row:
    late: list[float] = []
    if setting.pilot is not None:
        place.apply(setting.pilot)
        samples = place.send(replace(setting.sending, packets=setting.sending.packets // 4))
        late += samples.late_s
        ways = samples.one_way_s - context.base_s - setting.pilot.shape.delay_us / 1e6
        context = replace(context, late_s=tuple(map(float, ways)))
    place.apply(setting.put_on(place.backend))
    samples = place.send(setting.sending)
    judges = setting.judges_on(place.backend)
    measures = tuple(each for judge in judges for each in judge.measures(samples, context))
    late_s = float(np.sqrt(np.mean(np.square([*late, *samples.late_s]))))  # so that rare long stops show, too
    timed = any(judge.timed for judge in judges)
    return Row(
        setting.name, verdict(measures, late_s if timed else 0.0), samples.sent, measures, (), late_s, 0.0, tries
    )


def verdict(measures: Sequence[Measure], late_s: float) -> Verdict:
    """late_s: of the machine's timers, where they matter. Packets that the machine itself lost, or could not send, make
    any row worthless; late timers only one that failed.
    """
    if any(math.isnan(each.achieved) or (each.what == LOST_ELSEWHERE and each.achieved) for each in measures):
        return "disturbed"
    if all(each.ok for each in measures):
        return "held"
    return "disturbed" if late_s > LATE_S else "failed"

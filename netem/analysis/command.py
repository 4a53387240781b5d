"""summary.json of a command workload: programs, rounds that they reported, what the links did. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from netem.analysis import congestion, delays, expect, intervals
from netem.analysis.check import Check, Fidelity, Statistical
from netem.analysis.delays import DelayReport
from netem.analysis.fidelity import MAX_UNREQUESTED, delay_checks, unjudged_delays
from netem.analysis.queues import BurstReport, QueueReport
from netem.analysis.run import CaptureCount
from netem.analysis.stats import latency

VERSION = 1
DOUBTS = {
    "fragments": "fragments, which pass undecided: send datagrams that fit the MTU",
    "gso_seen": "bundles of segments that shared one decision",
    "overflow_seen": "packets that were not counted",
}


@dataclass(frozen=True)
class Cell:
    """What a port counted of one sender's packets of one kind in one window.

    port: the host that it faces, `^host` for that host's uplink. kind: data or other. window: None for what passed
    while an impairment was being changed. burst: the loss that bursts asked for, None without; base: the link's own.
    """

    port: str
    sender: str
    kind: str
    window: int | None
    burst: float | None
    base: float
    seen: int
    dropped: int
    bytes_seen: int

    @property
    def requested(self) -> float:
        """Of two independent losses."""
        return 1.0 - (1.0 - (self.burst or 0.0)) * (1.0 - self.base)


@dataclass(frozen=True)
class ProgramEnd:
    """status: as exit(3) gave it, negative for a signal. ended_by: itself, or the testbed when the job was over."""

    host: str
    rank: int
    argv: tuple[str, ...]
    status: int | None
    ended_by: str
    wall_s: float | None
    log: str


@dataclass(frozen=True)
class Impairment:
    """A change of the links. planned: seconds since the programs run, or an iteration. window: its cells' number."""

    bursts: tuple[dict[str, Any], ...]
    planned_s: float | None
    iteration: int | None
    t_s: float
    took_s: float
    window: int


@dataclass(frozen=True)
class Report:
    """One round, as a program reported it."""

    round: int
    rank: int
    host: str
    latency_s: float | None
    burst: bool


@dataclass(frozen=True)
class CommandRun:
    """One variant, one repeat. drops: by reason (queue, device) and port. unreached: bursts that never came."""

    name: str
    repeat: int
    wall_s: float
    programs: tuple[ProgramEnd, ...]
    cells: tuple[Cell, ...] = ()
    impairments: tuple[Impairment, ...] = ()
    reports: tuple[Report, ...] = ()
    drops: dict[str, dict[str, int]] = field(default_factory=dict)
    doubts: dict[str, int] = field(default_factory=dict)
    unreached: tuple[str, ...] = ()
    microbursts: tuple[BurstReport, ...] = ()
    queues: tuple[QueueReport, ...] = ()
    delays: tuple[DelayReport, ...] = ()


@dataclass(frozen=True)
class CommandData:
    """Everything that summary.json and the table are made of."""

    scenario: str
    seed: int
    backend: str
    loss_engine: str
    runs: tuple[CommandRun, ...]
    captures: tuple[CaptureCount, ...] = ()
    expect: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(run.name for run in self.runs))


def fidelity(data: CommandData) -> Fidelity:
    """Loss as requested in every window, none where none was asked for, every burst reached."""
    statistical = [one for run in data.runs for one in _statistical(run)]
    each = intervals.false_alarm_each(len(statistical))
    checks = [one(each) for one in statistical]
    for run in data.runs:
        checks += [_quiet(run), _reached(run), _unrequested(run), _doubts(run)]
        checks += [Check(name, run.name, run.repeat, ok, detail) for name, ok, detail in congestion.checks(run)]
        checks += unjudged_delays(run)
    return Fidelity(all(c.ok for c in checks), intervals.FALSE_ALARM_RUN, len(statistical), tuple(checks))


def _statistical(run: CommandRun) -> Iterator[Statistical]:
    """One check for each window and loss under bursts, and one for each steady loss."""
    groups: dict[tuple[int | None, float], list[Cell]] = {}
    for cell in run.cells:
        if cell.window is not None and cell.requested > 0:
            window = cell.window if cell.burst is not None else None
            groups.setdefault((window, round(cell.requested, 9)), []).append(cell)
    for (window, _), cells in groups.items():
        if sum(cell.seen for cell in cells):
            yield partial(_loss, run, window, cells)
    yield from delay_checks(run)


def _loss(run: CommandRun, window: int | None, cells: Sequence[Cell], false_alarm: float) -> Check:
    requested = cells[0].requested
    seen, dropped = sum(c.seen for c in cells), sum(c.dropped for c in cells)
    interval = intervals.clopper_pearson(dropped, seen, false_alarm)
    achieved = dropped / seen
    where = "between bursts" if window is None else _when(run, window)
    detail = f"{where}: requested {requested:.2%}, achieved {achieved:.2%} ({dropped} of {seen})"
    name = "base loss" if window is None else "burst loss"
    ok = requested in interval
    return Check(name, run.name, run.repeat, ok, detail, requested, achieved, interval.low, interval.high)


def _when(run: CommandRun, window: int) -> str:
    for one in run.impairments:
        if one.window == window:
            return f"at {one.planned_s:g} s" if one.planned_s is not None else f"iteration {one.iteration}"
    return f"window {window}"


def _quiet(run: CommandRun) -> Check:
    """No drop of the link where it was asked for none."""
    cells = [cell for cell in run.cells if cell.window is not None and not cell.requested]
    seen, dropped = sum(c.seen for c in cells), sum(c.dropped for c in cells)
    detail = f"{dropped} of {seen} packets without a burst dropped by the link"
    return Check("no burst", run.name, run.repeat, not dropped, detail)


def _reached(run: CommandRun) -> Check:
    detail = "; ".join(run.unreached) or "every burst was put in place"
    return Check("bursts", run.name, run.repeat, not run.unreached, detail)


def _unrequested(run: CommandRun) -> Check:
    """Devices that dropped packets behind the link, of all that it let through."""
    dropped = sum(run.drops.get("device", {}).values())
    seen = sum(cell.seen - cell.dropped for cell in run.cells)
    detail = f"devices dropped {dropped} of {seen} packets on their own"
    return Check("unrequested drops", run.name, run.repeat, dropped <= MAX_UNREQUESTED * seen, detail)


def _doubts(run: CommandRun) -> Check:
    """Only where there is a loss that packets could have escaped."""
    lossy = any(cell.requested for cell in run.cells)
    found = [f"{run.doubts[key]} {what}" for key, what in DOUBTS.items() if lossy and run.doubts.get(key)]
    return Check("links", run.name, run.repeat, not found, "; ".join(found) or "every packet was decided by itself")


def summarise_commands(data: CommandData) -> dict[str, Any]:
    """The content of summary.json. Ratios are plain numbers, times seconds; None (null) where there is no value."""
    checked = fidelity(data)
    commands = {name: _variant([run for run in data.runs if run.name == name]) for name in data.names}
    values = _values(commands, checked)
    verdicts = [expect.evaluate(text, values) for text in data.expect]
    return {
        "version": VERSION,
        "scenario": data.scenario,
        "seed": data.seed,
        "backend": data.backend,
        "loss_engine": data.loss_engine,
        "commands": commands,
        "fidelity": {
            "faithful": checked.faithful,
            "false_alarm": checked.false_alarm,
            "statistical_checks": checked.statistical_checks,
            "checks": [asdict(check) for check in checked.checks],
        },
        "captures": [asdict(capture) for capture in data.captures],
        "expectations": [asdict(verdict) for verdict in verdicts],
    }


def _variant(runs: Sequence[CommandRun]) -> dict[str, Any]:
    walls = [run.wall_s for run in runs]
    reports = [report for run in runs for report in run.reports]
    rounds = {(run.repeat, report.round) for run in runs for report in run.reports}
    return {
        "repeats": len(runs),
        "wall_s": {"mean": sum(walls) / len(walls), "min": min(walls), "max": max(walls)},
        "programs": [{"repeat": run.repeat, **asdict(program)} for run in runs for program in run.programs],
        "rounds": {"count": len(rounds)},
        "latency_s": _latency(reports),
        "clean_latency_s": _latency(report for report in reports if not report.burst),
        "burst_latency_s": _latency(report for report in reports if report.burst),
        "link": _link(runs),
        "ports": _ports(runs),
        "bursts": [burst for run in runs for burst in _bursts(run)],
        **congestion.summary(runs),
        "delays": delays.summary(runs),
    }


def _latency(reports: Iterable[Report]) -> dict[str, Any] | None:
    found = latency(report.latency_s for report in reports if report.latency_s is not None)
    return None if found is None else asdict(found)


def _link(runs: Sequence[CommandRun]) -> dict[str, Any]:
    """All ports together. A packet passes one port; what an uplink lost reaches none and is added."""
    cells = [cell for run in runs for cell in run.cells]
    lost_before = sum(cell.dropped for cell in cells if cell.port.startswith("^"))
    seen = sum(cell.seen for cell in cells if not cell.port.startswith("^")) + lost_before
    dropped = sum(cell.dropped for cell in cells)
    by_reason = {
        f"{reason}_dropped": sum(sum(run.drops.get(reason, {}).values()) for run in runs)
        for reason in ("queue", "device")
    }
    size = sum(cell.bytes_seen for cell in cells if not cell.port.startswith("^"))
    return {"seen": seen, "dropped": dropped, "loss": dropped / seen if seen else None, "bytes": size, **by_reason}


def _ports(runs: Sequence[CommandRun]) -> dict[str, dict[str, int]]:
    """By the host that a port faces, `^host` its uplink."""
    names = dict.fromkeys(
        [cell.port for run in runs for cell in run.cells]
        + [port for run in runs for drops in run.drops.values() for port in drops]
    )
    found = {}
    for name in sorted(names, key=lambda port: (port.lstrip("^"), port)):
        cells = [cell for run in runs for cell in run.cells if cell.port == name]
        found[name] = {
            "seen": sum(cell.seen for cell in cells),
            "dropped": sum(cell.dropped for cell in cells),
            "bytes": sum(cell.bytes_seen for cell in cells),
            **{
                f"{reason}_dropped": sum(run.drops.get(reason, {}).get(name, 0) for run in runs)
                for reason in ("queue", "device")
            },
        }
    return found


def _bursts(run: CommandRun) -> Iterator[dict[str, Any]]:
    """Each impairment with a loss, beside what the links did while it was in force."""
    for one in run.impairments:
        if not one.bursts:
            continue
        cells = [cell for cell in run.cells if cell.window == one.window and cell.burst is not None]
        seen, dropped = sum(c.seen for c in cells), sum(c.dropped for c in cells)
        yield {
            "repeat": run.repeat,
            "planned_s": one.planned_s,
            "iteration": one.iteration,
            "t_s": one.t_s,
            "took_s": one.took_s,
            "bursts": list(one.bursts),
            "requested": sorted({round(cell.requested, 9) for cell in cells}),
            "seen": seen,
            "dropped": dropped,
            "loss": dropped / seen if seen else None,
        }


def _values(commands: dict[str, Any], checked: Fidelity) -> dict[str, expect.Value | None]:
    """The names of `command_expect.NAMES`."""
    values: dict[str, expect.Value | None] = {"fidelity.faithful": checked.faithful}
    for name, found in commands.items():
        values[f"{name}.wall"] = float(found["wall_s"]["max"])
        values[f"{name}.rounds.count"] = float(found["rounds"]["count"])
        for group in ("latency", "clean_latency", "burst_latency"):
            for key in ("mean", "p50", "p95", "p99", "max"):
                whole = found[f"{group}_s"]
                values[f"{name}.{group}.{key}"] = None if whole is None else float(whole[key])
        for key, value in found["link"].items():
            values[f"{name}.link.{key}"] = None if value is None else float(value)
        values |= {f"{name}.{key}": value for key, value in congestion.values(found["queues"]).items()}
        values[f"{name}.bursts.loss"] = tuple(one["loss"] for one in found["bursts"] if one["loss"] is not None)
        values[f"{name}.bursts.seen"] = tuple(float(one["seen"]) for one in found["bursts"])
    return values

"""One run of a scenario, from preflight to summary."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from netem.analysis.command import CommandRun
from netem.analysis.command_table import render_commands
from netem.analysis.queues import of_data
from netem.analysis.recorded import Mask
from netem.analysis.records import EpochRow, RoundRow, csv_text
from netem.analysis.run import CaptureCount, RunData, TransportRun
from netem.analysis.summary import expectations_held, summarise
from netem.analysis.table import render
from netem.experiment import calibrate, command_run
from netem.experiment.asked import check_recorded, loss_plan, recorded_mask
from netem.experiment.command import require_programs
from netem.experiment.conductor import Conductor, Memory, RunFailed
from netem.experiment.fabric import Fabric
from netem.experiment.figures import draw_queues
from netem.experiment.folder import RunFolder, machine
from netem.experiment.generators import describe_traffic, require_recorder
from netem.experiment.hub import HubError
from netem.experiment.iperf import require_iperf
from netem.experiment.lengths import with_burst_lengths
from netem.experiment.passages import routing_facts
from netem.experiment.preload import check_engine
from netem.experiment.prepare import Job, check, gradient_bytes, make_jobs
from netem.experiment.progress import Display
from netem.experiment.record import Recorder
from netem.kernel.errors import LabError
from netem.kernel.user import User
from netem.lab import Lab, Settings
from netem.links.base import LinkError, UnsupportedFeature
from netem.links.choose import BackendChoice, check_bands, choose
from netem.preflight import probe, require, require_memory
from netem.spec import (
    Command,
    Loaded,
    Scenario,
    Topology,
    iterations_per_epoch,
    iterations_total,
    needs_delay,
    shapes_uplinks,
)
from netem.spec.timeline import known_rounds
from netem.spec.words import timeline_lines
from netem.state import DEFAULT_DIR, StateError
from netem.statuses import EXPECTATION, FAILED, INTERRUPTED, OK, PREFLIGHT, UNFAITHFUL


@dataclass(frozen=True)
class RunOptions:
    """What the command line says beyond the scenario. `out` is the parent of the run folder."""

    out: Path = Path("runs")
    argv: tuple[str, ...] = ()
    state_dir: Path = DEFAULT_DIR
    allow_unfaithful: bool = False
    json_output: bool = False


@dataclass
class Results:
    """What there is so far, also of a run that fails."""

    runs: list[TransportRun] = field(default_factory=list)
    commands: list[CommandRun] = field(default_factory=list)
    calibration: dict[str, Any] | None = None
    captures: list[CaptureCount] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    settings: dict[str, Any] = field(default_factory=dict)
    seeded: bool | None = None
    """Whether netem took the seed (`Wiring.seeded`)."""
    health: dict[str, Any] = field(default_factory=dict)
    mask: Mask = field(default_factory=dict)
    """What is lost again of an earlier run."""


def dry_run(loaded: Loaded, options: RunOptions) -> str:
    """What a run would do, without doing it. Raises SpecError."""
    check(loaded)
    spec = loaded.spec
    lines = [
        f"scenario {spec.name}, seed {spec.seed}: {iterations_total(spec)} iterations, results under {options.out}",
        f"topology {spec.topology.name}: {_who(spec.topology)}",
    ]
    if isinstance(spec.workload, Command):
        lines += command_run.plan(spec)
    else:
        lines += [f"transport {job.name} (repeat {job.repeat})" for job in make_jobs(loaded, spec.seed, "")]
    lines += timeline_lines(spec, spec.seed)
    lines += describe_traffic(spec)
    lines += [f"expect {text}" for text in spec.expect]
    return "\n".join(lines)


def _who(topology: Topology) -> str:
    others = [name for name in topology.hosts if name not in topology.ranks]
    ranked = [f"server {topology.server}", f"workers {', '.join(topology.workers)}"] if topology.ranks else []
    return ", ".join([*ranked, *([f"without a rank {', '.join(others)}"] if others else [])])


def run_scenario(loaded: Loaded, options: RunOptions, console: Console) -> int:
    """Runs a scenario and returns the exit status. Progress and table go to `console`.

    Raises Unavailable and UnsupportedFeature (status 4) before anything is built, SpecError (2), OSError for a run
    folder that cannot be made. Errors during the run end in the manifest and in status 1.
    """
    check(loaded)
    user = User.caller()
    require(user)
    spec = loaded.spec
    if isinstance(spec.workload, Command):
        require_programs(loaded, user)
    require_iperf(spec)
    require_memory(gradient_bytes(loaded), len(spec.topology.workers))
    mask, topology = recorded_mask(loaded), spec.topology
    probes = probe(options.state_dir)
    choice = choose(spec.link.backend, spec.link.loss_engine, topology.needs_netem or needs_delay(spec), probes)
    check_bands(choice.loss_engine, topology.needs_one_netem, topology.four_state_losses)
    require_recorder(spec, probes)
    check_recorded(mask, spec, choice)
    check_engine(spec, choice)
    with RunFolder(options.out, spec, spec.seed, user) as folder:
        return _run_in(folder, loaded, options, choice, mask, console)


def _run_in(
    folder: RunFolder, loaded: Loaded, options: RunOptions, choice: BackendChoice, mask: Mask, console: Console
) -> int:
    spec = loaded.spec
    console.print(f"{spec.name}: {choice.reason}; results in {folder.path}", highlight=False, soft_wrap=True)
    results, problem, status, note = Results(mask=mask), "", FAILED, None
    summary: dict[str, Any] | None = None
    began = time.monotonic()
    kept = calibrate.load(calibrate.path_of(folder.user), folder.user)
    results.calibration = calibrate.reference(kept, folder.started)
    try:
        if isinstance(spec.workload, Command):
            command_run.run_jobs(loaded, options, choice, folder, results, console)
            summary = command_run.summarise(spec, choice, results, folder)
        else:
            _run_jobs(loaded, options, choice, folder, results, console)
            summary = _summarise(loaded, choice, results, folder)
        note = draw_queues(folder, [*results.runs, *results.commands])
        status = _status(summary, options)
    except KeyboardInterrupt:
        problem, status = "interrupted", INTERRUPTED
    except UnsupportedFeature as error:
        problem, status = str(error), PREFLIGHT
    except (RunFailed, HubError, LabError, LinkError, StateError, OSError) as error:
        problem = str(error)
    except Exception as error:
        problem = f"internal error: {type(error).__name__}: {error}"
        raise
    finally:
        _write_manifest(folder, options, choice, results, summary, status, problem, time.monotonic() - began)
    if summary is not None:
        (render_commands if isinstance(spec.workload, Command) else render)(summary, console)
    if note:
        console.print(escape(note), highlight=False, soft_wrap=True)
    if problem:
        failed = status in (FAILED, PREFLIGHT)
        console.print(f"[bold red]run failed[/]: {escape(problem)}" if failed else problem, soft_wrap=True)
    console.print(calibrate.line(results.calibration), style="dim", highlight=False, soft_wrap=True)
    console.print(f"results: {folder.path}", highlight=False, soft_wrap=True)
    if options.json_output:
        _print_json(folder, status, problem, summary)
    return status


def _run_jobs(
    loaded: Loaded, options: RunOptions, choice: BackendChoice, folder: RunFolder, results: Results, console: Console
) -> None:
    spec = loaded.spec
    jobs = make_jobs(loaded, spec.seed, secrets.token_hex(16))
    began = time.monotonic()
    # Behind the rate the loss sits at the receiver, where GRO would merge packets that are to be lost one by one; a
    # queue's recorder counts there.
    gro = spec.link.loss_at != "after_rate" and not spec.queues.at
    settings = Settings(gro=gro, gso=not shapes_uplinks(spec))
    with (
        folder.append("events.jsonl") as events,
        Lab.build(spec.topology, name=spec.name, state_dir=options.state_dir, settings=settings) as lab,
        Fabric(lab, spec, choice, mask=results.mask) as fabric,
        Display(console, iterations_total(spec)) as display,
    ):
        results.settings = dict(lab.settings())
        for number, job in enumerate(jobs, 1):
            display.begin(job, number, len(jobs))
            recorder = Recorder(job, events, began, iterations_per_epoch(spec), display.event)
            conductor = Conductor(lab, fabric, spec, job, folder, recorder, results.memory)
            try:
                conductor.run()
            except BaseException:
                with contextlib.suppress(Exception):  # what there is of it; the first error is the one to tell
                    results.captures += conductor.finish()
                    _collect(spec, job, fabric, recorder, conductor, choice, results)
                raise
            results.captures += conductor.finish()
            _collect(spec, job, fabric, recorder, conductor, choice, results)
            folder.write_json(f"stats/{job.label}.json", _link_statistics(fabric, results, job))


def _collect(
    spec: Scenario,
    job: Job,
    fabric: Fabric,
    recorder: Recorder,
    conductor: Conductor,
    choice: BackendChoice,
    results: Results,
) -> None:
    traffic = conductor.traffic_results
    plan = loss_plan(spec, job.config.seed, results.mask)
    counts = fabric.counts(job, known_rounds(spec, job.config.seed))
    exact = choice.loss_engine == "bpf"
    run = recorder.result(
        counts, plan, conductor.executor.history, by_round=exact, repeatable=exact and not plan.base_loss
    )
    health = {name: asdict(each) for name, each in fabric.health().items()}
    doubts = {
        key: sum(each[key] for each in health.values()) for key in ("fragments", "short", "overflow_seen", "gso_seen")
    }
    run = replace(
        run,
        device_drops=fabric.device_drops(),
        queue_drops=of_data(fabric.queue_drops(), traffic.queues, spec.topology.ranks),
        uplink_drops=fabric.uplink_drops(),
        trunk_drops=fabric.trunk_drops(),
        altered=fabric.altered(),
        doubts=doubts,
        recorded=results.mask if job.key is not None else {},
        microbursts=traffic.bursts,
        queues=traffic.queues,
        delays=tuple(conductor.delays),
    )
    results.runs.append(run)
    results.seeded = fabric.wiring.seeded
    results.health[job.label] = health


def _link_statistics(fabric: Fabric, results: Results, job: Job) -> dict[str, Any]:
    """What the links counted of one job, flow by flow, and what makes their counts doubtful."""
    run = results.runs[-1]
    return {
        "flows": [asdict(count) for count in run.counts],
        "ports": results.health[job.label],
        "device_drops": run.device_drops,
        "queue_drops": run.queue_drops,
        "uplink_drops": run.uplink_drops,
        "trunk_drops": run.trunk_drops,
        "doubts": run.doubts,
        "queues": [queue.to_json() for queue in run.queues],
        "delays": [{**report.to_json(), "delays_s": report.delays_s} for report in run.delays],
    }


def _summarise(loaded: Loaded, choice: BackendChoice, results: Results, folder: RunFolder) -> dict[str, Any]:
    spec = loaded.spec
    data = RunData(
        scenario=spec.name,
        seed=spec.seed,
        backend=choice.name,
        loss_engine=choice.loss_engine,
        plan=loss_plan(spec, spec.seed, results.mask),
        runs=with_burst_lengths(spec, loss_plan(spec, spec.seed, results.mask), results.runs, folder.path),
        captures=tuple(results.captures),
        expect=spec.expect,
        judge_latencies=spec.latencies == "judged",
    )
    _write_rows(folder, results)
    summary = summarise(data)
    folder.write_json("summary.json", summary)
    return summary


def _write_rows(folder: RunFolder, results: Results) -> None:
    for name, kind, rows in (
        ("rounds.csv", RoundRow, [row for run in results.runs for row in run.rows]),
        ("epochs.csv", EpochRow, [row for run in results.runs for row in run.epochs]),
    ):
        folder.write(name, csv_text(kind, rows))  # type: ignore[type-var]


def _status(summary: dict[str, Any], options: RunOptions) -> int:
    if not summary["fidelity"]["faithful"] and not options.allow_unfaithful:
        return UNFAITHFUL
    return OK if expectations_held(summary) else EXPECTATION


def _write_manifest(
    folder: RunFolder,
    options: RunOptions,
    choice: BackendChoice,
    results: Results,
    summary: dict[str, Any] | None,
    status: int,
    problem: str,
    wall_s: float,
) -> None:
    if summary is None and results.runs:
        _write_rows(folder, results)  # what there is of an unfinished run
    verdicts = {
        "faithful": summary["fidelity"]["faithful"] if summary else None,
        "expectations": [[one["text"], one["held"]] for one in summary["expectations"]] if summary else None,
        "deterministic": _determinism(results),
    }
    folder.write_json(
        "manifest.json",
        {
            "version": 1,
            "scenario": folder.spec.name,
            "scenario_sha256": folder.scenario_hash,
            "seed": folder.seed,
            "argv": list(options.argv),
            "started_utc": folder.started.isoformat(timespec="seconds"),
            "wall_s": wall_s,
            **machine(),
            "calibration": results.calibration,
            "link_backend": choice.name,
            "loss_engine": choice.loss_engine,
            "link_reason": choice.reason,
            "netem_random": _netem_random(results.seeded),
            "mask": {run.name: "repeatable" if run.mask_seed is not None else "none" for run in results.runs},
            "mtu_bytes": folder.spec.topology.mtu,
            "hosts": results.settings,
            "routing": routing_facts(folder.spec.topology),
            "link_health": results.health,
            "peak_memory_bytes": results.memory.peak_bytes,
            "workload_user": folder.user.name,
            "captures": [asdict(capture) for capture in results.captures],
            **command_run.manifest(results),
            "exit_status": status,
            "problem": problem or None,
            "verdicts": verdicts,
        },
    )


def _netem_random(taken: bool | None) -> str | None:
    """Where sch_netem's random numbers came from; None where there is no netem."""
    if taken is None:
        return None
    return "seeded" if taken else "could not be seeded: that needs Linux 6.6 or newer"


def _determinism(results: Results) -> dict[str, str]:
    """Which results of each transport repeat bit by bit with the same seed."""
    found = {}
    for run in results.runs:
        drops = sum(row.dropped_socket or 0 for row in run.rows)
        if run.mask_seed is None and run.kind != "tcp":
            found[run.name] = "not repeatable: losses are random"
        elif all(not row.tolerance for row in run.rows):
            found[run.name] = "repeatable: nothing may be missing"
        elif run.stop_and_wait and not drops:
            found[run.name] = "repeatable: stop-and-wait over a repeatable mask, no socket drops"
        else:
            found[run.name] = "each transmission's fate is repeatable; which chunks are in time is not"
    return found


def _print_json(folder: RunFolder, status: int, problem: str, summary: dict[str, Any] | None) -> None:
    """The same keys as every other command's, and the summary where there is one."""
    content: dict[str, Any] = {"ok": status == OK, "exit_status": status, "folder": str(folder.path)}
    if problem:
        content["error"] = {"message": problem}
    sys.stdout.write(json.dumps({**content, "summary": summary}, indent=1) + "\n")

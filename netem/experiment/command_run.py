"""The part of a run that is different where the workload is a command: its jobs, its summary, its part of the plan."""

from __future__ import annotations

import contextlib
import csv
import io
import time
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from rich.console import Console

from netem.analysis.command import CommandData, Report, summarise_commands
from netem.experiment.command import CommandJob, command_of, make_command_jobs
from netem.experiment.command_conductor import CommandConductor, check_report
from netem.experiment.folder import RunFolder
from netem.experiment.open_fabric import OpenFabric
from netem.experiment.progress import Display
from netem.experiment.record import Recorder
from netem.lab import Lab, Settings
from netem.links.choose import BackendChoice
from netem.spec import Loaded, Scenario, iterations_total, shapes_uplinks
from netem.spec.command import line
from netem.spec.units import format_time

if TYPE_CHECKING:
    from netem.experiment.hub import Event
    from netem.experiment.run import Results, RunOptions


def plan(spec: Scenario) -> list[str]:
    """What the jobs would do, for `run --dry-run`."""
    work = command_of(spec)
    lines = [f"variant {job.name} (repeat {job.repeat})" for job in make_command_jobs(spec)]
    lines += [f"{host} runs {line(program.argv)}" for host, program in work.run.items()]
    lines.append(f"until {', '.join(work.until)} have ended, at most {format_time(work.limit_s)}")
    return lines


def run_jobs(
    loaded: Loaded,
    options: RunOptions,
    choice: BackendChoice,
    folder: RunFolder,
    results: Results,
    console: Console,
) -> None:
    """All variants and repeats in one lab. Raises what a run can end with; `results` has what there is."""
    spec = loaded.spec
    jobs = make_command_jobs(spec)
    began = time.monotonic()
    gro = spec.link.loss_at != "after_rate" and not spec.queues.at  # a queue's recorder counts behind the port
    settings = Settings(gro=gro, gso=not shapes_uplinks(spec))
    with (
        folder.append("events.jsonl") as events,
        Lab.build(spec.topology, name=spec.name, state_dir=options.state_dir, settings=settings) as lab,
        OpenFabric(lab, spec, choice) as fabric,
        Display(console, iterations_total(spec)) as display,
    ):
        results.settings = dict(lab.settings())
        for number, job in enumerate(jobs, 1):
            display.say(f"{job.name} ({number}/{len(jobs)}): starting {len(job.work.run)} programs")
            recorder = CommandRecorder(job, events, began, 1, display.event)  # type: ignore[arg-type]
            conductor = CommandConductor(lab, fabric, spec, job, folder, recorder, results.memory)
            try:
                conductor.run()
            except BaseException:
                with contextlib.suppress(Exception):  # what there is of it; the first error is the one to tell
                    _collect(conductor, job, folder, results)
                raise
            _collect(conductor, job, folder, results)


class CommandRecorder(Recorder):
    """Refuses reports that are not as agreed."""

    def __call__(self, event: Event) -> None:
        check_report(event)
        super().__call__(event)


def _collect(conductor: CommandConductor, job: CommandJob, folder: RunFolder, results: Results) -> None:
    results.captures += conductor.finish()
    run = conductor.result()
    results.commands.append(run)
    results.seeded = conductor.fabric.wiring.seeded
    results.health[job.label] = {name: asdict(port.health()) for name, port in conductor.fabric.ports.items()}
    cells = [asdict(cell) for cell in run.cells]
    folder.write_json(
        f"stats/{job.label}.json",
        {
            "cells": cells,
            "drops": run.drops,
            "doubts": run.doubts,
            "queues": [queue.to_json() for queue in run.queues],
            "delays": [{**report.to_json(), "delays_s": report.delays_s} for report in run.delays],
        },
    )


def summarise(spec: Scenario, choice: BackendChoice, results: Results, folder: RunFolder) -> dict[str, Any]:
    """Writes reports.csv and summary.json, and returns the latter."""
    data = CommandData(
        scenario=spec.name,
        seed=spec.seed,
        backend=choice.name,
        loss_engine=choice.loss_engine,
        runs=tuple(results.commands),
        captures=tuple(results.captures),
        expect=spec.expect,
    )
    if command_of(spec).iterations is not None:
        folder.write("reports.csv", _reports(results))
    summary = summarise_commands(data)
    folder.write_json("summary.json", summary)
    return summary


def _reports(results: Results) -> str:
    """reports.csv: a line for each round and rank that reported it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["variant", "repeat", *(field.name for field in fields(Report))])
    for run in results.commands:
        for report in run.reports:
            latency = "" if report.latency_s is None else repr(report.latency_s)
            row = [report.round, report.rank, report.host, latency, int(report.burst)]
            writer.writerow([run.name, run.repeat, *row])
    return out.getvalue()


def manifest(results: Results) -> dict[str, Any]:
    """What manifest.json says of the programs, also of a run that failed; nothing for other workloads."""
    if not results.commands:
        return {}
    return {
        "programs": [
            {"variant": run.name, "repeat": run.repeat, **asdict(program)}
            for run in results.commands
            for program in run.programs
        ]
    }

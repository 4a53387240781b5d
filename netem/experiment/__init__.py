"""Runs a scenario: lab, links, workload processes, gates, captures, results."""

from netem.experiment.prepare import check
from netem.experiment.run import RunOptions, dry_run, run_scenario

__all__ = ["RunOptions", "check", "dry_run", "run_scenario"]

"""Runs a scenario: lab, links, workload processes, gates, captures, results."""

from typing import TYPE_CHECKING, Any

from netem.experiment.prepare import check

if TYPE_CHECKING:
    from netem.experiment.run import RunOptions, dry_run, run_scenario

__all__ = ["RunOptions", "check", "dry_run", "run_scenario"]


def __getattr__(name: str) -> Any:
    """Loaded when asked for (PEP 562): `validate` needs `check` alone, and the rest takes a second to import."""
    if name in __all__:
        from netem.experiment import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""A finished run's folder, as far as two of them can be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dblp.config import profile_from
from netem.analysis.agreement import ROUNDS, Round, read_rounds
from netem.analysis.fates import Fates, captured
from netem.spec import Scenario, load_scenario, profile_options

RESOLVED, EVENTS, CAPTURES, MANIFEST = "scenario.resolved.yaml", "events.jsonl", "captures", "manifest.json"


class FolderError(Exception):
    """A folder is not that of a run, or a file in it is damaged; the message names it."""


class Delivery(NamedTuple):
    """One round of one worker in one direction."""

    transport: str
    repeat: int
    round: int
    worker: int
    direction: str


@dataclass(frozen=True)
class Run:
    """deliveries: digest of the set of chunks with which the round ended.

    repeatable_sets: these sets depend on the mask alone (stop-and-wait), not on timing.
    """

    path: Path
    spec: Scenario
    scenario_hash: str
    fates: Mapping[tuple[str, int], Fates]
    deliveries: Mapping[Delivery, str]
    repeatable_sets: bool
    rounds: Sequence[Round] = ()
    """Completed ones under loss."""
    backend: str = ""
    loss_engine: str = ""

    @property
    def stop_and_wait(self) -> bool:
        return bool(profile_from(profile_options(self.spec)).probing == "stop-and-wait")

    @property
    def repeatable_loss(self) -> bool:
        """The seed says which packets are lost; sch_netem draws lots."""
        return self.loss_engine != "netem"


def read_run(path: Path) -> Run:
    """Raises FolderError, SpecError, CaptureError, OSError."""
    resolved = path / RESOLVED
    if not resolved.is_file():
        raise FolderError(f"{path} is not the folder of a run: it has no {RESOLVED}")
    spec = load_scenario(resolved).spec
    names = list(spec.transports)
    backend, engine = _links(path / MANIFEST)
    fates = {(name, repeat): each for name, repeat, each in captured(path / CAPTURES, names, spec.topology.ranks)}
    return Run(
        path=path,
        spec=spec,
        scenario_hash=hashlib.sha256(resolved.read_bytes()).hexdigest(),
        fates=fates,
        deliveries=read_deliveries(path / EVENTS),
        repeatable_sets=profile_from(profile_options(spec)).probing == "stop-and-wait",
        rounds=_rounds(path),
        backend=backend,
        loss_engine=engine,
    )


def _links(path: Path) -> tuple[str, str]:
    """Link backend and loss engine; empty for a run that was killed before it wrote them."""
    if not path.is_file():
        return "", ""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        return str(manifest["link_backend"]), str(manifest["loss_engine"])
    except (ValueError, KeyError, TypeError) as error:
        raise FolderError(f"{path}: not the manifest of a run: {error!r}") from error


def _rounds(path: Path) -> list[Round]:
    try:
        return read_rounds(path)
    except (ValueError, KeyError, TypeError) as error:
        raise FolderError(f"{path / ROUNDS}: not the rounds of a run: {error!r}") from error


def read_deliveries(path: Path) -> dict[Delivery, str]:
    """From the `received` events of a run. A run that was killed may end in half a line. Raises FolderError."""
    found: dict[Delivery, str] = {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break
        try:
            event = json.loads(line)
            if event["event"] == "received" and event.get("delivered_digest"):
                key = Delivery(*(event[name] for name in Delivery._fields))
                found[key] = event["delivered_digest"]
        except (ValueError, KeyError, TypeError) as error:
            raise FolderError(f"{path}:{number}: not an event of a run: {error!r}") from error
    return found


def different_deliveries(one: Run, other: Run) -> tuple[int, list[Delivery]]:
    """(rounds that both have, those of them that ended with other chunks)."""
    shared = sorted(one.deliveries.keys() & other.deliveries.keys())
    return len(shared), [key for key in shared if one.deliveries[key] != other.deliveries[key]]

"""The run folder: one folder a run, owned by the user who called sudo, with everything that the run left behind."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import psutil

from netem.kernel.user import User
from netem.spec import Scenario, resolved_yaml

PACKAGES = ("dblp-netem", "numpy", "torch", "pyroute2", "pydantic", "rich", "scapy")
SUBFOLDERS = ("captures", "logs", "config", "stats")


class RunFolder:
    """A new folder `<out>/<scenario>-<UTC time>-<hash>/`."""

    def __init__(self, out: Path, spec: Scenario, seed: int, user: User) -> None:
        """Raises OSError when it cannot be made."""
        self.user, self.spec, self.seed = user, spec, seed
        self.scenario_hash = hashlib.sha256(resolved_yaml(spec).encode()).hexdigest()
        self.started = datetime.now(UTC)
        self._make(out, parents=True)
        stamp = self.started.strftime("%Y%m%dT%H%M%SZ")
        unique = hashlib.sha256(f"{self.scenario_hash}{seed}{os.urandom(8).hex()}".encode()).hexdigest()[:6]
        self.path = out.resolve() / f"{spec.name}-{stamp}-{unique}"
        for folder in (self.path, *(self.path / name for name in SUBFOLDERS)):
            self._make(folder)
        self.write("scenario.resolved.yaml", resolved_yaml(spec))

    def _make(self, folder: Path, *, parents: bool = False) -> None:
        missing = [each for each in (folder, *folder.parents) if not each.exists()] if parents else [folder]
        for each in reversed(missing):
            each.mkdir()
            self.user.own(each)

    def write(self, name: str, text: str, mode: int = 0o644) -> Path:
        """A file of this text, whole or not at all."""
        path = self.path / name
        temporary = path.with_name(path.name + ".part")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        self.user.own(temporary)
        temporary.rename(path)
        return path

    def write_json(self, name: str, value: Any) -> Path:
        return self.write(name, json.dumps(value, indent=1, allow_nan=False) + "\n")

    def append(self, name: str) -> TextIO:
        """A file to write line after line."""
        file = (self.path / name).open("a", encoding="utf-8", buffering=1)
        self.user.own(self.path / name)
        return file


def machine() -> dict[str, Any]:
    """What the numbers depend on: versions, kernel, size of the machine."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": versions,
        "kernel": f"{platform.system()} {platform.release()} {platform.version()}",
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
    }

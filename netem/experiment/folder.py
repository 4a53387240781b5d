"""The run folder: one folder a run, owned by the user who called sudo, with everything that the run left behind."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import sys
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import psutil

from netem import rootless
from netem.kernel.user import User
from netem.spec import Scenario, resolved_yaml

PACKAGES = ("dblp-netem", "numpy", "torch", "pyroute2", "pydantic", "rich", "scapy")
SUBFOLDERS = ("captures", "logs", "config", "stats", "figures")
FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class RunFolder:
    """A new folder `<out>/<scenario>-<UTC time>-<hash>/`, and a context manager that closes its descriptors.

    It belongs to the user from the start, and the user's processes work in it while root does: any name in it may
    become a link, or another file, at any time. So root goes by descriptors that it holds from the making of each
    folder, creates files that were not there before, gives away what it has open, and reads only what it has open.
    A link in the way is an error or is replaced; it is never followed. Links in `out` itself are: they are the
    caller's word.
    """

    def __init__(self, out: Path, spec: Scenario, seed: int, user: User) -> None:
        """Raises OSError when it cannot be made."""
        self.user, self.spec, self.seed = user, spec, seed
        self.scenario_hash = hashlib.sha256(resolved_yaml(spec).encode()).hexdigest()
        self.started = datetime.now(UTC)
        stamp = self.started.strftime("%Y%m%dT%H%M%SZ")
        unique = hashlib.sha256(f"{self.scenario_hash}{seed}{os.urandom(8).hex()}".encode()).hexdigest()[:6]
        self.path = out.resolve() / f"{spec.name}-{stamp}-{unique}"
        with ExitStack() as opened:
            self.descriptor = _make_folder(opened, self.path.name, self._open_parent(opened))
            self._folders = {".": self.descriptor}
            for name in SUBFOLDERS:
                self._folders[name] = _make_folder(opened, name, self.descriptor)
                user.own(self._folders[name])
            user.own(self.descriptor)  # last: until here nobody else could change anything in it
            self.write("scenario.resolved.yaml", resolved_yaml(spec))
            self._opened = opened.pop_all()

    def _open_parent(self, opened: ExitStack) -> int:
        """Goes down to `out`, resolved before, without following a link; makes what is missing, for the user."""
        at = _kept(opened, os.open("/", FOLDER | os.O_PATH))
        for name in self.path.parent.parts[1:]:
            try:
                at = _kept(opened, os.open(name, FOLDER | os.O_PATH, dir_fd=at))
            except FileNotFoundError:
                at = _make_folder(opened, name, at)
                self.user.own(at)
        return at

    def close(self) -> None:
        """What only some runs have leaves no empty folder behind."""
        with suppress(OSError):
            os.rmdir("figures", dir_fd=self.descriptor)
        self._opened.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open_new(self, name: str, mode: int = 0o644) -> BinaryIO:
        """A new file of the user, for appending and reading. `name` may lie in one of the subfolders.

        Raises FileExistsError when something has this name, a link too.
        """
        folder, leaf = self._place(name)
        return os.fdopen(self._create(leaf, folder, mode), "ab+", buffering=0)

    def append(self, name: str) -> TextIO:
        """A new file to write line after line. Raises FileExistsError."""
        folder, leaf = self._place(name)
        return os.fdopen(self._create(leaf, folder, 0o644), "a", encoding="utf-8", buffering=1)

    def write(self, name: str, text: str, mode: int = 0o644) -> Path:
        """A file of this text, whole or not at all; what had the name, a link too, is replaced. Raises OSError."""
        folder, leaf = self._place(name)
        temporary = f".{leaf}.{os.urandom(8).hex()}.part"
        descriptor = self._create(temporary, folder, mode)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
                file.write(text)
            os.rename(temporary, leaf, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        return self.path / name

    def write_json(self, name: str, value: Any) -> Path:
        return self.write(name, json.dumps(value, indent=1, allow_nan=False) + "\n")

    def _place(self, name: str) -> tuple[int, str]:
        folder, leaf = os.path.split(name)
        return self._folders[folder or "."], leaf

    def _create(self, leaf: str, folder: int, mode: int) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(leaf, flags, mode, dir_fd=folder)
        try:
            self.user.own(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _kept(opened: ExitStack, descriptor: int) -> int:
    opened.callback(os.close, descriptor)
    return descriptor


def _make_folder(opened: ExitStack, name: str, parent: int) -> int:
    """A new folder, open. OSError when it is not the one just made: who owns the parent can exchange it."""
    os.mkdir(name, 0o755, dir_fd=parent)
    made = _kept(opened, os.open(name, FOLDER, dir_fd=parent))
    if os.fstat(made).st_uid != os.geteuid() or os.listdir(made):
        raise FileExistsError(errno.EEXIST, "folder was exchanged while it was made", name)
    return made


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
        "rootless": rootless.inside(),
        "memory_bytes": psutil.virtual_memory().total,
    }

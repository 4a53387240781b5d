"""The state file of a lab: what it may have created, written before each creation, so that nothing is ever lost.

One JSON file and one lock file for each lab in the state directory. Whoever works on a lab holds its lock; a lab is
dead when its lock is free and its owner (process id, start time, boot) is gone. Written by rename without fsync: the
objects it lists do not survive a power failure either.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

DEFAULT_DIR = Path("/run/dblp-netem")
VERSION = 1


class StateError(Exception):
    """A state file cannot be read or written; the message names it."""


class LabBusy(StateError):
    """Another process is working on this lab."""


@dataclass(frozen=True)
class Process:
    """A process, safe against reuse of its id. `start_ticks` is field 22 of /proc/PID/stat (proc(5))."""

    pid: int
    start_ticks: int
    what: str = ""

    @property
    def alive(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks


@dataclass(frozen=True)
class Record:
    """What a state file holds. `owner` None: a lab that outlives the command (`up`), ended by `down` alone."""

    id: str
    name: str
    owner: Process | None
    boot: str
    created_utc: str
    namespaces: tuple[str, ...] = ()
    children: tuple[Process, ...] = ()
    plan: Mapping[str, Any] = field(default_factory=dict)
    links: Mapping[str, Any] = field(default_factory=dict)
    """What the links of a lab that stands by itself do to packets: see netem.lab.standing."""

    @property
    def abandoned(self) -> bool:
        """The owner is gone, or the machine was restarted since."""
        return self.boot != boot_id() or (self.owner is not None and not self.owner.alive)

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Record:
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise ValueError("not a JSON object")
        if (version := raw.pop("version")) != VERSION:
            raise ValueError(f"version {version}, not {VERSION}")
        owner = raw.pop("owner")
        children = tuple(Process(**child) for child in raw.pop("children"))
        namespaces = tuple(raw.pop("namespaces"))
        return cls(owner=Process(**owner) if owner else None, children=children, namespaces=namespaces, **raw)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the command's name may hold blanks and brackets
    return None if fields[0] in ("Z", "X") else int(fields[19])


def this_process() -> Process:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    return Process(os.getpid(), ticks, "owner")


class LabState:
    """The state of one lab. Every change is made under its lock, and on disk when the method returns."""

    def __init__(self, directory: Path, lock_fd: int | None, record: Record) -> None:
        """Use `create`, `open` (both keep the lock) or `look` (takes it for each change)."""
        self._directory = directory
        self._lock_fd = lock_fd
        self.record = record

    @classmethod
    def create(cls, directory: Path, record: Record) -> LabState:
        """Lock and write a new lab's state. LabBusy when the id is in use in this directory."""
        try:
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(f"make state directory {directory}: {error.strerror}") from error
        lock_fd = _lock(directory, record.id, make=True)
        state = cls(directory, lock_fd, record)
        if path_of(directory, record.id).exists():
            state.release()
            raise LabBusy(f"lab {record.id} exists in {directory}")
        state._save(record)
        return state

    @classmethod
    def open(cls, directory: Path, lab_id: str) -> LabState:
        """Lock and read an existing lab's state. LabBusy, or StateError when it is missing or damaged."""
        read(directory, lab_id)  # what is not a lab gets no lock file
        lock_fd = _lock(directory, lab_id, make=path_of(directory, lab_id).exists())
        try:
            return cls(directory, lock_fd, read(directory, lab_id))
        except BaseException:
            os.close(lock_fd)
            raise

    @classmethod
    def look(cls, directory: Path, lab_id: str) -> LabState:
        """Read a lab's state without its lock. StateError when it is missing or damaged."""
        return cls(directory, None, read(directory, lab_id))

    def acquire(self) -> None:
        """Take the lock, unless it is held, and read the state anew. LabBusy, or StateError when it is gone."""
        if self._lock_fd is None:
            self._lock_fd = _lock(self._directory, self.record.id, make=False)
            self.record = read(self._directory, self.record.id)

    @contextmanager
    def _changing(self) -> Generator[None, None, None]:
        held = self._lock_fd is not None
        self.acquire()
        try:
            yield
        finally:
            if not held:
                self.release()

    def _save(self, record: Record) -> None:
        path = path_of(self._directory, record.id)
        temporary = path.with_suffix(".json.new")
        try:
            temporary.write_text(record.to_json(), encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            raise StateError(f"write {path}: {error.strerror}") from error
        self.record = record

    def add_child(self, child: Process) -> None:
        """Record a child; those that have ended are forgotten on this occasion."""
        with self._changing():
            alive = tuple(c for c in self.record.children if c.alive)
            self._save(replace(self.record, children=(*alive, child)))

    def forget_namespace(self, name: str) -> None:
        """A name that turned out to be someone else's."""
        with self._changing():
            rest = tuple(n for n in self.record.namespaces if n != name)
            self._save(replace(self.record, namespaces=rest))

    def set_owner(self, owner: Process | None) -> None:
        with self._changing():
            self._save(replace(self.record, owner=owner))

    def set_links(self, links: Mapping[str, Any]) -> None:
        """What the links do now."""
        with self._changing():
            self._save(replace(self.record, links=links))

    def release(self) -> None:
        """Let go of the lock; the files stay. Idempotent."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def delete(self) -> None:
        """Remove the files and let go of the lock: nothing of the lab is left."""
        path = path_of(self._directory, self.record.id)
        path.with_suffix(".json.new").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        _lock_path(self._directory, self.record.id).unlink(missing_ok=True)
        self.release()


def path_of(directory: Path, lab_id: str) -> Path:
    return directory / f"{lab_id}.json"


def _lock_path(directory: Path, lab_id: str) -> Path:
    return directory / f"{lab_id}.lock"


def _lock(directory: Path, lab_id: str, make: bool) -> int:
    """The descriptor of a lab's lock file, locked (closed on exec). LabBusy or StateError."""
    path = _lock_path(directory, lab_id)
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if make else 0), 0o644)
        except OSError as error:
            raise StateError(f"no lab {lab_id} in {directory}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between open and flock its last holder may have deleted the file: then lock the new one.
            if os.fstat(fd).st_nlink == 1 and os.stat(path).st_ino == os.fstat(fd).st_ino:
                return fd
            os.close(fd)
        except FileNotFoundError:
            os.close(fd)
        except OSError as error:
            os.close(fd)
            if error.errno == errno.EWOULDBLOCK:
                raise LabBusy(f"lab {lab_id} is in use by another process") from error
            raise StateError(f"lock {path}: {error.strerror}") from error


def read(directory: Path, lab_id: str) -> Record:
    """A lab's record, without its lock. StateError when it is missing or damaged."""
    path = path_of(directory, lab_id)
    try:
        record = Record.from_json(path.read_text(encoding="utf-8"))
        if record.id != lab_id or not isinstance(record.name, str):
            raise ValueError("id or name do not fit")
    except FileNotFoundError:
        raise StateError(f"no lab {lab_id} in {directory}") from None
    except KeyError as error:
        raise not_a_record(path, f"it has no {error.args[0]}") from error
    except (IsADirectoryError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise not_a_record(path, str(error)) from error
    except OSError as error:
        raise StateError(f"read {path}: {error.strerror}") from error
    return record


def not_a_record(path: Path, why: str) -> StateError:
    """For a file that something else left in the state directory, or that is damaged."""
    return StateError(f"{path} is not a lab record ({why}); delete it")


def lab_ids(directory: Path) -> list[str]:
    """Ids of all labs with a state file, sorted."""
    return sorted(path.stem for path in directory.glob("*.json"))


def drop_orphans(directory: Path) -> None:
    """Delete lock files and half-written states of labs that were killed before their first state was written."""
    for path in sorted({*directory.glob("*.lock"), *directory.glob("*.json.new")}):
        lab_id = path.name.split(".")[0]
        if path_of(directory, lab_id).exists():
            continue
        try:
            fd = _lock(directory, lab_id, make=True)
        except StateError:
            continue
        try:
            if not path_of(directory, lab_id).exists():
                _lock_path(directory, lab_id).unlink(missing_ok=True)
                (directory / f"{lab_id}.json.new").unlink(missing_ok=True)
        except IsADirectoryError:
            continue  # not ours
        finally:
            os.close(fd)

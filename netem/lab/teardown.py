"""Ends a lab: its processes, then its namespaces. Touches only what its state file lists."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from netem.kernel import netns, veth
from netem.kernel.errors import KernelError, LabError
from netem.lab.build import PORT_GROUP
from netem.lab.plan import ID_PATTERN
from netem.state import LabBusy, LabState, Record, StateError, drop_orphans, lab_ids

KILL_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Removed:
    """One lab's end. `left` says in words what is still there and why; empty when nothing is."""

    lab_id: str
    name: str
    namespaces: tuple[str, ...] = ()
    killed: tuple[int, ...] = ()
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class CleanReport:
    """What `clean` did: labs removed, labs left alone (with the reason), files it could not read."""

    removed: tuple[Removed, ...] = ()
    kept: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems and not any(lab.left for lab in self.removed)


def clean(state_dir: Path) -> CleanReport:
    """Remove the labs whose owner is dead. Labs in use, and those of `up`, are not touched."""
    removed: list[Removed] = []
    kept: list[str] = []
    problems: list[str] = []
    for lab_id in lab_ids(state_dir):
        try:
            state = LabState.open(state_dir, lab_id)
        except LabBusy:
            kept.append(f"{lab_id}: in use")
            continue
        except StateError as error:
            problems.append(str(error))
            continue
        try:
            if state.record.abandoned:
                removed.append(remove(state))
            else:
                kept.append(f"{lab_id}: {_owner(state.record)}")
        except LabError as error:
            problems.append(f"{lab_id}: {error}")
        finally:
            state.release()
    if state_dir.is_dir():
        drop_orphans(state_dir)
    return CleanReport(tuple(removed), tuple(kept), tuple(problems))


def _owner(record: Record) -> str:
    if record.owner is None:
        return f"started by `up` as {record.name}; end it with `down {record.name}`"
    return f"process {record.owner.pid} is running it"


def remove(state: LabState) -> Removed:
    """End a lab whose lock the caller holds. The state file goes only when nothing is left."""
    record = state.record
    check_record(record)
    identities = {name: netns.identity(name) for name in record.namespaces}
    killed = kill_children(record, identities)
    left = [f"{_describe(pid)} runs in {space}" for pid, space in _inhabitants(identities)]
    done = []
    for name in record.namespaces:
        try:
            _delete_ports(name, identities[name])
            if netns.remove(name):
                done.append(name)
        except LabError as error:
            left.append(str(error))
    if not any(netns.exists(name) for name in record.namespaces):
        state.delete()
    return Removed(record.id, record.name, tuple(done), tuple(killed), tuple(left))


def check_record(record: Record) -> None:
    """A damaged or forged state file must not make root remove anything else."""
    wrong = [n for n in record.namespaces if not n.startswith(f"{record.id}-") or "/" in n]
    if not ID_PATTERN.fullmatch(record.id) or wrong:
        raise LabError(f"the state file of lab {record.id} lists foreign names ({', '.join(wrong)})")


def _delete_ports(name: str, identity: int | None) -> None:
    """Delete a switch's ports before its namespace: a peer whose host is still in use goes with them."""
    if identity is None:
        return
    with closing(netns.open_inside(name)) as inside:
        try:
            veth.delete_group(inside.netlink, PORT_GROUP)
        except KernelError as error:
            if error.code != errno.ENODEV:  # not a switch, or one without ports yet
                raise


def _processes() -> Iterable[tuple[int, int]]:
    """(pid, inode of its network namespace) of all processes."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                yield int(entry), os.stat(f"/proc/{entry}/ns/net").st_ino
            except OSError:
                continue


def _inhabitants(identities: Mapping[str, int | None]) -> list[tuple[int, str]]:
    """Processes in the lab's namespaces, with the namespace's name; the caller excluded."""
    spaces = {inode: name for name, inode in identities.items() if inode is not None}
    if not spaces:
        return []
    return [(pid, spaces[inode]) for pid, inode in _processes() if inode in spaces and pid != os.getpid()]


def _describe(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        command = ""
    return f"process {pid} ({command.strip()[:60]})"


def kill_children(record: Record, identities: Mapping[str, int | None]) -> list[int]:
    """Kill the recorded children (process id and start time match), and what they started inside the lab.

    A child leads a session of its own. A process of the lab's namespaces in that session descends from it: the kernel
    does not reuse an id while it names a session.
    """
    sessions = {child.pid for child in record.children}
    inside = [pid for pid, _ in _inhabitants(identities)]
    victims = {child.pid for child in record.children if child.alive}
    victims |= {pid for pid in inside if _session(pid) in sessions}
    for pid in victims:
        _kill(pid)
    _await_end(sorted(victims), KILL_TIMEOUT_S)
    return sorted(victims)


def kill_sessions(record: Record, leaders: Iterable[int]) -> None:
    """Kill what these children, ended or not, have started inside the lab and left running."""
    leaders = set(leaders)
    identities = {name: netns.identity(name) for name in record.namespaces}
    victims = [pid for pid, _ in _inhabitants(identities) if _session(pid) in leaders]
    for pid in victims:
        _kill(pid)
    _await_end(victims, KILL_TIMEOUT_S)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _await_end(pids: Sequence[int], timeout_s: float) -> None:
    """Wait until killed processes have left their namespaces; a zombie has. They are mostly not our children."""
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        while time.monotonic() < deadline:
            try:
                os.stat(f"/proc/{pid}/ns/net")
            except OSError:
                break
            time.sleep(0.002)

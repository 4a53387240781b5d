"""Lab: a topology in the kernel, from its namespaces to the processes in them."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

from netem.kernel import capture, netns, process
from netem.kernel.capture import Capture
from netem.kernel.errors import KernelError, LabError
from netem.kernel.packet_filter import Direction, PacketFilter
from netem.kernel.process import Child
from netem.kernel.sockets import open_socket
from netem.kernel.user import User
from netem.lab import teardown
from netem.lab.build import Builder, Places, PortPlace, Settings, find_ports, read_settings
from netem.lab.plan import DEFAULT_NETWORK, Host, Plan, TopologyLike, make_plan
from netem.state import (
    DEFAULT_DIR,
    LabBusy,
    LabState,
    Process,
    Record,
    StateError,
    boot_id,
    lab_ids,
    read,
    start_ticks,
    this_process,
)

ID_TRIES = 50
TERMINATE_TIMEOUT_S = 2.0


class Lab:
    """A built lab, and a context manager that tears it down. Use it from the main thread alone."""

    def __init__(self, state: LabState, plan: Plan, settings: Settings, *, mine: bool) -> None:
        """Use `Lab.build` or `Lab.attach`."""
        self._mine = mine
        self._state = state
        self._plan = plan
        self._settings = settings
        self._places: Places = {}
        self._children: list[Child] = []
        self._captures: list[Capture] = []
        self.problems: list[str] = []  # what went wrong while ending it
        self.removed: teardown.Removed | None = None
        self.hosts: dict[str, Host] = {host.name: host for host in plan.hosts}

    @classmethod
    def build(
        cls,
        topology: TopologyLike,
        *,
        name: str | None = None,
        state_dir: Path = DEFAULT_DIR,
        settings: Settings | None = None,
        network: str = DEFAULT_NETWORK,
    ) -> Lab:
        """Build a topology. On any error what was built is removed again.

        Errors: Unavailable (no privilege), PlanError (topology), KernelError, StateError.
        """
        settings = settings or Settings()
        state, plan = _claim(topology, name or topology.name, state_dir, network)
        lab = cls(state, plan, settings, mine=True)
        try:
            lab._construct()
        except BaseException:
            lab.close()
            raise
        return lab

    @classmethod
    def attach(cls, name_or_id: str, *, state_dir: Path = DEFAULT_DIR) -> Lab:
        """A lab that another command built: one left standing by `detach`, or one in use.

        As a context manager it ends only what this process started in it; `close` ends the lab, unless another process
        is working on it (LabBusy). StateError: no such lab.
        """
        state = LabState.look(state_dir, _find(name_or_id, state_dir))
        teardown.check_record(state.record)
        try:
            plan = Plan.from_json(state.record.plan)
        except (KeyError, TypeError) as error:
            raise StateError(f"the state of lab {name_or_id} has no plan of this version: {error}") from error
        lab = cls(state, plan, Settings(), mine=False)
        lab._places = find_ports(plan)
        return lab

    def detach(self) -> None:
        """Leave the lab standing after this command; `attach` finds it by name or id. Processes in it are ended."""
        self._end_children()
        if self._mine:
            self._state.set_owner(None)
            self._mine = False
        self._state.release()

    def _construct(self) -> None:
        for name in self._plan.namespaces:
            try:
                netns.create(name)
            except KernelError as error:
                if netns.exists(name):
                    self._state.forget_namespace(name)  # taken by someone else since it was planned
                raise error
        with closing(Builder(self._plan, self._settings)) as builder:
            self._places = builder.build()

    @property
    def id(self) -> str:
        return self._plan.lab_id

    @property
    def name(self) -> str:
        return self._state.record.name

    @property
    def namespaces(self) -> tuple[str, ...]:
        return self._plan.namespaces

    @property
    def links(self) -> Mapping[str, Any]:
        """What the links do, as `set_links` recorded it; empty for a lab of `run`."""
        return self._state.record.links

    def set_links(self, links: Mapping[str, Any]) -> None:
        """Record what the links do, for other processes. LabBusy when one is working on the lab."""
        self._state.set_links(links)

    @contextmanager
    def locked(self) -> Generator[None, None, None]:
        """No other process changes the lab meanwhile. LabBusy when one is at it."""
        self._state.acquire()
        try:
            yield
        finally:
            if not self._mine:
                self._state.release()

    def port_of(self, host: str) -> PortPlace:
        """The switch port that faces a host."""
        name = self._host(host).name
        return next(place for (_, beside), place in self._places.items() if beside == name)

    def port_between(self, switch: str, neighbour: str) -> PortPlace:
        """The port of a switch that faces a host or another switch."""
        try:
            return self._places[switch, neighbour]
        except KeyError:
            raise LabError(f"no link from switch {switch} to {neighbour} in lab {self.name}") from None

    def _host(self, name: str) -> Host:
        try:
            return self.hosts[name]
        except KeyError:
            raise LabError(f"no host {name} in lab {self.name}; there are {', '.join(self.hosts)}") from None

    def settings(self) -> dict[str, Mapping[str, Any]]:
        """Sysctls, offloads and MTU in force at each host, for the manifest."""
        return {host.name: read_settings(host, self._plan.network) for host in self.hosts.values()}

    def socket(self, host: str, kind: Literal["udp", "tcp"], rcvbuf_bytes: int, sndbuf_bytes: int) -> socket.socket:
        """An unbound IPv4 socket inside a host, with at least these buffers (the system's maximum is not in force)."""
        return open_socket(self._host(host).netns, kind, rcvbuf_bytes, sndbuf_bytes)

    def spawn(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path | BinaryIO | None,
        user: User | None = None,
        cwd: Path | str = "/",
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Start a program inside a host, as whoever called sudo unless `user` says otherwise; see process.start."""
        child = process.start(
            argv,
            netns=self._host(host).netns,
            env=env,
            user=user or User.caller(),
            log=log,
            cwd=cwd,
            pass_fds=pass_fds,
            on_start=lambda pid: self._record_child(pid, f"{host}: {argv[0]}"),
        )
        self._children.append(child)
        return child

    def end_sessions(self, children: Sequence[Child]) -> None:
        """Kill what these children have started and left running, those that have ended included."""
        teardown.kill_sessions(self._state.record, [child.pid for child in children])

    def capture(
        self,
        place: str | tuple[Literal["port"], str],
        path: Path,
        *,
        snap_bytes: int = 0,
        packets: PacketFilter | str | None = None,
        direction: Direction = "both",
        user: User | None = None,
        file: BinaryIO | None = None,
    ) -> Capture:
        """Capture at a host ("server") or at the switch port that faces it (("port", "server")); see capture.start.

        `direction` is as that interface sees it: egress of a switch port goes to the host, what the link dropped
        excluded. A capture still running when the lab closes is stopped.
        """
        if isinstance(place, str):
            host = self._host(place)
            netns_name, ifname, label = host.netns, host.ifname, place
        else:
            port = self.port_of(place[1])
            netns_name, ifname, label = port.netns, port.ifname, f"port to {place[1]}"
        running = capture.start(
            netns_name,
            ifname,
            path,
            snap_bytes=snap_bytes,
            packets=packets,
            direction=direction,
            user=user or User.caller(),
            file=file,
            label=label,
            on_start=lambda pid: self._record_child(pid, f"capture at {label}"),
        )
        self._captures.append(running)
        return running

    def _record_child(self, pid: int, what: str) -> None:
        ticks = start_ticks(pid)
        if ticks is None:
            return
        try:
            self._state.add_child(Process(pid, ticks, what))
        except LabBusy:
            if self._mine:
                raise
            # A guest in a lab that another process runs: it cannot be recorded, but it dies with us.

    def _end_children(self) -> None:
        """SIGTERM to all at once, then SIGKILL to those that do not listen; then the captures, which see it all."""
        for child in self._children:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + TERMINATE_TIMEOUT_S
        for child in self._children:
            child.terminate(max(0.0, deadline - time.monotonic()))
        self._children.clear()
        for running in self._captures:
            try:
                running.stop()
            except LabError as error:
                self.problems.append(str(error))
        self._captures.clear()

    def close(self) -> teardown.Removed:
        """Tear down: processes, captures, namespaces, state file. Idempotent; what is left is in the answer.

        LabBusy when another process is working on the lab.
        """
        if self.removed is None:
            self._state.acquire()
            try:
                self._end_children()
            finally:
                try:
                    self.removed = teardown.remove(self._state)
                finally:
                    self._state.release()
        return self.removed

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mine:
            self.close()
        else:
            self._end_children()


def _find(name_or_id: str, state_dir: Path) -> str:
    """The id of a lab given by id or name. StateError when there is none, or the name fits several."""
    ids = lab_ids(state_dir)
    if name_or_id in ids:
        return name_or_id
    found = [lab_id for lab_id in ids if read(state_dir, lab_id).name == name_or_id]
    if len(found) != 1:
        several = (
            f"{', '.join(found)} have that name: give the id" if found else f"there are {', '.join(ids) or 'none'}"
        )
        raise StateError(f"no lab {name_or_id} in {state_dir}; {several}")
    return found[0]


def _claim(topology: TopologyLike, name: str, state_dir: Path, network: str) -> tuple[LabState, Plan]:
    """Find a free id and write the state that lists everything the lab will create."""
    for _ in range(ID_TRIES):
        plan = make_plan(topology, f"dn{os.urandom(2).hex()}", network)
        if any(netns.exists(space) for space in plan.namespaces):
            continue
        record = Record(
            id=plan.lab_id,
            name=name,
            owner=this_process(),
            boot=boot_id(),
            created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            namespaces=plan.namespaces,
            plan=plan.to_json(),
        )
        try:
            return LabState.create(state_dir, record), plan
        except LabBusy:
            continue
    raise LabError("no free lab id; `dblp-netem status` lists the labs, `dblp-netem clean` removes dead ones")

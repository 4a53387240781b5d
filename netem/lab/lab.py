"""Lab: a topology in the kernel, from its namespaces to the processes in them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from netem.kernel import netns
from netem.kernel.errors import KernelError, LabError
from netem.kernel.sockets import open_socket
from netem.lab import teardown
from netem.lab.build import PortPlace, Settings, build_host, build_switches, read_settings
from netem.lab.plan import DEFAULT_NETWORK, Host, Plan, TopologyLike, make_plan
from netem.state import DEFAULT_DIR, LabBusy, LabState, Record, boot_id, this_process

ID_TRIES = 50


class Lab:
    """A built lab, and a context manager that tears it down. Use it from the main thread alone."""

    def __init__(self, state: LabState, plan: Plan, settings: Settings) -> None:
        """Use `Lab.build`."""
        self._state = state
        self._plan = plan
        self._settings = settings
        self._places: dict[str, PortPlace] = {}
        self._stack = ExitStack()
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
        lab = cls(state, plan, settings)
        try:
            lab._construct()
        except BaseException:
            lab.close()
            raise
        return lab

    def _construct(self) -> None:
        for name in self._plan.namespaces:
            try:
                netns.create(name)
            except KernelError as error:
                if netns.exists(name):
                    self._state.forget_namespace(name)  # taken by someone else since it was planned
                raise error
        self._places = build_switches(self._plan)
        for host in self._plan.hosts:
            build_host(self._plan, host, self._settings)

    @property
    def id(self) -> str:
        return self._plan.lab_id

    @property
    def name(self) -> str:
        return self._state.record.name

    @property
    def namespaces(self) -> tuple[str, ...]:
        return self._plan.namespaces

    def port_of(self, host: str) -> PortPlace:
        """The switch port that faces a host."""
        return self._places[self._host(host).name]

    def _host(self, name: str) -> Host:
        try:
            return self.hosts[name]
        except KeyError:
            raise LabError(f"no host {name} in lab {self.name}; there are {', '.join(self.hosts)}") from None

    def settings(self) -> dict[str, Mapping[str, Any]]:
        """Sysctls, offloads and MTU in force at each host, for the manifest."""
        return {host.name: read_settings(host) for host in self.hosts.values()}

    def socket(self, host: str, kind: Literal["udp", "tcp"], rcvbuf_bytes: int, sndbuf_bytes: int) -> socket.socket:
        """An unbound IPv4 socket inside a host, with at least these buffers (the system's maximum is not in force)."""
        return open_socket(self._host(host).netns, kind, rcvbuf_bytes, sndbuf_bytes)

    def close(self) -> teardown.Removed:
        """Tear down: captures, processes, namespaces, state file. Idempotent; never raises for what is left."""
        if self.removed is None:
            try:
                self._stack.close()
            finally:
                self.removed = teardown.remove(self._state)
                self._state.release()
        return self.removed

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
        )
        try:
            return LabState.create(state_dir, record), plan
        except LabBusy:
            continue
    raise LabError("no free lab id; `dblp-netem status` lists the labs, `dblp-netem clean` removes dead ones")

"""Jobs of a command workload: what each variant and repeat runs in which host, with which environment. Pure, but for
`require_programs`, which looks whether they are installed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dblp.config import DEFAULT_PORT
from netem.analysis.command_expect import check_all
from netem.experiment.hub import SOCKET_NAME
from netem.kernel.errors import Unavailable
from netem.kernel.process import DEFAULT_PATH
from netem.kernel.user import User
from netem.links.base import Flow, Key
from netem.preflight import first_closed
from netem.spec import Command, Loaded, Scenario
from netem.spec.command import Place, filled
from netem.spec.command_file import first_host


@dataclass(frozen=True)
class CommandJob:
    """One variant, one repeat."""

    name: str
    work: Command
    repeat: int
    seed: int

    @property
    def label(self) -> str:
        """For file names."""
        return f"{self.name}-r{self.repeat}"

    @property
    def key(self) -> Key | None:
        """Where a data packet says which transmission it is, if it does."""
        flow = self.work.flow
        return Key(ranges=flow.key) if flow is not None and flow.key else None

    def flow_to(self, host: str) -> Flow | None:
        """The data packets on their way to a host: to the ports, or from them; None: there are none marked as such."""
        flow = self.work.flow
        if flow is None:
            return None
        return Flow(flow.proto, **{"dst_ports" if host in flow.at else "src_ports": flow.ports})

    def flow_from(self, host: str) -> Flow | None:
        """The data packets that a host sends."""
        flow = self.work.flow
        if flow is None:
            return None
        return Flow(flow.proto, **{"src_ports" if host in flow.at else "dst_ports": flow.ports})

    def place(self, host: str, server: str, addresses: Mapping[str, str]) -> Place:
        return Place(host, addresses, server, sys.executable, self.seed, self.repeat, self.name)


def command_of(spec: Scenario) -> Command:
    assert isinstance(spec.workload, Command)
    return spec.workload


def make_command_jobs(spec: Scenario) -> list[CommandJob]:
    """Variants one after another, all of them in every repeat; a repeat has a seed of its own."""
    work = command_of(spec)
    return [CommandJob(name, work, repeat, spec.seed + repeat) for repeat in range(spec.repeats) for name in work.names]


def check_command_scenario(loaded: Loaded) -> None:
    """Raises SpecError, with file and line, for what only the analysis can judge."""
    work = command_of(loaded.spec)
    reports = work.iterations is not None
    check_all(
        loaded.spec.expect,
        work.names,
        loaded.source.error,
        reports=reports,
        bursts=bool(loaded.spec.bursts or loaded.spec.events),
        queues=bool(loaded.spec.queues.at),
    )


def command_environment(job: CommandJob, place: Place, own: Mapping[str, str]) -> dict[str, str]:
    """What torchrun users set, where to report, and the program's own; of the caller's, what sudo did not add."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SUDO_", "DBLP_"))}
    hosts = list(job.work.run)
    ours = {
        "RANK": job.work.ranks[place.host],
        "WORLD_SIZE": len(hosts),
        "MASTER_ADDR": place.addresses[hosts[0]],
        "MASTER_PORT": DEFAULT_PORT,
        "DBLP_EVENTS": SOCKET_NAME,
        "DBLP_NETEM_HOST": place.host,
    }
    # One thread a process unless the program asks for more, as torchrun does: the hosts share these cores.
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**defaults, **inherited, **own, **{key: str(value) for key, value in ours.items()}}


def require_programs(loaded: Loaded, user: User) -> None:
    """That every program can be found and executed by the user. Unavailable (exit status 4) names file and line."""
    spec = loaded.spec
    addresses = dict.fromkeys(spec.topology.hosts, "")
    for job in make_command_jobs(spec):
        for host in job.work.run:
            argv, own = filled(job.work, job.place(host, first_host(spec.topology), addresses))
            place = job.place(host, first_host(spec.topology), addresses)
            problem = _missing(argv[0], command_environment(job, place, own).get("PATH", DEFAULT_PATH), user)
            if problem:
                where = loaded.source.error(("workload", "run", host, "argv"), "")
                raise Unavailable(f"{where}: {problem}", "Install it, or give its path.")


def _missing(program: str, path: str, user: User) -> str:
    """Why a program cannot be executed; empty when it can."""
    if "/" not in program:
        found = shutil.which(program, path=path)
        if found is None:
            return f"no program {program} in PATH ({path})"
        program = found
    if not Path(program).is_absolute():
        return f"{program} is relative to the run folder, which is new: write {{folder}}/{program} for the scenario's"
    if not Path(program).is_file():
        return f"no program {program}"
    if user.is_current:
        return "" if os.access(program, os.X_OK) else f"{program} is not executable"
    closed = first_closed(Path(program), user)
    return f"{user.name} cannot execute {program}: {closed}" if closed else ""

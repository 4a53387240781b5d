"""What works on this machine, found out by trying the real thing in throw-away namespaces; and what to do if not."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from netem import rootless
from netem.kernel.errors import LabError, Unavailable
from netem.kernel.user import User
from netem.lab import Lab
from netem.state import DEFAULT_DIR, StateError

CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21  # linux/capability.h
NEEDED_BYTES = 3 << 30
NEEDED_CORES = 2

NO_NAMESPACE = (
    "In a container, start it with --privileged; otherwise run this on the machine itself or in a virtual one."
)


@dataclass(frozen=True)
class Check:
    """One feature. `needed`: nothing runs without it; the others are needed by some scenarios only."""

    ok: bool
    detail: str
    remedy: str = ""
    needed: bool = False


def require(user: User | None = None) -> None:
    """What `run`, `up` and `exec` need before anything is built. Unavailable (exit status 4) names the remedy."""
    for name, attempt in (("privileges", _privileges), ("user", lambda: _user(user or User.caller()))):
        check = attempt()
        if not check.ok:
            raise Unavailable(f"{name}: {check.detail}", check.remedy)


def require_memory(gradient_bytes: int, workers: int) -> None:
    """That the gradients of a run can fit: 2 at each worker, 3 at the server. Unavailable (exit status 4) if not."""
    needed, total = gradient_bytes * (2 * workers + 3), _meminfo("MemTotal")
    if needed > total:
        raise Unavailable(
            f"memory: a gradient of {_gib(gradient_bytes)} with {workers} workers needs about {_gib(needed)}, "
            f"and this machine has {_gib(total)}",
            "Use a smaller gradient (workload.chunks, workload.shapes) or fewer workers.",
        )


def probe(state_dir: Path = DEFAULT_DIR) -> dict[str, Check]:
    """Kernel features by name, tried in a lab of two hosts: namespace, offload, bpf, netem, tbf, ...

    Without the privilege or the namespaces the others are reported as not tried. Takes about 0.2 s.
    """
    # Here, because it loads everything that a link may need: `up` and `down` mostly do without.
    from netem.spec.topology import star
    from netem.tries import TRIES

    privileges = _privileges()
    checks = {"privileges": privileges}
    if not privileges.ok:
        return checks | dict.fromkeys(TRIES, Check(False, "not tried: needs root", privileges.remedy))
    try:
        lab = Lab.build(star(1, name="doctor"), state_dir=state_dir)
    except (LabError, StateError) as error:
        checks["namespace, veth, bridge"] = Check(False, str(error), NO_NAMESPACE, needed=True)
        return checks | dict.fromkeys(TRIES, Check(False, "not tried: needs a namespace", NO_NAMESPACE))
    with lab:
        detail = f"a lab of {len(lab.namespaces)} namespaces was built"
        checks["namespace, veth, bridge"] = Check(True, detail, needed=True)
        for name, (attempt, remedy) in TRIES.items():
            if name == "bpf" and rootless.inside():
                checks[name] = Check(False, "eBPF programs are the real root's to load: use sudo", "Use sudo.")
                continue
            checks[name] = _try(lambda attempt=attempt: attempt(lab), remedy)  # type: ignore[misc]
    return checks


def doctor(state_dir: Path = DEFAULT_DIR) -> dict[str, Check]:
    """Everything that `probe` tries, and the user, the tools and the size of the machine."""
    checks = probe(state_dir)
    checks["user"] = _caller()
    checks["rootless"] = _rootless()
    checks["capture"] = Check(True, "built in (pcapng)")
    checks["capture expressions"] = _tool("tcpdump", "Needed only for capture filters written as an expression.")
    checks["memory"] = _memory()
    checks["cores"] = _cores()
    return checks


def _try(attempt: Callable[[], str], remedy: str) -> Check:
    from netem.links.base import LinkError, UnsupportedFeature

    try:
        return Check(True, attempt())
    except UnsupportedFeature as error:
        return Check(False, error.detail or str(error), remedy)
    except (LabError, LinkError, OSError) as error:
        return Check(False, str(error), remedy)


def _privileges() -> Check:
    caps = next(
        (
            int(line.split()[1], 16)
            for line in Path("/proc/self/status").read_text().splitlines()
            if line[:6] == "CapEff"
        ),
        0,
    )
    missing = [
        name
        for name, bit in (("CAP_NET_ADMIN", CAP_NET_ADMIN), ("CAP_SYS_ADMIN", CAP_SYS_ADMIN))
        if not caps >> bit & 1
    ]
    if os.geteuid() != 0 or missing:
        why = f"{', '.join(missing)} missing" if missing else f"running as user {os.geteuid()}"
        return Check(False, why, f"Run it with sudo: sudo {_program()} ...", needed=True)
    detail = (
        "root of a user namespace: no eBPF, and socket buffers of rmem_max at most" if rootless.inside() else "root"
    )
    return Check(True, detail, needed=True)


def _rootless() -> Check:
    """For whoever called sudo: whether `run` works without it, on links of netem."""
    user = User.caller()
    if user.uid == 0 and not rootless.inside():
        return Check(False, "not tried: root needs no user namespace", "Call doctor as the user who would run without.")
    try:
        return Check(True, "this is one" if rootless.inside() else rootless.attempt(user))
    except Unavailable as error:
        return Check(False, error.what.removeprefix("rootless: "), error.remedy)


def _program() -> str:
    """How this program was called, for a shell: by its own name, or as `python -m netem.cli`."""
    if Path(sys.argv[0]).name != "cli.py":
        return sys.argv[0] or "dblp-netem"
    found = os.environ.get("PYTHONPATH")  # sudo does not hand it on
    setting = f"env {shlex.quote(f'PYTHONPATH={found}')} " if found else ""
    return f"{setting}{shlex.quote(sys.executable)} -m netem.cli"


def _caller() -> Check:
    try:
        return _user(User.caller())
    except Unavailable as error:
        return Check(False, error.what.removeprefix("user: "), error.remedy, needed=True)


def _user(user: User) -> Check:
    """Whether workloads can run as the user: the interpreter and the packages must be within reach. Tried, as them."""
    if user.is_current:
        return Check(True, f"workloads run as {user.name} (sudo was not used)", needed=True)
    packages = sorted({str(Path(p).resolve()) for p in (Path(__file__).parents[1], *map(Path, sys.path)) if _is_dir(p)})
    code = "import os,sys; print(*(p for p in sys.argv[1:] if not os.access(p, os.R_OK | os.X_OK)), sep='\\n')"
    remedy = f"Install into a folder that {user.name} can read, from a Python that {user.name} can execute (make does)."
    command = [sys.executable, "-I", "-S", "-c", code, *packages]
    try:
        done = subprocess.run(
            command, user=user.uid, group=user.gid, extra_groups=user.groups, cwd="/", timeout=30,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        block = first_closed(Path(sys.executable), user)
        detail = f"{user.name} cannot execute {sys.executable}: {block or error}"
        return Check(False, detail, remedy, needed=True)
    closed = done.stdout.split("\n")[0] if done.returncode == 0 else f"{sys.executable} ({done.stderr.strip()[-200:]})"
    if closed:
        return Check(False, f"{user.name} cannot read {closed}", remedy, needed=True)
    return Check(True, f"workloads run as {user.name}", needed=True)


def _is_dir(path: str | Path) -> bool:
    return bool(str(path)) and Path(path).is_dir()


def first_closed(path: Path, user: User) -> str | None:
    """The first part of a path, links followed, that the user may not pass or execute; None when all is open."""
    for part in _steps(path):
        try:
            mode = part.stat()
        except OSError as error:
            return f"{part}: {error.strerror}"
        if not _may_execute(mode, user):
            return f"{part} is closed to them ({stat.filemode(mode.st_mode)})"
    return None


def _steps(path: Path) -> Iterable[Path]:
    """The folders on the way to a file, the file, and the same for what a link points to."""
    for each in (Path(os.path.abspath(path)), Path(os.path.realpath(path))):
        yield from (*reversed(each.parents), each)


def _may_execute(status: os.stat_result, user: User) -> bool:
    if user.uid == 0:
        return True
    if status.st_uid == user.uid:
        return bool(status.st_mode & stat.S_IXUSR)
    if status.st_gid == user.gid or status.st_gid in user.groups:
        return bool(status.st_mode & stat.S_IXGRP)
    return bool(status.st_mode & stat.S_IXOTH)


def _tool(name: str, why: str) -> Check:
    path = shutil.which(name)
    return Check(path is not None, path or f"{name} is not installed", "" if path else f"{why} Install {name}.")


def _memory() -> Check:
    available = _meminfo("MemAvailable")
    remedy = "" if available >= NEEDED_BYTES else "Close other programs, or use fewer workers or a `replay` workload."
    return Check(available >= NEEDED_BYTES, f"{available / 2**30:.1f} GiB available, 3 GiB needed", remedy)


def _meminfo(name: str) -> int:
    """Bytes (proc(5))."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0))
    remedy = "" if cores >= NEEDED_CORES else "Results of a saturated machine are marked; give it two cores."
    return Check(cores >= NEEDED_CORES, f"{cores} usable, {NEEDED_CORES} needed", remedy)

"""What works on this machine, found out by trying the real thing in throw-away namespaces; and what to do if not."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from netem.kernel import offload, qdisc
from netem.kernel.errors import KernelError, LabError, Unavailable
from netem.kernel.netns import call_in, open_netlink
from netem.kernel.user import User
from netem.kernel.veth import index_of
from netem.lab import Lab
from netem.links.base import Flow, Key, LinkError, LossRule, Shape, UnsupportedFeature
from netem.links.bpf import BpfPort
from netem.links.netem import NetemPort
from netem.spec.topology import star
from netem.state import DEFAULT_DIR, StateError

CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21  # linux/capability.h
SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104  # linux/udp.h
NEEDED_BYTES = 3 << 30
NEEDED_CORES = 2

_FLOW, _KEY = Flow("udp", dst_ports=(29600, 29699)), Key(ranges=((4, 14),), index=(4, 8))
_SOURCE = "10.77.0.2"
_HANDLE = 0x10000  # 1:

NO_NAMESPACE = (
    "In a container, start it with --privileged; otherwise run this on the machine itself or in a virtual one."
)
NO_NETEM = (
    "Use the backend `bpf` (chosen by itself), or a kernel that has it: Debian linux-image-amd64 (not the cloud "
    "image), Ubuntu linux-modules-extra-$(uname -r), RHEL and Fedora kernel-modules-extra; WSL2 and micro-VMs have "
    "none."
)
NO_BPF = "Use the backend `netem`, or a kernel with CONFIG_BPF_SYSCALL, CONFIG_NET_CLS_BPF and CONFIG_NET_SCH_INGRESS."
NO_TBF = "A link without `rate` works. For a rate: a kernel with CONFIG_NET_SCH_TBF (RHEL: kernel-modules-extra)."


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
    privileges = _privileges()
    checks = {"privileges": privileges}
    if not privileges.ok:
        return checks | dict.fromkeys(_TRIES, Check(False, "not tried: needs root", privileges.remedy))
    try:
        lab = Lab.build(star(1, name="doctor"), state_dir=state_dir)
    except (LabError, StateError) as error:
        checks["namespace, veth, bridge"] = Check(False, str(error), NO_NAMESPACE, needed=True)
        return checks | dict.fromkeys(_TRIES, Check(False, "not tried: needs a namespace", NO_NAMESPACE))
    with lab:
        detail = f"a lab of {len(lab.namespaces)} namespaces was built"
        checks["namespace, veth, bridge"] = Check(True, detail, needed=True)
        for name, (attempt, remedy) in _TRIES.items():
            checks[name] = _try(lambda attempt=attempt: attempt(lab), remedy)  # type: ignore[misc]
    return checks


def doctor(state_dir: Path = DEFAULT_DIR) -> dict[str, Check]:
    """Everything that `probe` tries, and the user, the tools and the size of the machine."""
    checks = probe(state_dir)
    checks["user"] = _caller()
    checks["capture"] = Check(True, "built in (pcapng)")
    checks["capture expressions"] = _tool("tcpdump", "Needed only for capture filters written as an expression.")
    checks["memory"] = _memory()
    checks["cores"] = _cores()
    return checks


def _try(attempt: Callable[[], str], remedy: str) -> Check:
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
    return Check(True, "root", needed=True)


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


def _try_offload(lab: Lab) -> str:
    host = lab.hosts["server"]
    features = offload.read(host.netns, host.ifname)
    return f"{len(features)} features can be set; GRO is {'on' if features.get(offload.GRO) else 'off'}"


def _try_bpf(lab: Lab) -> str:
    place = lab.port_of("server")
    port = BpfPort("probe", place.netns, place.ifname)
    try:
        port.install(Shape(), _FLOW, _KEY, [_SOURCE])
        port.set_loss([LossRule(_SOURCE, 1, 0.5)])
    finally:
        port.close()
    return "the loss program was loaded and attached to clsact"


def _try_jit(lab: Lab) -> str:
    path = Path("/proc/sys/net/core/bpf_jit_enable")
    try:
        value = path.read_text().strip()
    except OSError:  # kernels that always compile (CONFIG_BPF_JIT_ALWAYS_ON) may not show it to all
        return "not shown by this kernel"
    if value == "0":
        raise LabError("net.core.bpf_jit_enable is 0: programs are interpreted, which costs a few percent")
    return "on"


def _try_netem(lab: Lab) -> str:
    place = lab.port_of("worker1")
    port = NetemPort("probe", place.netns, place.ifname)
    try:
        port.install(Shape(delay_us=1000), _FLOW, _KEY, [_SOURCE])
        port.set_loss([LossRule(_SOURCE, 1, 0.5)])
    finally:
        port.close()
    return "delay and loss were set and read back"


def _try_qdisc(lab: Lab, wanted: qdisc.Qdisc) -> str:
    host = lab.hosts["worker1"]
    netlink = open_netlink(host.netns)
    try:
        index = index_of(netlink, host.ifname)
        try:
            qdisc.execute(netlink, index, qdisc.plan((), (wanted,)))
        except KernelError as error:
            if error.code == errno.ENOENT:
                raise LabError(f"this kernel has no sch_{type(wanted).__name__.lower()}") from error
            raise
        qdisc.verify(qdisc.dump(netlink, index), (wanted,))
        qdisc.execute(netlink, index, qdisc.plan((wanted,), ()))
    finally:
        netlink.close()
    return "was added, read back and removed"


def _try_udp_offload(lab: Lab, option: int) -> str:
    host = lab.hosts["worker1"]

    def exchange() -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind((host.address, 0))
            if option == UDP_GRO:
                sock.setsockopt(SOL_UDP, UDP_GRO, 1)
                return "a socket takes merged packets"
            segment = [(SOL_UDP, UDP_SEGMENT, (1000).to_bytes(2, sys.byteorder))]
            sock.sendmsg([bytes(4000)], segment, 0, (lab.hosts["server"].address, 9))
            return "four datagrams were sent with one call"

    return call_in(host.netns, exchange)


_SLOW = "It works without, but slower: one system call for each packet."

_TRIES: dict[str, tuple[Callable[[Lab], str], str]] = {
    "offload": (_try_offload, "Kernel 4.10 or newer."),
    "bpf": (_try_bpf, NO_BPF),
    "bpf jit": (_try_jit, "It works without, but slower. To switch it on: sysctl net.core.bpf_jit_enable=1"),
    "netem": (_try_netem, NO_NETEM),
    "tbf": (lambda lab: _try_qdisc(lab, qdisc.Tbf(_HANDLE, qdisc.ROOT, 10**9, 65536, 1 << 20)), NO_TBF),
    "prio": (lambda lab: _try_qdisc(lab, qdisc.Prio(_HANDLE, qdisc.ROOT, 3)), "Needed by the backend `netem` only."),
    "udp segmentation": (lambda lab: _try_udp_offload(lab, UDP_SEGMENT), _SLOW),
    "udp gro": (lambda lab: _try_udp_offload(lab, UDP_GRO), _SLOW),
}


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

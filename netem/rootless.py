"""Runs without root: this process becomes root of a user namespace of its own (user_namespaces(7)).

It may then make network namespaces, links and netem qdiscs, which exist nowhere else and end with the process; loading
eBPF programs stays the real root's. Some systems allow no user namespaces, or none with privileges (AppArmor on Ubuntu
24.04): only a try tells.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

from netem.kernel import syscalls
from netem.kernel.errors import Unavailable
from netem.kernel.user import User

REMEDY = (
    "Use sudo. Or allow user namespaces: sysctl kernel.unprivileged_userns_clone=1 (Debian), "
    "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu 24.04), user.max_user_namespaces (RHEL); not in containers "
    "without --privileged."
)
TRY_LIMIT_S = 30
RUNTIME = Path("/run")


def enter() -> None:
    """Moves this process, for good, into a user namespace in which it is root, with mounts and a network of its own.

    Call it before threads are made. /run becomes an empty file system of this process and its
    children: namespaces and state files lie there, and leave with it. Unavailable (exit status 4) when it is refused.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        raise Unavailable("rootless: a process that has threads cannot enter a user namespace", REMEDY)
    uid, gid = os.geteuid(), os.getegid()
    attempted = "make a user namespace"
    try:
        syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS | syscalls.CLONE_NEWNET)
        attempted = "become root of a user namespace"
        Path("/proc/self/setgroups").write_text("deny")  # before gid_map, or that is refused
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        attempted = "mount file systems in a user namespace"
        syscalls.mount("", "/", syscalls.MS_PRIVATE | syscalls.MS_REC)
        syscalls.mount("tmpfs", str(RUNTIME), 0, kind="tmpfs")
    except OSError as error:
        raise Unavailable(f"rootless: {attempted}: {os.strerror(error.errno or errno.EPERM)}", REMEDY) from error


def inside(uid_map: Path = Path("/proc/self/uid_map")) -> bool:
    """Whether this process is in a user namespace that does not map every user to itself."""
    return uid_map.read_text().split() != ["0", "0", "4294967295"]


def attempt(user: User) -> str:
    """Tries it as a user, in a process of its own, with a network namespace as a lab has it. What worked.

    Raises Unavailable with the reason.
    """
    identity = {} if user.is_current else {"user": user.uid, "group": user.gid, "extra_groups": user.groups}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "netem.rootless"], cwd="/", capture_output=True, text=True, timeout=TRY_LIMIT_S,
            check=False, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}, **identity,
        )  # type: ignore[call-overload]  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"rootless: {error}", REMEDY) from error
    if done.returncode != 0:
        raise Unavailable((done.stderr.strip().splitlines() or ["ended without a reason"])[-1], REMEDY)
    return str(done.stdout.strip())


def _main() -> int:
    from netem.kernel import netns
    from netem.kernel.errors import LabError

    try:
        enter()
        netns.create("try")
        netns.open_inside("try").close()
        netns.remove("try")
    except LabError as error:
        sys.stderr.write(f"{getattr(error, 'what', error)}\n")
        return 1
    sys.stdout.write("a network namespace was made without root\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main())

"""User-mode Linux: a kernel that runs as an ordinary program, so that it needs neither KVM nor root.

Computation is as fast as on the machine itself, in the kernel too; a system call takes some 20 us, and there is one
processor (Documentation/virt/uml in the kernel's tree).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from netem.vm.machine import Machine

PROGRAM = "linux.uml"
PACKAGE = "user-mode Linux (Debian: apt-get install user-mode-linux)"
MODULE_FOLDERS = (Path("/usr/lib/uml/modules"), Path("/lib/modules"))
BOOT_LIMIT_S = 60.0
VERSION_LIMIT_S = 10.0
ADVICE = "one processor, on which system calls are slow: latencies are reported, not judged (`latencies: reported`)"
_ELF = b"\x7fELF"
# The root is read-only and under a layer in memory, as soon as that can be mounted. The consoles are pipes: 1 for what
# is said on standard output, 2 for standard error.
_INIT = """\
#!/bin/sh
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
HOME=/root
export PATH HOME
modules={modules}
mount -t proc proc /proc
if ! grep -qw overlay /proc/filesystems; then insmod "$modules"/kernel/fs/overlayfs/overlay.ko || exit 1; fi
mount -t tmpfs -o size=80% tmpfs /run || exit 1
mkdir /run/upper /run/work /run/root
mount -t overlay -o lowerdir=/,upperdir=/run/upper,workdir=/run/work overlay /run/root || exit 1
cd /run/root || exit 1
mkdir -p old
pivot_root . old || exit 1
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
if [ -n "$modules" ]; then
    mkdir -p /lib/modules/"$(uname -r)"
    mount --rbind /old"$modules" /lib/modules/"$(uname -r)"
fi
umount -l /old
rmdir /old
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup 2>/dev/null
ip link set lo up
echo dblp-netem > /proc/sys/kernel/hostname
mount -t hostfs -o {shared} hostfs {shared} || exit 1
cd {cwd} || exit 1
stty -F /dev/tty1 raw
stty -F /dev/tty2 raw
{{ {{ /bin/sh -c {script}; }} 2>&1 1>&3 3>&- | cat > /dev/tty2; }} 3>&1 | cat > /dev/tty1
sync
echo o > /proc/sysrq-trigger
sleep 60
"""


@dataclass(frozen=True)
class UserModeLinux:
    """kernel: the program. modules: the folder of its modules; None where everything is built in."""

    kernel: Path
    release: str
    modules: Path | None
    advice: str = ADVICE
    boot_limit_s: float | None = BOOT_LIMIT_S
    full_speed: bool = False

    @property
    def name(self) -> str:
        return f"user-mode Linux {self.release}"

    def command_line(self, machine: Machine, script: str, cwd: Path, shared: Path) -> list[str]:
        """Writes the machine's first program beside what it shares."""
        init = shared / "init"
        parts = {"modules": str(self.modules or ""), "shared": str(shared), "cwd": str(cwd), "script": script}
        init.write_text(_INIT.format(**{name: shlex.quote(text) for name, text in parts.items()}))
        init.chmod(0o755)
        argv = [*_one_processor(), str(self.kernel), f"mem={machine.memory}", "rootfstype=hostfs", "rootflags=/", "ro"]
        argv += [f'init="{init}"', f"uml_dir={shared}", "umid=uml", "con=null"]
        argv += ["con0=null,fd:2"] if machine.verbose else ["con0=null", "quiet"]
        return [*argv, "con1=null,fd:1", "con2=null,fd:2"]

    def environment(self) -> Mapping[str, str]:
        return {}


def find(program: Path | None = None) -> UserModeLinux | None:
    """The kernel that was asked for, or the one on PATH; None where there is none, or its modules lack sch_netem."""
    found = program or (Path(where) if (where := shutil.which(PROGRAM)) else None)
    release = version(found) if found else None
    if found is None or release is None:
        return None
    folders = [folder / release for folder in MODULE_FOLDERS if (folder / release).is_dir()]
    modules = next((folder for folder in folders if any((folder / "kernel/net/sched").glob("sch_netem.ko*"))), None)
    return None if folders and modules is None else UserModeLinux(found, release, modules)


def version(program: Path) -> str | None:
    """The release of a user-mode kernel; None if it is something else."""
    if not is_program(program):
        return None
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=VERSION_LIMIT_S, check=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    text = done.stdout.strip()
    return text if re.match(r"\d+\.\d+", text) else None


def is_program(file: Path) -> bool:
    """Whether a kernel image is a program and so user-mode Linux: those for /boot begin with code for the BIOS."""
    try:
        with file.open("rb") as image:
            return image.read(len(_ELF)) == _ELF
    except OSError:
        return False


def _one_processor() -> list[str]:
    """It has one processor, but is several processes that take turns: seven times faster where they share a core."""
    if not shutil.which("taskset"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    return ["taskset", "--cpu-list", str(cores[os.getpid() % len(cores)])]

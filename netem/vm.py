"""A throw-away kernel that has sch_netem, over the user's own files: for hosts without netem, or without root.

virtme-ng boots a kernel from /boot with this machine's root file system, changes to which are thrown away; only folders
that are handed in keep what is written to them. With KVM it is about as fast as the machine; without, QEMU emulates the
processor, some fifteen times slower.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from netem.kernel.errors import Unavailable
from netem.kernel.user import User

KVM, CPUINFO = Path("/dev/kvm"), Path("/proc/cpuinfo")
_KVM_CREATE_VM = 0xAE01  # linux/kvm.h
BOOT_FOLDER, MODULES = Path("/boot"), Path("/lib/modules")
# Devices of the emulated PC that nothing here uses: without them the machine boots in half the time.
UNUSED_MODULES = (
    "kvm_amd,kvm_intel,kvm,ccp,irqbypass,ahci,libahci,libata,sr_mod,cdrom,sg,i2c_i801,i2c_smbus,lpc_ich,iTCO_wdt,"
    "pcspkr,psmouse,evdev,i6300esb,ghash_clmulni_intel,aesni_intel,sha512_ssse3,sha256_ssse3,sha1_ssse3,"
    "crct10dif_pclmul,crc32_pclmul,crc32c_intel,powernow_k8,acpi_cpufreq,button,qemu_fw_cfg,serio_raw,joydev"
)
KVM_BOOT_LIMIT_S = 60.0
"""A machine with KVM has booted by then, or never will."""
KILL_LIMIT_S = 10.0
POLL_S = 0.1
# What a program in the machine sees of the caller's environment: who called sudo, and the product's own variables.
_HANDED_ON = ("SUDO_UID", "SUDO_GID", "SUDO_USER", "PYTHONPATH", "TERM", "LANG", "LC_ALL", "COLUMNS", "NO_COLOR")


class MachineFailed(Exception):
    """The virtual machine did not boot, or did not end in time; the message has its last words."""


class NotBooted(MachineFailed):
    """No program has run in the machine."""


@dataclass(frozen=True)
class Tools:
    """What a virtual machine needs, as found: paths, or None where it is missing."""

    vng: Path | None
    qemu: Path | None
    busybox: Path | None
    kernel: Path | None

    def missing(self) -> list[str]:
        """What is not there, each with what to do."""
        found = {
            "virtme-ng (pip install virtme-ng)": self.vng,
            "qemu-system-x86_64 (Debian, Ubuntu: apt-get install qemu-system-x86)": self.qemu,
            "a static busybox (Debian, Ubuntu: apt-get install busybox-static)": self.busybox,
            "a readable kernel with sch_netem in /boot (Debian: apt-get install linux-image-amd64; Ubuntu: "
            "linux-image-generic linux-modules-extra-..., and chmod +r /boot/vmlinuz-*; or name one with --kernel)": (
                self.kernel
            ),
        }
        return [what for what, where in found.items() if where is None]


@dataclass(frozen=True)
class Machine:
    """How to boot. `memory` as QEMU takes it. `kept`: a folder that exists; what is new in it comes back at the end."""

    kernel: Path
    kvm: bool
    cpus: int = 2
    memory: str = "4G"
    kept: Path | None = None
    verbose: bool = False
    unused_modules: str = field(default=UNUSED_MODULES, repr=False)


def find_tools(kernel: Path | None = None) -> Tools:
    """`kernel`: the one that was asked for; otherwise $DBLP_NETEM_VM_KERNEL, or the newest that has sch_netem."""
    beside = Path(sys.executable).parent / "vng"
    chosen = kernel or (Path(os.environ["DBLP_NETEM_VM_KERNEL"]) if os.environ.get("DBLP_NETEM_VM_KERNEL") else None)
    return Tools(
        vng=beside if beside.exists() else _which("vng"),
        qemu=_which("qemu-system-x86_64"),
        busybox=_which("busybox"),
        kernel=chosen or newest_kernel(),
    )


def _which(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found else None


def newest_kernel(boot: Path = BOOT_FOLDER, modules: Path = MODULES) -> Path | None:
    """The newest kernel image that may be read and whose modules are here and have sch_netem."""
    images = [
        image
        for image in boot.glob("vmlinuz-*")
        if any((modules / image.name.removeprefix("vmlinuz-") / "kernel/net/sched").glob("sch_netem.ko*"))
        and os.access(image, os.R_OK)
    ]
    return max(images, key=lambda image: image.stat().st_mtime, default=None)


def kvm_offered(cpuinfo: Path = CPUINFO) -> bool:
    """Whether KVM is worth a try: the processor helps, and a virtual machine can be made."""
    flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "").split()
    if not {"vmx", "svm"} & set(flags):
        return False
    try:
        device = os.open(KVM, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.close(fcntl.ioctl(device, _KVM_CREATE_VM, 0))
    except OSError:
        return False
    finally:
        os.close(device)
    return True


def require_tools(kernel: Path | None = None) -> Tools:
    """Unavailable (exit status 4) names everything that is missing, and what to install."""
    if kernel is not None and not os.access(kernel, os.R_OK):
        raise Unavailable(
            f"kernel {kernel}: not a file that can be read", "Name a kernel image such as /boot/vmlinuz-6.1."
        )
    tools = find_tools(kernel)
    if lacking := tools.missing():
        raise Unavailable("a virtual machine needs " + "; ".join(lacking), "Install what is named, then try again.")
    return tools


def command_line(machine: Machine, tools: Tools, script: str, cwd: Path, shared: Path) -> list[str]:
    """The argument vector of virtme-ng. `script` is for the shell in the machine, which is all that it takes.

    Of this machine's files only those in `shared` can be changed, and Unix sockets cannot be made there.
    """
    argv = [str(tools.vng), "--run", str(machine.kernel), "--user", "root", "--cwd", str(cwd)]
    argv += ["--cpus", str(machine.cpus), "--memory", machine.memory]
    argv += [] if machine.kvm else ["--disable-kvm"]
    argv += ["--verbose"] if machine.verbose else []
    return [*argv, "--rwdir", str(shared), "--append", f"module_blacklist={machine.unused_modules}", "--", script]


def run(
    machine: Machine, tools: Tools, argv: Sequence[str], *, cwd: Path, limit_s: float, output: int | None = None
) -> int:
    """Runs a program in the machine as root and returns its exit status.

    output: file descriptor for what it and the machine say; None: the caller's own.

    Raises NotBooted when it has shown no sign of life, MachineFailed when there is no status for another reason.
    Nothing is left running.
    """
    with tempfile.TemporaryDirectory(prefix="dblp-netem-vm-") as name:
        shared = Path(name)
        alive, status, results = (shared / part for part in ("alive", "status", "results"))
        results.mkdir()
        script = _script([*_environment(), *argv], machine.kept, alive, status, results)
        child = _start(command_line(machine, tools, script, cwd, shared), tools, cwd)
        copies = _copy(child, output)
        try:
            _await(child, alive, limit_s, KVM_BOOT_LIMIT_S if machine.kvm else limit_s)
        finally:
            _end(child)
            for copy in copies:
                copy.join(KILL_LIMIT_S)
            if machine.kept is not None:
                _bring_back(results, machine.kept)
        text = status.read_text().strip() if status.exists() else ""
        booted = alive.exists()
    if text.isdigit():
        return int(text)
    if not booted:
        raise NotBooted(f"the virtual machine with {machine.kernel} did not boot: --verbose shows what its kernel says")
    raise MachineFailed(f"the virtual machine with {machine.kernel} ended before the program in it did")


def _script(program: Sequence[str], kept: Path | None, alive: Path, status: Path, results: Path) -> str:
    """The machine has a file system of its own in place of `kept`, as sockets need it; its content is copied out."""
    a, s, r, k = (shlex.quote(str(path)) for path in (alive, status, results, kept))
    lines = [f"echo > {a}", shlex.join(program), "result=$?", f"echo $result > {s}"]
    if kept is not None:
        lines[1:1] = [f"mount -t tmpfs tmpfs {k}"]
        lines[4:4] = [f"cp -r --preserve=mode,timestamps {k}/. {r}"]
    return "; ".join(lines)


def _bring_back(results: Path, kept: Path) -> None:
    """Moves what is new, and gives it to whoever called sudo."""
    user = User.caller()
    for entry in results.iterdir():
        if (kept / entry.name).exists():
            continue
        place = Path(shutil.move(entry, kept / entry.name))
        if not user.is_current:
            for path in (place, *place.rglob("*")):
                os.chown(path, user.uid, user.gid, follow_symlinks=False)


def _environment() -> list[str]:
    """As arguments of env(1)."""
    return ["env", *(f"{name}={os.environ[name]}" for name in _HANDED_ON if name in os.environ)]


def _start(vector: Sequence[str], tools: Tools, cwd: Path) -> subprocess.Popen[bytes]:
    # virtme-ng looks for its helpers on PATH.
    path = f"{tools.vng.parent if tools.vng else ''}:{os.environ.get('PATH', os.defpath)}"
    return subprocess.Popen(
        vector, cwd=cwd, env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def _copy(child: subprocess.Popen[bytes], output: int | None) -> list[threading.Thread]:
    """Through pipes: the machine opens its output anew, and would write over a file from the start."""

    def copy(source: int, target: int) -> None:
        while data := os.read(source, 1 << 16):
            while data:
                data = data[os.write(target, data) :]

    assert child.stdout is not None
    assert child.stderr is not None
    pairs = [(child.stdout, 1 if output is None else output), (child.stderr, 2 if output is None else output)]
    threads = [threading.Thread(target=copy, args=(each.fileno(), target), daemon=True) for each, target in pairs]
    for thread in threads:
        thread.start()
    return threads


def _await(child: subprocess.Popen[bytes], alive: Path, limit_s: float, boot_limit_s: float) -> None:
    began = time.monotonic()
    while not alive.exists():
        if child.poll() is not None or time.monotonic() - began > boot_limit_s:
            return
        time.sleep(POLL_S)  # a folder of another kernel: nothing tells when it changes
    try:
        child.wait(timeout=max(0.0, limit_s - (time.monotonic() - began)))
    except subprocess.TimeoutExpired:
        raise MachineFailed(f"the virtual machine was not done in {limit_s:g} s; see --limit") from None


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # its helpers too
    child.wait(timeout=KILL_LIMIT_S)

"""A kernel from /boot under QEMU, by virtme-ng: with KVM about as fast as the machine, without some 15 times slower."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from netem.vm.machine import Machine

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
EMULATED = (
    "no usable KVM: the processor is emulated, some 15 times slower; latencies are reported, not judged. A replay "
    "scenario such as burst90-replay is the sensible choice; training takes very long. User-mode Linux is much faster "
    "(Debian: apt-get install user-mode-linux)."
)


@dataclass(frozen=True)
class Tools:
    """What virtme-ng needs, as found: paths, or None where it is missing."""

    vng: Path | None
    qemu: Path | None
    busybox: Path | None
    kernel: Path | None

    @classmethod
    def find(cls, kernel: Path | None = None) -> Tools:
        """kernel: the one that was asked for; otherwise the newest that has sch_netem."""
        beside = Path(sys.executable).parent / "vng"
        return cls(
            vng=beside if beside.exists() else _which("vng"),
            qemu=_which("qemu-system-x86_64"),
            busybox=_which("busybox"),
            kernel=kernel or newest_kernel(),
        )

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
class Virtme:
    """QEMU. The tools have to be complete."""

    tools: Tools
    kvm: bool

    @property
    def kernel(self) -> Path:
        assert self.tools.kernel is not None
        return self.tools.kernel

    @property
    def name(self) -> str:
        return "KVM" if self.kvm else "emulation"

    @property
    def advice(self) -> str:
        return "" if self.kvm else EMULATED

    @property
    def boot_limit_s(self) -> float | None:
        return KVM_BOOT_LIMIT_S if self.kvm else None

    @property
    def full_speed(self) -> bool:
        return self.kvm

    def command_line(self, machine: Machine, script: str, cwd: Path, shared: Path) -> list[str]:
        argv = [str(self.tools.vng), "--run", str(self.kernel), "--user", "root", "--cwd", str(cwd)]
        argv += ["--cpus", str(machine.cpus), "--memory", machine.memory]
        argv += [] if self.kvm else ["--disable-kvm"]
        argv += ["--verbose"] if machine.verbose else []
        return [*argv, "--rwdir", str(shared), "--append", f"module_blacklist={UNUSED_MODULES}", "--", script]

    def environment(self) -> Mapping[str, str]:
        """virtme-ng looks for its helpers on PATH."""
        folder = self.tools.vng.parent if self.tools.vng else ""
        return {"PATH": f"{folder}:{os.environ.get('PATH', os.defpath)}"}


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

"""The vm tier: one virtual machine for the session boots a kernel with sch_netem and runs guest_checks.py.

Its root file system is this machine's, with changes thrown away (virtme-ng); only the results folder is shared for
writing. DBLP_NETEM_VM_KERNEL=/boot/vmlinuz-... chooses the kernel. By hand, with the virtual environment on PATH:

    vng --run /boot/vmlinuz-VERSION --disable-kvm --cpus 2 --memory 2G --user root --rwdir DIR -- \
        python tests/vm/guest_checks.py DIR/result.json [CHECK...]
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GUEST_LIMIT_S = 1200  # 90 s where two cores are free; the emulation shares them with whatever runs beside it
# Devices of the emulated PC that nothing here uses: without them the machine boots in half the time.
UNUSED_MODULES = (
    "kvm_amd,kvm_intel,kvm,ccp,irqbypass,ahci,libahci,libata,sr_mod,cdrom,sg,i2c_i801,i2c_smbus,lpc_ich,iTCO_wdt,"
    "pcspkr,psmouse,evdev,i6300esb,ghash_clmulni_intel,aesni_intel,sha512_ssse3,sha256_ssse3,sha1_ssse3,"
    "crct10dif_pclmul,crc32_pclmul,crc32c_intel,powernow_k8,acpi_cpufreq,button,qemu_fw_cfg,serio_raw,joydev"
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "check(name): whose measurements in the machine the test is about")


def kernel_image() -> Path | None:
    """The newest kernel in /boot whose modules are here and have sch_netem."""
    chosen = os.environ.get("DBLP_NETEM_VM_KERNEL")
    if chosen:
        return Path(chosen)
    images = [
        image
        for image in Path("/boot").glob("vmlinuz-*")
        if any(Path("/lib/modules", image.name[8:], "kernel/net/sched").glob("sch_netem.ko*"))
        and os.access(image, os.R_OK)
    ]
    return max(images, key=lambda image: image.stat().st_mtime, default=None)


def find_vng() -> str | None:
    beside = Path(sys.executable).parent / "vng"
    return str(beside) if beside.exists() else shutil.which("vng")


def missing() -> list[str]:
    """What this machine lacks, each with what to do."""
    found = {
        "virtme-ng (pip install virtme-ng)": find_vng(),
        "qemu-system-x86_64 (Debian: apt-get install qemu-system-x86)": shutil.which("qemu-system-x86_64"),
        "busybox (Debian: apt-get install busybox-static)": shutil.which("busybox"),
        "a readable kernel with sch_netem in /boot (Debian: apt-get install linux-image-amd64)": kernel_image(),
    }
    return [what for what, where in found.items() if where is None]


def boot(command: str, results: Path, log: Path) -> int:
    """Run a shell command in the machine; its output and the kernel's messages go to `log`. Exit status."""
    vng, image = find_vng(), kernel_image()
    assert vng
    assert image
    argv = [vng, "--verbose", "--run", str(image), "--disable-kvm", "--cpus", "2", "--memory", "2G"]
    argv += ["--user", "root", "--rwdir", str(results), "--append", f"module_blacklist={UNUSED_MODULES}"]
    # vng looks for its helpers on PATH.
    environment = {**os.environ, "PATH": f"{Path(vng).parent}:{os.environ.get('PATH', os.defpath)}"}
    with log.open("wb") as output:
        machine = subprocess.Popen(
            [*argv, "--", command],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            return machine.wait(timeout=GUEST_LIMIT_S)
        finally:
            if machine.poll() is None:
                os.killpg(machine.pid, signal.SIGKILL)
                machine.wait(timeout=10)


@pytest.fixture(scope="session")
def guest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What guest_checks.py measured, by check."""
    lacking = missing()
    if lacking:
        text = f"the vm tier needs {'; '.join(lacking)}, or run tests/vm/requirements.sh as root"
        pytest.fail(text) if os.environ.get("CI") else pytest.skip(text)
    results = tmp_path_factory.mktemp("vm")
    result, log = results / "result.json", results / "machine.log"
    script = [sys.executable, "-B", str(HERE / "guest_checks.py"), str(result)]
    status = boot(shlex.join(script), results, log)
    if not result.exists():
        pytest.fail(f"the machine gave no result, status {status}: {log}\n{log.read_text(errors='replace')[-3000:]}")
    return json.loads(result.read_text())


@pytest.fixture
def measured(guest: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    """The measurements of the check that the test's `check` marker, else its name, says."""
    marker = request.node.get_closest_marker("check")
    name = marker.args[0] if marker else request.node.originalname.removeprefix("test_")
    found = guest.get(name)
    if found is None or "error" in found:
        pytest.fail(f"check {name} in the machine: {(found or {}).get('error', 'did not run')}")
    return found

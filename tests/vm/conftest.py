"""The vm tier: one virtual machine for the session boots a kernel with sch_netem and runs guest_checks.py.

Its root file system is this machine's, with changes thrown away; only what is written to the results folder comes back
(netem/vm.py). DBLP_NETEM_VM_KERNEL=/boot/vmlinuz-... chooses the kernel. By hand, with the virtual environment on PATH:

    vng --run /boot/vmlinuz-VERSION --disable-kvm --cpus 2 --memory 2G --user root --rwdir DIR -- \
        python tests/vm/guest_checks.py DIR/result.json [CHECK...]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from netem import vm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GUEST_LIMIT_S = 1200  # 90 s where two cores are free; the emulation shares them with whatever runs beside it


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "check(name): whose measurements in the machine the test is about")


def boot(script: list[str], tools: vm.Tools, results: Path, log: Path) -> int | str:
    """Run a program in the machine; what it and its kernel say goes to `log`. Exit status, or what went wrong."""
    assert tools.kernel
    machine = vm.Machine(tools.kernel, kvm=False, memory="2G", kept=results, verbose=True)
    with log.open("wb") as output:
        try:
            return vm.run(machine, tools, script, cwd=ROOT, limit_s=GUEST_LIMIT_S, output=output.fileno())
        except vm.MachineFailed as error:
            return str(error)


@pytest.fixture(scope="session")
def guest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What guest_checks.py measured, by check."""
    tools = vm.find_tools()
    if tools.missing():
        text = f"the vm tier needs {'; '.join(tools.missing())}, or run tests/vm/requirements.sh as root"
        pytest.fail(text) if os.environ.get("CI") else pytest.skip(text)
    results = tmp_path_factory.mktemp("vm")
    result, log = results / "result.json", tmp_path_factory.mktemp("vm-log") / "machine.log"
    script = [sys.executable, "-B", str(HERE / "guest_checks.py"), str(result)]
    status = boot(script, tools, results, log)
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

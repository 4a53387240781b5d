"""The vm tier: a kernel with sch_netem runs guest_checks.py, one boot of each engine for the session.

All checks run under user-mode Linux, a few again on Debian's own kernel on an emulated processor (netem/vm). The root
file system is this machine's, with changes thrown away; only what is written to the results folder comes back.
DBLP_NETEM_VM_KERNEL=... chooses another kernel for all of them. By hand, as root:

    dblp-netem vm --help, or python tests/vm/guest_checks.py result.json [CHECK...] on a machine with netem
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from netem import vm
from netem.kernel.errors import Unavailable
from netem.vm.virtme import Tools, Virtme

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GUEST_LIMIT_S = 1200  # 90 s where a core is free; it shares them with whatever runs beside it
EMULATED_CHECKS = ("kernel", "delay", "loss_90", "change_in_place", "every_option", "burst_run")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "check(name): whose measurements in the machine the test is about")


def _lacking(text: str) -> NoReturn:
    text = f"{text}, or run tests/vm/requirements.sh as root"
    pytest.fail(text) if os.environ.get("CI") else pytest.skip(text)


def _measure(engine: vm.Engine, folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """What guest_checks.py found in the machine, by check; what the machine said goes beside it."""
    results, log = folder / "results", folder / "machine.log"
    results.mkdir()
    result = results / "result.json"
    script = [sys.executable, "-B", str(HERE / "guest_checks.py"), str(result), *names]
    machine = vm.Machine(memory="2G", kept=results, verbose=True)
    with log.open("wb") as output:
        try:
            status: int | str = vm.run(engine, machine, script, cwd=ROOT, limit_s=GUEST_LIMIT_S, output=output.fileno())
        except vm.MachineFailed as error:
            status = str(error)
    if not result.exists():
        pytest.fail(f"the machine gave no result, status {status}: {log}\n{log.read_text(errors='replace')[-3000:]}")
    return json.loads(result.read_text())


@pytest.fixture(scope="session")
def guest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All checks, under user-mode Linux."""
    try:
        engine, *_ = vm.candidates()
    except Unavailable as error:
        _lacking(str(error))
    return _measure(engine, tmp_path_factory.mktemp("vm"), [])


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Some checks again, with QEMU."""
    tools = Tools.find()
    if tools.missing():
        _lacking(f"the vm tier needs {'; '.join(tools.missing())}")
    return _measure(Virtme(tools, kvm=False), tmp_path_factory.mktemp("vm-emulated"), EMULATED_CHECKS)


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The measurements of the check that the test's `check` marker, else its name, says."""
    marker = request.node.get_closest_marker("check")
    name = marker.args[0] if marker else request.node.originalname.removeprefix("test_")
    guest = request.getfixturevalue("guest")
    found = guest.get(name)
    if found is None or "error" in found:
        pytest.fail(f"check {name} in the machine: {(found or {}).get('error', 'did not run')}")
    return found

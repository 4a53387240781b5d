"""Kernel tests build real labs. Not root: skipped, but in CI that is a failure."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Collection, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from netem.kernel.snapshot import HostSnapshot, host_snapshot
from netem.state import LabState, Record

SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture(autouse=True)
def _root_only() -> None:
    if os.geteuid() != 0:
        reason = "needs root: run the tests with sudo"
        if os.environ.get("CI"):
            pytest.fail(f"CI is set: {reason}")
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _as_root_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when pytest was started with sudo: a test that wants a calling user sets one."""
    monkeypatch.delenv("SUDO_UID", raising=False)
    monkeypatch.delenv("SUDO_GID", raising=False)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def unchanged_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host is the same before and after: links, qdiscs, sysctls, and no namespace of a lab built meanwhile."""
    made: set[str] = set()
    real_create = LabState.create

    def create(directory: Path, record: Record) -> LabState:
        made.add(record.id)
        return real_create(directory, record)

    monkeypatch.setattr(LabState, "create", create)
    before = host_snapshot()
    yield
    assert differences_since(before, made) == []


def differences_since(before: HostSnapshot, lab_ids: Collection[str]) -> list[str]:
    """What differs from an earlier snapshot; of the namespaces, only those of these labs: others may work here too."""
    return [
        line
        for line in before.differences(host_snapshot())
        if not line.startswith("namespaces:") or any(lab_id in line for lab_id in lab_ids)
    ]


@pytest.fixture
def since() -> Callable[[HostSnapshot, Collection[str]], list[str]]:
    return differences_since


def copy_packages(names: list[str], site: Path) -> None:
    """Installed distributions and what they need, file by file: quick, and without a registry."""
    done: set[str] = set()
    while names:
        name = re.split(r"[^A-Za-z0-9_.-]", names.pop().strip())[0].lower().replace("_", "-")
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if name in done:
            continue
        done.add(name)
        names += [line for line in found.requires or [] if "extra ==" not in line]
        for file in found.files or []:
            if not str(file).startswith("..") and file.suffix != ".pyc":
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(found.locate_file(file), site / file)


def without_torch(project: Path) -> list[str]:
    """What the project depends on, but for torch: a replay does without."""
    wanted = tomllib.loads((project / "pyproject.toml").read_text())["project"]["dependencies"]
    return [requirement for requirement in wanted if not requirement.startswith("torch")]


@pytest.fixture(scope="session")
def system_python() -> Iterator[Path]:
    """An interpreter that everybody may execute, with this project and what a replay needs, in a folder of its own.

    The one that runs the tests may lie where only root can read; then its users could not run workloads either.
    """
    if not Path(SYSTEM_PYTHON).exists():
        pytest.skip(f"needs {SYSTEM_PYTHON} (Debian: apt-get install python3-venv)")
    with tempfile.TemporaryDirectory(prefix="dblp-netem-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        subprocess.run([SYSTEM_PYTHON, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=60)
        project = Path(__file__).resolve().parents[2]
        site = next((folder / "venv/lib").glob("python3*/site-packages"))
        own = f"python{sys.version_info.major}.{sys.version_info.minor}"
        if site.parent.name != own:
            pytest.skip(f"{SYSTEM_PYTHON} is {site.parent.name}, the tests run with {own}")
        copy_packages(without_torch(project), site)
        for package in ("dblp", "netem"):
            shutil.copytree(project / package, site / package)
        for data in ("topologies", "scenarios"):
            shutil.copytree(project / data, site / "netem/_data" / data)
        yield folder / "venv/bin/python"

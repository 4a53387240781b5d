"""The wheel carries all that is needed: it runs outside the checkout, from an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 100


def run(arguments: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed into a folder of its own; dependencies come from the running environment."""
    folder = tmp_path_factory.mktemp("wheel")
    built = run(["-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)], ROOT)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("dblp_netem-*.whl")
    target = folder / "site"
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    installed = run(pip, folder)
    assert installed.returncode == 0, installed.stderr
    return target


def test_it_carries_scenarios_topologies_and_data(site: Path) -> None:
    for kind in ("scenarios", "topologies"):
        shipped = {path.relative_to(ROOT / kind) for path in (ROOT / kind).rglob("*.yaml")}
        assert shipped
        assert {
            path.relative_to(site / "netem/_data" / kind) for path in (site / "netem/_data" / kind).rglob("*.yaml")
        } == (shipped)
    assert list((site / "dblp/_data").iterdir())


@pytest.mark.parametrize("command", [["validate", "burst90"], ["run", "--dry-run", "burst90"], ["show", "star3"]])
def test_the_command_works_in_an_empty_folder(site: Path, tmp_path: Path, command: list[str]) -> None:
    where = run(["-c", "import netem; print(netem.__file__)"], tmp_path, PYTHONPATH=str(site))
    assert Path(where.stdout.strip()).is_relative_to(site)
    done = run([str(site / "bin/dblp-netem"), *command], tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())

"""The script that makes a machine ready: linted, and run where everything is there already."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [ROOT / "vagrant" / "provision.sh", ROOT / "tests" / "vm" / "requirements.sh", ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_clean(script: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: run tests/vm/requirements.sh as root")
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.timeout(1300)
def test_provision(request: pytest.FixtureRequest) -> None:
    if not (ROOT / ".venv" / ".made-by-make").exists():
        pytest.skip("the machine has no network to install from: run `make install` first")
    measured: dict[str, Any] = request.getfixturevalue("measured")
    assert measured["status"] == 0, measured["output"]
    assert "netem                    delay and loss were set and read back" in measured["output"]


def test_what_is_no_checkout_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(["bash", SCRIPTS[0], tmp_path], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, str(tmp_path) in done.stderr) == (2, True)

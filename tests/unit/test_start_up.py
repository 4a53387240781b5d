"""What the commands around labs load: whoever types them waits for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import netem.cli, netem.preflight, netem.lab
from netem.spec import load_topology
heavy = {"torch", "numpy", "pyroute2", "scapy", "psutil", "matplotlib"}
print(sorted(heavy & set(sys.modules)))
"""


def test_up_and_down_of_a_plain_lab_load_no_large_library() -> None:
    """torch takes seconds, pyroute2 and numpy a fifth of a second each."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"

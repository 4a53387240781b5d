"""Labs for benchmarks: a star of hosts around one switch, and programs in its hosts that report as JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT
from netem.kernel.process import Child
from netem.kernel.user import User
from netem.lab import Lab
from netem.lab.build import Settings
from netem.spec import star


class ProgramFailed(RuntimeError):
    """A program in a host ended with a status other than 0, or not in time; the message has the end of its output."""


@dataclass
class Program:
    """A program that runs in a host. Standard output and error go to one file."""

    child: Child
    log: Path

    def output(self, timeout_s: float) -> str:
        """What it wrote, once it has ended with status 0. Raises ProgramFailed, and ends it when it is late."""
        try:
            status = self.child.wait(timeout_s)
        except TimeoutError:
            self.child.terminate()
            raise ProgramFailed(f"{self._name()}: not done in {timeout_s:g} s: {self._tail()}") from None
        if status != 0:
            raise ProgramFailed(f"{self._name()}: status {status}: {self._tail()}")
        return self.log.read_text(errors="replace")

    def report(self, timeout_s: float) -> Any:
        """The JSON on the last line of its output."""
        return json.loads(self.output(timeout_s).strip().splitlines()[-1])

    def _name(self) -> str:
        return " ".join(self.child.argv)[-120:]

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-800:]


class Star:
    """A lab of hosts `server`, `worker1` ... and their programs. Use `built`."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self._folder, self._started = lab, folder, 0

    def address(self, host: str) -> str:
        return self.lab.hosts[host].address

    def start(self, host: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Program:
        """Start a program in a host, as root, in the checkout."""
        self._started += 1
        log = self._folder / f"{self._started}-{host}.log"
        child = self.lab.spawn(host, argv, env=environment(env or {}), log=log, user=User.current(), cwd=ROOT)
        return Program(child, log)

    def python(self, host: str, module: str, *arguments: str) -> Program:
        """Start a module of this checkout in a host with the interpreter of the benchmark."""
        return self.start(host, [sys.executable, "-m", module, *arguments])


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """What programs in a host see: the checkout's modules first, and one thread in numeric libraries."""
    return {
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
        **extra,
    }


@contextmanager
def built(workers: int, settings: Settings | None = None) -> Iterator[Star]:
    """A star of one server and `workers` workers, MTU 1500, no rate, delay or loss; gone at the end.

    Packets in its fabric are of the MTU: hosts segment before the switch (TSO and UDP segmentation are off).
    """
    topology = star(workers, name="bench")
    with (
        tempfile.TemporaryDirectory(prefix="dblp-netem-bench-") as folder,
        Lab.build(topology, name=f"bench-{os.getpid()}", settings=settings or Settings()) as lab,
    ):
        yield Star(lab, Path(folder))

"""iperf3 as background traffic: a server in one host, a client in another, ended with the job."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from typing import BinaryIO

from netem.kernel.errors import LabError, Unavailable
from netem.kernel.process import Child
from netem.kernel.user import User
from netem.lab import Lab
from netem.spec import Background, Scenario

PROGRAM = "iperf3"
START_LIMIT_S = 10.0
LONGEST_S = 86_400
UDP_AND_IP_BYTES = 28


def require_iperf(spec: Scenario) -> None:
    """Unavailable (status 4) where a scenario asks for iperf3 and there is none."""
    wanted = [stream for stream in spec.background if stream.kind.startswith(PROGRAM)]
    if wanted and shutil.which(PROGRAM) is None:
        what = f"background traffic of kind {wanted[0].kind} needs iperf3, which is not installed"
        raise Unavailable(what, "Debian, Ubuntu: apt-get install iperf3; or use kind: udp, which is built in")


class Iperf:
    """One flow. The client begins with `begin`: until then only the server listens."""

    def __init__(
        self, lab: Lab, stream: Background, port: int, user: User, server_log: BinaryIO, client_log: BinaryIO
    ) -> None:
        self._lab, self._stream, self._port, self._user = lab, stream, port, user
        self._client_log = client_log
        self._client: Child | None = None
        to = str(stream.to)
        self._server = lab.spawn(
            to,
            [program(), "--server", "--one-off", "--port", str(port), "--bind", lab.hosts[to].address, "--forceflush"],
            env={},
            log=server_log,
            user=user,
        )
        self._await_listening(server_log)

    def _await_listening(self, log: BinaryIO) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while b"listening" not in os.pread(log.fileno(), 4096, 0):
            if self._server.poll() is not None or time.monotonic() > deadline:
                said = os.pread(log.fileno(), 500, 0).decode(errors="replace").strip()
                raise LabError(f"iperf3 at {self._stream.to} does not listen: {said or 'no output'}")
            time.sleep(0.01)

    def begin(self) -> None:
        self._client = self._lab.spawn(
            self._stream.sender, self.client_arguments(), env={}, log=self._client_log, user=self._user
        )

    def client_arguments(self) -> list[str]:
        stream = self._stream
        argv = [program(), "--client", self._lab.hosts[str(stream.to)].address, "--port", str(self._port)]
        argv += ["--time", str(LONGEST_S), "--interval", "1", "--forceflush"]
        if stream.rate_bps is not None:
            argv += ["--bitrate", str(stream.rate_bps)]
        if stream.kind == "iperf3-udp":
            argv += ["--udp", "--length", str((stream.packet_bytes or 0) - UDP_AND_IP_BYTES)]
        return argv

    def end(self) -> None:
        """Idempotent. The client first: it tells the server, and writes down what it has sent."""
        for child in (self._client, self._server):
            if child is not None and child.poll() is None:
                child.signal(signal.SIGINT)
                with contextlib.suppress(TimeoutError):
                    child.wait(1.0)
                child.terminate()


def program() -> str:
    return shutil.which(PROGRAM) or PROGRAM

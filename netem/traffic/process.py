"""The testbed's end of a packet source: starts it, hands in sockets, tells it when, reads what it has sent."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import netem
from netem.kernel.errors import LabError
from netem.kernel.process import Child
from netem.kernel.user import User
from netem.traffic.plan import Burst, Sent, Stream
from netem.traffic.source import MAX_MESSAGE_BYTES

READY_LIMIT_S = 60.0
PRIORITY = 1


class Spawner(Protocol):
    """What a source needs of a lab (`netem.lab.Lab.spawn`)."""

    def spawn(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: dict[str, str],
        log: Path | BinaryIO | None,
        user: User | None = None,
        cwd: Path | str = "/",
        pass_fds: Sequence[int] = (),
    ) -> Child: ...


class PacketSource:
    """One process that sends packets from sockets of any host, and a context manager that ends it.

    It runs as `user`, without privileges, but where the system allows it with the lowest real-time priority: what it
    stands for is hardware that does not wait for a processor. Bursts are short; it sleeps in between.
    """

    def __init__(self, spawner: Spawner, host: str, *, user: User, log: BinaryIO | None, realtime: bool = True) -> None:
        self.name = f"packet source at {host}"
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._plans = 0
        self._reports: list[Sent] = []
        with theirs:
            try:
                self.child = spawner.spawn(
                    host,
                    [sys.executable, "-m", "netem.traffic.source", str(theirs.fileno())],
                    env={"PYTHONPATH": str(Path(netem.__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": "1"},
                    log=log,
                    user=user,
                    pass_fds=(theirs.fileno(),),
                )
            except BaseException:
                self._control.close()
                raise
        self.realtime = realtime and self._prefer()

    def _prefer(self) -> bool:
        try:
            os.sched_setscheduler(self.child.pid, os.SCHED_FIFO, os.sched_param(PRIORITY))
        except OSError:
            return False
        return True

    def add(self, plan: Burst | Stream, sockets: Sequence[socket.socket], *, segment: bool) -> int:
        """Hands in the senders' connected sockets; the plan's number. `segment`: many packets with one call.

        Without it packets enter the host's queueing discipline one by one, which one with a rate demands.
        """
        if len(sockets) != plan.senders:
            raise ValueError(f"{len(sockets)} sockets for {plan.senders} senders")
        message = json.dumps({"plan": plan.to_json(), "segment": segment}).encode()
        try:
            socket.send_fds(self._control, [message], [sock.fileno() for sock in sockets])
        except OSError as error:
            raise LabError(f"{self.name}: hand in {len(sockets)} sockets: {error}") from error
        self._plans += 1
        return self._plans - 1

    def wait_ready(self) -> None:
        """All plans so far are known. LabError after a minute, or when the process has ended."""
        deadline = time.monotonic() + READY_LIMIT_S
        known = 0
        while known < self._plans:
            message = self._receive(deadline - time.monotonic())
            if message is None:
                raise LabError(f"{self.name} was not ready within {READY_LIMIT_S:.0f} s")
            known += "ready" in message

    def fire(self, plan: int, start_ns: int) -> None:
        """Begin at this time (CLOCK_MONOTONIC)."""
        self._send({"fire": plan, "start_ns": start_ns})

    def stop(self, plan: int) -> None:
        """End a stream; its report follows."""
        self._send({"stop": plan})

    def reports(self, wait_for: int = 0, timeout_s: float = 0.0) -> list[Sent]:
        """What has been sent since the last call; waits until there are `wait_for` reports, up to `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        found: list[Sent] = []
        while True:
            left = max(0.0, deadline - time.monotonic()) if len(found) < wait_for else 0.0
            message = self._receive(left)
            if message is None:
                return found
            found.append(Sent.from_json(message["sent"]))

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError as error:
            raise LabError(f"{self.name} has ended: {error}") from error

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        """None when nothing came. LabError when the process has ended."""
        ready, _, _ = select.select([self._control], [], [], max(0.0, timeout_s))
        if not ready:
            return None
        with suppress(ConnectionResetError):
            text = self._control.recv(MAX_MESSAGE_BYTES)
            if text:
                message: dict[str, Any] = json.loads(text)
                return message
        raise LabError(f"{self.name} has ended by itself; its log says why")

    def close(self) -> None:
        """Idempotent."""
        self._control.close()
        self.child.terminate()

    def __enter__(self) -> PacketSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

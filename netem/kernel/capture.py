"""Captures at an interface of a namespace, to pcapng, with the kernel's own count of what it had no room for.

Where the tap sits (packet(7), AF_PACKET): on egress behind the queueing discipline, so behind clsact and netem drops;
on ingress in front of both. A host that has GRO on shows merged packets on ingress; the switch port that faces it
shows them one by one, as they were on the wire.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from netem.kernel.errors import KernelError, LabError, attempting
from netem.kernel.netns import call_in
from netem.kernel.packet_filter import Direction, PacketFilter, compile_expression, compile_filter, direction_check
from netem.kernel.user import User

WORKER = Path(__file__).with_name("capture_worker.py")
SOL_PACKET, PACKET_RX_RING, PACKET_VERSION = 263, 5, 10  # linux/if_packet.h
SO_ATTACH_FILTER = 26
TPACKET_V3 = 2
ETH_P_ALL = 3
BLOCK_BYTES = 1 << 18
RETIRE_MS = 20
DEFAULT_RING_BYTES = 32 << 20  # about 190,000 packets of 96 bytes
START_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 60.0


@dataclass(frozen=True)
class CaptureStats:
    """received: packets in the file. missed_by_kernel: packets that passed the filter and found no room."""

    path: str
    interface: str
    received: int
    missed_by_kernel: int
    tool: str = "builtin"


class Capture:
    """A running capture; `stop` drains what the kernel has queued and returns the counts."""

    def __init__(
        self, popen: subprocess.Popen[bytes], control: BinaryIO, status: BinaryIO, path: Path, interface: str
    ) -> None:
        """Use `start`."""
        self._popen = popen
        self._control = control
        self._status = status
        self._path = path
        self._interface = interface
        self._stats: CaptureStats | None = None
        self.pid = popen.pid

    def stop(self) -> CaptureStats:
        """End the capture; idempotent. LabError when the file could not be written or the writer died."""
        if self._stats is None:
            self._control.close()  # the end of this pipe is the sign to stop; so is our death
            try:
                report = json.loads(_read_line(self._status, STOP_TIMEOUT_S) or "{}")
                self._popen.wait(STOP_TIMEOUT_S)
            except (ValueError, TimeoutError, subprocess.TimeoutExpired) as error:
                raise LabError(f"capture of {self._interface} to {self._path} did not stop: {error}") from error
            finally:
                self._kill()
            if "received" not in report:
                raise LabError(f"capture to {self._path} failed: {report.get('error', 'the writer died')}")
            self._stats = CaptureStats(str(self._path), self._interface, **report)
        return self._stats

    def _kill(self) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait(10.0)
        self._status.close()


def start(
    netns: str,
    ifname: str,
    path: Path,
    *,
    snap_bytes: int = 0,
    packets: PacketFilter | str | None = None,
    direction: Direction = "both",
    user: User,
    file: BinaryIO | None = None,
    label: str = "",
    ring_bytes: int = DEFAULT_RING_BYTES,
    on_start: Callable[[int], None] = lambda pid: None,
) -> Capture:
    """Start a capture; from the moment this returns no packet escapes it but those counted as missed.

    snap_bytes: bytes kept of each packet, 0 for all.
    packets: a PacketFilter, or a pcap-filter(7) expression (this needs tcpdump to compile it).
    user: owns the file and runs the writer. label: the interface's name in the file.
    file: where `path` is open already; it is used in place of a new one, and may be closed after the start.
    Errors: KernelError, Unavailable, LabError.
    """
    program = _compile(packets, direction, snap_bytes)
    blocks = max(2, ring_bytes // BLOCK_BYTES)
    what = f"capture {label or ifname} in {netns} to {path}"
    with ExitStack() as temporary, ExitStack() as kept, attempting(what):
        sock = temporary.enter_context(call_in(netns, lambda: _open_ring(ifname, program, blocks)))
        file = file or temporary.enter_context(create_file(path, user))
        (control_in, control_out), (status_in, status_out) = _pipe(), _pipe()
        for pipe, stack in ((control_in, temporary), (status_out, temporary), (control_out, kept), (status_in, kept)):
            stack.enter_context(pipe)
        orders = {
            "socket_fd": sock.fileno(),
            "file_fd": file.fileno(),
            "control_fd": control_in.fileno(),
            "status_fd": status_out.fileno(),
            "block_bytes": BLOCK_BYTES,
            "blocks": blocks,
            "retire_ms": RETIRE_MS,
            "snap_bytes": snap_bytes,
            "interface": label or ifname,
            "comment": f"{direction} of {ifname} in {netns}",
        }
        popen = _start_worker(orders, user)
        kept.callback(_reap, popen)
        on_start(popen.pid)
        status_out.close()
        first = _read_line(status_in, START_TIMEOUT_S)
        if first != "ready":
            raise KernelError(what, detail=json.loads(first)["error"] if first else "the writer died")
        kept.pop_all()  # the Capture owns them now
        return Capture(popen, control_out, status_in, path, label or ifname)


def _compile(packets: PacketFilter | str | None, direction: Direction, snap_bytes: int) -> bytes:
    if isinstance(packets, str):
        return direction_check(direction) + compile_expression(packets, snap_bytes)
    return compile_filter(packets or PacketFilter(), direction, snap_bytes)


def _open_ring(ifname: str, program: bytes, blocks: int) -> socket.socket:
    """A packet socket with its ring and filter, bound last: before that it receives nothing. Inside the namespace."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    try:
        sock.setsockopt(SOL_PACKET, PACKET_VERSION, TPACKET_V3)
        # struct tpacket_req3: block size and number, frame size and number, retire timeout, private bytes, features
        ring = struct.pack("=IIIIIII", BLOCK_BYTES, blocks, BLOCK_BYTES, blocks, RETIRE_MS, 0, 0)
        sock.setsockopt(SOL_PACKET, PACKET_RX_RING, ring)
        code = ctypes.create_string_buffer(program, len(program))
        fprog = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
        sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, fprog)
        sock.bind((ifname, ETH_P_ALL))
    except BaseException:
        sock.close()
        raise
    return sock


def create_file(path: Path, user: User) -> BinaryIO:
    """A new file that the user owns; an existing one is replaced, a link never followed."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    if not user.is_current:
        os.fchown(fd, user.uid, user.gid)
    return os.fdopen(fd, "wb")


def _start_worker(orders: dict[str, object], user: User) -> subprocess.Popen[bytes]:
    """The writer needs no privileges: what it works on is handed in."""
    change = None if user.is_current else user
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(WORKER), json.dumps(orders)],
        pass_fds=[fd for name, fd in orders.items() if name.endswith("_fd") and isinstance(fd, int)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None,
        start_new_session=True,
        cwd="/",
        user=change.uid if change else None,
        group=change.gid if change else None,
        extra_groups=change.groups if change else None,
    )


def _pipe() -> tuple[BinaryIO, BinaryIO]:
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    return os.fdopen(read_fd, "rb"), os.fdopen(write_fd, "wb")


def _reap(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    popen.wait(10.0)


def _read_line(pipe: BinaryIO, timeout_s: float) -> str:
    """One line, without its end; empty at the end of the pipe. TimeoutError."""
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"the capture's writer said nothing for {timeout_s} s")
        part = os.read(pipe.fileno(), 1)
        if not part:
            break
        line += part
    return line.decode().strip()

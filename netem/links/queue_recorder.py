"""Packets in a port's queue, one by one: when each entered and left, its length and kind, or that it was dropped.

Nothing is polled. eBPF programs at the egress of the switch port, in front of its queueing discipline and behind the
loss, where the packet leaves for the device, and at the interface behind the port write into memory that is read
afterwards; see `queue_program`. GRO has to be off at that interface: it would merge what is counted packet by packet.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netem.kernel import bpf, offload
from netem.kernel.bpf_asm import Assembler
from netem.kernel.clsact import Attachment
from netem.kernel.errors import KernelError
from netem.links import queue_program as program
from netem.links.base import Flow, LinkError, UnsupportedFeature

RECORD = np.dtype([("time_in_ns", "u8"), ("time_out_ns", "u8"), ("bytes", "u4"), ("kind", "u4")])
"""`time_out_ns` 0: it has not come out. Times are CLOCK_MONOTONIC, bytes those of link-layer frames."""
_COUNT = np.dtype([("packets_in", "u8"), ("bytes_in", "u8"), ("packets_out", "i8")])
_NEEDS = "a kernel from 5.18 on with eBPF and CONFIG_BPF_EVENTS"
_WINDOWS = struct.Struct(f"={2 * program.MAX_WINDOWS}Q")
DEFAULT_RECORDS = 1 << 17
# On the way out behind the loss, on the way in before it: what that takes is not the queue's.
_ENTER_PRIORITY, _ARRIVE_PRIORITY = 100, 1


Window = tuple[int, int]


def merged_windows(windows: Sequence[Window], now_ns: int) -> list[Window]:
    """Those that are not over, sorted, without overlap, at most MAX_WINDOWS: the nearest ones become one."""
    found: list[Window] = []
    for start, end in sorted(window for window in windows if window[1] > now_ns):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    while len(found) > program.MAX_WINDOWS:
        at = min(range(len(found) - 1), key=lambda number: found[number + 1][0] - found[number][1])
        found[at : at + 2] = [(found[at][0], found[at + 1][1])]
    return found


@dataclass(frozen=True)
class FlowCount:
    """Packets of one kind that entered the queue and that came out, since `install`, whatever the windows."""

    kind: str
    packets_in: int
    bytes_in: int
    packets_out: int


@dataclass(frozen=True)
class QueueReading:
    """Records in the order of arrival; `overflow` packets were inside a window and found no room for theirs.

    `kinds[record["kind"]]` names a record's kind.
    """

    kinds: tuple[str, ...]
    records: NDArray[Any]
    overflow: int
    flows: tuple[FlowCount, ...]


class QueueRecorder:
    """Of one port. `port`, `behind`: (namespace, interface) of the switch port, and of what it faces.

    records: packets that are recorded in all windows together, 24 bytes each; what is beyond is counted.
    """

    def __init__(
        self, name: str, port: tuple[str | None, str], behind: tuple[str, str], *, records: int = DEFAULT_RECORDS
    ) -> None:
        self.name, self.capacity = name, records
        self._behind = behind
        self._enter = Attachment(*port, "egress", _ENTER_PRIORITY)
        self._arrive = Attachment(*behind, "ingress", _ARRIVE_PRIORITY)
        self._number = int.from_bytes(os.urandom(4)) & program.MAX_NUMBER
        self._owned: ExitStack | None = None
        self._kinds: tuple[str, ...] = ()
        self._windows: list[Window] = []

    def install(self, flows: Sequence[tuple[str, Flow]]) -> None:
        """Count from zero, record nothing yet. `flows`: (kind, flow), the first that matches decides.

        What no flow matches is of kind "other". Several flows may be of one kind. UnsupportedFeature on a kernel that
        cannot; LinkError.
        """
        if offload.read(*self._behind).get(offload.GRO):
            why = f"GRO at {'/'.join(self._behind)} merges packets before each can be counted; turn it off"
            raise UnsupportedFeature("recording a queue", (), why)
        self._kinds = tuple(dict.fromkeys(("other", *(kind for kind, _ in flows))))
        numbered = [(self._kinds.index(kind), flow) for kind, flow in flows]
        self.close()
        self._windows = []
        with ExitStack() as stack:
            try:
                self._make_maps(stack)
                self._trace(stack)
                for place, name, text in (
                    (self._arrive, "queue_arrive", program.arrive_program(self._number, self.capacity)),
                    (self._enter, "queue_enter", program.enter_program(self._number, numbered, self.capacity)),
                ):
                    place.attach(self._load(stack, name, text))
                    stack.callback(place.detach)
            except KernelError as error:
                raise LinkError(f"record the queue of {self.name}: {error}") from error
            self._owned = stack.pop_all()

    def _trace(self, stack: ExitStack) -> None:
        """The program right behind the queue, before any packet is given a tag."""
        try:
            with self._load(stack, "queue_probe", program.time_stamp_probe()) as probe:
                time_stamp_at = program.time_stamp_offset(probe.translated)
            leave = program.leave_program(self._number, self.capacity, time_stamp_at)
            loaded = self._load(stack, "queue_leave", leave, bpf.RAW_TRACEPOINT)
            stack.enter_context(bpf.RawTracepoint("net_dev_start_xmit", loaded))
        except (bpf.BpfError, ValueError) as error:
            raise UnsupportedFeature("recording a queue", (_NEEDS,), str(error)) from error

    def _make_maps(self, stack: ExitStack) -> None:
        made = (
            bpf.Map("windows", bpf.ARRAY, 4, program.WINDOWS_BYTES, 1),
            bpf.Map("next", bpf.ARRAY, 4, program.NEXT_BYTES, 1),
            bpf.Map("counts", bpf.ARRAY, 4, program.COUNT_BYTES, program.MAX_KINDS),
            bpf.Map("records", bpf.ARRAY, 4, program.RECORD_BYTES, self.capacity, bpf.MMAPABLE),
        )
        self._maps = {each.name: stack.enter_context(each) for each in made}

    def _load(self, stack: ExitStack, name: str, text: Assembler, kind: int = bpf.SCHED_CLS) -> bpf.Program:
        code = text.assemble({each.name: each.fd for each in self._maps.values()})
        try:
            return stack.enter_context(bpf.Program(name, code, kind=kind))
        except bpf.BpfError as error:
            raise UnsupportedFeature("recording a queue", (_NEEDS,), str(error)) from error

    def arm(self, from_ns: int, until_ns: int) -> None:
        """Record what enters from then until then (CLOCK_MONOTONIC), beside the windows that are not over."""
        self._windows = merged_windows([*self._windows, (from_ns, until_ns)], time.monotonic_ns())
        flat = [bound for window in self._windows for bound in window]
        self._map("windows").update(bytes(4), _WINDOWS.pack(*flat, *[0] * (2 * program.MAX_WINDOWS - len(flat))))

    def read(self) -> QueueReading:
        """What was recorded so far. Read when the queue is empty: what still waits there has no time of leaving."""
        asked = int.from_bytes(self._read("next"), sys.byteorder)
        kept = min(asked, self.capacity)
        with closing(self._map("records").memory()) as memory:
            records = np.frombuffer(memory[: kept * RECORD.itemsize], RECORD)
        counts = np.frombuffer(b"".join(value for _, value in self._map("counts").items()), _COUNT).tolist()
        flows = tuple(FlowCount(kind, *values) for kind, values in zip(self._kinds, counts, strict=False))
        return QueueReading(self._kinds, records, asked - kept, flows)

    def _map(self, name: str) -> bpf.Map:
        if self._owned is None:
            raise LinkError(f"record the queue of {self.name}: nothing is installed")
        return self._maps[name]

    def _read(self, name: str) -> bytes:
        return self._map(name).lookup(bytes(4)) or bytes(self._map(name).value_bytes)

    def close(self) -> None:
        """Detach and forget. The interfaces or their namespaces may be gone already."""
        if self._owned is not None:
            self._owned.close()
            self._owned = None

"""What a finished run hands to the analysis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from netem.analysis.altered import Altered
from netem.analysis.burst_lengths import Lengths
from netem.analysis.delays import DelayReport
from netem.analysis.load import Load
from netem.analysis.merge import LossPlan
from netem.analysis.oracle import IntArray
from netem.analysis.punctual import Moment
from netem.analysis.queues import BurstReport, QueueReport
from netem.analysis.recorded import Mask
from netem.analysis.records import EpochRow, LinkCount, RoundRow

OrderFn = Callable[[int, int, str, int], IntArray]
"""(round, worker, direction, chunks) -> order in which the chunks of that round are sent first."""


@dataclass(frozen=True)
class TransportRun:
    """One transport, one repeat.

    Args:
        kind: dblp, mlt or tcp.
        counts: of its own data packets, empty where nothing was counted.
        total_s: from the first worker's first round to the last worker's end, without set-up and gates.
        by_round: the links' counts belong to rounds by packet header (bpf), so totals close round by round.
        reliable_broadcast: replicas have to be bit-identical after every epoch.
        stop_and_wait: every pass waits for its bitmap; then passes and packets follow the oracle exactly.
        mask_seed: seed of the repeatable mask; None where losses are not repeatable (`mask: none`).
        device_drops: direction -> packets that the receivers' devices dropped behind the loss (a veth's ring is full on
            a saturated machine); devices count all packets and know no rounds.
        queue_drops: direction -> packets that a link's queue dropped behind the loss: what its rate and queue ask for.
        uplink_drops: direction -> the same in front of the place where the loss is made.
        trunk_drops: direction -> what queues and devices between switches dropped, in front of the place where bursts
            are made; of the devices, it is in device_drops too.
        doubts: what makes the links' decisions and counts doubtful (`netem.links.base.PortHealth`), summed over ports.
        recorded: transmissions that a recorded mask loses.
        load: what the whole machine was busy with meanwhile (`netem.analysis.load.Load`), where it is known.
        microbursts, queues: what generators sent, and what recorded ports did with all packets.
        delays: what probes found of the paths' delays.
        burst_lengths: losses in a row, where a chain was asked for.
        order: the send order, where the exact course of a round is to be checked.
        altered: what links damage and copy, as the topology asks for.
        moments: changes by time, planned and actual.
        facts: anything else that summary.json should carry for this transport (detector, phases, ...).
    """

    name: str
    kind: str
    repeat: int
    rows: tuple[RoundRow, ...]
    epochs: tuple[EpochRow, ...]
    counts: tuple[LinkCount, ...]
    total_s: float | None
    by_round: bool = True
    reliable_broadcast: bool = True
    stop_and_wait: bool = False
    mask_seed: int | None = None
    order: OrderFn | None = None
    device_drops: dict[str, int] = field(default_factory=dict)
    queue_drops: dict[str, int] = field(default_factory=dict)
    uplink_drops: dict[str, int] = field(default_factory=dict)
    trunk_drops: dict[str, int] = field(default_factory=dict)
    doubts: dict[str, int] = field(default_factory=dict)
    recorded: Mask = field(default_factory=dict)
    load: Load | None = None
    microbursts: tuple[BurstReport, ...] = ()
    queues: tuple[QueueReport, ...] = ()
    altered: Altered = field(default_factory=Altered)
    moments: tuple[Moment, ...] = ()
    delays: tuple[DelayReport, ...] = ()
    burst_lengths: tuple[Lengths, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CaptureCount:
    """Packets of one capture; `missed_by_kernel` is the kernel's own count of what the capture did not get."""

    name: str
    transport: str
    received: int | None
    missed_by_kernel: int | None
    tool: str


@dataclass(frozen=True)
class RunData:
    """Everything summary.json and the table are made of."""

    scenario: str
    seed: int
    backend: str
    loss_engine: str
    plan: LossPlan
    runs: tuple[TransportRun, ...]
    captures: tuple[CaptureCount, ...] = ()
    expect: tuple[str, ...] = ()
    judge_latencies: bool = True

    @property
    def transports(self) -> list[str]:
        """Names in the order in which they ran."""
        return list(dict.fromkeys(run.name for run in self.runs))

    def rows(self, transport: str) -> list[RoundRow]:
        """Of all repeats."""
        return [row for run in self.runs if run.name == transport for row in run.rows]

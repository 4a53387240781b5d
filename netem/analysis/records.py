"""The rows of rounds.csv and epochs.csv: typed, in file order, made from a run's events and the links'
counters.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Event = dict[str, Any]
"""One JSON line of the workload, as read."""


@dataclass(frozen=True)
class RoundRow:
    """One round of one worker in one direction. Times in seconds, ratios as plain numbers; None = not
    known.

    `latency_s` is the sender's clock from the first send to the stop it read, without the gate. `passes` is
    what the receiver saw. `packets_at_need` ends with the packet that completed the round, `packets_sent`
    includes what was in flight after it. `wait_s` is gate and stragglers. `oracle_*` are means. `loss_requested` is
    None where it changed within the round. `runqueue_s`: how long the sender's or the receiver's
    thread, whichever it was longer, was ready to run and waited for a core.
    """

    transport: str
    repeat: int
    round: int
    iteration: int
    bucket: int
    epoch: int
    worker: int
    direction: str
    phase: str
    tolerance: float | None
    chunks: int | None
    delivered: int | None
    passes: int | None
    packets_sent: int | None
    packets_at_need: int | None
    bytes_sent: int | None
    latency_s: float | None
    wait_s: float | None
    goodput_bps: float | None
    outcome: str
    burst: int
    dropped_link: int | None
    dropped_socket: int | None
    late: int | None
    duplicate: int | None
    oracle_passes: float | None
    oracle_packets: float | None
    loss_requested: float | None
    runqueue_s: float | None = None


@dataclass(frozen=True)
class EpochRow:
    """One epoch of one worker. `replica_divergence` is 0 where parameters and optimiser state are
    bit-identical.
    """

    transport: str
    repeat: int
    epoch: int
    worker: int
    train_loss: float | None
    metric: str
    value: float | None
    wall_s: float | None
    replica_divergence: float | None


@dataclass(frozen=True)
class LinkCount:
    """What the links counted for one flow: data packets of `worker`'s flow in `direction`, before the loss.

    `round` is None for what the backend cannot attribute to a round (netem between two snapshots); such
    packets are in no other count. `seen` includes `dropped`.
    `trials` and `hits` are the same for the ratio of the loss, where a queue between two lossy links took packets
    from it: as many as would have entered the first link without that queue.
    """

    direction: str
    worker: int
    round: int | None
    seen: int
    dropped: int
    bytes_seen: int = 0
    trials: int | None = None
    hits: int | None = None
    duplicated: int = 0
    """Of those that got through, how many did so twice."""
    corrupted: int = 0
    """Of those that got through, how many with a wrong checksum: no socket gets them."""

    @property
    def ratio_seen(self) -> int:
        """Of how many packets `ratio_dropped` is a share."""
        return self.seen if self.trials is None else self.trials

    @property
    def ratio_dropped(self) -> int:
        return self.dropped if self.hits is None else self.hits

    @classmethod
    def from_counter(cls, counter: Any, direction: str, worker: int) -> LinkCount:
        """From a `netem.links.base.Counter`: its index is the round."""
        return cls(direction, worker, counter.index, counter.seen, counter.dropped, counter.bytes_seen)


Row = TypeVar("Row", RoundRow, EpochRow)


def columns(row: type[RoundRow] | type[EpochRow]) -> list[str]:
    return [field.name for field in dataclasses.fields(row)]


def csv_text(kind: type[Row], rows: Iterable[Row]) -> str:
    """All rows with a header; None becomes an empty cell, floats keep all their digits."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns(kind))
    for row in rows:
        writer.writerow("" if value is None else value for value in dataclasses.astuple(row))
    return text.getvalue()


def write_csv(path: Path, kind: type[Row], rows: Iterable[Row]) -> None:
    """A file of csv_text. Raises OSError."""
    path.write_text(csv_text(kind, rows), encoding="utf-8", newline="")


def read_csv(path: Path, kind: type[Row]) -> list[Row]:
    """The rows of a file that write_csv wrote. Raises ValueError naming file and line for anything else."""
    parsers = {field.name: _parser(str(field.type)) for field in dataclasses.fields(kind)}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != list(parsers):
            raise ValueError(f"{path}:1: columns are {reader.fieldnames}, expected {list(parsers)}")
        rows: list[Row] = []
        for cells in reader:
            try:
                rows.append(kind(**{name: parse(cells[name]) for name, parse in parsers.items()}))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}:{reader.line_num}: {error}") from error
        return rows


def _parser(annotation: str) -> Any:
    base = {"str": str, "int": int, "float": float}[annotation.removesuffix(" | None")]
    if not annotation.endswith(" | None"):
        return base
    return lambda text: None if text == "" else base(text)


def counts_by_flow(counts: Sequence[LinkCount]) -> dict[tuple[int, int, str], LinkCount]:
    """Counts with a round, by (round, worker, direction); several of the same flow are added up."""
    table: dict[tuple[int, int, str], LinkCount] = {}
    for count in counts:
        if count.round is None:
            continue
        key = (count.round, count.worker, count.direction)
        known = table.get(key)
        if known is not None:
            count = dataclasses.replace(
                count,
                seen=known.seen + count.seen,
                dropped=known.dropped + count.dropped,
                trials=known.ratio_seen + count.ratio_seen,
                hits=known.ratio_dropped + count.ratio_dropped,
                bytes_seen=known.bytes_seen + count.bytes_seen,
                duplicated=known.duplicated + count.duplicated,
                corrupted=known.corrupted + count.corrupted,
            )
        table[key] = count
    return table

"""Recorded loss masks: which transmissions are to be lost again, read from a file or from an earlier run.

A file is CSV, or npz with arrays of the same names: `direction` (up, down), `worker` (rank, 1..n), `round`,
`sequence`, `pass`; one row a lost transmission. Of a run, its captures before and after the loss say what was lost.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from netem.analysis.fates import Fates, Flow, Keys, compare
from netem.analysis.folder import FolderError, read_run
from netem.analysis.pcapng import CaptureError

COLUMNS = ("direction", "worker", "round", "sequence", "pass")
LIMITS = {"worker": 2**16, "round": 2**32, "sequence": 2**32, "pass": 2**16}

Mask = Mapping[Flow, Keys]
"""Of each flow the lost transmissions, as `fates.Keys`."""


class MaskError(ValueError):
    """Not a recorded mask; the message names file and line."""


def read_mask(path: Path, transport: str | None = None, repeat: int = 0) -> Mask:
    """Of a CSV or npz file, or of a run's folder. Raises MaskError."""
    if not path.is_dir():
        if transport is not None or repeat:
            raise MaskError(f"{path}: is a file; `transport` and `repeat` choose within the folder of a run")
        return _read_npz(path) if path.suffix == ".npz" else _read_csv(path)
    try:
        run = read_run(path)
    except (FolderError, CaptureError, OSError) as error:
        raise MaskError(str(error)) from error
    found = {name: fates for (name, number), fates in run.fates.items() if number == repeat and fates.flows}
    if not found:
        hint = 'run it with capture: {at: ["*"], snap: 96 B, rounds: all, both: true}'
        raise MaskError(f"{path}: no packets were captured before and after the loss; {hint}")
    if transport is not None and transport not in found:
        known = ", ".join(found)
        raise MaskError(f"{path}: no captures of transport {transport!r} in repeat {repeat} (there are: {known})")
    chosen = [(name, fates) for name, fates in found.items() if transport in (None, name)]
    _check_agreement(path, chosen)
    return joined(_lost(fates) for _, fates in chosen)


def _check_agreement(path: Path, chosen: Sequence[tuple[str, Fates]]) -> None:
    """Transports over one mask have lost the same; over random losses each has its own."""
    for name, fates in chosen:
        if fates.missed:
            raise MaskError(f"{path}: the captures missed {fates.missed} packets, so the losses are not known")
        if compare(chosen[0][1], fates).different:
            first = chosen[0][0]
            raise MaskError(f"{path}: {first} and {name} have lost different packets; choose one with `transport`")


def _lost(fates: Fates) -> Mask:
    lost = {flow: fate.keys[~fate.arrived] for flow, fate in fates.flows.items()}
    return {flow: keys for flow, keys in lost.items() if len(keys)}


def write_mask(path: Path, mask: Mask) -> None:
    """A CSV file that `read_mask` reads. Raises OSError."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for flow, keys in sorted(mask.items()):
            for key in keys.tolist():
                writer.writerow([flow.direction, flow.rank, flow.round, key >> 16, key & 0xFFFF])


def _read_csv(path: Path) -> Mask:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file)
            header = next(reader, [])
            if tuple(header) != COLUMNS:
                raise MaskError(
                    f"{path}:1: the columns are {', '.join(header) or 'missing'}; expected {', '.join(COLUMNS)}"
                )
            return _grouped(_checked(f"{path}:{reader.line_num}", row) for row in reader)
    except (OSError, UnicodeDecodeError) as error:
        raise MaskError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'is not text'}") from error


def _checked(place: str, row: list[str]) -> tuple[str, int, int, int, int]:
    if len(row) != len(COLUMNS) or row[0] not in ("up", "down") or not all(cell.isdigit() for cell in row[1:]):
        raise MaskError(f"{place}: {','.join(row)!r}: expected up or down, and four whole numbers")
    worker, round_, sequence, pass_ = map(int, row[1:])
    for (name, limit), value in zip(LIMITS.items(), (worker, round_, sequence, pass_), strict=True):
        if value >= limit or (name == "worker" and value == 0):
            raise MaskError(f"{place}: {name} {value} is out of range (below {limit}; workers count from 1)")
    return row[0], worker, round_, sequence, pass_


def _read_npz(path: Path) -> Mask:
    try:
        with np.load(path, allow_pickle=False) as file:
            columns = [file[name].tolist() for name in COLUMNS]
    except (OSError, ValueError, KeyError) as error:
        raise MaskError(f"{path}: is not an npz file with the arrays {', '.join(COLUMNS)}: {error}") from error
    if len({len(column) for column in columns}) != 1:
        raise MaskError(f"{path}: the arrays {', '.join(COLUMNS)} are not of one length")
    rows = zip(*columns, strict=True)
    return _grouped(_checked(f"{path}[{n}]", [str(cell) for cell in row]) for n, row in enumerate(rows))


def _grouped(rows: Iterable[tuple[str, int, int, int, int]]) -> Mask:
    found: dict[Flow, list[int]] = {}
    for direction, worker, round_, sequence, pass_ in rows:
        found.setdefault(Flow(direction, worker, round_), []).append(sequence << 16 | pass_)
    return {flow: np.unique(np.array(keys, np.uint64)) for flow, keys in found.items()}


def joined(masks: Iterable[Mask]) -> Mask:
    """What at least one of them loses."""
    found: dict[Flow, Keys] = {}
    for mask in masks:
        for flow, keys in mask.items():
            found[flow] = np.union1d(found[flow], keys) if flow in found else keys
    return found


def names_of(mask: Mask, direction: str, rank: int) -> Iterator[bytes]:
    """Round, sequence and pass of each lost transmission, as DBLP's header has them (docs/protocol.md)."""
    for flow, keys in mask.items():
        if (flow.direction, flow.rank) == (direction, rank):
            start = flow.round.to_bytes(4, "big")
            for key in keys.tolist():
                yield start + key.to_bytes(6, "big")

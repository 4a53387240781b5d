"""Recorded loss masks: files, what is refused, and the check of a round against the list."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from netem.analysis import oracle
from netem.analysis.course import recorded_drop
from netem.analysis.fates import Flow
from netem.analysis.fidelity import fidelity
from netem.analysis.recorded import COLUMNS, MaskError, joined, names_of, read_mask, write_mask
from tests.unit.analysis_data import SEED, FakeBurst, faithful_run, order_of, plan, with_run

ROWS = "up,1,3,5,0\nup,1,3,5,2\ndown,2,4,70000,0\n"


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(",".join(COLUMNS) + "\n" + ROWS)
    mask = read_mask(tmp_path / "a.csv")
    assert {flow: keys.tolist() for flow, keys in mask.items()} == {
        Flow("up", 1, 3): [5 << 16, 5 << 16 | 2],
        Flow("down", 2, 4): [70_000 << 16],
    }
    write_mask(tmp_path / "b.csv", mask)
    again = read_mask(tmp_path / "b.csv")
    assert {flow: keys.tolist() for flow, keys in again.items()} == {f: k.tolist() for f, k in mask.items()}
    columns = zip(*(row.split(",") for row in ROWS.split()), strict=True)
    arrays = {n: np.array(c) if n == "direction" else np.array(c, int) for n, c in zip(COLUMNS, columns, strict=True)}
    np.savez(tmp_path / "c.npz", **arrays)
    assert read_mask(tmp_path / "c.npz").keys() == mask.keys()


def test_names_are_those_of_the_packet_header() -> None:
    mask = {Flow("up", 1, 3): np.array([5 << 16 | 2], np.uint64)}
    assert list(names_of(mask, "up", 1)) == [bytes.fromhex("00000003000000050002")]
    assert list(names_of(mask, "down", 1)) == list(names_of(mask, "up", 2)) == []


def test_joined_masks_lose_what_one_of_them_loses() -> None:
    one = {Flow("up", 1, 3): np.array([1, 2], np.uint64)}
    other = {Flow("up", 1, 3): np.array([2, 7], np.uint64), Flow("up", 2, 3): np.array([9], np.uint64)}
    assert {f: k.tolist() for f, k in joined([one, other]).items()} == {
        Flow("up", 1, 3): [1, 2, 7],
        Flow("up", 2, 3): [9],
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n", "a.csv:1: the columns are a, b; expected direction, worker"),
        (",".join(COLUMNS) + "\nleft,1,3,5,0\n", "a.csv:2"),
        (",".join(COLUMNS) + "\nup,1,3,5\n", "expected up or down, and four whole numbers"),
        (",".join(COLUMNS) + "\nup,0,3,5,0\n", "worker 0 is out of range"),
        (",".join(COLUMNS) + "\nup,1,3,5,65536\n", "pass 65536 is out of range"),
    ],
)
def test_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(MaskError) as caught:
        read_mask(tmp_path / "a.csv")
    assert words in str(caught.value)


def test_what_is_no_mask(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"PK")
    for path, words in ((tmp_path / "a.npz", "npz"), (tmp_path, "not the folder of a run"), (tmp_path / "x", "read")):
        with pytest.raises(MaskError, match=words):
            read_mask(path)


def test_a_round_is_checked_against_the_list() -> None:
    """The mask of a hash, as a list: the course of the round is the same, and one packet more or less is found."""
    burst = FakeBurst(4, 0.9)
    data = faithful_run(bursts=(burst,))
    lost = {}
    for worker in (1, 2, 3):
        drop = oracle.mask_drop(SEED, "up", worker, 4, 0.9)
        found = [s << 16 | p for p in range(200) for s in np.flatnonzero(drop(np.arange(500), p)).tolist()]
        lost[Flow("up", worker, 4)] = np.unique(np.array(found, np.uint64))
    keys = lost[Flow("up", 1, 4)]
    want = oracle.predict(order_of(4, 1, "up", 500), 400, 500, recorded_drop(keys))
    hashed = oracle.predict(order_of(4, 1, "up", 500), 400, 500, oracle.mask_drop(SEED, "up", 1, 4, 0.9))
    assert (want.passes, want.packets_at_need) == (hashed.passes, hashed.packets_at_need)
    data = replace(data, plan=replace(plan(burst), bursts=()))
    rows = [replace(row, loss_requested=None if row.burst else 0.0) for row in data.runs[0].rows]
    data = with_run(data, 0, recorded=lost, rows=tuple(rows))
    checks = {(c.name, c.transport): c for c in fidelity(data).checks}
    assert checks["recorded mask", "dblp"].ok, checks["recorded mask", "dblp"]
    assert checks["recorded mask", "dblp"].detail.startswith("3 rounds equal")
    fewer = {**lost, Flow("up", 2, 4): lost[Flow("up", 2, 4)][1:]}
    checks = {(c.name, c.transport): c for c in fidelity(with_run(data, 0, recorded=fewer)).checks}
    assert not checks["recorded mask", "dblp"].ok

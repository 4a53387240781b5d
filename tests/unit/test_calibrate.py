"""What a machine can resolve, and how a run refers to it."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from netem.analysis import resolution
from netem.experiment.calibrate import Calibration, line, load, path_of, reference, save
from netem.kernel.user import User

NOW = datetime(2026, 5, 4, tzinfo=UTC)
FOUND = Calibration(
    measured_utc=(NOW - timedelta(hours=3)).isoformat(timespec="seconds"),
    kernel=platform.release(),
    cores=len(os.sched_getaffinity(0)),
    idle_p50_s=1e-3,
    idle_p95_s=2e-3,
    single_s=1.5e-3,
    mean_s=2e-4,
    goodput_bps=1e9,
    late_p50_s=1e-4,
    late_p99_s=1e-3,
    late_max_s=2e-3,
    waiting_share=None,
)


def test_differences_of_normal_noise_are_those_of_theory() -> None:
    values = np.random.default_rng(5).normal(10e-3, 1e-3, 600).tolist()
    assert resolution.single(values) == pytest.approx(1.96 * 2**0.5 * 1e-3, rel=0.1)
    assert resolution.mean(values, 30) == pytest.approx(1.96 * (2 / 30) ** 0.5 * 1e-3, rel=0.1)
    assert resolution.single([1.0, 1.0, 1.0]) == 0


def test_a_run_refers_to_it() -> None:
    referred = reference(FOUND, NOW)
    assert referred is not None
    assert (referred["age_s"], referred["same_kernel"], referred["same_cores"]) == (10_800, True, True)
    assert line(referred) == ("calibration: single rounds differ by up to 1.5 ms by themselves, means of 30 by 0.2 ms")


def test_a_missing_or_stale_one_is_said_in_one_line() -> None:
    assert reference(None, NOW) is None
    assert "doctor --calibrate" in line(None)
    old = replace(FOUND, kernel="2.6.32", measured_utc=(NOW - timedelta(days=40)).isoformat())
    assert line(reference(old, NOW)).endswith("(of another kernel, 40 days old: measure again)")


def test_it_is_kept_in_the_state_folder_of_the_user(tmp_path: Path) -> None:
    user = User.current()
    path = path_of(user, {"XDG_STATE_HOME": str(tmp_path)})
    assert path == tmp_path / "dblp-netem/calibration.json"
    assert str(path_of(user, {})) == f"{user.home}/.local/state/dblp-netem/calibration.json"
    assert load(path, user) is None
    save(FOUND, path, user)
    assert load(path, user) == FOUND
    for damage in ("{", "[]", '{"version": 1}', '{"measured_utc": "yesterday"}'):
        path.write_text(damage)
        assert load(path, user) is None

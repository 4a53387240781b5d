"""Kernel tests build real labs. Not root: skipped, but in CI that is a failure."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from netem.kernel.snapshot import HostSnapshot, host_snapshot


@pytest.fixture(autouse=True)
def _root_only() -> None:
    if os.geteuid() != 0:
        reason = "needs root: run the tests with sudo"
        if os.environ.get("CI"):
            pytest.fail(f"CI is set: {reason}")
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _as_root_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when pytest was started with sudo: a test that wants a calling user sets one."""
    monkeypatch.delenv("SUDO_UID", raising=False)
    monkeypatch.delenv("SUDO_GID", raising=False)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def unchanged_host() -> Iterator[None]:
    """The host is the same before and after: namespaces, links, qdiscs, sysctls."""
    before = host_snapshot()
    yield
    assert differences_since(before) == []


def differences_since(before: HostSnapshot, patience_s: float = 15.0) -> list[str]:
    """What differs from an earlier snapshot for good. Others may work on this machine: what they made must go away."""
    deadline = time.monotonic() + patience_s
    while (found := before.differences(host_snapshot())) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


@pytest.fixture
def settled() -> Callable[[HostSnapshot], list[str]]:
    return differences_since

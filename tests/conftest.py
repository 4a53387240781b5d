"""Shared by all tiers: in CI nothing may be skipped silently.

A test that needs a capability the machine lacks calls ``pytest.skip("what is missing and what to do")``.
With the environment variable ``DBLP_NETEM_NO_SKIP=1`` (set by ``.ci/run``) that skip is a failure with the
same text.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

NO_SKIP = os.environ.get("DBLP_NETEM_NO_SKIP") == "1"


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turns a skip (not an expected failure) into a failure that keeps the reason."""
    if NO_SKIP and report.outcome == "skipped" and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"DBLP_NETEM_NO_SKIP=1: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    _fail_if_skipped(report)
    return report

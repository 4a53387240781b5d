"""Results of a command workload: what is faithful, what the expectations see, what the table shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from netem.analysis.command import Cell, CommandData, CommandRun, Impairment, ProgramEnd, Report, summarise_commands
from netem.analysis.command_expect import NAMES, check_all
from netem.analysis.command_table import render_commands
from netem.analysis.queues import FlowDrops, QueueReport

END = ProgramEnd("worker1", 0, ("prog", "-x"), 0, "itself", 2.0, "logs/a-r0-worker1.log")
BURST = {"loss": 0.3, "direction": "up", "match": "data", "workers": ["worker1"], "for_s": None}
QUIET = Cell("server", "worker1", "data", 0, None, 0.0, 5000, 0, 5_000_000)
LOSSY = Cell("server", "worker1", "data", 1, 0.3, 0.0, 10_000, 3010, 10_000_000)
QUEUE = QueueReport(
    host="server", limit_bytes=2000, rate_bps=10**6, flows=(FlowDrops("data", 10, 7),), counted_drops=3, recorded=10,
    unrecorded=0, peak_bytes=1000, peak_packets=1, largest_frame=1000, sojourn_mean_s=0.1, sojourn_p99_s=0.2,
    sojourn_max_s=0.3, drops_by_kind={"data": 3}, drops_in_burst=1.0,
)  # fmt: skip
RUN = CommandRun(
    name="a",
    repeat=0,
    wall_s=2.5,
    programs=(END,),
    cells=(QUIET, LOSSY),
    impairments=(Impairment((BURST,), 1.0, None, 1.002, 0.001, 1), Impairment((), 1.1, None, 1.101, 0.001, 2)),
    reports=(Report(0, 0, "worker1", 0.01, False), Report(1, 0, "worker1", 0.04, True)),
    drops={"device": {"server": 0}, "queue": {"server": 4}},
)


def summary(*runs: CommandRun, expect: tuple[str, ...] = ()) -> dict[str, Any]:
    return summarise_commands(CommandData("s", 1, "bpf", "bpf", runs, expect=expect))


def failed(run: CommandRun) -> list[str]:
    return [check["name"] for check in summary(run)["fidelity"]["checks"] if not check["ok"]]


def test_a_run_that_did_as_asked_is_faithful() -> None:
    found = summary(RUN)
    assert found["fidelity"]["faithful"]
    (burst,) = found["commands"]["a"]["bursts"]
    assert (burst["requested"], burst["seen"], burst["dropped"]) == ([0.3], 10_000, 3010)
    assert found["commands"]["a"]["link"] == {
        "seen": 15_000, "dropped": 3010, "loss": 3010 / 15_000, "bytes": 15_000_000,
        "queue_dropped": 4, "device_dropped": 0,
    }  # fmt: skip
    assert found["commands"]["a"]["burst_latency_s"]["mean"] == 0.04
    assert found["commands"]["a"]["clean_latency_s"]["max"] == 0.01


UNFAITHFUL = [
    (replace(RUN, cells=(QUIET, replace(LOSSY, dropped=3300))), "burst loss"),
    (replace(RUN, cells=(replace(QUIET, dropped=1), LOSSY)), "no burst"),
    (replace(RUN, cells=(replace(QUIET, base=0.1, dropped=900), LOSSY)), "base loss"),
    (replace(RUN, unreached=("the burst at 9 s did not come",)), "bursts"),
    (replace(RUN, drops={"device": {"server": 20}}), "unrequested drops"),
    (replace(RUN, doubts={"fragments": 3}), "links"),
]


@pytest.mark.parametrize(("run", "check"), UNFAITHFUL, ids=[check for _, check in UNFAITHFUL])
def test_what_makes_a_run_unfaithful(run: CommandRun, check: str) -> None:
    assert failed(run) == [check]


def test_base_loss_and_burst_are_two_independent_losses() -> None:
    both = replace(LOSSY, base=0.1, dropped=round(10_000 * (1 - 0.7 * 0.9)))
    assert failed(replace(RUN, cells=(QUIET, both))) == []


def test_packets_during_a_change_belong_to_no_window() -> None:
    between = replace(QUIET, window=None, dropped=3)
    assert failed(replace(RUN, cells=(QUIET, LOSSY, between))) == []


def test_a_packet_that_the_uplink_lost_is_counted_once() -> None:
    uplink = Cell("^worker1", "worker1", "data", 0, None, 0.1, 5560, 560, 0)
    link = summary(replace(RUN, cells=(QUIET, LOSSY, uplink)))["commands"]["a"]["link"]
    assert (link["seen"], link["dropped"]) == (15_000 + 560, 3010 + 560)


def test_every_name_of_an_expectation_has_a_value() -> None:
    texts = tuple(f"a.{name} >= 0" for name in NAMES)
    watched = replace(RUN, queues=(QUEUE,))
    assert [one["held"] for one in summary(watched, expect=texts)["expectations"]] == [True] * len(texts)
    check_all(texts, ["a"], lambda path, message: AssertionError(message), reports=True, bursts=True, queues=True)


def test_recorded_queues_are_in_the_summary_and_checked() -> None:
    assert summary(RUN)["commands"]["a"]["queues"] == []
    (entry,) = summary(replace(RUN, queues=(QUEUE,)))["commands"]["a"]["queues"]
    assert (entry["host"], entry["dropped"], entry["peak_share"]) == ("server", 3, 0.5)
    assert failed(replace(RUN, queues=(QUEUE,))) == []
    assert failed(replace(RUN, queues=(replace(QUEUE, counted_drops=2),))) == ["queues"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.wal < 1", "did you mean a.wall"),
        ("b.wall < 1", "unknown name"),
        ("a.latency.max < 1 s", "report no rounds"),
        ("a.bursts.loss > 1%", "no bursts"),
        ("a.queue.peak > 1%", "no queue is recorded"),
        ("1 < 2", "names no result"),
    ],
)
def test_expectations_that_cannot_hold_are_refused(text: str, message: str) -> None:
    def error(path: tuple[str | int, ...], said: str) -> Exception:
        return ValueError(f"{path}: {said}")

    with pytest.raises(ValueError, match=message):
        check_all([text], ["a"], error, reports=False, bursts=False)


def test_the_table_says_what_happened() -> None:
    odd = replace(END, status=3)
    silent = replace(LOSSY, seen=0, dropped=0)
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    render_commands(summary(replace(RUN, programs=(odd,), cells=(QUIET, silent)), expect=("a.wall < 1",)), console)
    text = console.export_text()
    assert "no packet passed during the burst at 1 s" in text
    assert "worker1 ended with status 3 (logs/a-r0-worker1.log)" in text
    assert "expect FAILED a.wall < 1" in text

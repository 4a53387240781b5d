"""`workload: {kind: command}`: programs, placeholders, what ends the job, and events by time."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from netem.spec import Command, load_scenario, load_scenario_text, resolved_yaml
from netem.spec.command import Place, PlaceholderError, fill, filled
from netem.spec.timed import timed_steps
from tests.unit.spec_texts import refused

TEXT = """\
topology: {star: {workers: 3}}
workload:
  kind: command
  run:
    server: {argv: [iperf3, -s], ready: {tcp: 5201}}
    "worker*": [prog, --rank, "{rank}/{world_size}", -c, "{server}", -t, 5, -l, 0.10]
    worker2: {argv: [other, "{address}"], env: {PEER: "{address:worker3}"}, status: 3}
  until: workers
  flow: {proto: tcp, ports: 5201}
events:
  - {at: 2 s, for: 100 ms, loss: 30%}
  - {at: 2050 ms, for: 100 ms, loss: 90%, on: "worker1.down", match: all}
"""
ADDRESSES = {"server": "10.77.0.1", "worker1": "10.77.0.2", "worker2": "10.77.0.3", "worker3": "10.77.0.4"}


def work_of(*overrides: str, text: str = TEXT) -> Command:
    work = load_scenario_text(text, overrides).spec.workload
    assert isinstance(work, Command)
    return work


def at(host: str, **more: object) -> Place:
    return Place(host, ADDRESSES, "server", "/usr/bin/python3", **more)  # type: ignore[arg-type]


def test_wildcards_give_a_program_to_each_host_and_an_exact_name_wins() -> None:
    work = work_of()
    assert list(work.run) == ["server", "worker1", "worker2", "worker3"]
    assert work.run["worker1"] == work.run["worker3"]
    assert work.run["worker2"].status == 3
    assert work.run["server"].ready is not None
    assert work.run["server"].ready.port == ("tcp", 5201)
    assert work.until == ("worker1", "worker2", "worker3")
    assert work.flow is not None
    assert (work.flow.ports, work.flow.at) == ((5201, 5201), ("server",))


def test_arguments_are_filled_and_numbers_stay_as_they_are_written() -> None:
    argv, env = filled(work_of(), at("worker3"))
    assert argv == ("prog", "--rank", "3/4", "-c", "10.77.0.1", "-t", "5", "-l", "0.10")
    assert env == {}
    argv, env = filled(work_of(), at("worker2"))
    assert argv == ("other", "10.77.0.3")
    assert env == {"PEER": "10.77.0.4"}


def test_ranks_count_the_hosts_that_run_something() -> None:
    work = work_of("workload.run.server=null", "workload.flow=null")
    assert work.ranks == {"worker1": 0, "worker2": 1, "worker3": 2}
    assert filled(work, at("worker1"))[0][2] == "0/3"


def test_a_variant_fills_its_own_placeholders() -> None:
    variants = "workload.variants={a: {control: cubic}, b: {control: reno}}"
    work = work_of(variants, "workload.run.server=[x, '{control}']")
    assert work.names == ("a", "b")
    assert filled(work, at("server", variant="b"))[0] == ("x", "reno")


def test_texts_that_are_no_placeholders_stay() -> None:
    values = {"rank": "2"}
    assert fill('{"a": {"b": 1}}', values) == '{"a": {"b": 1}}'
    assert fill("{{print}} {rank} {{rank}} {} {1}", values) == "{print} 2 {rank} {} {1}"
    with pytest.raises(PlaceholderError, match=r"unknown placeholder \{rnk\}; did you mean 'rank'"):
        fill("{rnk}", values)


def test_the_folder_is_that_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("")
    (tmp_path / "s.yaml").write_text(TEXT.replace("[iperf3, -s]", '["{python}", "{folder}/my.py"]'))
    loaded = load_scenario(tmp_path / "s.yaml")
    assert isinstance(loaded.spec.workload, Command)
    assert loaded.spec.workload.run["server"].argv[1] == str(tmp_path / "my.py")
    assert load_scenario_text(resolved_yaml(loaded.spec)).spec == loaded.spec
    (tmp_path / "my.py").unlink()
    with pytest.raises(Exception, match=r"s.yaml:5: workload.run.server.*my.py: no such file"):
        load_scenario(tmp_path / "s.yaml")


def test_the_resolved_form_loads_again() -> None:
    spec = load_scenario_text(TEXT).spec
    assert load_scenario_text(resolved_yaml(spec)).spec == spec


def test_events_become_steps_with_the_whole_state() -> None:
    steps = list(timed_steps(load_scenario_text(TEXT).spec, 0))
    assert [round(step.at_s, 3) for step in steps] == [2.0, 2.05, 2.1, 2.15]
    states = [[burst for effect in step.effects for burst in effect.bursts] for step in steps]
    assert [sorted((b.loss, b.direction, b.match, len(b.workers)) for b in state) for state in states] == [
        [(0.3, "up", "data", 3)],
        [(0.3, "up", "data", 3), (0.9, "down", "all", 1)],
        [(0.9, "down", "all", 1)],
        [],
    ]


REFUSED = [
    ("workload.run.server=iperf3 -s", "a program is a list of arguments, such as [iperf3, -s]"),
    ("workload.run.serverr=[x]", "'serverr' is not a host; did you mean 'server'?"),
    ("workload.run.server=[]", "is empty; a program is a list of arguments"),
    ("workload.run.server=[x, '{rnk}']", "unknown placeholder {rnk}; did you mean 'rank'?"),
    ("workload.run.server={argv: [x], ready: {}}", "names one port"),
    ("workload.run.server={argv: [x], ready: {tcp: 70000}}", "70000 is out of range"),
    ("workload.run.server={argv: [x], env: {RANK: 1}}", "is set by the testbed"),
    ("workload.run.server={argv: [x], statuss: 1}", "unknown key 'statuss'; did you mean 'status'?"),
    ("workload.until=worker9", "'worker9' is not a host"),
    ("workload.limit=30", "30 has no unit"),
    ("workload.flow={proto: tcp, ports: 0}", "is no port"),
    ("workload.flow={proto: tcp, ports: 9..5}", "the first port of a range is not after the last"),
    ("workload.flow={proto: tcp, ports: 5, key: [[0, 4]]}", "is for udp alone"),
    ("workload.flow={proto: udp, ports: 5, key: [[4, 4]]}", "is no byte range"),
    ("workload.variants={a: {rank: 1}}", "is a placeholder already"),
    ("workload.variants={a: {x: 1}, b: {y: 1}}", "all variants have the same keys"),
    ("transports={tcp: {}}", "compare settings with workload.variants"),
    ("capture={at: [server], rounds: bursts}", "packets of a command do not say their round"),
    ("bursts=[{iteration: 1, loss: 1%}]", "needs workload.iterations"),
    ("events.0.at=5", "5 has no unit"),
    ("events.0.on=worker1.sideways", "is not HOST.up or HOST.down"),
    ("events.0.on=worker7", "'worker7' is not a host"),
]


@pytest.mark.parametrize(("override", "message"), REFUSED, ids=[override for override, _ in REFUSED])
def test_mistakes_are_refused_with_what_is_allowed(override: str, message: str) -> None:
    assert message in str(refused(TEXT, override))


def test_an_error_in_a_program_names_its_line() -> None:
    error = refused(TEXT.replace("{server}", "{srver}"))
    assert error.line == 6
    assert "{srver}" in error.message


def test_events_that_go_on_for_ever_are_drawn_as_they_come() -> None:
    text = TEXT[: TEXT.index("events:")] + "events: [{every: 1 s, for: 250 ms, loss: 5%}]\n"
    steps = list(islice(timed_steps(load_scenario_text(text).spec, 0), 5))
    assert [(step.at_s, len(step.effects)) for step in steps] == [(0, 1), (0.25, 0), (1, 1), (1.25, 0), (2, 1)]


def test_events_that_programs_know_nothing_of_are_refused() -> None:
    assert "know no phases" in str(refused(TEXT, "events=[{while: critical, loss: 1%}]"))
    assert "needs workload.iterations" in str(refused(TEXT, "events=[{iteration: 0..3, loss: 1%}]"))


def test_bursts_of_programs_are_not_loaded_before() -> None:
    assert "packets of programs do not say their round" in str(refused(TEXT, "link.arm=preloaded"))


def test_a_burst_by_iteration_needs_programs_that_count_them() -> None:
    spec = load_scenario_text(TEXT, ["workload.iterations=10", "bursts=[{iteration: 4, loss: 50%}]"]).spec
    assert spec.bursts[0].workers == ("worker1", "worker2", "worker3")
    assert "is after the last iteration" in str(
        refused(TEXT, "workload.iterations=4", "bursts=[{iteration: 4, loss: 50%}]")
    )


def test_other_workloads_still_need_transports() -> None:
    text = "topology: star3\nworkload: {kind: replay, chunks: 9, iterations: 9}\n"
    assert "transports: is required" in str(refused(text))
    assert "is empty" in str(refused(text + "transports: {}\n"))

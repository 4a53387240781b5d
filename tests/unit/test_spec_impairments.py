"""What only netem can do, in files: read, written back, refused where it would lie, and carried to the links."""

from __future__ import annotations

from pathlib import Path

import pytest

from netem.analysis.merge import LossPlan
from netem.experiment.passages import base_loss, in_bursts
from netem.experiment.wiring import shape_of
from netem.kernel.loss_models import FourState
from netem.kernel.netem_options import Overhead, Slot
from netem.links.base import Extras, Shape, UnsupportedFeature
from netem.links.chain import GilbertElliott
from netem.links.choose import check_bands, choose
from netem.spec import LinkShape, SpecError, Topology, load_scenario_text, load_topology_text, resolved_yaml, schema
from tests.unit.test_choose import BOTH, BPF_ONLY

STAR = "star: {{workers: 1}}\nlinks:\n  - {{between: ['*', sw], {}}}\n"


def topology(properties: str, file: str = "t.yaml") -> Topology:
    return load_topology_text(STAR.format(properties), file=file)


def shape(properties: str) -> Shape:
    """Of worker1, towards the host."""
    return shape_of(topology(properties).link_of("worker1").down)


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ("delay: 10 ms", Extras()),
        ("delay: 10 ms, reorder: 25%", Extras(reorder_ratio=0.25, reorder_gap=1)),
        ("delay: 10 ms, reorder: {ratio: 25%, gap: 5}", Extras(reorder_ratio=0.25, reorder_gap=5)),
        ("duplicate: 1%, corrupt: 0.1%", Extras(duplicate_ratio=0.01, corrupt_ratio=0.001)),
        (
            "rate: 1 Gbit, overhead: {packet: -14 B, cell: 48 B, cell_overhead: 5 B}",
            Extras(overhead=Overhead(-14, 48, 5)),
        ),
        ("rate: 1 Gbit, overhead: {packet: 24 B}", Extras(overhead=Overhead(24))),
        ("slot: {min: 1 ms, max: 2 ms, packets: 5, bytes: 3 kB}", Extras(slot=Slot(10**6, 2 * 10**6, 5, 3000))),
        ("slot: {delay: 1 ms, jitter: 200 us}", Extras(slot=Slot(mean_ns=10**6, deviation_ns=200_000))),
        ("loss: 1%, ecn: true, limit: 500", Extras(ecn=True, limit_packets=500)),
        ("loss: {four_state: {p13: 2%, p31: 30%}}", Extras(loss=FourState(0.02, 0.3))),
    ],
)
def test_from_the_file_to_the_link(properties: str, expected: Extras) -> None:
    assert shape(properties).extras == expected
    found = topology(properties)
    assert load_topology_text(resolved_yaml(found)) == found, "explicit, it says the same"


@pytest.mark.parametrize("name", ["normal", "pareto", "paretonormal"])
def test_distributions_by_name(name: str) -> None:
    table = shape(f"delay: 9 ms, jitter: 1 ms, rate: 1 Gbit, distribution: {name}").extras.table
    assert table is not None
    assert len(table) == 4096
    assert shape("delay: 9 ms, jitter: 1 ms, rate: 1 Gbit, distribution: uniform").extras.table is None


def test_a_table_from_a_file_beside_the_topology(tmp_path: Path) -> None:
    (tmp_path / "own.dist").write_text("# mine\n-8192 0 8192\n")
    text = "delay: 9 ms, jitter: 1 ms, rate: 1 Gbit, distribution: own.dist"
    found = topology(text, file=str(tmp_path / "t.yaml"))
    assert shape_of(found.link_of("worker1").up).extras.table == (-8192, 0, 8192)
    assert load_topology_text(resolved_yaml(found)) == found, "the values are in it, not the file's name"
    (tmp_path / "own.dist").write_text("1.5")
    with pytest.raises(SpecError, match="whole numbers"):
        topology(text, file=str(tmp_path / "t.yaml"))


def test_one_direction_and_both() -> None:
    link = topology("loss: 1%, up: {loss: {four_state: {p13: 2%, p31: 30%}}}").link_of("worker1")
    assert link.down.loss == 0.01
    assert link.up.loss != link.up.loss + 0.0, "equal numbers are not equal models"
    assert float(link.up.loss) == pytest.approx(0.0625)


def test_a_chain_is_the_links_own_and_every_backend_has_it() -> None:
    found = topology("loss: {gilbert_elliott: {loss: 1%, burst: 5}}")
    made = shape_of(found.link_of("worker1").down)
    assert made.chain == GilbertElliott.of_bursts(0.01, 5)
    assert (made.loss_ratio, made.extras, found.needs_netem) == (0.0, Extras(), ())


def test_reorder_says_what_jitter_may_do_or_is_a_share() -> None:
    link = topology("delay: 5 ms, jitter: 1 ms, reorder: allow").link_of("worker1")
    assert (link.reorder, link.up.reorder) == ("allow", None)
    link = topology("delay: 5 ms, jitter: 1 ms, reorder: 5%").link_of("worker1")
    assert link.reorder == "refuse"
    assert link.up.reorder is not None, "whoever asks for reordering need not allow it"


def test_defaults_may_say_either_and_the_links_own_key_wins() -> None:
    text = (
        "star: {workers: 1}\ndefaults: {delay: 5 ms, jitter: 1 ms, reorder: %s}\n"
        "links:\n  - {between: [server, sw]%s}\n"
    )
    server, worker = load_topology_text(text % ("allow", "")).host_links
    assert (server.reorder, worker.reorder, worker.up.reorder) == ("allow", "allow", None)
    server, worker = load_topology_text(text % ("5%", ", reorder: allow")).host_links
    assert (server.reorder, worker.reorder) == ("allow", "refuse")
    assert server.up.reorder is None
    assert worker.up.reorder is not None


def test_four_states_in_front_of_the_last_link_have_no_interval_but_are_no_base_loss() -> None:
    """Between switches: netem loses them at the port that leads there, and no flow's counter sees it."""
    model = "loss: {four_state: {p13: 2%, p31: 98%}}"
    text = "dumbbell: {left: {server: 1}, right: {workers: 1}}\nlinks:\n"
    trunk = load_topology_text(text + f"  - {{between: [left, right], {model}}}\n")
    assert trunk.needs_netem == ("loss (left to right up, left to right down)",)
    assert (trunk.four_state_losses, trunk.shapes_uplinks) == ((), False)
    assert (base_loss(trunk), in_bursts(trunk)) == ({}, frozenset())
    last = load_topology_text(text + f"  - {{between: [worker1, right], down: {{{model}}}}}\n")
    assert base_loss(last) == {(1, "down"): pytest.approx(0.02)}
    assert in_bursts(last) == {(1, "down")}
    assert last.four_state_losses == ("loss (worker1 down)",)


def test_flows_in_bursts_are_not_held_to_an_interval() -> None:
    base = {(1, "down"): 0.02, (1, "up"): 0.1}
    plan = LossPlan((), {"worker1": 1}, base, in_bursts=frozenset({(1, "down")}))
    assert plan.requested(0, 1, "down") == (None, False)
    assert plan.requested(0, 1, "up") == (pytest.approx(0.1), False)


LIES = [
    ("jitter: 1 ms", "jitter", "reorders packets"),
    ("delay: 5 ms, distribution: normal", "distribution", "does nothing without jitter"),
    ("reorder: 5%", "reorder", "does nothing without a delay"),
    ("ecn: true", "ecn", "does nothing without loss"),
    ("limit: 5, queue: 5 packets", "limit", "exclude each other"),
    ("overhead: {packet: 4 B}", "overhead", "does nothing without a rate"),
    ("rate: 1 Gbit, overhead: {cell_overhead: 5 B}", "overhead.cell_overhead", "without the size of a cell"),
    ("rate: 1 Gbit, queue: 9 kB, overhead: {packet: 4 B}", "queue", "number of packets"),
    ("loss: {correlation: 25%}", "loss.correlation", "not offered.*1.7%"),
    ("loss: {gilbert_elliott: {loss: 90%, burst: 2}}", "loss.gilbert_elliott", "bursts of 9 packets or more"),
    ("loss: {four_state: {p13: 60%, p31: 50%, p14: 50%}}", "loss.four_state", "1 at most"),
    ("loss: {four_state: {p13: 60%}}", "loss.four_state.p31", "is required"),
    ("loss: {four_state: {p13: 60%, p31: 1}}", "loss.four_state", "no unit"),
    ("loss: {four_state: {p13: 60%, p41: 1%}}", "loss.four_state.p41", "unknown key"),
    ("slot: {min: 1 ms}", "slot.max", "is required"),
    ("slot: {min: 3 ms, max: 2 ms}", "slot.min", "more than max"),
    ("slot: {max: 2 ms, jitter: 1 ms}", "slot", "either"),
    ("slot: {jitter: 1 ms}", "slot", "needs a delay"),
    ("delay: 9 ms, jitter: 3 s, rate: 1 Gbit", "jitter", "out of range"),
    ("distribution: nrmal", "distribution", "did you mean 'normal'"),
    ("overhead: {packet: 4}, rate: 1 Gbit", "overhead.packet", "no unit"),
]


@pytest.mark.parametrize(("properties", "where", "words"), LIES, ids=[row[0] for row in LIES])
def test_what_would_not_do_what_it_says_is_refused(properties: str, where: str, words: str) -> None:
    with pytest.raises(SpecError, match=rf"t\.yaml:3: links\.0\.(up\.|down\.)?({where}): .*{words}"):
        topology(properties)


def test_four_states_take_no_bursts_on_top() -> None:
    model = "down: {loss: {four_state: {p13: 2%, p31: 30%}}}"
    scenario = (
        "name: t\nworkload: {kind: replay, chunks: 10, iterations: 9}\ntransports: {mlt: {fixed: 1%}}\n"
        f"topology: {{star: {{workers: 1}}, links: [{{between: ['*', sw], {model}}}]}}\n"
    )
    load_scenario_text(scenario)
    with pytest.raises(SpecError, match="cannot be combined with bursts"):
        load_scenario_text(scenario + "bursts: [{iteration: 2, loss: 90%}]\n")


def test_the_schema_knows_the_short_forms() -> None:
    definitions = schema("topology")["$defs"]
    link, one = definitions["Link"]["properties"], definitions["LinkShape"]["properties"]
    assert set(EACH) <= set(one)
    assert set(EACH) <= set(link)
    forms = link["reorder"]["anyOf"]
    assert forms[0] == {"enum": ["refuse", "allow"]}
    assert "%" in forms[1]["pattern"]
    assert "type" not in link["reorder"]
    assert one["reorder"]["anyOf"] == forms[1:]
    for properties in (one, definitions["Slot"]["properties"]):
        assert {"type": "string", "description": "The file of a table."} in properties["distribution"]["anyOf"]


EACH = {
    "delay": "delay: 1 ms",
    "jitter": "jitter: 1 ms, rate: 1 Gbit",
    "distribution": "jitter: 1 ms, rate: 1 Gbit, distribution: normal",
    "loss": "loss: {four_state: {p13: 2%, p31: 30%}}",
    "overhead": "rate: 1 Gbit, overhead: {packet: 4 B}",
    "limit": "limit: 5",
    "duplicate": "duplicate: 1%",
    "corrupt": "corrupt: 1%",
    "reorder": "delay: 1 ms, reorder: 5%",
    "slot": "slot: {max: 1 ms}",
    "ecn": "loss: 1%, ecn: true",
}


@pytest.mark.parametrize("key", EACH)
def test_each_option_is_refused_on_bpf_with_the_link_that_asks(key: str) -> None:
    found = load_topology_text(
        "star: {workers: 2}\nlinks:\n"
        f"  - {{between: [server, sw]}}\n  - {{between: ['worker*', sw], down: {{{EACH[key]}}}}}\n"
    )
    assert f"{key} (worker1 down, worker2 down)" in found.needs_netem
    with pytest.raises(
        UnsupportedFeature, match=rf"{key} \(worker1 down, worker2 down\).*available with: netem"
    ) as error:
        choose("bpf", "auto", found.needs_netem, BOTH)
    assert error.value.exit_status == 4
    with pytest.raises(UnsupportedFeature, match=rf"{key} \(worker1.*no sch_netem"):
        choose("auto", "auto", found.needs_netem, BPF_ONLY)
    assert choose("auto", "auto", found.needs_netem, BOTH).name == "netem"


def test_every_option_is_in_the_list() -> None:
    assert set(EACH) == set(LinkShape.ONLY_NETEM)


def test_a_plain_link_needs_no_netem() -> None:
    assert topology("rate: 1 Gbit, loss: 1%, queue: 9 packets").needs_netem == ()


@pytest.mark.parametrize("key", ["overhead", "duplicate", "slot"])
def test_what_needs_a_port_with_a_single_netem(key: str) -> None:
    """Down it takes loss_engine: bpf; up, at the host's own uplink, there is only one."""
    down, up = topology(f"down: {{{EACH[key]}}}"), topology(f"up: {{{EACH[key]}}}")
    with pytest.raises(UnsupportedFeature, match=rf"{key} \(server down, worker1 down\).*loss_engine: bpf"):
        check_bands("netem", down.needs_one_netem, down.four_state_losses)
    check_bands("bpf", down.needs_one_netem, down.four_state_losses)
    check_bands("netem", up.needs_one_netem, up.four_state_losses)


def test_four_states_and_the_mask_exclude_each_other() -> None:
    down = topology(f"down: {{{EACH['loss']}}}")
    with pytest.raises(UnsupportedFeature, match="loss_engine: netem"):
        check_bands("bpf", down.needs_one_netem, down.four_state_losses)
    check_bands("netem", down.needs_one_netem, down.four_state_losses)

"""Which backend is chosen, and what the refusals say."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from netem.links.base import UnsupportedFeature
from netem.links.choose import ELSEWHERE, BackendChoice, choose


@dataclass(frozen=True)
class Tried:
    ok: bool
    detail: str = ""


NETEM_ONLY = {"netem": Tried(True), "bpf": Tried(False, "no CAP_BPF")}
BPF_ONLY = {"netem": Tried(False, "no sch_netem"), "bpf": Tried(True)}
BOTH = {"netem": Tried(True), "bpf": Tried(True)}
NEITHER = {"netem": Tried(False, "no sch_netem"), "bpf": Tried(False, "no CAP_BPF")}

CHOICES = [
    # requested, loss engine, delay, probes -> name, loss engine
    ("auto", "auto", False, BOTH, "netem", "netem"),
    ("auto", "auto", True, BOTH, "netem", "netem"),
    ("auto", "auto", False, BPF_ONLY, "bpf", "bpf"),
    ("auto", "auto", False, NETEM_ONLY, "netem", "netem"),
    ("auto", "bpf", False, BOTH, "netem", "bpf"),
    ("auto", "bpf", True, BOTH, "netem", "bpf"),
    ("auto", "bpf", False, BPF_ONLY, "bpf", "bpf"),
    ("auto", "netem", False, BOTH, "netem", "netem"),
    ("netem", "auto", True, BOTH, "netem", "netem"),
    ("netem", "bpf", False, BOTH, "netem", "bpf"),
    ("bpf", "auto", False, BOTH, "bpf", "bpf"),
    ("bpf", "bpf", False, BPF_ONLY, "bpf", "bpf"),
    ("fake", "auto", True, {}, "fake", "fake"),
]


@pytest.mark.parametrize(("requested", "engine", "delay", "probes", "name", "loss"), CHOICES)
def test_choice(requested, engine, delay, probes, name, loss) -> None:
    choice = choose(requested, engine, delay, probes)
    assert (choice.name, choice.loss_engine) == (name, loss)
    assert choice.reason.startswith(name)


REFUSALS = [
    # requested, loss engine, delay, probes -> feature, backends that have it, words of the message
    ("auto", "auto", True, BPF_ONLY, "delay", (ELSEWHERE,), "no sch_netem"),
    ("bpf", "auto", True, BPF_ONLY, "delay", (ELSEWHERE,), "cannot hold"),
    ("bpf", "auto", True, BOTH, "delay", ("netem",), "cannot hold"),
    ("netem", "auto", False, BPF_ONLY, "link backend netem", ("bpf", ELSEWHERE), "no sch_netem"),
    ("bpf", "auto", False, NETEM_ONLY, "link backend bpf", ("netem",), "no CAP_BPF"),
    ("auto", "auto", False, NEITHER, "a link backend", (ELSEWHERE,), "no CAP_BPF"),
    ("auto", "auto", False, {}, "a link backend", (ELSEWHERE,), "not tried"),
    ("auto", "netem", False, BPF_ONLY, "loss engine netem", ("bpf", ELSEWHERE), "no sch_netem"),
    ("bpf", "netem", False, BOTH, "loss engine netem", ("netem",), "itself"),
    ("netem", "bpf", False, NETEM_ONLY, "loss engine bpf", ("netem",), "no CAP_BPF"),
]


@pytest.mark.parametrize(("requested", "engine", "delay", "probes", "feature", "have", "words"), REFUSALS)
def test_refusal(requested, engine, delay, probes, feature, have, words) -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        choose(requested, engine, delay, probes)
    error = caught.value
    assert (error.feature, error.backends_that_have_it) == (feature, have)
    assert words in str(error)
    assert all(name in str(error) for name in have)
    assert error.exit_status == 4


def test_reason_says_why_netem_was_passed_over() -> None:
    assert choose("auto", "auto", False, BPF_ONLY) == BackendChoice(
        "bpf", "bpf", "bpf: netem does not work here (no sch_netem)"
    )

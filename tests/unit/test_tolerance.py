"""Tolerance policies and detectors of critical learning regimes: what they decide, and bad configurations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dblp.errors import ConfigError, LocalProtocolError
from dblp.tolerance import Detector, detector_from, policy_from, relative_change

NORMS = st.one_of(st.none(), st.just(math.nan), st.floats(min_value=0.0, allow_infinity=True))


def phases(detector: Detector, norms: Sequence[float | None], epoch: int = 1000) -> str:
    """One letter a round, c(ritical) or n(ormal): round 0, then the round after each norm."""
    verdicts = [detector.first()]
    verdicts += [
        detector.next(iteration, iteration % epoch == 0, norm) for iteration, norm in enumerate(norms, start=1)
    ]
    return "".join(verdict.phase[0] for verdict in verdicts)


def test_schedule_ranges_are_inclusive_and_ignore_norms() -> None:
    detector = detector_from({"kind": "schedule", "critical": [[0, 1], [4, 4]]})
    assert phases(detector, [math.nan, None, 0.0, 1.0, 2.0, 3.0]) == "ccnncnn"


def test_empty_schedule_is_never_critical() -> None:
    assert phases(detector_from({"kind": "schedule", "critical": []}), [1.0, 9.0]) == "nnn"


@pytest.mark.parametrize(("kind", "expected"), [("never", "nnnn"), ("always", "cccc")])
def test_constant_detectors(kind: str, expected: str) -> None:
    assert phases(detector_from({"kind": kind}), [1.0, 9.0, math.nan]) == expected


# Epochs of 3 rounds. The decision for rounds 3..5 compares the norms of rounds 1 and 2, the next one rounds 4 and 5.
@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        pytest.param([9.0, 4.0, 4.0, 1.0, 1.0, 1.0], "cccnnnn", id="steady"),
        pytest.param([4.0, 4.0, 2.0, 2.0, 2.0, 2.0], "ccccccn", id="half is enough"),
        pytest.param([4.0, 4.0, 2.01, 2.0, 2.0, 2.0], "cccnnnn", id="less than half is not"),
        pytest.param([4.0, 4.0, 6.0, 2.0, 2.0, 2.0], "ccccccn", id="growth counts too"),
        pytest.param([4.0, 4.0, 4.0, 4.0, 4.0, 1.0], "cccnnnc", id="normal to critical"),
        pytest.param([1.0, 9.0, 9.0, 1.0, 9.0, 9.0], "cccnnnn", id="jumps inside an epoch do not count"),
        pytest.param([1.0, 0.0, 0.0, 0.0, 0.0, 1.0], "cccnnnc", id="zero to zero, zero to one"),
        pytest.param([1.0, 1.0, None, 1.0, 1.0, 1.0], "ccccccn", id="unknown keeps critical"),
        pytest.param([1.0, 1.0, 1.0, 1.0, None, 9.0], "cccnnnn", id="unknown keeps normal"),
        pytest.param([1.0, 1.0, 1.0, 1.0, 1.0, math.nan], "cccnnnc", id="nan"),
        pytest.param([1.0, 1.0, 1.0, 1.0, math.inf, math.inf], "cccnnnc", id="infinity"),
        pytest.param([1.0, 1.0, 1.0, 1.0, None, math.nan], "cccnnnc", id="nan beats unknown"),
    ],
)
def test_paper_eq1(norms: list[float | None], expected: str) -> None:
    assert phases(detector_from({"kind": "paper", "eta": 0.5}), norms, epoch=3) == expected


# Windows of 2 rounds: the first decision is for round 4.
@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        pytest.param([2.0, 2.0, 2.0, 2.0, 2.0, 2.0], "ccccnnn", id="steady"),
        pytest.param([1.0, 3.0, 3.0, 1.0, 0.1, 3.9], "ccccnnn", id="means, not single norms"),
        pytest.param([2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0], "ccccnnccn", id="half is enough"),
        pytest.param([2.0, 2.0, 2.0, None, 2.0, 2.0], "ccccnnn", id="unknown is left out of the mean"),
        pytest.param([2.0, 2.0, None, None, 9.0, 9.0, 9.0, 9.0], "ccccccccn", id="no evidence keeps the phase"),
        pytest.param([2.0, 2.0, 2.0, 2.0, math.nan, 2.0, 2.0, 2.0, 2.0, 2.0], "ccccnnccccn", id="nan"),
        pytest.param([0.0, 0.0, 0.0, 0.0, 0.0, 1.0], "ccccnnc", id="zeros"),
    ],
)
def test_every_n_rounds(norms: list[float | None], expected: str) -> None:
    assert phases(detector_from({"kind": "every-n-rounds", "n": 2, "eta": 0.5}), norms) == expected


def test_every_n_rounds_ignores_epochs() -> None:
    norms = [2.0, 2.0, 2.0, 2.0, 2.0, 9.0]
    raw = {"kind": "every-n-rounds", "n": 2}
    assert phases(detector_from(raw), norms, epoch=1) == phases(detector_from(raw), norms, epoch=1000)


@pytest.mark.parametrize("raw", [{"kind": "paper"}, {"kind": "every-n-rounds", "n": 1}])
def test_huge_norms_do_not_overflow(raw: dict[str, object]) -> None:
    assert phases(detector_from(raw), [1e308, 1e308, 1e308], epoch=1)[-1] == "n"


@pytest.mark.parametrize("kind", ["paper", "every-n-rounds"])
def test_negative_norm_is_the_callers_mistake(kind: str) -> None:
    with pytest.raises(LocalProtocolError, match="negative"):
        detector_from({"kind": kind}).next(1, False, -1.0)


@given(norms=st.lists(NORMS, max_size=40), epoch=st.integers(1, 5), n=st.integers(1, 5))
def test_any_norms_give_a_phase_and_the_same_one_twice(norms: list[float | None], epoch: int, n: int) -> None:
    for raw in ({"kind": "paper"}, {"kind": "every-n-rounds", "n": n}):
        assert phases(detector_from(raw), norms, epoch) == phases(detector_from(raw), norms, epoch)


@given(before=st.floats(0.0, 1e300), after=st.floats(0.0, 1e300))
def test_relative_change_is_never_negative_or_nan(before: float, after: float) -> None:
    assert relative_change(before, after) >= 0.0


def test_adaptive_policy_maps_phases_to_tolerances() -> None:
    policy = policy_from(
        {
            "name": "dblp",
            "kind": "bounded",
            "low": 0.008,
            "high": 0.408,
            "detector": {"kind": "schedule", "critical": [[0, 0]]},
        }
    )
    first, second = policy.first(), policy.next(1, False, 1.0)
    assert (first.phase, first.tolerance) == ("critical", 0.008)
    assert (second.phase, second.tolerance) == ("normal", 0.408)
    assert "schedule" in second.reason


def test_fixed_policy_and_tcp() -> None:
    assert policy_from({"name": "mlt", "fixed": 0.008}).next(5, True, 3.0).tolerance == 0.008
    assert policy_from({"name": "tcp", "kind": "tcp"}).first().tolerance == 0.0


SCHEDULE = {"kind": "schedule", "critical": [[0, 14]]}


@pytest.mark.parametrize(
    ("transport", "path"),
    [
        ({}, "transport.low"),
        ({"kind": "udp"}, "transport.kind"),
        ({"kind": "tcp", "fixed": 0.1}, "transport.fixed"),
        ({"fixed": 1.0}, "transport.fixed"),
        ({"fixed": -0.1}, "transport.fixed"),
        ({"fixed": math.nan}, "transport.fixed"),
        ({"fixed": "0.8%"}, "transport.fixed"),
        ({"fixed": True}, "transport.fixed"),
        ({"fixed": 0.1, "low": 0.1}, "transport.low"),
        ({"low": 0.1, "detector": SCHEDULE}, "transport.high"),
        ({"low": 0.5, "high": 0.4, "detector": SCHEDULE}, "transport.low"),
        ({"low": 0.1, "high": 0.4}, "transport.detector"),
        ({"low": 0.1, "high": 0.4, "detector": SCHEDULE, "hihg": 1}, "transport.hihg"),
    ],
)
def test_bad_transport_names_the_key(transport: dict[str, object], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        policy_from(transport)
    assert ".".join(map(str, caught.value.path)) == path


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ("paper", "detector"),
        ({}, "detector.kind"),
        ({"kind": "accordian"}, "detector.kind"),
        ({"kind": "schedule"}, "detector.critical"),
        ({"kind": "schedule", "critical": "0..14"}, "detector.critical"),
        ({"kind": "schedule", "critical": [[0, 1], [3]]}, "detector.critical.1"),
        ({"kind": "schedule", "critical": [[5, 4]]}, "detector.critical.0"),
        ({"kind": "schedule", "critical": [[-1, 4]]}, "detector.critical.0"),
        ({"kind": "schedule", "critical": [[0, 1.5]]}, "detector.critical.0"),
        ({"kind": "paper", "eta": 0}, "detector.eta"),
        ({"kind": "paper", "n": 10}, "detector.n"),
        ({"kind": "every-n-rounds", "n": 0}, "detector.n"),
        ({"kind": "every-n-rounds", "n": 2.5}, "detector.n"),
        ({"kind": "never", "eta": 0.5}, "detector.eta"),
    ],
)
def test_bad_detector_names_the_key(raw: object, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        detector_from(raw)
    assert ".".join(map(str, caught.value.path)) == path

"""Loss in bursts as files write it, and bursts that are loaded before the run."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from netem.experiment.fabric import rules_for
from netem.experiment.passages import base_loss
from netem.experiment.preload import check_engine
from netem.links import chain, mask
from netem.links.base import UnsupportedFeature
from netem.links.chain import GilbertElliott
from netem.links.choose import BackendChoice
from netem.spec import Burst, Scenario, Step, load_scenario_text, resolved_yaml, star
from netem.spec.arming import obstacle, preloaded
from netem.spec.loss import BurstyLoss, loss_text, together
from tests.unit.spec_texts import REPLAY, refused

FIVES = "{gilbert_elliott: {loss: 30%, burst: 5}}"


def with_loss(loss: str, rest: str = "") -> str:
    return REPLAY + f"\nbursts: [{{iteration: 1, loss: {loss}{rest}}}]\n"


def loss_of(text: str) -> float:
    return load_scenario_text(with_loss(text)).spec.bursts[0].loss


def test_by_mean_loss_and_burst_length() -> None:
    loss = loss_of(FIVES)
    assert isinstance(loss, BurstyLoss)
    assert loss.parameters == pytest.approx((0.2 * 0.3 / 0.7, 0.2, 0.0, 1.0))
    assert float(loss) == pytest.approx(0.3)
    assert loss.burst_packets == pytest.approx(5)
    assert loss_text(loss) == "30% in bursts of 5"


def test_by_probabilities() -> None:
    loss = loss_of("{gilbert_elliott: {p: 10%, r: 20%, h: 10%, k: 99%}}")
    assert isinstance(loss, BurstyLoss)
    assert loss.parameters == (0.1, 0.2, 0.1, 0.99)
    assert float(loss) == pytest.approx(0.9 / 3 + 0.01 * 2 / 3)
    simple = loss_of("{gilbert_elliott: {p: 10%, r: 20%}}")
    assert isinstance(simple, BurstyLoss)
    assert (simple.h, simple.k) == (0.0, 1.0)


@pytest.mark.parametrize("loss", ["90%", FIVES, "{gilbert_elliott: {p: 1.25%, r: 20%, h: 10%, k: 99%}}"])
def test_written_and_read_again_it_is_the_same(loss: str) -> None:
    loaded = load_scenario_text(with_loss(loss, ", duplicate: 2%"))
    assert load_scenario_text(resolved_yaml(loaded.spec)).spec == loaded.spec
    assert loaded.spec.bursts[0].duplicate == 0.02


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("{gilbert_eliott: {loss: 30%, burst: 5}}", "did you mean 'gilbert_elliott'"),
        ("{gilbert_elliott: {loss: 30%, bursts: 5}}", "did you mean 'burst'"),
        ("{gilbert_elliott: {loss: 90%, burst: 5}}", "needs bursts of 9 packets or more, not 5"),
        ("{gilbert_elliott: {loss: 0%, burst: 5}}", "more than 0% and less than 100%"),
        ("{gilbert_elliott: {loss: 30%}}", "is required"),
        ("{gilbert_elliott: {loss: 30%, burst: 5 packets}}", "number of packets such as 5"),
        ("{gilbert_elliott: {loss: 0.3, burst: 5}}", "has no unit"),
        ("{gilbert_elliott: {loss: 30%, burst: 5, p: 3%}}", "exclude each other"),
        ("{gilbert_elliott: {p: 0%, r: 0%}}", "never leaves"),
        ("{gilbert_elliott: {p: 110%, r: 0%}}", "p: 110% is out of range; allowed: 0% to 100%"),
        ("{gilbert_elliott: 30%}", "expected"),
        ("110%", "out of range"),
    ],
)
def test_refusals_say_where(loss: str, message: str) -> None:
    error = refused(with_loss(loss))
    assert message in str(error)
    assert "bursts.0.loss" in str(error)


def test_a_chain_is_no_ratio_of_its_mean() -> None:
    loss = BurstyLoss.of_bursts(0.5, 4)
    assert loss != 0.5
    assert loss == BurstyLoss.of_bursts(0.5, 4)
    assert loss != BurstyLoss.of_bursts(0.5, 5)
    assert 0.4 < loss < 0.6
    assert copy.deepcopy(loss) == pickle.loads(pickle.dumps(loss)) == loss


def test_one_loss_after_another() -> None:
    loss = BurstyLoss(0.1, 0.2, 0.1, 0.9)
    both = together(loss, 0.5)
    assert isinstance(both, BurstyLoss)
    assert float(both) == pytest.approx(1 - (1 - float(loss)) * 0.5)
    assert together(0.5, loss) == both
    assert together(0.2, 0.5) == pytest.approx(0.6)
    assert together(loss, loss) == pytest.approx(1 - (1 - float(loss)) ** 2)


@pytest.mark.parametrize("loss", [BurstyLoss.of_bursts(0.3, 5), BurstyLoss(0.05, 0.1, 0.3, 0.95)])
def test_how_much_more_losses_in_bursts_scatter(loss: BurstyLoss) -> None:
    n = 2000
    one = chain.limits(GilbertElliott(*loss.parameters))
    counts = np.array([chain.lost(mask.mix(seed), n, one).sum() for seed in range(600)])
    assert counts.var() / (n * float(loss) * (1 - float(loss))) == pytest.approx(loss.clustering, rel=0.2)


def test_rules_carry_the_chain_of_the_higher_loss() -> None:
    fives, light = BurstyLoss.of_bursts(0.3, 5), 0.1
    names = {1: "worker1", 2: "worker2", 3: "worker3"}
    bursts = (
        Burst(iteration=4, loss=light, workers=("worker1", "worker2"), duplicate=0.2),
        Burst(iteration=4, loss=fives, workers=("worker2", "worker3")),
    )
    found = rules_for(Step(4, "apply", bursts, 7), "up", (1, 2, 3), {n: f"10.0.0.{n}" for n in names}, names, 7)
    one, two, three = found
    own = GilbertElliott(*fives.parameters)
    assert [(r.loss_ratio, r.chain, r.duplicate_ratio) for r in found] == [
        (0.1, None, 0.2), (float(fives), own, 0.2), (float(fives), own, 0.0),
    ]  # fmt: skip
    assert len({one.state, two.state, three.state}) == 3


def test_steady_loss_of_a_path() -> None:
    topology = star(2, down={"loss": BurstyLoss.of_bursts(0.3, 5)}, up={"loss": 0.1})
    found = base_loss(topology)
    assert isinstance(found[1, "up"], BurstyLoss)
    assert float(found[1, "up"]) == pytest.approx(float(found[2, "down"]))


def scenario(rest: str) -> Scenario:
    return load_scenario_text(REPLAY + rest).spec


@pytest.mark.parametrize(
    ("rest", "why"),
    [
        ("\nbursts: [{iteration: 1, loss: 90%}]", None),
        ("\nevents: [{iteration: 1..3, loss: 90%}]", None),
        ("\nbursts: [{iteration: 1, loss: 90%, for: 5 ms}]", "ends within a round"),
        ("\nbursts: [{iteration: 1, loss: 90%, match: all}]", "match: all"),
        ("\nevents: [{iteration: 1, rate: 1 Gbit}]", "more than the loss"),
        ("\nevents: [{at: 1 s, for: 1 s, loss: 90%}]", "not known before"),
    ],
)
def test_what_can_be_loaded_before(rest: str, why: str | None) -> None:
    auto = scenario(rest + "\nlink: {arm: auto}")
    found = obstacle(auto)
    assert (found is None) == (why is None)
    assert why is None or why in (found or ("", ""))[1]
    assert preloaded(auto, keyed=True, repeatable=True) == (why is None)
    assert not preloaded(auto, keyed=False, repeatable=True)
    assert not preloaded(auto, keyed=True, repeatable=False)
    assert not preloaded(scenario(rest), keyed=True, repeatable=True)
    if why is not None:
        error = refused(REPLAY + rest + "\nlink: {arm: preloaded}")
        assert why in str(error)
        assert "link.arm" in str(error)


def test_a_stream_cannot_be_preloaded() -> None:
    error = refused(REPLAY.replace("mlt: {fixed: 0%}", "tcp: {}") + "\nlink: {arm: preloaded}")
    assert "arm: auto" in str(error)


@pytest.mark.parametrize(
    ("rest", "feature"),
    [
        ("\nlink: {arm: preloaded}", "arm: preloaded"),
        (f"\nbursts: [{{iteration: 1, loss: {FIVES}}}]", "gilbert_elliott"),
        (f"\nevents: [{{at: 1 s, for: 1 s, loss: {FIVES}}}]", "gilbert_elliott"),
        ("\nbursts: [{iteration: 1, loss: 1%, duplicate: 1%}]", "duplicate"),
        ("\nbursts: [{iteration: 1, loss: 1%, corrupt: 1%}]", "corrupt"),
    ],
)
def test_what_netem_cannot_do_is_refused_before_anything_is_built(rest: str, feature: str) -> None:
    spec = scenario(rest)
    check_engine(spec, BackendChoice("netem", "bpf", ""))
    with pytest.raises(UnsupportedFeature, match=feature) as caught:
        check_engine(spec, BackendChoice("netem", "netem", ""))
    assert caught.value.backends_that_have_it == ("bpf", "loss_engine: bpf")

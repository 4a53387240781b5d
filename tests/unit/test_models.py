"""Models: size, equal and repeatable replicas."""

from __future__ import annotations

import subprocess
import sys
import typing

import numpy as np
import pytest
import torch

from dblp.models import DATA_SETS, MODELS, Learner, MomentumSgd, Sgd, build_model, configure_torch
from dblp.options import TrainOptions


@pytest.fixture(autouse=True)
def _repeatable_torch() -> typing.Iterator[None]:
    threads = torch.get_num_threads()
    configure_torch()
    yield
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode("default")


def learner(rank: int = 1, seed: int = 7) -> Learner:
    return Learner("digits-cnn", "digits", epochs=8, batch_size=32, sgd=Sgd(), seed=seed, rank=rank, world_size=4)


def test_the_options_name_exactly_the_models_and_data_sets_there_are() -> None:
    hints = typing.get_type_hints(TrainOptions)
    assert set(typing.get_args(hints["model"])) == set(MODELS)
    assert set(typing.get_args(hints["data"])) == set(DATA_SETS)


def test_digits_cnn_has_about_a_million_parameters_in_about_3000_chunks() -> None:
    values = learner().buffer.flat.size
    assert values == 1_078_666
    assert -(-values // 364) == 2964
    assert learner().iterations_per_epoch == 15


def test_the_seed_alone_decides_the_initial_model() -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    states = {seed: learner(rank=1, seed=seed).state().tobytes() for seed in (7, 8)}
    assert torch.equal(torch.get_rng_state(), before)
    assert learner(rank=3, seed=7).state().tobytes() == states[7]
    assert states[7] != states[8]


def test_unknown_model() -> None:
    with pytest.raises(KeyError):
        build_model("resnet", 0)


def test_workers_see_different_samples() -> None:
    first, second = learner(rank=1), learner(rank=2)
    first.gradient(first.start_epoch(0)[0])
    second.gradient(second.start_epoch(0)[0])
    assert not np.array_equal(first.buffer.flat, second.buffer.flat)


def test_two_runs_are_bit_identical_and_learn() -> None:
    def train() -> tuple[list[float], bytes]:
        one = learner()
        losses = []
        for batch in one.start_epoch(0)[:8]:
            losses.append(one.gradient(batch))
            one.apply()
        return losses, one.state().tobytes()

    (losses, state), again = train(), train()
    assert (losses, state) == again
    assert losses[-1] < losses[0]


def test_accuracy_of_an_untrained_model_is_near_chance() -> None:
    assert learner().evaluate() < 0.4


def test_learning_rate_decays_to_nearly_nothing_or_stays() -> None:
    rates = [Sgd(learning_rate=0.1).rate(epoch, 8) for epoch in range(8)]
    assert rates[0] == 0.1
    assert rates == sorted(rates, reverse=True)
    assert 0.0 < rates[-1] < 0.005
    assert Sgd(learning_rate=0.1, decay="none").rate(7, 8) == 0.1


def test_the_optimiser_is_torchs_sgd_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    flat, gradient = torch.randn(1000, generator=generator), torch.zeros(1000)
    reference = torch.nn.Parameter(flat.clone())
    theirs = torch.optim.SGD([reference], lr=0.05, momentum=0.9)
    ours = MomentumSgd(flat, gradient, 0.9)
    for _ in range(5):
        gradient.copy_(torch.randn(1000, generator=generator))
        reference.grad = gradient.clone()
        theirs.step()
        ours.step(0.05)
    assert torch.equal(flat, reference.detach())
    velocity = theirs.state[reference]["momentum_buffer"]
    assert ours.state().tobytes() == torch.cat([flat, velocity]).numpy().tobytes()


def test_training_does_not_load_torchs_compiler() -> None:
    code = (
        "import sys\nfrom dblp.models import *\nconfigure_torch()\n"
        "x = Learner('digits-cnn', 'digits', epochs=1, batch_size=9, sgd=Sgd(), seed=0, rank=1, world_size=2)\n"
        "x.gradient(x.start_epoch(0)[0])\nx.apply()\nx.evaluate()\nsys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0

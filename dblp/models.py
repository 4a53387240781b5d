"""The models that the training workload knows, and one worker's side of data-parallel SGD.

No batch normalisation: its running statistics are not gradients, so replicas that average only gradients
would drift apart in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from dblp.data import Digits, batches, batches_per_epoch, load_digits, shard
from dblp.tensors import GradientBuffer, bind_gradients, bind_parameters


def configure_torch() -> None:
    """Make torch repeatable bit for bit: one thread, deterministic algorithms. Call before building a model.

    One thread also keeps workers that share a machine from slowing one another down.
    """
    torch.set_num_threads(1)
    # Not use_deterministic_algorithms(True), which does the same, but first imports torch's compiler for 1.5 s.
    torch.set_deterministic_debug_mode("error")


class DigitsCnn(nn.Module):
    """Two 3x3 convolutions and two linear layers for 8x8 digits: 1,078,666 parameters, 2,964 chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.hidden = nn.Linear(64 * 4 * 4, 1024)
        self.classes = nn.Linear(1024, 10)
        for layer in (self.conv1, self.conv2, self.hidden):
            # He et al. 2015. torch's default is smaller: the first epoch then learns next to nothing.
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (n, 10) of images float32 (n, 1, 8, 8)."""
        maps = functional.relu(self.conv2(functional.relu(self.conv1(images))))
        pooled = functional.max_pool2d(maps, 2).flatten(1)
        return self.classes(functional.relu(self.hidden(pooled)))


MODELS: dict[str, Callable[[], nn.Module]] = {"digits-cnn": DigitsCnn}
DATA_SETS: dict[str, Callable[[], Digits]] = {"digits": load_digits}


def build_model(name: str, seed: int) -> nn.Module:
    """Build a model whose initial parameters depend on `name` and `seed` only, so all workers start alike.

    The caller's random state is left as it was. Raises KeyError for an unknown name.
    """
    factory = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory()


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent with momentum; no weight decay, no damping.

    decay "cosine" lowers the learning rate from epoch to epoch, so that the last epochs settle and the final
    accuracy does not depend on which batch came last; "none" keeps it.
    """

    learning_rate: float = 0.05
    momentum: float = 0.9
    decay: Literal["cosine", "none"] = "cosine"

    def rate(self, epoch: int, epochs: int) -> float:
        """Learning rate in an epoch: learning_rate (1 + cos(pi epoch / epochs)) / 2 with cosine decay."""
        if self.decay == "none":
            return self.learning_rate
        return self.learning_rate * (1.0 + math.cos(math.pi * epoch / epochs)) / 2.0


class MomentumSgd:
    """SGD with momentum on flat vectors; bit for bit what torch.optim.SGD computes.

    torch.optim imports torch's compiler: 2 s of processor time in every worker before its first step, more than
    it then trains for.
    """

    def __init__(self, parameters: torch.Tensor, gradient: torch.Tensor, momentum: float) -> None:
        self._parameters, self._gradient, self._momentum = parameters, gradient, momentum
        self._velocity = torch.zeros_like(parameters)

    def step(self, learning_rate: float) -> None:
        """velocity = momentum velocity + gradient; parameters -= learning_rate velocity."""
        with torch.no_grad():
            self._velocity.mul_(self._momentum).add_(self._gradient)
            self._parameters.add_(self._velocity, alpha=-learning_rate)

    def state(self) -> NDArray[np.float32]:
        """Parameters followed by the velocity, a new float32 array of twice the parameters' size."""
        return torch.cat([self._parameters, self._velocity]).numpy()


class Learner:
    """One worker's replica: its shard, model and optimiser. Gradients live in `buffer.flat`."""

    def __init__(
        self,
        model: str,
        data: str,
        *,
        epochs: int,
        batch_size: int,
        sgd: Sgd,
        seed: int,
        rank: int,
        world_size: int,
    ) -> None:
        """Raises KeyError for an unknown model or data set, ValueError where the rank has no shard."""
        source = DATA_SETS[data]()
        own = shard(len(source.train_labels), rank, world_size)
        self._images = torch.from_numpy(source.train_images[own])
        self._labels = torch.from_numpy(source.train_labels[own])
        self._test_images = torch.from_numpy(source.test_images)
        self._test_labels = torch.from_numpy(source.test_labels)
        self._epochs, self._batch_size, self._sgd, self._seed, self._rank = epochs, batch_size, sgd, seed, rank
        self._model = build_model(model, seed)
        self.buffer: GradientBuffer = bind_gradients(self._model)
        gradient = torch.from_numpy(self.buffer.flat)
        self._optimizer = MomentumSgd(bind_parameters(self._model), gradient, sgd.momentum)
        self._rate = sgd.learning_rate
        self.iterations_per_epoch = batches_per_epoch(len(self._labels), batch_size)

    def start_epoch(self, epoch: int) -> list[torch.Tensor]:
        """Set the epoch's learning rate; return the sample indices of each of its batches."""
        self._rate = self._sgd.rate(epoch, self._epochs)
        order = batches(len(self._labels), self._batch_size, seed=self._seed, epoch=epoch, rank=self._rank)
        return [torch.from_numpy(indices) for indices in order]

    def gradient(self, batch: torch.Tensor) -> float:
        """Write the gradient of one batch's mean loss into `buffer.flat`; return that loss."""
        self.buffer.zero()
        loss = functional.cross_entropy(self._model(self._images[batch]), self._labels[batch])
        loss.backward()
        return float(loss.detach())

    def apply(self) -> None:
        """One optimiser step with whatever gradient `buffer.flat` holds now."""
        self._optimizer.step(self._rate)

    def evaluate(self) -> float:
        """Accuracy (0..1) on the held-out images."""
        with torch.no_grad():
            hits = (self._model(self._test_images).argmax(dim=1) == self._test_labels).sum()
        return int(hits) / len(self._test_labels)

    def state(self) -> NDArray[np.float32]:
        """Parameters and momentum: equal bytes mean identical replicas."""
        return self._optimizer.state()

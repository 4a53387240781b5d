"""Parameters and gradients as flat vectors: shared with torch, never rebound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from dblp.chunks import TensorSpec
from dblp.tensors import bind_gradients, bind_parameters, is_bound


def linear() -> nn.Module:
    """A layer with weights 0..5 and biases 6, 7."""
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(6.0).view(2, 3))
        layer.bias.copy_(torch.tensor([6.0, 7.0]))
    return layer


def test_specs_follow_the_parameters() -> None:
    buffer = bind_gradients(linear())
    assert buffer.specs == (TensorSpec("weight", (2, 3)), TensorSpec("bias", (2,)))
    assert buffer.flat.dtype == np.float32
    assert buffer.flat.tolist() == [0.0] * 8


def test_backward_writes_into_the_buffer_and_a_step_reads_from_it() -> None:
    layer = linear()
    buffer = bind_gradients(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(torch.tensor([[1.0, 2.0, 3.0]])).sum().backward()
    assert buffer.flat.tolist() == [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0, 1.0]
    buffer.flat[:] = 1.0
    optimizer.step()
    assert layer.weight.tolist() == [[-1.0, 0.0, 1.0], [2.0, 3.0, 4.0]]
    assert layer.bias.tolist() == [5.0, 6.0]


def test_the_buffer_stays_bound_over_steps() -> None:
    layer = linear()
    buffer = bind_gradients(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        buffer.zero()
        layer(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        assert is_bound(layer, buffer)
        assert buffer.flat.tolist() == [4.0] * 8
    layer.zero_grad(set_to_none=True)
    assert not is_bound(layer, buffer)


def test_frozen_parameters_are_left_out() -> None:
    layer = linear()
    layer.bias.requires_grad_(False)
    assert [spec.name for spec in bind_gradients(layer).specs] == ["weight"]


def test_only_float32_is_accepted() -> None:
    with pytest.raises(ValueError, match="float64"):
        bind_gradients(linear().double())


def test_parameters_keep_their_values_and_follow_the_flat_tensor() -> None:
    layer = linear()
    flat = bind_parameters(layer)
    assert flat.tolist() == list(range(8))
    flat.mul_(2.0)
    assert layer.bias.tolist() == [12.0, 14.0]
    assert layer(torch.ones(1, 3)).tolist() == [[18.0, 38.0]]

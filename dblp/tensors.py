"""Tensors <-> one flat, reused float32 buffer.

The gradients of a model are views of one contiguous numpy array: the backward pass writes into the array
that the transport sends, and the optimiser reads what the transport received, without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dblp.chunks import TensorSpec


@dataclass(frozen=True)
class GradientBuffer:
    """All gradients of one model.

    flat: float32 (sum of the tensors' sizes,), in the order of `model.named_parameters()`. The same memory
    as every `parameter.grad`. specs: name and shape of each tensor in that order.
    """

    flat: NDArray[np.float32]
    specs: tuple[TensorSpec, ...]

    def zero(self) -> None:
        """Clear every gradient. Never use `zero_grad(set_to_none=True)`: it would cut the views off."""
        self.flat.fill(0.0)


def bind_gradients(model: torch.nn.Module) -> GradientBuffer:
    """Make every parameter's gradient a view of one new flat buffer of zeros.

    autograd adds in place to a gradient that exists, so the views stay bound for the life of the model.
    Raises ValueError where a parameter is not float32 on the CPU.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for name, parameter in named:
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise ValueError(f"parameter {name} is {parameter.dtype} on {parameter.device}: need float32 on cpu")
    flat = np.zeros(sum(p.numel() for _, p in named), dtype=np.float32)
    whole = torch.from_numpy(flat)
    offset = 0
    for _, parameter in named:
        parameter.grad = whole[offset : offset + parameter.numel()].view(parameter.shape)
        offset += parameter.numel()
    return GradientBuffer(flat, tuple(TensorSpec(name, tuple(p.shape)) for name, p in named))


def is_bound(model: torch.nn.Module, buffer: GradientBuffer) -> bool:
    """Whether every gradient still lies in `buffer` (`set_to_none` or a foreign hook would have moved it)."""
    start = buffer.flat.ctypes.data
    end = start + buffer.flat.nbytes
    return all(p.grad is not None and start <= p.grad.data_ptr() < end for p in model.parameters() if p.requires_grad)


def state_vector(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> NDArray[np.float32]:
    """Parameters followed by the optimiser's momentum, as a new float32 array of twice the parameters' size.

    Momentum that does not exist yet (before the first step) counts as zero.
    """
    parameters = list(model.parameters())
    total = sum(p.numel() for p in parameters)
    vector = np.zeros(2 * total, dtype=np.float32)
    offset = 0
    for parameter in parameters:
        size = parameter.numel()
        vector[offset : offset + size] = parameter.detach().numpy().reshape(-1)
        momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
        if momentum is not None:
            vector[total + offset : total + offset + size] = momentum.numpy().reshape(-1)
        offset += size
    return vector

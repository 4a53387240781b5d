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
    whole = torch.zeros(sum(p.numel() for _, p in named))  # torch's memory: aligned as its kernels like it
    offset = 0
    for _, parameter in named:
        parameter.grad = whole[offset : offset + parameter.numel()].view(parameter.shape)
        offset += parameter.numel()
    return GradientBuffer(whole.numpy(), tuple(TensorSpec(name, tuple(p.shape)) for name, p in named))


def is_bound(model: torch.nn.Module, buffer: GradientBuffer) -> bool:
    """Whether every gradient still lies in `buffer` (`set_to_none` or a foreign hook would have moved it)."""
    start = buffer.flat.ctypes.data
    end = start + buffer.flat.nbytes
    return all(p.grad is not None and start <= p.grad.data_ptr() < end for p in model.parameters() if p.requires_grad)


def bind_parameters(model: torch.nn.Module) -> torch.Tensor:
    """Make every trainable parameter a view of one new flat tensor that holds their values, in the same order.

    With `bind_gradients` an optimiser step is then a few operations on two vectors.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    offset = 0
    for parameter in parameters:
        parameter.data = flat[offset : offset + parameter.numel()].view(parameter.shape)
        offset += parameter.numel()
    return flat

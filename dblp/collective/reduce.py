"""The arithmetic of the server: mean over the workers in rank order, norms, divergence of replicas. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dblp.chunks import BoolArray, FloatArray
from dblp.dtypes import FLOAT32, WireArray, WireDtype, blocks


def mean_into(
    out: WireArray,
    gradients: Sequence[WireArray],
    delivered: Sequence[BoolArray],
    mode: str,
    dtype: WireDtype = FLOAT32,
) -> None:
    """Writes the mean of the workers' gradients (each (chunks, chunk_values), zero where not delivered) into `out`.

    Everything is of format `dtype`, sums are float32: the mean is rounded once, at the end. mode "delivered" divides
    each chunk by the number of workers that delivered it (nobody: zero), "all" by the number of workers. Sums run in
    rank order, so the result is bit-repeatable.
    """
    divisor = np.full(len(out), len(gradients), np.float32)
    if mode == "delivered":
        divisor[:] = np.maximum(np.sum(np.stack(delivered), axis=0, dtype=np.int64), 1)
    for part in blocks(len(out), out[:1].size):
        total = np.array(dtype.decode(gradients[0][part]))
        for gradient in gradients[1:]:
            total += dtype.decode(gradient[part])
        total /= divisor[part, None]
        dtype.encode(total, out[part])


def norm(values: WireArray, dtype: WireDtype = FLOAT32) -> float:
    """L2 norm of all numbers, which need not lie contiguously, summed in float64 block by block.

    Not by BLAS: its threads would compete with the workers, and its result depends on the build.
    """
    total = 0.0
    for part in blocks(len(values), values[:1].size):
        block = dtype.decode(values[part]).astype(np.float64).reshape(-1)
        total += float(np.einsum("i,i->", block, block))
    return float(np.sqrt(total))


def divergence(states: Sequence[FloatArray]) -> float:
    """Largest L2 distance of a replica's state to the mean state, over the mean state's norm; 0 = identical."""
    mean = np.mean(np.stack(states).astype(np.float64), axis=0)
    scale = float(np.linalg.norm(mean)) or 1.0
    return max(float(np.linalg.norm(state - mean)) for state in states) / scale

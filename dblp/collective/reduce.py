"""The arithmetic of the server: mean over the workers in rank order, norms, divergence of replicas. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dblp.chunks import BoolArray, FloatArray

BLOCK_VALUES = 1 << 14


def mean_into(out: FloatArray, gradients: Sequence[FloatArray], delivered: Sequence[BoolArray], mode: str) -> None:
    """Writes the mean of the workers' gradients (each (chunks, chunk_values), zero where not delivered) into `out`.

    mode "delivered" divides each chunk by the number of workers that delivered it (nobody: zero), "all" by the number
    of workers. Sums run in rank order, so the result is bit-repeatable.
    """
    np.copyto(out, gradients[0])
    for gradient in gradients[1:]:
        out += gradient
    if mode == "all":
        out /= np.float32(len(gradients))
        return
    count = np.sum(np.stack(delivered), axis=0, dtype=np.int64)
    out /= np.maximum(count, 1).astype(np.float32)[:, None]


def norm(values: FloatArray) -> float:
    """L2 norm of all numbers, which need not lie contiguously, summed in float64 block by block.

    Not by BLAS: its threads would compete with the workers, and its result depends on the build.
    """
    total = 0.0
    rows = max(1, BLOCK_VALUES // max(1, values[:1].size))
    for start in range(0, len(values), rows):
        part = values[start : start + rows].astype(np.float64).reshape(-1)
        total += float(np.einsum("i,i->", part, part))
    return float(np.sqrt(total))


def divergence(states: Sequence[FloatArray]) -> float:
    """Largest L2 distance of a replica's state to the mean state, over the mean state's norm; 0 = identical."""
    mean = np.mean(np.stack(states).astype(np.float64), axis=0)
    scale = float(np.linalg.norm(mean)) or 1.0
    return max(float(np.linalg.norm(state - mean)) for state in states) / scale

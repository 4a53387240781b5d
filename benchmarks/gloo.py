"""One rank of all-reduces over Gloo (torch.distributed), for bench_allreduce.

python -m benchmarks.gloo RANK RANKS ADDRESS VALUES TIMES

ADDRESS: where rank 0 listens, in a lab. VALUES: float32 values of the gradient. Prints the seconds from each
all-reduce's end to the next one's: as in the replay of dblp they hold one scaled copy of the gradient.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise

import numpy as np
import torch
import torch.distributed

from benchmarks.harness import out

PORT = 29400
SCALES = 16


def main(arguments: list[str]) -> None:
    rank, ranks, values, times = (int(arguments[place]) for place in (0, 1, 3, 4))
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{arguments[2]}:{PORT}", rank=rank, world_size=ranks
    )
    noise = np.random.default_rng(rank).standard_normal(values, dtype=np.float32)
    gradient = np.zeros(values, dtype=np.float32)
    shared = torch.from_numpy(gradient)
    ends = []
    for number in range(times):
        np.multiply(noise, np.float32(1.0 + number % SCALES / SCALES), out=gradient)
        torch.distributed.all_reduce(shared)
        ends.append(time.perf_counter())
    out(json.dumps([later - earlier for earlier, later in pairwise(ends)]))
    torch.distributed.barrier()  # rank 0 keeps the others' meeting point
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

"""All-reduces over Gloo (torch.distributed), started as torchrun does: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed
from testbed import Testbed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--values", type=int, default=1_000_000)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")  # what the interface of every host in a lab is called
    torch.distributed.init_process_group("gloo")
    testbed = Testbed(torch.distributed.get_rank())
    gradient = torch.ones(options.values)
    for round_ in range(options.rounds):
        testbed.gate(round_)
        began = time.perf_counter()
        torch.distributed.all_reduce(gradient)
        testbed.report(round_, time.perf_counter() - began)
        gradient.fill_(1.0)
    torch.distributed.barrier()  # rank 0 keeps the others' meeting point
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

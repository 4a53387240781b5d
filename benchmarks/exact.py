"""Is what the eBPF program does to packets what the simulator predicts, packet by packet, for every seed?

    sudo .venv/bin/python benchmarks/exact.py [--seeds 20] [--packets 100000]

Loads the program in a namespace of its own and gives it numbered chunks one by one (BPF_PROG_TEST_RUN), no traffic.
Exit status 0: every fate was the predicted one, and mean bursts within 5 %; else 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from netem.kernel import netns
from netem.links import mask, predict
from netem.links.base import Flow, Key, LossRule
from netem.links.chain import GilbertElliott
from netem.links.loss_filter import LossFilter
from netem.links.program_layout import SHOT

FLOW, KEY = Flow("udp", dst_ports=(29600, 29699)), Key(((4, 14),), (4, 8), (8, 12))
SOURCE = "10.77.0.2"
ROUND = 40
HEADERS = bytes(12) + bytes.fromhex("0800 4500 003a 0000 0000 4011 0000 0a4d0002 0a4d0001 7405 73a1 0026 0000 00000000")
BURST_TOLERANCE = 0.05

Lost = NDArray[np.bool_]


@dataclass(frozen=True)
class Setting:
    """`predict`: (state, packets) -> which of the first transmissions of a round are lost.

    `dblp-netem doctor --fidelity` compares real packets with the same prediction.
    """

    name: str
    ratio: float
    one: GilbertElliott | None = None

    @property
    def burst_packets(self) -> float | None:
        """Mean number of packets lost in a row, where that is simple."""
        if self.one is None:
            return 1.0 / (1.0 - self.ratio)
        return 1.0 / self.one.r if (self.one.h, self.one.k) == (0.0, 1.0) else None

    def predict(self, state: int, packets: int) -> Lost:
        return predict.by_rule(self.rule(state), ROUND, packets).lost

    def rule(self, state: int) -> LossRule:
        return LossRule(SOURCE, state, self.ratio, first=ROUND, last=ROUND, chain=self.one)


def settings() -> list[Setting]:
    found = [Setting(f"{ratio:.0%}, each by itself", ratio) for ratio in (0.01, 0.3, 0.9)]
    for ratio, burst in ((0.05, 2), (0.3, 5), (0.2, 10), (0.6, 2), (0.9, 12)):
        found.append(Setting(f"{ratio:.0%} in bursts of {burst}", ratio, GilbertElliott.of_bursts(ratio, burst)))
    uneven = GilbertElliott(0.02, 0.1, 0.2, 0.99)
    return [*found, Setting("p 2 %, r 10 %, h 20 %, k 99 %", uneven.mean_ratio, uneven)]


def fates(loss: LossFilter, packets: int) -> Lost:
    head = HEADERS + ROUND.to_bytes(4, "big")
    frames = (head + n.to_bytes(4, "big") + bytes(20) for n in range(packets))
    return np.fromiter((loss.program.test_run(frame)[0] == SHOT for frame in frames), np.bool_, packets)


def bursts_of(lost: Lost) -> int:
    """How many stretches of losses."""
    return int(np.count_nonzero(lost[1:] & ~lost[:-1])) + int(lost[0])


def say(text: str, to: TextIO = sys.stdout) -> None:
    to.write(text + "\n")
    to.flush()


def compare(loss: LossFilter, setting: Setting, seeds: int, packets: int) -> bool:
    """One line of the table: fates over all seeds, `packets` in all."""
    each, different, dropped, bursts = packets // seeds, 0, 0, 0
    for seed in range(seeds):
        state = mask.port_state(seed, "up", 1)
        loss.set_loss([setting.rule(state)])
        found = fates(loss, each)
        different += int((found != setting.predict(state, each)).sum())
        dropped, bursts = dropped + int(found.sum()), bursts + bursts_of(found)
    length, wanted = dropped / max(1, bursts), setting.burst_packets
    good = wanted is None or abs(length / wanted - 1) <= BURST_TOLERANCE
    asked = "" if wanted is None else f"{wanted:.2f}"
    share = dropped / (each * seeds)
    say(f"{setting.name:32} {each * seeds:9,} {different:9} {share:9.2%} {setting.ratio:9.2%} {length:8.2f} {asked:>8}")
    return good and not different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--packets", type=int, default=100_000, help="of each setting, over all seeds")
    options = parser.parse_args()
    if os.geteuid() != 0:
        say("needs root: run with sudo", sys.stderr)
        return 4
    name = f"exact{os.getpid()}"
    netns.create(name)
    try:
        loss = LossFilter(name, "lo")
        loss.install(FLOW, KEY, [SOURCE])
        say(f"{'loss':32} {'packets':>9} {'unlike':>9} {'lost':>9} {'asked':>9} {'burst':>8} {'asked':>8}")
        held = [compare(loss, each, options.seeds, options.packets) for each in settings()]
        loss.close()
    finally:
        netns.remove(name)
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())

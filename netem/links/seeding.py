"""The seeds of a netem port's random numbers (pure). Linux 6.6 and later take one (TCA_NETEM_PRNG_SEED).

A change resets netem's generator, to a seed of the kernel's own where the message has none. With the same seed each
time all bursts would lose packets of the same numbers, so every change has another one; a netem that a change leaves as
it is keeps its seed, and goes on with its numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace

from netem.kernel import netem_options, qdisc
from netem.kernel import rtnetlink as rt
from netem.kernel.qdisc import Netem, Tree
from netem.links.mask import mix


def port_seed(seed: int, name: str) -> int:
    """Of one port of a run."""
    return mix(mix(seed) ^ zlib.crc32(name.encode()))


def seeded(wanted: Tree, now: Tree, seed: int, number: int) -> Tree:
    """`wanted` with the seeds of a port's change `number`; 0 is its installation, at which all begin anew."""
    there = {part.handle: part for part in now if isinstance(part, Netem)}
    parts: list[qdisc.Qdisc] = []
    for part in wanted:
        if isinstance(part, Netem):
            old = there.get(part.handle)
            same = old is not None and replace(old.options, prng_seed=None) == part.options
            kept = old.options.prng_seed if old is not None and same and number else None
            one = mix(mix(seed ^ number) ^ part.handle) if kept is None else kept
            part = replace(part, options=replace(part.options, prng_seed=one))
        parts.append(part)
    return tuple(parts)


def can_seed(found: Mapping[int, qdisc.Found]) -> bool:
    """Whether the kernel that describes these qdiscs takes seeds: then it reports the one that it took by itself."""
    netems = [each for each in found.values() if each.kind == "netem"]
    return bool(netems) and all(
        netem_options.PRNG_SEED in rt.attributes(each.options[netem_options.FIXED_BYTES :]) for each in netems
    )

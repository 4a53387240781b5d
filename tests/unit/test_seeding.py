"""Seeds of netem's random numbers: another one for each change, the same ones in each run."""

from __future__ import annotations

from netem.kernel import netem_options, qdisc
from netem.kernel.netem_options import NetemOptions
from netem.kernel.qdisc import Found, Netem, Prio, Stats, Tree
from netem.links.seeding import can_seed, port_seed, seeded


def tree(*losses: float) -> Tree:
    bands = [Netem(0x1000000 + band, 0x100000 | band + 1, NetemOptions(10, loss=x)) for band, x in enumerate(losses)]
    return (Prio(0x100000, qdisc.ROOT, len(losses)), *bands)


def seeds(parts: Tree) -> list[int | None]:
    return [part.options.prng_seed for part in parts if isinstance(part, Netem)]


def test_a_change_has_new_seeds_for_what_it_changes() -> None:
    first = seeded(tree(0.0, 0.0, 0.0), (), 7, 0)
    assert len({*seeds(first)}) == 3
    burst = seeded(tree(0.0, 0.9, 0.0), first, 7, 1)
    kept = [old == new for old, new in zip(seeds(first), seeds(burst), strict=True)]
    assert kept == [True, False, True], "the others go on with their numbers"
    assert len(qdisc.plan(first, burst)) == 1
    clear = seeded(tree(0.0, 0.0, 0.0), burst, 7, 2)
    again = seeded(tree(0.0, 0.9, 0.0), clear, 7, 3)
    assert seeds(again)[1] not in seeds(burst), "the next burst does not lose packets of the same numbers"


def test_the_same_run_has_the_same_seeds() -> None:
    def run(seed: int) -> list[list[int | None]]:
        first = seeded(tree(0.0, 0.1), (), port_seed(seed, "port to server"), 0)
        burst = seeded(tree(0.0, 0.9), first, port_seed(seed, "port to server"), 1)
        anew = seeded(tree(0.0, 0.1), burst, port_seed(seed, "port to server"), 0)
        assert seeds(anew) == seeds(first), "the next job begins as the first one did"
        return [seeds(first), seeds(burst)]

    assert run(3) == run(3)
    assert run(3) != run(4)
    assert port_seed(3, "port to server") != port_seed(3, "port to worker1")


def test_a_kernel_says_whether_it_takes_seeds() -> None:
    def found(options: NetemOptions) -> dict[int, Found]:
        return {1: Found(2, 1, qdisc.ROOT, "netem", netem_options.encode(options), Stats())}

    assert can_seed(found(NetemOptions(10, prng_seed=0)))
    assert not can_seed(found(NetemOptions(10)))
    assert not can_seed({})

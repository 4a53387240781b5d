"""Gilbert-Elliott loss: the two forms of the function agree, and it is the chain that it says it is."""

from __future__ import annotations

import numpy as np
import pytest

from netem.links import chain, mask
from netem.links.base import Key
from netem.links.chain import GilbertElliott

CHAINS = {
    "30 % in fives": GilbertElliott.of_bursts(0.3, 5),
    "90 % in tens": GilbertElliott.of_bursts(0.9, 10),
    "60 % in twos: more likely to change than not": GilbertElliott.of_bursts(0.6, 2),
    "lossy good, leaky bad": GilbertElliott(0.02, 0.1, 0.2, 0.95),
    "always bad": GilbertElliott(1.0, 0.0),
    "never bad": GilbertElliott(0.0, 1.0),
}


def runs(lost: np.ndarray) -> np.ndarray:
    """Lengths of the stretches of losses."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], lost.astype(np.int8), [0]))))
    return edges[1::2] - edges[::2]


@pytest.mark.parametrize("one", CHAINS.values(), ids=CHAINS)
def test_arrays_equal_the_reference(one: GilbertElliott) -> None:
    base, limits, places = mask.mix(5), chain.limits(one), 3 * chain.BLOCK + 10
    expected = [chain.lost_scalar(base, n, limits) for n in range(places)]
    assert chain.lost(base, places, limits).tolist() == expected


@pytest.mark.parametrize("one", [CHAINS[name] for name in list(CHAINS)[:4]], ids=list(CHAINS)[:4])
def test_mean_loss(one: GilbertElliott) -> None:
    n = 1_000_000
    share = chain.lost(mask.mix(9), n, chain.limits(one)).mean()
    spread = (one.mean_ratio * (1 - one.mean_ratio) * 2 * chain.memory_packets(one) / n) ** 0.5
    assert abs(share - one.mean_ratio) < 5 * spread


@pytest.mark.parametrize(
    ("loss", "burst"), [(0.05, 2), (0.3, 5), (0.1, 50), (0.5, 20), (0.6, 2), (0.9, 10), (0.2, 100)]
)
def test_mean_burst_length(loss: float, burst: float) -> None:
    """Within 5 %, up to the longest memory that is taken: it is what the blocks could shorten."""
    lengths = runs(chain.lost(mask.mix(11), 2_000_000, chain.limits(GilbertElliott.of_bursts(loss, burst))))
    assert lengths.mean() == pytest.approx(burst, rel=0.05)


def test_burst_lengths_are_geometric() -> None:
    lengths = runs(chain.lost(mask.mix(13), 2_000_000, chain.limits(GilbertElliott.of_bursts(0.3, 5))))
    for k in range(1, 15):
        expected = 0.2 * 0.8 ** (k - 1) * len(lengths)
        assert abs((lengths == k).sum() - expected) < 5 * expected**0.5


def test_transitions_are_those_asked_for() -> None:
    one = GilbertElliott(0.7, 0.6)  # p + r > 1
    lost = chain.lost(mask.mix(17), 1_000_000, chain.limits(one))
    before, after = lost[:-1], lost[1:]
    assert after[~before].mean() == pytest.approx(0.7, abs=0.005)
    assert after[before].mean() == pytest.approx(0.4, abs=0.005)


def test_parameters_of_means() -> None:
    one = GilbertElliott.of_bursts(0.3, 5)
    assert (one.p, one.r) == pytest.approx((0.2 * 0.3 / 0.7, 0.2))
    assert one.mean_ratio == pytest.approx(0.3)
    assert GilbertElliott.of_bursts(0.9, 9).p == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GilbertElliott.of_bursts(0.9, 5), "needs bursts of 9 packets or more"),
        (lambda: GilbertElliott.of_bursts(1.0, 5), "loss 1.0"),
        (lambda: GilbertElliott.of_bursts(0.1, 0.5), "a burst of 1 or more"),
        (lambda: GilbertElliott(0.0, 0.0), "never leaves"),
        (lambda: GilbertElliott(1.5, 0.1), "p 1.5"),
        (lambda: chain.limits(GilbertElliott.of_bursts(0.1, 1000)), "remembers 900 packets"),
        (lambda: chain.limits(GilbertElliott(1.0, 1.0)), "remembers inf packets"),
    ],
)
def test_refusals(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_the_place_is_a_whole_word_of_the_key() -> None:
    assert Key(((4, 14),), (4, 8), (8, 12)).place_word == 1
    for place in ((9, 13), (8, 10), (20, 24), (12, 16)):
        with pytest.raises(ValueError, match="one of the key's words"):
            Key(((4, 14),), (4, 8), place)

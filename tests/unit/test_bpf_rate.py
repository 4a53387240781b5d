"""How deep the bucket of a rate is: late timers must not cost rate, an idle link must not send for long at once."""

from __future__ import annotations

import pytest

from netem.kernel.qdisc import Tbf
from netem.links.base import Shape
from netem.links.bpf import rate_tree
from netem.links.bucket import bucket_bytes


@pytest.mark.parametrize(
    ("rate_bps", "queue_bytes", "expected"),
    [
        (100_000_000, 1 << 20, 50_000),  # 4 ms
        (1_000_000_000, 1 << 20, 1 << 18),  # a quarter of the queue
        (1_000_000_000, 1 << 16, 125_000),  # 1 ms at least
        (1_000_000, 1 << 20, 4 * 1514),  # four frames at least
        (10_000_000_000, 1 << 24, 1 << 22),
    ],
)
def test_bucket(rate_bps: int, queue_bytes: int, expected: int) -> None:
    assert bucket_bytes(rate_bps, 1500, queue_bytes) == expected


def test_the_rate_is_limited_with_that_bucket() -> None:
    (tbf,) = rate_tree(Shape(rate_bps=100_000_000), 1500)
    assert isinstance(tbf, Tbf)
    assert (tbf.burst_bytes, tbf.limit_bytes) == (50_000, 1 << 20)

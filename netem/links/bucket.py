"""How deep the bucket of a rate limiter is (tbf, tc-tbf(8)), for every backend alike."""

from __future__ import annotations

from netem.kernel import qdisc

QUEUE_BYTES = 1 << 20
"""Where no queue is asked for."""
_BUCKET_MS = 4


def bucket_bytes(rate_bps: int, mtu: int, queue_bytes: int, asked_bytes: int | None = None) -> int:
    """tbf's bucket: 4 ms at the rate, but at most a quarter of the queue, and at least 1 ms and four frames
    (less for a short queue that was asked for: `qdisc.burst_bytes`).

    A link that has been idle sends that much at once. A timer that comes later than the bucket is deep loses the
    rest for good: on busy cores they come up to some milliseconds late.
    """
    wanted = min(rate_bps * _BUCKET_MS // 8000, queue_bytes // 4)
    return max(qdisc.burst_bytes(rate_bps, mtu, asked_bytes), wanted)

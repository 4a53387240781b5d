"""Combinations of a link's properties that would not do what they say."""

from __future__ import annotations

from collections.abc import Iterator

from netem.spec.impairments import Overhead, Slot
from netem.spec.topology import Link, LinkShape

Path_ = tuple[str | int, ...]
Problem = tuple[Path_, str]
"""(keys below the direction, what is wrong and what to do)"""


def problems(link: Link, shape: LinkShape) -> Iterator[Problem]:
    """What is wrong with one direction of a link."""
    if shape.jitter_s and shape.rate_bps is None and link.reorder == "refuse" and shape.reorder is None:
        yield ("jitter",), "jitter without a rate reorders packets; give a rate, or write reorder: allow"
    if shape.distribution != "uniform" and not shape.jitter_s:
        yield ("distribution",), "does nothing without jitter, whose distribution it is"
    if shape.reorder is not None and not shape.delay_s:
        yield ("reorder",), "does nothing without a delay: a packet overtakes those that are delayed"
    if shape.ecn and not shape.loss:
        yield ("ecn",), "does nothing without loss: it marks packets in place of losing them"
    if shape.limit is not None and shape.queue is not None:
        yield ("limit",), "`limit` and `queue` exclude each other: both say how much waits"
    if shape.overhead is not None:
        yield from _overhead(shape, shape.overhead)
    if shape.slot is not None:
        yield from _slot(shape.slot)


def _overhead(shape: LinkShape, overhead: Overhead) -> Iterator[Problem]:
    if shape.rate_bps is None:
        yield ("overhead",), "does nothing without a rate"
    if overhead.cell_overhead_bytes and not overhead.cell_bytes:
        yield ("overhead", "cell_overhead"), "does nothing without the size of a cell"
    if shape.queue_bytes is not None:
        yield ("queue",), "with an overhead the rate is netem's, whose queue is a number of packets"


def _slot(slot: Slot) -> Iterator[Problem]:
    by_distribution = slot.jitter_s or slot.delay_s or slot.distribution is not None
    if by_distribution and (slot.min_s is not None or slot.max_s is not None):
        yield ("slot",), "expected either min and max, or distribution, delay and jitter"
    elif by_distribution and not (slot.jitter_s and slot.delay_s):
        yield ("slot",), "a distribution of slots needs a delay and a jitter above 0"
    elif not by_distribution and slot.max_s is None:
        yield ("slot", "max"), "is required: the longest time between two slots"
    elif not by_distribution and (slot.min_s or 0.0) > (slot.max_s or 0.0):
        yield ("slot", "min"), "is more than max"

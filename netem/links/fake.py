"""The `fake` backend: a port in memory with the semantics of `bpf`. Nothing is sent; a test offers packets.

It records its shape and does not act on delay or rate: it has no clock. Random decisions come from a seeded source,
repeatable ones are those of the mask.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from netem.links import chain, mask
from netem.links.base import Counter, Flow, Key, Kind, LinkError, LossRule, PortHealth, Shape, check_windows
from netem.links.chain import GilbertElliott


class FakePort:
    """A switch port in memory.

    `history` lists every full state of rules that `set_loss` was given, `shapes` every shape of `set_shape`.
    """

    backend = "fake"

    def __init__(self, name: str, *, seed: int = 0) -> None:
        self.name = name
        self.shape = Shape()
        self.history: list[tuple[LossRule, ...]] = []
        self.shapes: list[Shape] = []
        self.closed = False
        self._random = random.Random(seed)
        self._sources: tuple[str, ...] | None = None
        self._reset()

    def _reset(self) -> None:
        self._rules: dict[str, list[LossRule]] = {}
        self._places: dict[tuple[str, int], int] = {}
        self._base_place = 0
        self._label = 0
        self._short = 0
        self._counts: dict[tuple[str, int, Kind], list[int]] = {}

    def install(self, shape: Shape, flow: Flow | None, key: Key | None, sources: Sequence[str]) -> None:
        if key is not None and (flow is None or flow.proto != "udp"):
            raise ValueError("a key needs a UDP flow: it names bytes of the UDP payload")
        self._reset()
        self.shape, self.flow, self.key, self._sources = shape, flow, key, tuple(sources)

    def adopt(self, shape: Shape, sources: Sequence[str]) -> None:
        self.shape, self.flow, self.key, self._sources = shape, None, None, tuple(sources)

    def prepare(self, rules: Sequence[LossRule]) -> None:
        """Nothing to work out."""

    def set_loss(self, rules: Sequence[LossRule]) -> None:
        by_source: dict[str, list[LossRule]] = {}
        for rule in rules:
            by_source.setdefault(rule.source, []).append(rule)
        unknown = by_source.keys() - set(self._installed())
        if unknown:
            raise LinkError(f"loss at {self.name}: no such sender {', '.join(sorted(unknown))}")
        if self.flow is None and any(rule.match == "data" for rule in rules):
            raise LinkError(f"loss at {self.name}: match data, but no data flow is installed")
        check_windows(by_source, keyed=self.key is not None and self.key.index is not None)
        self._rules = by_source
        self.history.append(tuple(rules))

    def set_shape(self, shape: Shape) -> None:
        self._installed()
        kept = {"loss_ratio": self.shape.loss_ratio, "chain": self.shape.chain, "chain_state": self.shape.chain_state}
        self.shape = replace(shape, **kept)  # type: ignore[arg-type]
        self.shapes.append(self.shape)

    def set_label(self, index: int) -> None:
        if not 0 <= index < 2**32:
            raise ValueError(f"label {index}: expected 0..2**32-1")
        self._installed()
        self._label = index

    def offer(self, source: str, payload: bytes, kind: Kind = "data") -> bool:
        """Whether a packet with this UDP payload gets through. Bytes are counted without any header."""
        if source not in self._installed():
            return True
        words = mask.key_words(payload, self.key.ranges) if self.key else None
        index = self._label
        if kind == "data" and self.key is not None:
            if len(payload) < self.key.payload_bytes:
                self._short += 1
                kind = "other"
            elif self.key.index is not None:
                index = int.from_bytes(payload[slice(*self.key.index)], "big")
        rule = self._rule(source, kind, index)
        dropped = self._lost(rule, kind, index, words) or self._base_lost()
        twice, corrupt = (False, False) if rule is None or words is None or dropped else _what_else(rule, words)
        counts = self._counts.setdefault((source, index, kind), [0, 0, 0, 0, 0])
        for at, more in enumerate((1, dropped, len(payload), twice, corrupt)):
            counts[at] += more
        return not dropped

    def _rule(self, source: str, kind: Kind, index: int) -> LossRule | None:
        """The one for this packet."""
        windowed = self.key is not None and self.key.index is not None
        for rule in self._rules.get(source, ()):
            if rule.match == "all" or (kind == "data" and (not windowed or rule.first <= index <= rule.last)):
                return rule
        return None

    def _lost(self, rule: LossRule | None, kind: Kind, index: int, words: tuple[int, ...] | None) -> bool:
        if rule is None:
            return False
        if kind == "data" and rule.chain is not None:
            return self._lost_in_chain(rule, rule.chain, index, words)
        if kind == "other" or words is None:
            return self._chance(rule.loss_ratio)
        return mask.drops_scalar(rule.state, words, mask.threshold(rule.loss_ratio))

    def _lost_in_chain(self, rule: LossRule, one: GilbertElliott, index: int, words: tuple[int, ...] | None) -> bool:
        along = self.key.place_word if self.key is not None else None
        if words is not None and along is not None:
            others = [word for n, word in enumerate(words) if n != along]
            return chain.lost_scalar(chain.key_base(rule.state, others), words[along], chain.limits(one))
        place = self._places.get((rule.source, index), 0)
        self._places[rule.source, index] = place + 1
        return chain.lost_scalar(chain.arrival_base(rule.state, index), place, chain.limits(one))

    def _base_lost(self) -> bool:
        if self.shape.chain is None:
            return self._chance(self.shape.loss_ratio)
        self._base_place += 1
        return chain.lost_scalar(self.shape.chain_state, self._base_place - 1, chain.limits(self.shape.chain))

    def _chance(self, ratio: float) -> bool:
        return self._random.getrandbits(32) < mask.threshold(ratio)

    def counters(self) -> list[Counter]:
        self._installed()
        return [
            Counter(source, index, seen, dropped, size, kind, twice, corrupt)
            for (source, index, kind), (seen, dropped, size, twice, corrupt) in sorted(self._counts.items())
        ]

    def health(self) -> PortHealth:
        self._installed()
        return PortHealth(short=self._short)

    def close(self) -> None:
        self.closed = True

    def _installed(self) -> tuple[str, ...]:
        if self._sources is None or self.closed:
            raise LinkError(f"port {self.name}: nothing is installed")
        return self._sources


def _what_else(rule: LossRule, words: tuple[int, ...]) -> tuple[bool, bool]:
    """Whether a packet gets through twice, and whether damaged."""
    key = mask.hash_scalar(rule.state, words)
    twice = key & mask.U32 < mask.threshold(rule.duplicate_ratio)
    return twice, mask.mix(key) >> 32 < mask.threshold(rule.corrupt_ratio)

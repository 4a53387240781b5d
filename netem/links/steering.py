"""Which band of the `netem` backend each loss rule gets, and the filters that steer its packets there (pure)."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from netem.kernel.u32 import Filter, Match, prefixes
from netem.links.base import INDEX_MAX, Flow, Key, LinkError, LossRule, UnsupportedFeature
from netem.links.ledger import Part

_PROTOCOLS = {"tcp": 6, "udp": 17}
_IP_HEADER_BYTES = 20  # the filters ask for a header without options
_UDP_PAYLOAD = _IP_HEADER_BYTES + 8
FILTERS_MAX = 2048

Matches = tuple[Match, ...]


@dataclass(frozen=True)
class Steering:
    """ratios: band -> the rules' loss; parts: band -> whose packets it gets; filters: all of one priority, `labels`
    says for each which (band, part) it is about.
    """

    ratios: Mapping[int, float] = field(default_factory=dict)
    parts: Mapping[int, tuple[Part, ...]] = field(default_factory=dict)
    filters: tuple[Filter, ...] = ()
    labels: tuple[tuple[int, Part], ...] = ()
    priority: int = 0


@dataclass(frozen=True)
class _Group:
    """Packets of one rule that are counted together; the filters are alternatives."""

    part: Part
    loss_ratio: float
    alternatives: tuple[Matches, ...]


def steer(
    rules: Sequence[LossRule],
    flow: Flow | None,
    key: Key | None,
    sources: Sequence[str],
    bands: int,
    parent: int,
    priority: int,
) -> Steering:
    """Assign rules to bands 1..`bands` of the prio qdisc `parent`.

    LinkError for a rule that cannot be followed; UnsupportedFeature when more different loss ratios are asked
    for at once than there are bands.
    """
    _check(rules, flow, sources)
    groups = [group for rule in rules for group in _groups(rule, flow, key)]
    band_of = _bands(groups, bands)
    placed = list(zip(band_of, groups, strict=True))
    ratios = {band: group.loss_ratio for band, group in placed}
    parts = {band: tuple(group.part for other, group in placed if other == band) for band in ratios}
    return _steering(placed, ratios, parts, parent, priority)


def watch(flow: Flow | None, sources: Sequence[str], parent: int, priority: int) -> Steering:
    """Filters that leave the data of known senders in band 0 and count it."""
    if flow is None:
        return Steering()
    groups = [_Group(Part(source), 0.0, tuple(_data(source, flow, None, None))) for source in sources]
    placed = [(0, group) for group in groups]
    return _steering(placed, {}, {0: tuple(group.part for group in groups)}, parent, priority)


def _steering(
    placed: Sequence[tuple[int, _Group]],
    ratios: Mapping[int, float],
    parts: Mapping[int, tuple[Part, ...]],
    parent: int,
    priority: int,
) -> Steering:
    pairs = [
        (Filter(parent, priority, parent | band + 1, matches), (band, group.part))
        for band, group in placed
        for matches in group.alternatives
    ]
    if len(pairs) > FILTERS_MAX:
        detail = f"{len(pairs)} filters for windows of ports and rounds, at most {FILTERS_MAX}"
        raise UnsupportedFeature("these loss windows", ("loss_engine: bpf",), detail)
    return Steering(ratios, parts, tuple(f for f, _ in pairs), tuple(label for _, label in pairs), priority)


def _check(rules: Sequence[LossRule], flow: Flow | None, sources: Sequence[str]) -> None:
    for rule in rules:
        if rule.source not in sources:
            raise LinkError(f"loss rule for {rule.source}: not a sender at this port ({', '.join(sources)})")
        if rule.match == "data" and flow is None:
            raise LinkError(f"loss rule for data of {rule.source}: the port was installed without a flow")
    if len({rule.source for rule in rules}) != len(rules):
        raise LinkError("two loss rules for one sender")


def _groups(rule: LossRule, flow: Flow | None, key: Key | None) -> list[_Group]:
    """A rule's data, and for match "all" then the rest of its sender: filters are tried in order."""
    groups = []
    if flow is not None:
        indexed = key is not None and key.index is not None and flow.proto == "udp"
        index = rule.first if indexed and rule.first == rule.last else None
        alternatives = tuple(_data(rule.source, flow, key, (rule.first, rule.last)))
        groups.append(_Group(Part(rule.source, index), rule.loss_ratio, alternatives))
    if rule.match == "all":
        groups.append(_Group(Part(rule.source, None, "other"), rule.loss_ratio, ((_from(rule.source),),)))
    return groups


def _bands(groups: Sequence[_Group], bands: int) -> list[int]:
    """The band of each group: its own where there are enough, else one a loss ratio."""
    if len(groups) <= bands:
        return list(range(1, len(groups) + 1))
    ratios = sorted({group.loss_ratio for group in groups})
    if len(ratios) > bands:
        detail = f"{len(ratios)} different loss ratios at one port, netem has {bands} bands"
        raise UnsupportedFeature("this many loss ratios at once", ("loss_engine: bpf",), detail)
    return [1 + ratios.index(group.loss_ratio) for group in groups]


def _from(source: str) -> Match:
    return Match(12, ipaddress.IPv4Address(source).packed, b"\xff" * 4)


def _data(source: str, flow: Flow, key: Key | None, indexes: tuple[int, int] | None) -> list[Matches]:
    """A sender's data packets as alternatives of byte matches; `indexes` is an inclusive window."""
    fixed = (
        Match(0, b"\x45", b"\xff"),
        Match(6, b"\x00\x00", b"\x1f\xff"),  # not a later fragment: that one has no ports
        Match(9, bytes([_PROTOCOLS[flow.proto]]), b"\xff"),
        _from(source),
    )
    alternatives: list[Matches] = [fixed]
    for offset, window in ((_IP_HEADER_BYTES, flow.src_ports), (_IP_HEADER_BYTES + 2, flow.dst_ports)):
        if window is not None:
            alternatives = _times(alternatives, offset, 2, window)
    if key is not None and key.index is not None and flow.proto == "udp" and indexes is not None:
        alternatives = _times(alternatives, _UDP_PAYLOAD + key.index[0], 4, indexes)
    return alternatives


def _times(alternatives: list[Matches], offset: int, size: int, window: tuple[int, int]) -> list[Matches]:
    """Each alternative with each prefix of the window; the full window matches everything."""
    if window == (0, INDEX_MAX):
        return alternatives
    keys = [
        Match(offset, value.to_bytes(size, "big"), mask.to_bytes(size, "big"))
        for value, mask in prefixes(*window, size * 8)
    ]
    return [(*alternative, key) for alternative in alternatives for key in keys]

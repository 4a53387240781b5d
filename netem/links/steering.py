"""Which band of the `netem` backend each loss rule gets, and the filters that steer its packets there (pure)."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from netem.kernel.u32 import Filter, Match, prefixes
from netem.links.base import INDEX_MAX, Flow, Key, LinkError, LossRule, UnsupportedFeature

_PROTOCOLS = {"tcp": 6, "udp": 17}
_IP_HEADER_BYTES = 20  # the filters ask for a header without options
_UDP_PAYLOAD = _IP_HEADER_BYTES + 8
FILTERS_MAX = 2048


@dataclass(frozen=True)
class Steering:
    """ratios: band -> the rules' loss; owners: band -> sender ("*": several); filters: all of one priority."""

    ratios: Mapping[int, float] = field(default_factory=dict)
    owners: Mapping[int, str] = field(default_factory=dict)
    filters: tuple[Filter, ...] = ()
    priority: int = 0


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
    band_of = _bands(rules, sources, bands)
    ratios = {band_of[rule.source]: rule.loss_ratio for rule in rules}
    owners: dict[int, str] = {}
    for rule in rules:
        band = band_of[rule.source]
        owners[band] = "*" if band in owners else rule.source
    filters = tuple(
        Filter(parent, priority, parent | band_of[rule.source] + 1, matches)
        for rule in rules
        for matches in rule_matches(rule, flow, key)
    )
    if len(filters) > FILTERS_MAX:
        detail = f"{len(filters)} filters for windows of ports and rounds, at most {FILTERS_MAX}"
        raise UnsupportedFeature("these loss windows", ("loss_engine: bpf",), detail)
    return Steering(ratios, owners, filters, priority)


def _check(rules: Sequence[LossRule], flow: Flow | None, sources: Sequence[str]) -> None:
    for rule in rules:
        if rule.source not in sources:
            raise LinkError(f"loss rule for {rule.source}: not a sender at this port ({', '.join(sources)})")
        if rule.match == "data" and flow is None:
            raise LinkError(f"loss rule for data of {rule.source}: the port was installed without a flow")
    if len({rule.source for rule in rules}) != len(rules):
        raise LinkError("two loss rules for one sender")


def _bands(rules: Sequence[LossRule], sources: Sequence[str], bands: int) -> dict[str, int]:
    """sender -> band: its own where there is one for each sender of the port, else one a loss ratio."""
    if len(sources) <= bands:
        return {rule.source: 1 + list(sources).index(rule.source) for rule in rules}
    ratios = sorted({rule.loss_ratio for rule in rules})
    if len(ratios) > bands:
        detail = f"{len(ratios)} different loss ratios at one port, netem has {bands} bands"
        raise UnsupportedFeature("this many loss ratios at once", ("loss_engine: bpf",), detail)
    return {rule.source: 1 + ratios.index(rule.loss_ratio) for rule in rules}


def rule_matches(rule: LossRule, flow: Flow | None, key: Key | None) -> list[tuple[Match, ...]]:
    """The packets of a rule as alternatives of byte matches."""
    source = Match(12, ipaddress.IPv4Address(rule.source).packed, b"\xff" * 4)
    if rule.match == "all" or flow is None:
        return [(source,)]
    fixed = (
        Match(0, b"\x45", b"\xff"),
        Match(6, b"\x00\x00", b"\x1f\xff"),  # not a later fragment: that one has no ports
        Match(9, bytes([_PROTOCOLS[flow.proto]]), b"\xff"),
        source,
    )
    alternatives: list[tuple[Match, ...]] = [fixed]
    for offset, window in ((_IP_HEADER_BYTES, flow.src_ports), (_IP_HEADER_BYTES + 2, flow.dst_ports)):
        if window is not None:
            alternatives = _times(alternatives, offset, 2, window)
    if key is not None and key.index is not None and flow.proto == "udp":
        alternatives = _times(alternatives, _UDP_PAYLOAD + key.index[0], 4, (rule.first, rule.last))
    return alternatives


def _times(
    alternatives: list[tuple[Match, ...]], offset: int, size: int, window: tuple[int, int]
) -> list[tuple[Match, ...]]:
    """Each alternative with each prefix of the window; the full window matches everything."""
    if window == (0, INDEX_MAX):
        return alternatives
    keys = [
        Match(offset, value.to_bytes(size, "big"), mask.to_bytes(size, "big"))
        for value, mask in prefixes(*window, size * 8)
    ]
    return [(*alternative, key) for alternative in alternatives for key in keys]

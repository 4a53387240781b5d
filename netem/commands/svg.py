"""A topology as a picture (SVG 1.1): switches in levels, hosts below theirs, links coloured by what they do. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from netem.commands.describe import link_words, way_words
from netem.commands.layout import Row, kinds, levels, rows, several
from netem.spec import Link, Topology

_CHAR = 6.7  # width of a character of the text below, about
_FONT = 'font-family="DejaVu Sans, Verdana, sans-serif" font-size="11"'
_MARGIN, _TITLE = 24.0, 40.0
_BOX_HEIGHT, _ROW_HEIGHT, _LEVEL_GAP, _COLUMN_GAP = 26.0, 26.0, 84.0, 28.0
_INDENT = 16.0  # of a host's box, from the left edge of its switch's column
_ARC, _ARC_STEP = 20.0, 34.0  # how far above its switches a link inside a level rises, and each further one
_LABELLED = 4
"""Up to so many links between switches have their properties beside them; more are told by colour alone."""
_COLOURS = ("#5b6470", "#c0392b", "#1f6fb2", "#1e8449", "#b9770e", "#7d3c98", "#0e7c86", "#a04000")
_DASHES = ("", "7 3", "2 3", "10 3 2 3")
_FILLS = {"server": "#1f4e79", "worker": "#d6e6f5", "host": "#ececec"}
_INKS = {"server": "#ffffff", "worker": "#12283c", "host": "#333333"}
_SWITCH_FILL, _SWITCH_INK = "#3b3f46", "#ffffff"
_ROLE_WORDS = {"server": "server", "worker": "worker", "host": "host without a rank"}

Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """A rectangle with a text in it: upper left corner and size."""

    x: float
    y: float
    width: float
    text: str

    @property
    def middle(self) -> float:
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        return self.y + _BOX_HEIGHT

    @property
    def centre(self) -> float:
        return self.y + _BOX_HEIGHT / 2


@dataclass(frozen=True)
class Place:
    """Where everything is: switches by name, hosts by (switch, number of the row)."""

    switches: dict[str, Box]
    hosts: dict[tuple[str, int], Box]
    width: float
    bottom: float


def picture(topology: Topology) -> str:
    """The SVG document."""
    found, below = levels(topology), rows(topology, link_words)
    place = _placed(topology, found, below)
    styles = {text: _style(n) for n, text in enumerate(kinds(topology.links, link_words))}
    parts = [_text(_MARGIN, 24, f"{topology.name}: {_counts(topology)}", bold=True)]
    labels: list[str] = []
    arcs = {pair: number for level in found for number, pair in enumerate(_arcs(topology, level))}
    for link in topology.trunks:
        number = arcs.get(link.between, 0)
        line, label = _trunk(link, place, styles[link_words(link)], number, len(topology.trunks) <= _LABELLED)
        parts.append(line)
        labels += label
    for switch, group in below.items():
        parts += _hosts(switch, group, place, styles)
    parts += [_box(box, _SWITCH_FILL, _SWITCH_INK, bold=True) for box in place.switches.values()]
    parts += labels
    legend, height, widest = _legend(topology, styles, place)
    width = max(place.width, widest)
    body = "\n".join(parts + legend)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" {_FONT}>\n'
        f"<title>{escape(topology.name)}</title>\n"
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _counts(topology: Topology) -> str:
    numbers = {role: sum(host.role == role for host in topology.hosts.values()) for role in _ROLE_WORDS}
    words = [
        f"{n} {_ROLE_WORDS[role].replace('host', 'hosts' if n > 1 else 'host', 1)}" for role, n in numbers.items() if n
    ]
    words = [f"{text}s" if text.endswith(" worker") and not text.startswith("1 ") else text for text in words]
    switches = len(topology.switches)
    return ", ".join([*words, f"{switches} switch{'es' * (switches > 1)}"])


def _style(number: int) -> str:
    dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="{_COLOURS[number % len(_COLOURS)]}" stroke-width="2" fill="none"{dashes}'


# Places


def _placed(topology: Topology, found: Sequence[Sequence[str]], below: Mapping[str, tuple[Row, ...]]) -> Place:
    """The lowest level decides the width, one column a switch; the levels above are spread over it."""
    gap = _COLUMN_GAP
    if 0 < len(topology.trunks) <= _LABELLED:
        words = [text for link in topology.trunks for text in _trunk_words(link, right=True)]
        gap += _CHAR * max(map(len, words), default=6)
    head = _head(topology, found)
    step_up = _BOX_HEIGHT + max(_LEVEL_GAP, head + 20)
    top = _TITLE + head + (len(found) - 1) * step_up
    columns = [_column(name, below.get(name, ())) for name in found[0]]
    needed = [sum(max(8 * _CHAR, _width(name)) + _COLUMN_GAP for name in level) - _COLUMN_GAP for level in found[1:]]
    total = max([sum(columns) + gap * (len(columns) - 1), *needed])
    spare = (total - sum(columns)) / len(columns) if len(columns) > 1 else 0.0
    step = max(gap, spare) if len(columns) > 1 else gap
    x, switches, hosts = _MARGIN, {}, {}
    lowest = top + _BOX_HEIGHT
    for name, column in zip(found[0], columns, strict=True):
        switches[name] = Box(x, top, _width(name) if below.get(name) else column, name)
        for number, row in enumerate(below.get(name, ())):
            y = top + _BOX_HEIGHT + 10 + number * (_ROW_HEIGHT + 6)
            hosts[name, number] = Box(x + _INDENT, y, _width(_row_text(row)), _row_text(row))
            lowest = max(lowest, y + _BOX_HEIGHT)
        x += column + step
    width = max(x - step, _MARGIN + total) + _MARGIN
    for level, names in enumerate(found[1:], 1):
        y = top - level * step_up
        for number, name in enumerate(names):
            middle = _MARGIN + (width - 2 * _MARGIN) * (number + 0.5) / len(names)
            own = _width(name)
            switches[name] = Box(middle - own / 2, y, own, name)
    return Place(switches, hosts, width, lowest)


def _head(topology: Topology, found: Sequence[Sequence[str]]) -> float:
    """Room above each level for links inside it: arcs over other switches, and texts."""
    arcs = max(len(_arcs(topology, level)) for level in found)
    labels = 0 < len(topology.trunks) <= _LABELLED
    return (_ARC_STEP * arcs + _ARC if arcs else 0.0) + 18.0 * labels


def _arcs(topology: Topology, level: Sequence[str]) -> list[tuple[str, str]]:
    """The links that pass over other switches of their level, short ones first: they are drawn lower."""
    at = {name: n for n, name in enumerate(level)}
    inside = [link.between for link in topology.trunks if link.between[0] in at and link.between[1] in at]
    spans = sorted((abs(at[a] - at[b]), n) for n, (a, b) in enumerate(inside))
    return [inside[n] for span, n in spans if span > 1]


def _width(text: str) -> float:
    return max(48.0, _CHAR * len(text) + 16)


def _column(name: str, group: Sequence[Row]) -> float:
    return max([_width(name), *(_INDENT + _width(_row_text(row)) for row in group)])


def _row_text(row: Row) -> str:
    return f"{row.name} · {row.words}"


# Links


def _trunk(link: Link, place: Place, style: str, number: int, labelled: bool) -> tuple[str, list[str]]:
    """The line between two switches, and the texts beside it."""
    first, second = (place.switches[name] for name in link.between)
    left, right = (first, second) if first.middle <= second.middle else (second, first)
    texts = _trunk_words(link, right=left is first) if labelled else []
    if first.y != second.y:
        low, high = (first, second) if first.y > second.y else (second, first)
        line = f'<path d="M{low.middle:.1f} {low.y:.1f} L{high.middle:.1f} {high.bottom:.1f}" {style}/>'
        return line, _labels((low.middle + high.middle) / 2, (low.y + high.bottom) / 2, texts)
    between = [b for b in place.switches.values() if b.y == left.y and left.middle < b.middle < right.middle]
    if not between:
        y = left.centre
        line = f'<path d="M{left.x + left.width:.1f} {y:.1f} L{right.x:.1f} {y:.1f}" {style}/>'
        return line, _labels((left.x + left.width + right.x) / 2, y - 6, texts)
    peak = left.y - _ARC - _ARC_STEP * number
    middle = (left.middle + right.middle) / 2
    curve = f"M{left.middle:.1f} {left.y:.1f} Q{middle:.1f} {2 * peak - left.y:.1f} {right.middle:.1f} {left.y:.1f}"
    line = f'<path d="{curve}" {style}/>'
    return line, _labels(middle, peak - 4, texts)


def _trunk_words(link: Link, right: bool) -> list[str]:
    """What a link does, in one line, or in one for each way with an arrow. `right`: its first end is on the left."""
    up, down = way_words(link)
    if up == down:
        return [up] if up else []
    arrows = ("→", "←") if right else ("←", "→")
    return [f"{arrow} {text or 'no limit'}" for arrow, text in zip(arrows, (up, down), strict=True)]


def _labels(x: float, y: float, texts: Sequence[str]) -> list[str]:
    """Lines of text above a point, on white, so that lines below stay readable."""
    found = []
    for number, text in enumerate(reversed(texts)):
        top = y - 14 * number
        width = _CHAR * len(text) + 6
        found.append(
            f'<rect x="{x - width / 2:.1f}" y="{top - 11:.1f}" width="{width:.1f}" height="14" fill="#ffffff"/>'
            + _text(x, top, text, anchor="middle")
        )
    return found


def _hosts(switch: str, group: Sequence[Row], place: Place, styles: dict[str, str]) -> list[str]:
    """The boxes of a switch's hosts, with their links on the left."""
    stem = place.switches[switch].x + 6
    parts = []
    for number in reversed(range(len(group))):  # short links above long ones
        box, row = place.hosts[switch, number], group[number]
        start = place.switches[switch].bottom
        path = f"M{stem:.1f} {start:.1f} V{box.centre:.1f} H{box.x:.1f}"
        parts.append(f'<path d="{path}" {styles[link_words(row.link)]}/>')
        parts.append(_box(box, _FILLS[row.role], _INKS[row.role]))
    return parts


# Words


def _legend(topology: Topology, styles: dict[str, str], place: Place) -> tuple[list[str], float, float]:
    """A line of colour for each kind of link, and what the colours of hosts mean; then height and width of it all."""
    y, parts, widest = place.bottom + 34, [], 0.0
    room = max(60, int((place.width - 2 * _MARGIN - 44) / _CHAR))
    for text, group in kinds(topology.links, link_words).items():
        who = _who(topology, group) if len(styles) > 1 else "all links"
        parts.append(f'<path d="M{_MARGIN} {y - 4:.1f} h32" {styles[text]}/>')
        for line in textwrap.wrap(f"{who}: {text}", room, break_on_hyphens=False):
            parts.append(_text(_MARGIN + 44, y, line))
            widest = max(widest, 2 * _MARGIN + 44 + _CHAR * len(line))
            y += 17
    x = _MARGIN
    for role in [role for role in _ROLE_WORDS if any(host.role == role for host in topology.hosts.values())]:
        parts.append(
            f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="14" height="11" rx="2" fill="{_FILLS[role]}" stroke="#8a929c"/>'
        )
        parts.append(_text(x + 20, y, _ROLE_WORDS[role]))
        x += 44 + _CHAR * len(_ROLE_WORDS[role])
    if any(link.up != link.down for link in topology.links):
        y += 17
        note = "up: to the switch; between switches from the first named to the second"
        parts.append(_text(_MARGIN, y, note))
        widest = max(widest, 2 * _MARGIN + _CHAR * len(note))
    return parts, y + 20, max(widest, x)


def _who(topology: Topology, group: Sequence[Link]) -> str:
    """Which links these are: hosts by name, links between switches by both ends."""
    hosts = [link.host for link in group if link.host in topology.hosts]
    trunks = [f"{link.host}–{link.switch}" for link in group if link.host not in topology.hosts]
    words = []
    if hosts:
        words.append("all hosts" if len(hosts) == len(topology.hosts) else several(hosts))
    if trunks:
        every = len(trunks) == len(topology.trunks) > 1
        words.append("all links between switches" if every else several(trunks))
    return ", ".join(words)


def _box(box: Box, fill: str, ink: str, bold: bool = False) -> str:
    return (
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{_BOX_HEIGHT}" rx="4" '
        f'fill="{fill}" stroke="#8a929c"/>'
        + _text(box.middle, box.centre + 4, box.text, anchor="middle", ink=ink, bold=bold)
    )


def _text(x: float, y: float, text: str, anchor: str = "start", ink: str = "#1b1f24", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{ink}"{weight}>{escape(text)}</text>'

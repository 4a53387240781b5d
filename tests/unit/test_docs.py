"""What the documentation says, as far as a machine can tell: links, examples, columns and exit statuses."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from netem import statuses
from netem.analysis.records import EpochRow, RoundRow
from netem.links import mask
from netem.spec import load_scenario_text, load_topology_text

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """(page:line, text) of every fenced block in this language."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in FENCE.finditer(text):
            if found[2] == language:
                yield f"{page.name}:{text.count(chr(10), 0, found.start()) + 1}", found[3]


def blocks_with(language: str, start: str) -> list[tuple[str, str]]:
    return [(where, text) for where, text in blocks(language) if re.search(start, text, re.MULTILINE)]


SCENARIOS = blocks_with("yaml", r"^(transports|workload):")
TOPOLOGIES = [one for one in blocks_with("yaml", r"^(hosts|star):") if one not in SCENARIOS]
PROGRAMS = list(blocks("python"))


def ids(found: list[tuple[str, str]]) -> list[str]:
    return [where for where, _ in found]


def printed(program: str) -> str:
    """What an example prints. Examples are pure: they need no privileges, network or files."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(program, "<example>", "exec"), {"__name__": "example"})
    return output.getvalue()


def rows_after(page: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading or line that begins so."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(heading))
    table: list[list[str]] = []
    for line in lines[at:]:
        if line.startswith("|"):
            table.append([cell.strip() for cell in line.strip("|").split("|")])
        elif table:
            break
    return table


def test_the_examples_are_found() -> None:
    assert SCENARIOS
    assert TOPOLOGIES
    assert len(PROGRAMS) >= 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in target]
    missing = [target for target in targets if not (page.parent / target.partition("#")[0]).exists()]
    assert not missing


def test_every_page_is_linked_from_the_readme() -> None:
    targets = set(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert {f"docs/{page.name}" for page in PAGES if page.parent.name == "docs"} <= targets


@pytest.mark.parametrize(("where", "text"), SCENARIOS, ids=ids(SCENARIOS))
def test_scenarios_are_valid(where: str, text: str) -> None:
    spec = load_scenario_text(text, ["name=example"], file=where).spec
    assert spec.transports or spec.workload.kind == "command"


@pytest.mark.parametrize(("where", "text"), TOPOLOGIES, ids=ids(TOPOLOGIES))
def test_topologies_are_valid(where: str, text: str) -> None:
    assert load_topology_text(text, file=where).workers


@pytest.mark.parametrize(("where", "text"), PROGRAMS, ids=ids(PROGRAMS))
def test_programs_run(where: str, text: str) -> None:
    assert printed(text)


def test_the_example_of_the_mask_prints_what_the_page_says() -> None:
    page = (ROOT / "docs" / "repeatability.md").read_text(encoding="utf-8")
    said = re.findall(r"chunk (\d+)(?: gets through)? as pass (\d+)", page)
    (program,) = (text for where, text in PROGRAMS if where.startswith("repeatability.md"))
    assert [line.split() for line in printed(program).splitlines()] == [list(pair) for pair in said]


def test_the_worked_example_of_the_mask() -> None:
    """The steps of the table, by the definition on the page and not by the code of the mask."""
    full = 2**64 - 1

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & full
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & full
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & full
        return x ^ x >> 31

    states = [mix(7), mix(mix(7) ^ (0 << 32 | 1))]
    for word in (40, 100, 0 << 16):
        states.append(mix(states[-1] ^ word))
    rows = rows_after("docs/repeatability.md", "## An example")[2:]
    assert [row[1].strip("`") for row in rows[:5]] == [f"0x{state:016x}" for state in states]
    assert [int(row[1].split(":")[0]) for row in rows[5:]] == [states[-1] >> 32, mask.threshold(0.9)]
    assert states[1] == mask.port_state(7, "up", 1)


def test_exit_statuses_are_those_of_the_program() -> None:
    known = {value for name, value in vars(statuses).items() if name.isupper() and isinstance(value, int)}
    assert {int(row[0]) for row in rows_after("README.md", "| exit status")[2:]} == known


def test_every_column_is_described() -> None:
    cells = [row[0] for row in rows_after("docs/files.md", "## rounds.csv")[2:]]
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert named == [field.name for field in dataclasses.fields(RoundRow)]
    page = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    assert all(f"`{field.name}`" in page for field in dataclasses.fields(EpochRow))

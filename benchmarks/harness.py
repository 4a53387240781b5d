"""What every benchmark shares: lines with a verdict, samples and their spread, the machine, JSON and table.

A benchmark is a file benchmarks/bench_<name>.py with

    TITLE = "(a) one flow, clean"                        # its letter sorts it
    def measure(context: Context) -> list[Line]: ...

`measure` takes its contestants in turns (`alternate`), keeps every single sample (`context.record`), and judges
medians. A program that is not installed makes its lines missing (`Line.absent`), never passed.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import pwd
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("numpy", "torch", "pyroute2", "matplotlib")
BUSY_LIMIT = 0.1
COLOURS = {"pass": "green", "fail": "red", "error": "red", "missing": "yellow", "": "dim"}

Sense = Literal["at least", "at most"]
T = TypeVar("T")


@dataclass(frozen=True)
class Line:
    """One line of the table. Without a limit it informs and has no verdict.

    value, limit: in `unit`. detail: medians, spreads and counts behind the value, for the reader.
    missing: what is not installed or not possible here, and so keeps the value from being measured.
    """

    name: str
    value: float | None
    limit: float | None = None
    sense: Sense = "at most"
    unit: str = "x"
    detail: str = ""
    missing: str | None = None

    @classmethod
    def absent(
        cls, name: str, what: str, limit: float | None = None, sense: Sense = "at most", unit: str = "x"
    ) -> Line:
        """A line that cannot be measured here because of `what`."""
        return cls(name, None, limit, sense, unit, missing=what)

    @property
    def verdict(self) -> str:
        """pass, fail, missing, error (no value, and nothing is missing), or "" (no limit)."""
        if self.missing is not None:
            return "missing"
        if self.value is None or self.value != self.value:
            return "error"
        if self.limit is None:
            return ""
        good = self.value >= self.limit if self.sense == "at least" else self.value <= self.limit
        return "pass" if good else "fail"


def rounded(value: float, digits: int = 3) -> str:
    """So many significant digits, thousands with commas, no exponent."""
    return f"{float(f'{value:.{digits}g}'):,.12g}"


@dataclass(frozen=True)
class Spread:
    """Samples of one quantity in five numbers."""

    median: float
    low: float
    high: float
    quartiles: tuple[float, float]
    count: int

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        """ValueError without samples."""
        values = sorted(samples)
        if not values:
            raise ValueError("no samples")
        quarters = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        middle = statistics.median(values)
        return cls(middle, values[0], values[-1], (quarters[0], quarters[2]), len(values))

    def shown(self, scale: float = 1.0, unit: str = "", digits: int = 3) -> str:
        """median (low..high, n), each times `scale`, in `unit`."""
        middle, low, high = (rounded(value * scale, digits) for value in (self.median, self.low, self.high))
        return f"{middle}{unit and ' ' + unit} ({low}..{high}, n={self.count})"


@dataclass
class Context:
    """What a benchmark gets: how thorough to be, where files go, and a place for its samples.

    folder: files of this run. raw: everything recorded, by benchmark; it goes into the JSON as it is.
    busy: share of the cores that other programs used before each benchmark.
    """

    folder: Path
    quick: bool = False
    console: Console = field(default_factory=lambda: Console(highlight=False))
    raw: dict[str, dict[str, Any]] = field(default_factory=dict)
    figures: list[Path] = field(default_factory=list)
    current: str = ""
    temporary: str | None = None
    busy: dict[str, float] = field(default_factory=dict)

    def repeats(self, full: int, quick: int = 2) -> int:
        """How often: the one or the other."""
        return quick if self.quick else full

    def say(self, text: str) -> None:
        """Progress, for whoever waits."""
        self.console.print(f"[dim]{self.current}: {text}[/]", soft_wrap=True)

    def record(self, name: str, samples: Any) -> None:
        """Keep raw samples of the benchmark that runs, for the JSON. The unit belongs into the name."""
        self.raw.setdefault(self.current, {})[name] = samples

    def scratch(self) -> Path:
        """A new folder for what is of no interest afterwards; it goes with the benchmark."""
        return Path(tempfile.mkdtemp(dir=self.temporary, prefix=self.current))

    def figure(self, name: str) -> Path:
        """The path of a figure, without suffix; each suffix that is written is listed in the JSON."""
        path = self.folder / name
        self.figures.append(path)
        return path


def alternate(contestants: Mapping[str, Callable[[], T]], turns: int) -> dict[str, list[T]]:
    """Call all contestants `turns` times, in turns, each turn in the other order, so that a drift hits all alike."""
    samples: dict[str, list[T]] = {name: [] for name in contestants}
    for turn in range(turns):
        names = list(contestants)
        for name in names if turn % 2 == 0 else reversed(names):
            samples[name].append(contestants[name]())
    return samples


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over median."""
    return statistics.median(above) / statistics.median(below)


def installed(program: str) -> str | None:
    """The path of a program, or None."""
    return shutil.which(program)


def machine() -> dict[str, Any]:
    """What the numbers depend on: kernel, cores, memory, versions."""
    return {
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def busy_share(seconds: float = 1.0) -> float:
    """Share of the cores that is in use now (proc(5), /proc/stat): before a measurement it should be near 0."""

    def ticks() -> tuple[int, int]:
        fields = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]  # idle and waiting for disks

    total, idle = ticks()
    time.sleep(seconds)
    total_then, idle_then = ticks()
    return 1.0 - (idle_then - idle) / max(1, total_then - total)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def discover() -> dict[str, ModuleType]:
    """All benchmarks by name (bench_flow.py is "flow"), in the order of their titles."""
    found = {
        path.stem.removeprefix("bench_"): importlib.import_module(f"benchmarks.{path.stem}")
        for path in Path(__file__).parent.glob("bench_*.py")
    }
    return dict(sorted(found.items(), key=lambda item: item[1].TITLE))


def run(chosen: Mapping[str, ModuleType], context: Context) -> dict[str, list[Line]]:
    """Measure one benchmark after the other; one that raises gives an error line, and the others still run."""
    lines: dict[str, list[Line]] = {}
    before = machine()
    for name, module in chosen.items():
        context.current = name
        context.say(module.TITLE)
        context.busy[name] = busy_share()
        if context.busy[name] > BUSY_LIMIT:
            context.say(f"other programs use {context.busy[name]:.0%} of the cores: the numbers will not be worth much")
        try:
            with tempfile.TemporaryDirectory(prefix="dblp-netem-bench-") as context.temporary:
                lines[name] = module.measure(context)
        except Exception as error:
            context.console.print_exception()
            lines[name] = [Line(module.TITLE, None, detail=f"{type(error).__name__}: {error}")]
        write_json(context, before, lines)
    return lines


def write_json(context: Context, described: Mapping[str, Any], lines: Mapping[str, list[Line]]) -> Path:
    """All lines, verdicts and samples so far, as bench.json in the run's folder."""
    content = {
        "version": 1,
        "ended_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": context.quick,
        "machine": described,
        "busy_before": context.busy,
        "lines": [{"benchmark": name, **asdict(one), "verdict": one.verdict} for name in lines for one in lines[name]],
        "figures": sorted(path.name for base in context.figures for path in base.parent.glob(f"{base.name}.*")),
        "samples": context.raw,
    }
    target, fresh = context.folder / "bench.json", context.folder / ".bench.json.new"
    fresh.write_text(json.dumps(content, indent=1) + "\n")
    fresh.replace(target)
    give(context.folder)
    return target


def new_folder() -> Path:
    """A folder below results/ for this run, by the time in UTC."""
    folder = RESULTS / datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    folder.mkdir(parents=True)
    give(RESULTS)
    return folder


def give(path: Path) -> None:
    """Results belong to whoever called sudo."""
    uid = int(os.environ.get("SUDO_UID", "0"))
    if os.geteuid() == 0 and uid:
        for each in (path, *path.rglob("*")):
            os.chown(each, uid, pwd.getpwuid(uid).pw_gid, follow_symlinks=False)


def table(lines: Mapping[str, list[Line]], titles: Mapping[str, str]) -> Table:
    """Everything measured, a section for each benchmark."""
    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title, justify in (("", "left"), ("measured", "right"), ("limit", "left"), ("verdict", "left"), ("", "left")):
        shown.add_column(title, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for name, each in lines.items():
        shown.add_row(f"[bold]{titles[name]}[/]")
        for line in each:
            limit = "" if line.limit is None else f"{line.sense} {line.limit:g}"
            value = "" if line.value is None else f"{rounded(line.value)} {line.unit}"
            verdict = f"[{COLOURS[line.verdict]}]{line.verdict}[/]"
            shown.add_row(f"  {line.name}", value, limit, verdict, line.missing or line.detail)
    return shown


def status(lines: Mapping[str, list[Line]]) -> int:
    """0 when every limit holds, 1 when one does not or a benchmark failed, 3 when all that is wrong is missing."""
    verdicts = {line.verdict for each in lines.values() for line in each}
    return 1 if verdicts & {"fail", "error"} else 3 if "missing" in verdicts else 0


def disagreements(first: Path, second: Path) -> list[str]:
    """Lines whose verdicts differ between two bench.json files, and lines that only one of them has."""
    both = []
    for path in (first, second):
        rows = json.loads(path.read_text())["lines"]
        both.append({(row["benchmark"], row["name"]): (row["verdict"], row["value"]) for row in rows})
    found = []
    for key in dict.fromkeys([*both[0], *both[1]]):
        one, other = (side.get(key, ("not measured", None)) for side in both)
        if one[0] != other[0]:
            found.append(f"{key[0]}: {key[1]}: {one[0]} ({one[1]}), {other[0]} ({other[1]})")
    return found


def out(text: str) -> None:
    """A line to standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()

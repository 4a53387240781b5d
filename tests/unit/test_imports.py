"""The import directions of the two packages, read from the source (nothing is imported)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# dblp: a module may import modules of a lower level only. `collective` and `workload` meet in `train` alone.
DBLP_LEVELS = {
    "errors": 0, "dtypes": 0,
    "wire": 1, "chunks": 1, "tolerance": 1, "config": 1, "reducer": 1, "mmsg": 1,
    "early": 2, "pacing": 1, "sender": 3, "receiver": 2, "options": 2, "events": 2, "data": 2, "tensors": 2,
    "io": 3, "models": 3,
    "datagrams": 4, "workload": 4,
    "collective": 5,
    "train": 6,
}  # fmt: skip
SANS_IO = {
    "errors",
    "dtypes",
    "wire",
    "chunks",
    "tolerance",
    "reducer",
    "options",
    "early",
    "pacing",
    "sender",
    "receiver",
}
FORBIDDEN_IN_SANS_IO = {
    "socket", "socketserver", "select", "selectors", "asyncio", "ssl",
    "time", "threading", "multiprocessing", "concurrent", "random", "secrets", "torch",
}  # fmt: skip
MAY_IMPORT_TORCH = {"dblp.train", "dblp.models", "dblp.data", "dblp.hook", "dblp.tensors"}
NETEM_WITHOUT_DBLP = ("netem.kernel", "netem.links", "netem.spec", "netem.lab", "netem.traffic")
NETEM_WITH_DBLP = ("netem.experiment", "netem.analysis", "netem.cli")
DBLP_PURE = {
    "errors",
    "dtypes",
    "wire",
    "chunks",
    "tolerance",
    "config",
    "options",
    "early",
    "pacing",
    "sender",
    "receiver",
}


def _module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _modules() -> dict[str, Path]:
    return {
        _module_name(path): path for package in ("dblp", "netem") for path in sorted((ROOT / package).rglob("*.py"))
    }


MODULES = _modules()


def _imports(name: str) -> set[str]:
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return _imports_of(path.read_text(encoding="utf-8"), package)


def _imports_of(source: str, package: str) -> set[str]:
    """Absolute dotted names imported anywhere in a source text, function bodies and TYPE_CHECKING blocks too.

    ``from a import b`` gives a.b where that is a module of ours, else a.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in MODULES else base)
    return found


def _top(name: str) -> str:
    return name.split(".")[0]


def _dblp_modules(parts: set[str]) -> list[str]:
    """Modules of dblp whose second part is listed: dblp.io and dblp.io.gso for "io"."""
    return [n for n in MODULES if _top(n) == "dblp" and n != "dblp" and n.split(".")[1] in parts]


def _within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("name", [n for n in MODULES if _top(n) == "dblp"])
def test_dblp_never_imports_netem(name: str) -> None:
    assert not {i for i in _imports(name) if _top(i) == "netem"}


@pytest.mark.parametrize("name", [n for n in MODULES if _top(n) == "netem"])
def test_only_experiment_analysis_and_cli_know_dblp(name: str) -> None:
    known = {i for i in _imports(name) if _top(i) == "dblp"}
    if not _within(name, NETEM_WITH_DBLP):
        assert not known
    impure = {i for i in known if i != "dblp" and i.split(".")[1] not in DBLP_PURE}
    assert not impure, f"{name} may use dblp's wire format and configuration types, never its IO"


@pytest.mark.parametrize("name", [n for n in MODULES if _within(n, NETEM_WITHOUT_DBLP)])
def test_the_lab_does_not_know_the_experiment(name: str) -> None:
    assert not {i for i in _imports(name) if _within(i, NETEM_WITH_DBLP)}


def test_every_module_of_dblp_has_a_level() -> None:
    assert {n.split(".")[1] for n in MODULES if n.startswith("dblp.")} == set(DBLP_LEVELS)


@pytest.mark.parametrize("name", _dblp_modules(set(DBLP_LEVELS)))
def test_dblp_layers_point_one_way(name: str) -> None:
    level = DBLP_LEVELS[name.split(".")[1]]
    own = {i.split(".")[1] for i in _imports(name) if i.startswith("dblp.")} - {name.split(".")[1]}
    wrong = {o for o in own if DBLP_LEVELS[o] >= level}
    assert not wrong, f"{name} (level {level}) imports {sorted(wrong)} of the same or a higher level"


@pytest.mark.parametrize("name", _dblp_modules(SANS_IO))
def test_left_of_io_nothing_blocks_or_draws(name: str) -> None:
    assert not {i for i in _imports(name) if _top(i) in FORBIDDEN_IN_SANS_IO}


@pytest.mark.parametrize("name", [n for n in MODULES if _top(n) == "dblp" and n != "dblp.wire"])
def test_struct_is_used_by_wire_alone(name: str) -> None:
    """The kernel's control messages (SO_RXQ_OVFL, UDP_GRO) are single integers: int.from_bytes reads them."""
    assert "struct" not in _imports(name), f"{name}: only dblp.wire packs and parses messages"


@pytest.mark.parametrize("name", list(MODULES))
def test_torch_is_imported_where_training_happens_only(name: str) -> None:
    if name not in MAY_IMPORT_TORCH:
        assert not {i for i in _imports(name) if _top(i) == "torch"}


def test_the_walker_sees_relative_and_nested_imports() -> None:
    source = "from . import analysis\nfrom ..x import y\ndef f():\n    import torch.nn\n"
    assert _imports_of(source, "netem") >= {"netem.analysis", "torch.nn"}
    assert _imports_of("from .errors import E", "dblp") == {"dblp.errors"}

"""Measures everything and judges it, or chosen benchmarks only. Needs root and a few minutes of an idle machine.

    sudo .venv/bin/python -m benchmarks
    sudo .venv/bin/python -m benchmarks --only flow,bound --quick
    .venv/bin/python -m benchmarks --agree benchmarks/results/A/bench.json benchmarks/results/B/bench.json

Exit status: 0 every limit holds, 1 one does not (or a benchmark failed), 2 wrong usage, 3 all holds that could be
measured, but a program is missing.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.harness import Context, disagreements, discover, new_folder, out, run, status, table

TERMINATED = 143


def _arguments(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"some of them, with commas: {','.join(names)}")
    parser.add_argument("--quick", action="store_true", help="few repetitions and small sizes: shows that it works")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--agree", nargs=2, type=Path, metavar="JSON", help="do two runs agree on every verdict?")
    options = parser.parse_args()
    options.names = options.only.split(",") if options.only else names
    unknown = sorted(set(options.names) - set(names))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(names)}")
    return options


def main() -> int:
    found = discover()
    options = _arguments(list(found))
    if options.list:
        for name, module in found.items():
            out(f"{name:12} {module.TITLE}")
        return 0
    if options.agree:
        differing = disagreements(*options.agree)
        out("\n".join(differing) or "both runs agree on every verdict")
        return 1 if differing else 0
    if os.geteuid() != 0:
        out("benchmarks build labs: they need root (sudo)")
        return 2
    chosen = {name: module for name, module in found.items() if name in options.names}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # labs are torn down on the way out
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    context = Context(new_folder(), options.quick, console)
    lines = run(chosen, context)
    context.console.print(table(lines, {name: module.TITLE for name, module in chosen.items()}))
    context.console.print(f"results: {context.folder / 'bench.json'}", soft_wrap=True)
    return status(lines)


if __name__ == "__main__":
    raise SystemExit(main())

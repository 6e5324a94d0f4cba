"""Put the figures of a run into the README: from the JSON of ``run.py`` to a Markdown table.

    python benchmarks/report.py [FILE] [--readme README.md] [--print]

replaces what stands between ``<!-- figures:begin -->`` and ``<!-- figures:end -->``; with ``--print`` it only shows it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import show
from peers import OURS

BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"
ROOT = Path(__file__).parent.parent


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/report.py", description="Figures of a run, as Markdown.")
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "out" / "bench.json", help="what run.py wrote")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="the file to put them into")
    parser.add_argument("--print", action="store_true", help="print them, and change no file")
    options = parser.parse_args(argv)
    try:
        figures = markdown(json.loads(options.file.read_text(encoding="utf-8")))
        if options.print:
            print(figures)
            return 0
        changed = between_marks(options.readme.read_text(encoding="utf-8"), figures)
    except (OSError, ValueError) as error:
        print(f"benchmarks/report.py: {error}", file=sys.stderr)
        return 1
    temporary = options.readme.with_name(f".{options.readme.name}.partial-{os.getpid()}")
    temporary.write_text(changed, encoding="utf-8")
    os.replace(temporary, options.readme)
    print(f"Wrote the figures of {options.file} into {options.readme}")
    return 0


def between_marks(text: str, figures: str) -> str:
    """The text with its part between the marks replaced.

    >>> between_marks(f"a {BEGIN} old {END} b", "new").replace("\\n", "|")
    'a <!-- figures:begin -->|new|<!-- figures:end --> b'
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the text has no {BEGIN} followed by {END}")
    return f"{before}{BEGIN}\n{figures}\n{END}{after}"


def markdown(found: dict[str, Any]) -> str:
    """Tables of times and memory, and a line on the machine that they come from."""
    about = found["peers"]
    if OURS not in about:
        raise ValueError(f"this run measured {', '.join(about)} alone: figures are ratios to {OURS}")
    others = [name for name in about if name != OURS]
    timed = [row for row in found["rows"] if "median" in row]
    weighed = [row for row in found["rows"] if "footprint" in row]
    parts = []
    if timed:
        heads = ["heads × tokens × dim", "threads", "ms", "work", "of the limit"]
        parts.append(table(heads + [f"against {about[name]['name']}" for name in others],
                           [_time(row, others) for row in timed]))  # fmt: skip
    if weighed:
        heads = ["peak memory beyond inputs and outputs", "threads", *(peer["name"] for peer in about.values())]
        parts.append(table(heads, [_memory(row, list(about)) for row in weighed]))
    return "\n\n".join([*parts, where(found)])


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, its first column to the left.

    >>> print(table(["work", "ms"], [["8 × 512", "1.0"]]))
    | work | ms |
    | :-- | --: |
    | 8 × 512 | 1.0 |
    """
    marks = [":--"] + ["--:"] * (len(heads) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, marks, *rows))


def where(found: dict[str, Any]) -> str:
    """The machine and the versions, in words."""
    facts, rows = found["machine"], found["rows"]
    limits = "; ".join(
        f"{show.threads(count)}: {limit['float32'] / 1e9:.0f} GFLOP/s in float32, "
        f"{limit['float64'] / 1e9:.0f} in float64, {limit['bandwidth'] / 1e9:.1f} GB/s read"
        for count, limit in found["threads"].items()
    )
    repetitions = max((len(next(iter(row["seconds"].values()))) for row in rows if "seconds" in row), default=0)
    return (
        f"Medians of {repetitions} paired repetitions, {facts['date']}, on {facts['processor']} ({facts['core']}, "
        f"{facts['vectors']}), {facts['cores']} cores, {facts['system']}; Python {facts['python']}, "
        f"{show.versions(found)}; {show.blas(found)}. This machine's limits in the same run: {limits}."
    )


def _time(row: dict[str, Any], others: list[str]) -> list[str]:
    times = row["times_ours"]
    return [
        row["title"],
        str(row["threads"]),
        f"{1e3 * row['median'][OURS]:,.2f}",
        show.rate(row, OURS),
        f"{row['share'][OURS]:.2f}",
        *(f"{times[name]:.2f}×" if name in times else f"– ({row['lacks'][name]})" for name in others),
    ]


def _memory(row: dict[str, Any], names: list[str]) -> list[str]:
    cells = [row["title"], str(row["threads"])]
    for name in names:
        found = row["footprint"].get(name)
        if found is None:
            cells.append(f"– ({row['lacks'][name]})")
        else:
            cells.append(f"{found['bytes'] / 1e6:.1f} MB" if "bytes" in found else "not measured")
    return cells


if __name__ == "__main__":
    sys.exit(main())

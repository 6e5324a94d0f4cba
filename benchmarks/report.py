"""Put the figures of a run where people read them: from the JSON of ``run.py`` to Markdown.

    python benchmarks/report.py [FILE] [--readme README.md] [--page docs/performance.md] [--print]

writes the page with every row, and replaces what stands between ``<!-- figures:begin -->`` and ``<!-- figures:end -->``
in the README by the few rows that the table of workloads calls headlines. With ``--print`` it only shows the page.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import page
from peers import OURS

BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"
ROOT = Path(__file__).parent.parent


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/report.py", description="Figures of a run, as Markdown.")
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "out" / "bench.json", help="what run.py wrote")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="the file for the headlines")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md", help="the file for all rows")
    parser.add_argument("--print", action="store_true", help="print the page, and change no file")
    options = parser.parse_args(argv)
    try:
        found = json.loads(options.file.read_text(encoding="utf-8"))
        if OURS not in found["peers"]:
            raise ValueError(f"this run measured {', '.join(found['peers'])} alone: figures are ratios to {OURS}")
        whole = page.whole(found)
        if options.print:
            print(whole)
            return 0
        changed = between_marks(options.readme.read_text(encoding="utf-8"), page.headlines(found))
        replace(options.page, whole)
        replace(options.readme, changed)
    except (OSError, ValueError) as error:
        print(f"benchmarks/report.py: {error}", file=sys.stderr)
        return 1
    print(f"Wrote the figures of {options.file} into {options.page} and {options.readme}")
    return 0


def between_marks(text: str, figures: str, first: str = BEGIN, last: str = END) -> str:
    """The text with its part between the marks replaced.

    >>> between_marks(f"a {BEGIN} old {END} b", "new").replace("\\n", "|")
    'a <!-- figures:begin -->|new|<!-- figures:end --> b'
    """
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"the text has no {first} followed by {last}")
    return f"{before}{first}\n{figures}\n{last}{after}"


def replace(file: Path, text: str) -> None:
    """Whole or not there."""
    temporary = file.with_name(f".{file.name}.partial-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)


if __name__ == "__main__":
    sys.exit(main())

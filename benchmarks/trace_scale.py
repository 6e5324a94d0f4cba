"""What it takes to trace a whole model over a long text, beside the model's own forward pass.

    .venv/bin/python benchmarks/trace_scale.py                               # SmolLM2 over 8,192 tokens, some minutes
    .venv/bin/python benchmarks/trace_scale.py --tokens 1024 --repeats 5
    .venv/bin/python benchmarks/trace_scale.py --page docs/tracing.md        # puts the figures between its marks

Each repetition lets the model read the text by itself, and then while every head of every layer is recorded and
measured, queries and keys stored on disk: the time that is shown is the median of their ratios. Memory is the most that
the process held in a traced run, the model, the libraries and the text in it. Both ways of reading have been gone once
before, over few tokens. Linux only, as ``footprint.py`` is. Exit codes: 0; 2 for wrong usage. What falls short of a
target is said, and is no failure.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import clearhead as ch
import footprint
import machine
import report
from clearhead.memory import written

TOKENS = 8192
DEFAULT_FILE = Path("out") / "trace_scale.json"
BEGIN, END = "<!-- scale:begin -->", "<!-- scale:end -->"
# What a trace of so many tokens has set itself, for 2 cores: times the model's own forward pass, and bytes in all.
MOST_TIME, MOST_MEMORY = 2.0, 3e9


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        found = measure(options)
    except (ValueError, OSError) as error:
        print(f"benchmarks/trace_scale.py: {error}", file=sys.stderr)
        return 2
    options.json.parent.mkdir(parents=True, exist_ok=True)
    report.replace(options.json, json.dumps(found, ensure_ascii=False, indent=1))
    print(figures(found))
    print(f"\nEvery repetition: {options.json}")
    if options.page is not None:
        text = options.page.read_text(encoding="utf-8")
        report.replace(options.page, report.between_marks(text, figures(found), BEGIN, END))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/trace_scale.py", description="The cost of tracing a model.")
    parser.add_argument("--model", default="smollm2", help="as `clearhead trace` takes it (default: smollm2)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="default: Python's language reference, from pydoc")
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help=f"how many (default: {TOKENS})")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="repetitions (default: 3)")
    parser.add_argument("--threads", type=int, metavar="N", help="of the model and of Clearhead (default: all cores)")
    parser.add_argument("--json", type=Path, default=DEFAULT_FILE, metavar="FILE",
                        help=f"where it goes (default: {DEFAULT_FILE})")  # fmt: skip
    parser.add_argument("--page", type=Path, metavar="FILE", help="a page to put the figures in, between its marks")
    options = parser.parse_args(argv)
    if options.tokens < 2 or options.repeats < 1 or (options.threads is not None and options.threads < 1):
        parser.error("--tokens takes 2 or more, --repeats and --threads 1 or more")
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every repetition's seconds and bytes, the medians, and what was measured on what."""
    import torch

    from clearhead.cli.demo import language_reference
    from clearhead.trace import load, read_text, record, tokenize

    threads = options.threads or ch.get_num_threads()
    ch.set_num_threads(threads)
    torch.set_num_threads(threads)
    model = load(options.model)
    text = language_reference() if options.text is None else read_text(options.text)
    tokens = tokenize(model.tokenizer, text, options.tokens)
    few = tokenize(model.tokenizer, text, min(256, options.tokens))
    seconds: dict[str, list[float]] = {"model": [], "trace": []}
    memory: list[int] = []
    with tempfile.TemporaryDirectory(dir=options.json.parent if options.json.parent.is_dir() else None) as folder:
        path = Path(folder) / "t"
        _read(model, few.ids)
        record(model, few, path)
        for _ in range(options.repeats):
            seconds["model"].append(_timed(lambda: _read(model, tokens.ids)))
            shutil.rmtree(path, ignore_errors=True)
            footprint.give_back()
            footprint.reset_peak()
            seconds["trace"].append(_timed(lambda: record(model, tokens, path)))
            memory.append(footprint.status("VmHWM"))
        trace = ch.trace.Trace.open(path)
        return {
            "machine": machine.describe(),
            "versions": {"torch": torch.__version__, "transformers": trace.model.transformers},
            "model": model.name,
            "tokens": len(tokens),
            "layers": len(trace.layers),
            "heads": sum(site.heads for site in trace.sites),
            "dtype": trace.model.dtype,
            "measures": sorted({*trace.measures(trace.layers[0]).to_dict()} - {"rows"}),
            "threads": threads,
            "seconds": seconds,
            "times": statistics.median(b / a for a, b in zip(*seconds.values(), strict=True)),
            "memory": memory,
            "disk": trace.nbytes,
            "dense": trace.dense_nbytes,
            "passed": trace.check().passed,
        }


def _read(model: Any, ids: tuple[int, ...]) -> None:
    """The model's own forward pass, as a traced run has it run."""
    import torch

    with torch.inference_mode():
        model.network(input_ids=torch.tensor([ids], device=model.network.device), use_cache=False)


def _timed(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def figures(found: dict[str, Any]) -> str:
    """What was measured, as Markdown: what it was and where, and a table."""
    facts, took = found["machine"], {name: statistics.median(some) for name, some in found["seconds"].items()}
    memory, tokens, gigabytes = max(found["memory"]), found["tokens"], written(MOST_MEMORY)
    beside = f"{took['trace']:,.1f} s, {found['times']:.2f}× the {took['model']:,.1f} s of the model's own pass"
    rows = [
        ["time", beside, _bound(tokens, found["times"], MOST_TIME, f"under {MOST_TIME:g}×")],
        ["memory, with the model in it", written(memory), _bound(tokens, memory, MOST_MEMORY, f"under {gigabytes}")],
        ["on disk", written(found["disk"]), ""],
        ["dense weights would take", written(found["dense"]), ""],
    ]
    repetitions = f"{len(found['memory'])} repetition{'s' * (len(found['memory']) != 1)}"
    commit = f", commit {facts['commit']}" if facts.get("commit") else ""
    return (
        f"{found['model']} ({found['dtype']}) over {found['tokens']:,} tokens: {found['layers']} layers, "
        f"{found['heads']} heads, queries and keys stored, measured: {', '.join(found['measures'])}.\n\n"
        + _table(["", "a trace", "target"], rows)
        + f"\n\nMedian of {repetitions}, {facts['date']}{commit}, on {facts['processor']}, {found['threads']} of "
        f"{facts['cores']} cores; Python {facts['python']}, torch {found['versions']['torch']}, transformers "
        f"{found['versions']['transformers']}. `clearhead check` of it {'passes' if found['passed'] else 'FAILS'}."
    )


def _bound(tokens: int, reached: float, most: float, words: str) -> str:
    """Targets are for a long text: over a short one, what is done once weighs more."""
    return "" if tokens < TOKENS else words if reached < most else f"{words}: short"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, [":--"] * len(heads), *rows))


if __name__ == "__main__":
    sys.exit(main())

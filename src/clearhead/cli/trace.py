"""``clearhead trace``: record every head of a model over a text."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.console import counting, peak_memory, stderr, stdout, waiting
from clearhead.memory import written

if TYPE_CHECKING:
    from clearhead.trace import Model, Trace
    from clearhead.trace.format import Tokens


def trace(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A local Hugging Face folder, or: smollm2.")],
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="The text to read, UTF-8.")],
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", metavar="N", min=1, help="Read the first N tokens only.")
    ] = None,
    layers: Annotated[str | None, typer.Option("--layers", metavar="0,5-8", help="Record these layers only.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Where it goes. Default: the text's name with .trace"),
    ] = None,
) -> None:
    """Record every head of a language model over a text, exactly, without changing the model's output."""
    from clearhead.trace import read_text, tokenize
    from clearhead.trace.models import find
    from clearhead.trace.writer import check_destination

    chosen = parse_layers(layers)
    folder = output or Path(text.with_suffix(".trace").name)
    # What can be wrong is looked at before the model is loaded.
    content = read_text(text)
    find(model)
    check_destination(folder)
    loaded = load_model(model)
    with waiting("Finding the tokens"):
        tokens = tokenize(loaded.tokenizer, content, max_tokens)
    record_trace(loaded, tokens, folder, chosen)
    stdout().print(f"Next: clearhead report {folder}", soft_wrap=True)


def parse_layers(given: str | None) -> set[int] | None:
    """The layers that ``0,5-8`` names: 0, 5, 6, 7, 8. None is all.

    >>> sorted(parse_layers("0,5-8"))
    [0, 5, 6, 7, 8]
    """
    if given is None:
        return None
    found: set[int] = set()
    for part in given.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if match is None:
            raise typer.BadParameter(f"{given!r}: numbers and ranges, as in 0,5-8", param_hint="'--layers'")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise typer.BadParameter(f"{part.strip()!r} runs backwards: write {last}-{first}", param_hint="'--layers'")
        found |= set(range(first, last + 1))
    return found


def load_model(name: str) -> Model:
    """Load a model, showing that it takes a while."""
    from clearhead.trace import load
    from clearhead.trace.models import find

    first = not find(name).is_dir()
    with waiting(f"Converting {name} (once, some seconds)" if first else f"Loading {name}"):
        return load(name)


def record_trace(model: Model, tokens: Tokens, folder: Path, layers: set[int] | None = None) -> tuple[Trace, float]:
    """Record, say what it will take and what it took. Gives the trace and the seconds."""
    from clearhead.trace import record
    from clearhead.trace.recording import check_layers, check_length, estimate
    from clearhead.trace.writer import check_space

    check_length(model, tokens)
    check_layers(model, layers)
    count = model.config.num_hidden_layers if layers is None else len(layers)
    size = estimate(model, len(tokens), layers)
    stderr().print(
        f"{model.name}: {count} of {model.config.num_hidden_layers} layers, {len(tokens):,} tokens: "
        f"the trace will take about {written(size)}",
        soft_wrap=True,
    )
    check_space(folder, size)
    start = time.perf_counter()
    with counting("Reading", count) as progress:
        found = record(model, tokens, folder, layers=layers, progress=progress)
    seconds = time.perf_counter() - start
    memory = peak_memory()
    stdout().print(
        f"Wrote {folder}: {written(found.nbytes)} in {seconds:.1f} s"
        + (f", peak memory {written(memory)}" if memory else "")
        + f". As matrices, its weights would take {written(found.dense_nbytes)}.",
        soft_wrap=True,
    )
    return found, seconds

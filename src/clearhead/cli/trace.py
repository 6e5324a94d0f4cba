"""``clearhead trace``: record every head of a model over a text."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from clearhead.cli.console import counting, peak_memory, stderr, stdout, waiting
from clearhead.memory import written

if TYPE_CHECKING:
    from clearhead.trace import Model, Trace
    from clearhead.trace.format import Tokens
    from clearhead.trace.keep import Keeping


def trace(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A local Hugging Face folder, or: smollm2, minilm.")],
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="The text to read, UTF-8.")],
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", metavar="N", min=1, help="Read the first N tokens only. Default: what the model can."
        ),
    ] = None,
    layers: Annotated[str | None, typer.Option("--layers", metavar="0,5-8", help="Record these layers only.")] = None,
    heads: Annotated[str | None, typer.Option("--heads", metavar="0,5-8", help="Record these heads only.")] = None,
    kinds: Annotated[
        str | None, typer.Option("--kinds", metavar="KINDS", help="Record these only: encoder,decoder,cross ...")
    ] = None,
    store: Annotated[
        str | None, typer.Option("--store", metavar="DTYPE", help="Keep queries and keys as float16 or bfloat16.")
    ] = None,
    measures_only: Annotated[
        bool, typer.Option("--measures-only", help="Keep no queries and keys, but what is measured.")
    ] = False,
    generate: Annotated[
        int, typer.Option("--generate", metavar="N", min=0, help="Let the model write N tokens after the text.")
    ] = 0,
    go_on: Annotated[bool, typer.Option("--continue", help="Go on with a run that was killed.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Where it goes. Default: the text's name with .trace"),
    ] = None,
) -> None:
    """Record every head of a language model over a text, exactly, without changing the model's output."""
    from clearhead.trace import read_text
    from clearhead.trace.keep import STORES, Keeping
    from clearhead.trace.models import find
    from clearhead.trace.writer import check_destination

    if store is not None and store not in STORES:
        raise typer.BadParameter(f"{store!r}: {' or '.join(STORES)}", param_hint="'--store'")
    keeping = Keeping(parse_layers(heads, "--heads"), cast(Any, store), measures_only)
    chosen = Chosen(parse_layers(layers), keeping, None if kinds is None else tuple(kinds.split(",")), generate, go_on)
    folder = output or Path(text.with_suffix(".trace").name)
    # What can be wrong is looked at before the model is loaded.
    content = read_text(text)
    find(model)
    check_destination(folder)
    loaded = load_model(model, writing=generate > 0)
    tokens = find_tokens(loaded, content, max_tokens, generate)
    record_trace(loaded, tokens, folder, chosen)
    stdout().print(f"Next: clearhead report {folder}", soft_wrap=True)


def find_tokens(model: Model, content: str, most: int | None, write: int) -> Tokens:
    """The tokens of a text; of one that is longer than the model reads, its beginning, which is said."""
    from clearhead.trace import tokenize
    from clearhead.trace.recording import longest

    with waiting("Finding the tokens"):
        tokens = tokenize(model.tokenizer, content, most)
        room = longest(model, write)
        if most is not None or room is None or len(tokens) <= room:
            return tokens
        beginning = tokenize(model.tokenizer, content, room)
    stderr().print(
        f"The text has {len(tokens):,} tokens and {model.name} reads at most {room:,}"
        + (f" before it writes {write:,}" if write else "")
        + f": its first {len(beginning):,} are traced, up to character {max(beginning.stop):,} of {len(content):,}.",
        soft_wrap=True,
    )
    return beginning


@dataclass(frozen=True)
class Chosen:
    """What of a model is to be recorded, and how."""

    layers: set[int] | None = None
    keeping: Keeping | None = None
    kinds: tuple[str, ...] | None = None
    write: int = 0
    go_on: bool = False


def parse_layers(given: str | None, option: str = "--layers") -> set[int] | None:
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
            raise typer.BadParameter(f"{given!r}: numbers and ranges, as in 0,5-8", param_hint=f"'{option}'")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise typer.BadParameter(f"{part.strip()!r} runs backwards: write {last}-{first}", param_hint=f"'{option}'")
        found |= set(range(first, last + 1))
    return found


def load_model(name: str, writing: bool = False) -> Model:
    """Load a model, showing that it takes a while."""
    from clearhead.trace import load
    from clearhead.trace.models import find

    first = not find(name).is_dir()
    with waiting(f"Converting {name} (once, some seconds)" if first else f"Loading {name}"):
        return load(name, writing=writing)


def record_trace(model: Model, tokens: Tokens, folder: Path, chosen: Chosen | None = None) -> tuple[Trace, float]:
    """Record, say what it will take and what it took. Gives the trace and the seconds."""
    from clearhead.trace import record
    from clearhead.trace import recording as plans
    from clearhead.trace.keep import Keeping
    from clearhead.trace.sites import find_attentions

    chosen = chosen or Chosen()
    keeping = chosen.keeping or Keeping()
    plans.check_length(model, tokens, chosen.write)
    plans.check_layers(model, chosen.layers)
    plans.check_writes(model, chosen.write)
    attentions = find_attentions(model.network)
    every = len(attentions.layers())
    steps = len(attentions.chosen(chosen.layers, chosen.kinds))
    needs = plans.needs(model, len(tokens), chosen.layers, chosen.kinds, keeping, chosen.write)
    stderr().print(
        f"{model.name}: {every if chosen.layers is None else len(chosen.layers)} of {every} layers, "
        f"{len(tokens):,} token{'s' * (len(tokens) != 1)}: the trace will take about {written(needs.disk)}, "
        f"reading it {written(needs.memory)} of memory",
        soft_wrap=True,
    )
    plans.check_room(folder, needs)
    start = time.perf_counter()
    with counting("Reading", steps) as progress:
        found = record(
            model,
            tokens,
            folder,
            layers=chosen.layers,
            heads=keeping.heads,
            kinds=chosen.kinds,
            store=keeping.store,
            only_measures=keeping.only_measures,
            progress=progress,
            go_on=chosen.go_on,
            write=chosen.write,
        )
    seconds = time.perf_counter() - start
    peak = peak_memory()
    stdout().print(
        f"Wrote {folder}: {written(found.nbytes)} in {seconds:.1f} s"
        + (f", peak memory {written(peak)}" if peak else "")
        + f". As matrices, its weights would take {written(found.dense_nbytes)}.",
        soft_wrap=True,
    )
    return found, seconds

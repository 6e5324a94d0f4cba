"""Trace a model that you have: one call, or whatever it does in a block."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from clearhead.trace.errors import TraceError
from clearhead.trace.estimates import check_needs, estimate, reads_inputs
from clearhead.trace.keep import Keeping, Store, check_store
from clearhead.trace.reader import Trace
from clearhead.trace.recorder import Memory, recording
from clearhead.trace.sites import check_kinds, find_attentions
from clearhead.trace.writer import check_destination, writing


class Tracing:
    """What :func:`tracing` gives: ``trace`` is there once its block has ended, and so are a Trace's own attributes."""

    def __init__(self) -> None:
        self._trace: Trace | None = None

    @property
    def trace(self) -> Trace:
        if self._trace is None:
            raise TraceError("the trace is made when its block ends well: look at it after the block")
        return self._trace

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.trace, name)

    def __len__(self) -> int:
        return len(self.trace)

    def __repr__(self) -> str:
        return "<a trace, once its block has ended>" if self._trace is None else repr(self._trace)


def trace(
    model: Any,
    inputs: Mapping[str, Any],
    path: str | PathLike[str] | None = None,
    *,
    tokenizer: Any = None,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    kinds: Collection[str] | None = None,
    store: Store | None = None,
    only_measures: bool = False,
) -> Trace:
    """Run a transformers model once and record what its attentions do.

    Parameters
    ----------
    model : PreTrainedModel
        Any whose attention goes through transformers' AttentionInterface, with the implementation "sdpa", "eager" or
        "clearhead". It runs as it is: its outputs are the same bits as without the trace.
    inputs : mapping
        What the model is called with, as a tokenizer or processor gives it: ``model(**inputs)``.
    path : str or path, optional
        A folder for the trace: each attention is written as soon as it has run. None keeps it in memory. A process
        that is killed leaves ``path.unfinished``, which says what it holds and never opens as a trace; since the
        inputs are not kept, it can only be removed.
    tokenizer : optional
        Names the tokens; without it they are shown by their numbers.
    layers, heads, kinds : collections, optional
        Which to record, None for all. Kinds are "self" in models of one stack, else "encoder", "decoder", "cross",
        "text", "vision", "audio".
    store : "float16" or "bfloat16", optional
        The dtype of queries and keys; the model's own when None, and where that has 16 bits already.
    only_measures : bool
        Keep no queries and keys, but what was measured: 8.3 kB a head and 2 bytes a head and token.

    Returns
    -------
    Trace

    Raises
    ------
    TraceError
        If the model's attention cannot be heard, or not be told from queries and keys; before the model runs, if it
        reads text, whose shapes say what the trace will take, and disk or memory are too small for it. What images,
        sound and caches take is not known before: then an attention that does not fit is refused when it comes.

    Notes
    -----
    Costs two passes over the scores beside the model's own, and the memory of one layer's queries and keys (of all
    layers', if the trace is kept in memory). Nothing of the size of a matrix of weights is made.

    >>> import clearhead as ch
    >>> found = ch.trace(model, tokenizer("Hello there.", return_tensors="pt"))     # doctest: +SKIP
    >>> found.weights(layer=3, head=0)[0, 2]                                        # doctest: +SKIP
    """
    import torch

    keeping = Keeping(heads, store, only_measures)
    _check_room(model, inputs, path, layers, kinds, keeping)
    found = Tracing()
    with (
        _recorded(model, path, found, once=True, tokenizer=tokenizer, layers=layers, kinds=kinds, keeping=keeping),
        torch.inference_mode(),
    ):
        model(**inputs)
    return found.trace


def _check_room(
    model: Any,
    inputs: Mapping[str, Any],
    path: str | PathLike[str] | None,
    layers: Collection[int] | None,
    kinds: Collection[str] | None,
    keeping: Keeping,
) -> None:
    """Raise TraceError if it can be told that disk or memory are too small: from the inputs' shapes, of text."""
    attentions = find_attentions(model)
    check_kinds(attentions, kinds, model)
    reads = reads_inputs(model, inputs)
    if reads is None or not attentions.chosen(layers, kinds):
        return
    needs = estimate(model, reads, layers, kinds, keeping, in_memory=path is None)
    fewer = "give fewer texts, tokens, layers or heads, or only_measures=True"
    if path is None:
        check_needs(needs, None, fewer, f"give a path, to keep the trace on disk, or {fewer.removeprefix('give ')}")
    else:
        check_needs(needs, Path(path), fewer, "give fewer texts or tokens")


@contextmanager
def tracing(
    model: Any,
    path: str | PathLike[str] | None = None,
    *,
    tokenizer: Any = None,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    kinds: Collection[str] | None = None,
    store: Store | None = None,
    only_measures: bool = False,
) -> Iterator[Tracing]:
    """Record what a transformers model's attentions do in a block: one call, or one ``model.generate``.

    A generation becomes one record in absolute positions: the rows of the prompt, then one row for each token that
    was read back in (the last token that was written was not). The parameters are those of :func:`trace`; queries and
    keys are held in memory until the block ends. How much will run there is not known before, and so nothing is
    estimated: a trace that does not fit is refused at the end of the block.

    >>> import clearhead as ch
    >>> with ch.tracing(model, tokenizer=tokenizer) as trace:                       # doctest: +SKIP
    ...     model.generate(**inputs, max_new_tokens=20)
    >>> trace.weights(layer=3)                                                      # doctest: +SKIP
    """
    found = Tracing()
    with _recorded(
        model,
        path,
        found,
        once=False,
        tokenizer=tokenizer,
        layers=layers,
        kinds=kinds,
        keeping=Keeping(heads, store, only_measures),
    ):
        yield found


@contextmanager
def _recorded(
    model: Any, path: str | PathLike[str] | None, found: Tracing, *, keeping: Keeping, **options: Any
) -> Iterator[None]:
    check_store(keeping.store)
    name = Path(getattr(model.config, "_name_or_path", "") or "").name or type(model).__name__
    with ExitStack() as stack:
        if path is None:
            into: Any = Memory()
        else:
            check_destination(Path(path))
            chosen = find_attentions(model).chosen(options["layers"], options["kinds"])
            into = stack.enter_context(writing(Path(path), {"model": name, "of": str(len(chosen))}))
        with recording(model, into, name=name, keeping=keeping, **options):
            yield
    found._trace = into.trace() if path is None else Trace.open(path)

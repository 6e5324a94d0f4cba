"""Listen to a model and make a trace of what is heard: each attention gathered, kept, and put where it belongs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from clearhead.memory import available, written
from clearhead.trace.capture import Call, Session, capture
from clearhead.trace.errors import TraceError
from clearhead.trace.faithful import check_output
from clearhead.trace.format import Checks, Index, ModelFacts, Side, Site, SiteCheck, Tokens, site_file
from clearhead.trace.gather import Gathering
from clearhead.trace.inputs import Inputs, watching
from clearhead.trace.keep import Keeping, keep
from clearhead.trace.reader import Trace
from clearhead.trace.sites import Attention, query_side
from clearhead.trace.visible import unseen

Arrays = dict[str, NDArray[Any]]
Bools = NDArray[np.bool_]


class Into(Protocol):
    """Where sites go as they are made."""

    def add(self, site: Site, check: SiteCheck, arrays: Arrays) -> None: ...

    def finish(self, index: Index) -> None: ...


class Memory:
    """Sites kept in memory."""

    def __init__(self) -> None:
        self.held: dict[str, Arrays] = {}
        self.index: Index | None = None

    def add(self, site: Site, check: SiteCheck, arrays: Arrays) -> None:
        size, free = sum(array.nbytes for array in arrays.values()), available()
        if free is not None and size > free:
            raise TraceError(
                f"{site} takes {written(size)} and {written(free)} of memory are free: give a path, to keep the trace "
                f"on disk, fewer layers or heads, or only_measures=True"
            )
        for array in arrays.values():
            array.flags.writeable = False
        self.held[site_file(site.kind, site.layer)] = arrays

    def finish(self, index: Index) -> None:
        self.index = index

    def trace(self) -> Trace:
        assert self.index is not None
        return Trace(self.index, held=self.held)


class Recorder:
    """What has been heard of a model so far. Made by :func:`recording`."""

    def __init__(self, into: Into, keeping: Keeping, once: bool, progress: Callable[[Attention], None] | None) -> None:
        """``once`` : each attention runs once, and is kept as soon as it has."""
        self.into, self.keeping, self.once, self.progress = into, keeping, once, progress
        self.gatherings: dict[Attention, Gathering] = {}
        self.deviations: dict[Attention, float] = {}
        self.padding: dict[str, Bools | None] = {}  # by side
        self.sites: list[Site] = []
        self.checks: list[SiteCheck] = []
        self.texts: dict[str, tuple[int, int]] = {}  # texts and tokens of each side

    def begin_with(self, done: Collection[tuple[Site, SiteCheck]]) -> None:
        """Take what an earlier run of one text left."""
        for site, check in done:
            self.sites.append(site)
            self.checks.append(check)
            self.texts.setdefault(site.query_side, (1, site.queries))
            self.texts.setdefault(site.key_side, (1, site.keys))

    def hear(self, call: Call) -> None:
        one = call.site
        if self.once and one in self.gatherings:
            raise TraceError(
                f"{one.kind} layer {one.layer} ran twice: one pass over whole texts was to be recorded, in which each "
                f"attention runs once"
            )
        there = self.keeping.measures_there(call.query.device.type)
        gathering = self.gatherings.setdefault(one, Gathering(one, move=not there))
        first = gathering.queries
        part = gathering.add(call)
        self.deviations[one] = max(self.deviations.get(one, 0.0), check_output(part, first))
        if self.once:
            self.keep(one)

    def keep(self, one: Attention) -> None:
        """Keep what was gathered of one attention, and let go of it."""
        gathering = self.gatherings[one]
        gathered = gathering.whole()
        texts, _, queries, _ = gathered.query.shape
        keys, kind = gathered.key.shape[2], gathering.site.kind
        side = query_side(kind)
        padding = self.padding.get(side)
        if kind != "cross":
            padding = unseen(gathered.visible, texts, queries, keys) if queries == keys else None
            known = self.padding.get(side, padding)
            self.padding[side] = None if padding is None or known is None else padding & known
        if kind == "cross":
            self._count("encoder", gathered.key.shape[0], keys)
        self._count(side, texts, queries)
        site, arrays, check = keep(gathered, self.keeping, padding, self.deviations[one])
        gathering.query, gathering.key, gathering.biases = [], [], []
        self.into.add(site, check, arrays)
        self.sites.append(site)
        self.checks.append(check)
        if self.progress is not None:
            self.progress(gathering.site)

    def _count(self, side: str, texts: int, tokens: int) -> None:
        known = self.texts.setdefault(side, (texts, tokens))
        if known != (texts, tokens):
            raise TraceError(
                f"the {side} side has {known[0]} texts of {known[1]} tokens in one attention and {texts} of {tokens} "
                f"in another: that cannot be one trace. (With num_return_sequences, trace one at a time)"
            )

    def finish(
        self, session: Session, inputs: Inputs, model: ModelFacts, tokenizer: Any, tokens: Tokens | None
    ) -> None:
        """Keep what is left and write the index. ``tokens`` : those of the one text, if they are known already."""
        from clearhead import __version__

        if session.wanted:  # unless an earlier run did all of it
            check_heard(session)
        if not self.once:
            for one in self.gatherings:
                self.keep(one)
        sides = tuple(
            inputs.side(name, *self.texts[name], self.padding.get(name), tokenizer)  # type: ignore[arg-type]
            for name in self.texts
        )
        if tokens is not None:
            first = sides[0]
            sides = (Side(first.name, (_begun(first.texts[0], tokens),), first.grid), *sides[1:])
        heard = {(site.kind, site.layer) for site in self.sites}
        missing = [
            f"{one.kind} layer {one.layer}" for one in session.attentions.heard if (one.kind, one.layer) not in heard
        ]
        checks = Checks(tuple(self.checks), (*missing, *session.attentions.deaf))
        self.into.finish(Index(__version__, model, sides, tuple(self.sites), checks))


def _begun(written: Tokens, read: Tokens) -> Tokens:
    """A text whose first tokens are known with their places, and that may go on: what was written follows it."""
    count = len(read)
    begins = next((start for start in written.start[count:] if start >= 0), 0)
    later = max((0, *read.stop)) - begins
    special = (*read.special, *(place for place in written.special if place >= count))
    return Tokens(
        ids=read.ids + written.ids[count:],
        text=read.text + written.text[count:],
        start=read.start + tuple(start + later if start >= 0 else -1 for start in written.start[count:]),
        stop=read.stop + tuple(stop + later if stop >= 0 else -1 for stop in written.stop[count:]),
        special=special,
        padding=read.padding,
    )


@contextmanager
def recording(
    network: Any,
    into: Into,
    *,
    name: str,
    layers: Collection[int] | None = None,
    kinds: Collection[str] | None = None,
    keeping: Keeping,
    once: bool,
    tokenizer: Any = None,
    tokens: Tokens | None = None,
    progress: Callable[[Attention], None] | None = None,
    done: Collection[tuple[Site, SiteCheck]] = (),
) -> Iterator[Recorder]:
    """Record what a model's attentions do while the block lasts; the index is written when it ends well.

    ``done`` : what is there already, and is not heard again."""
    recorder = Recorder(into, keeping, once, progress)
    recorder.begin_with(done)
    skip = [(site.kind, site.layer) for site, _ in done]
    with (
        capture(network, recorder.hear, layers, kinds, skip) as session,
        watching(network, session.attentions) as inputs,
    ):
        yield recorder
    recorder.finish(session, inputs, model_facts(network, name, session), tokenizer, tokens)


def check_heard(session: Session) -> None:
    """Raise TraceError if an attention that was asked for stayed silent."""
    if not session.heard:
        raise TraceError(
            "the model did not run, or ran compiled or in another thread: nothing was heard. Run it inside the block"
        )
    kinds = {one.kind for one in session.heard}
    silent = [one for one in session.silent() if one.kind in kinds]
    if silent:
        raise TraceError(
            f"{silent[0].kind} layer {', '.join(str(one.layer) for one in silent if one.kind == silent[0].kind)} did "
            f"not run: it cannot be traced with the others"
        )


def model_facts(network: Any, name: str, session: Session) -> ModelFacts:
    """What trace.json says of the model."""
    import torch
    import transformers

    config = network.config
    return ModelFacts(
        name=name,
        type=config.model_type,
        layers=1 + max(one.layer for one in session.attentions.heard),
        context=max(0, int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0)),
        dtype=str(network.dtype).removeprefix("torch."),
        attention=session.implementation or str(config.get_text_config()._attn_implementation),
        transformers=transformers.__version__,
        torch=torch.__version__,
    )

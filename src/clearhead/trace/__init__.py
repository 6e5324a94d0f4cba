"""Every head of a transformers model over its inputs, recorded while the model runs and looked at later.

    models.py, smollm2.py,       find and load a model: local, offline, never unpickled
      minilm.py
    text.py, spans.py,           a text as tokens, each with the characters it came from
      decoding.py
    live.py, recording.py        trace a model that is at hand, or one that `load` found, over a text
    recorder.py                  who does the following, for one trace
      sites.py                     which attentions a model has: kinds and layers
      capture.py                   listen to them without changing a bit
      inputs.py                    what their queries and keys stand for
      visible.py                   who may look at whom, in two integers a row where possible
      gather.py                    a prompt and single steps as one record, in absolute positions
      faithful.py                  is the record the model's own attention?
      measured.py, there.py        what every head does, in a few numbers: by kernels, or where the device is
      keep.py                      what of all this is kept
    writer.py, tensors.py        whole or not there: temporary names, then renamed
    unfinished.py                what a killed run left, and going on with it
    format.py, checked.py,       what lies on disk; JSON and files checked before anything is believed
      holding.py
    recompute.py                 from what is kept of a site to its weights
    opening.py, reader.py        Trace: opened by mapping it into memory
    questions.py                 what else a trace can be asked, each by a file of its own
      segments.py, marks.py,       parts of a text by name, and how they look at each other
        between.py
      alignment.py                 cross attention as links between words
      bertviz.py                   for another viewer
    attentions.py, generation.py matrices of weights from elsewhere, as a trace
    diff.py                      what changed between two traces
    report.py                    what every head does, and the strongest of each sort

>>> import clearhead as ch
>>> from clearhead.trace import Trace, load, record, tokenize
>>> model = load("smollm2")                                                # doctest: +SKIP
>>> trace = record(model, tokenize(model.tokenizer, "Hello there."), "hello.trace")   # doctest: +SKIP
>>> trace.weights(3)[0, 2]                                                 # doctest: +SKIP
>>> trace = ch.trace(any_model, inputs)                                    # doctest: +SKIP

``clearhead.trace`` is this package and can be called as well, as :func:`clearhead.trace.live.trace`. torch and
transformers are imported by what runs a model, when it runs it: reading a trace needs neither.
"""

import sys
from types import ModuleType
from typing import Any

from clearhead.trace.capture import Call, capture
from clearhead.trace.errors import TraceError
from clearhead.trace.format import Checks, Side, Site, SiteCheck, Tokens
from clearhead.trace.live import Tracing, trace, tracing
from clearhead.trace.measured import SiteMeasures
from clearhead.trace.models import Model, load
from clearhead.trace.reader import Trace
from clearhead.trace.recording import record
from clearhead.trace.report import Report, summarize
from clearhead.trace.text import read_text, tokenize

__all__ = [
    "Call",
    "Checks",
    "Model",
    "Report",
    "Side",
    "Site",
    "SiteCheck",
    "SiteMeasures",
    "Tokens",
    "Trace",
    "TraceError",
    "Tracing",
    "capture",
    "load",
    "read_text",
    "record",
    "summarize",
    "tokenize",
    "trace",
    "tracing",
]


class _Callable(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Trace:
        return trace(*arguments, **options)


# A package's attribute of this name is the package, whatever is put there: so it is what one calls.
sys.modules[__name__].__class__ = _Callable

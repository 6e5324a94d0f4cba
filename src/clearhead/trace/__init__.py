"""Every head of a language model over a text, recorded while the model runs and looked at later.

    models.py, smollm2.py   find and load a model: local, offline, never unpickled
    text.py                 a text as tokens, each with the characters it came from
    capture.py              listen to the model's attention without changing a bit of it
    visible.py              who may look at whom, in two integers a row where possible
    recording.py            run once, write each layer as it happens
    writer.py, tensors.py   whole or not there: temporary names, then renamed
    format.py, reader.py    what lies on disk; opened by mapping it into memory
    report.py               what every head does, in five numbers

>>> from clearhead.trace import Trace, load, record, tokenize
>>> model = load("smollm2")                                                # doctest: +SKIP
>>> trace = record(model, tokenize(model.tokenizer, "Hello there."), "hello.trace")   # doctest: +SKIP
>>> trace.weights(3)[0, 2]                                                 # doctest: +SKIP

torch and transformers are imported by what runs a model, when it runs it: reading a trace needs neither.
"""

from clearhead.trace.capture import Layer, capture
from clearhead.trace.errors import TraceError
from clearhead.trace.models import Model, load
from clearhead.trace.reader import Trace
from clearhead.trace.recording import record
from clearhead.trace.report import Report, summarize
from clearhead.trace.text import read_text, tokenize

__all__ = [
    "Layer",
    "Model",
    "Report",
    "Trace",
    "TraceError",
    "capture",
    "load",
    "read_text",
    "record",
    "summarize",
    "tokenize",
]

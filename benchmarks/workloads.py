"""One table: every row of ``make bench``, and what it should reach.

A row is data alone. To add one, add a line; to measure another kind of thing, give it a kind of its own in
``measure``. Targets are those that Clearhead has set itself, for two cores; what falls short of them is said.
"""

from __future__ import annotations

from collections.abc import Iterator

from models import ModelRun
from startup import CALL, Start
from targets import Target
from workload import Workload

Row = Workload | Start | ModelRun

FORWARD, MASKS, DECODE, SMALL = ("forward",), ("masks",), ("decode",), ("small",)
BACKWARD = ("backward",)
MEASURES, PLAIN = ("measures",), "× the time of the plain forward pass"
MODELS, WHOLE = ("models",), "× the speed with sdpa"
OURS_ALONE: tuple[str, ...] = ()


def of_arithmetic(at_most: float) -> tuple[Target]:
    """A mask that hides cells should save their time: what is counted is time for the same arithmetic."""
    return (Target("beside", at_most=at_most, of="× its share of the time without a mask"),)


FULL = (Target("fastest", at_least=1.25), Target("naive", at_least=10.0, of="× the speed of naive NumPy"))
SHORT = (Target("fastest", at_least=1.2),)
BUILT_IN = (Target("beside", at_most=1.4, of="× the time of the built-in equivalent"),)

# What rows are set beside, where it is not a row itself.
LONG = Workload("long", FORWARD, heads=4, tokens=16_384, dim=64)
MIDDLE = Workload("middle", FORWARD, heads=8, tokens=2048, dim=64)
DENSE = Workload("dense", FORWARD, batch=64, heads=4, tokens=1191, dim=64)  # cells of the ragged batch
CAUSAL = Workload("causal", FORWARD, heads=8, tokens=4096, dim=64, mask="causal")
ADDITIVE = Workload("additive-part", FORWARD, heads=8, tokens=1024, dim=64, score="additive", measures="memory")

ROWS: tuple[Row, ...] = (
    Workload("full-64-one", FORWARD, heads=8, tokens=4096, dim=64, threads=1, peers=OURS_ALONE,
             targets=(Target("limit", at_least=0.80, of=" of the FMA peak"),), headline=True),
    Workload("full-128-one", FORWARD, heads=8, tokens=4096, dim=128, threads=1, peers=OURS_ALONE,
             targets=(Target("limit", at_least=0.86, of=" of the FMA peak"),), headline=True),
    Workload("full-64", FORWARD, heads=8, tokens=4096, dim=64, targets=FULL, headline=True),
    Workload("full-128", FORWARD, heads=8, tokens=4096, dim=128, targets=FULL),
    Workload("causal-64", FORWARD, heads=8, tokens=4096, dim=64, mask="causal", targets=FULL),
    Workload("causal-128", FORWARD, heads=8, tokens=4096, dim=128, mask="causal", targets=FULL, headline=True),
    Workload("short-512", FORWARD, heads=8, tokens=512, dim=64, targets=SHORT),
    Workload("short-1024", FORWARD, heads=8, tokens=1024, dim=64, targets=SHORT),
    Workload("batch", FORWARD, batch=4, heads=12, tokens=128, dim=64, targets=(Target("torch", at_least=1.2),),
             headline=True),
    Workload("bfloat16", FORWARD, heads=8, tokens=2048, dim=128, dtype="bfloat16", mask="causal",
             targets=(Target("torch", at_least=1.25),), headline=True),
    Workload("float16", FORWARD, heads=8, tokens=2048, dim=128, dtype="float16", mask="causal",
             targets=(Target("torch", at_least=1.25),)),
    Workload("float64", FORWARD, heads=8, tokens=2048, dim=128, dtype="float64", mask="causal",
             targets=(Target("torch", at_least=2.5),)),
    Workload("window", MASKS, heads=4, tokens=16_384, dim=64, mask="window", left=1023, peers=("torch",), beside=LONG,
             targets=of_arithmetic(1.3), headline=True),
    Workload("documents", MASKS, heads=4, tokens=16_384, dim=64, mask="documents", documents=32, peers=OURS_ALONE,
             beside=LONG, targets=of_arithmetic(1.3)),
    Workload("mask-random", MASKS, heads=8, tokens=2048, dim=64, mask="random", beside=MIDDLE,
             targets=(Target("beside", at_most=1.3, of="× the time without a mask"),)),
    Workload("mask-function", MASKS, heads=8, tokens=2048, dim=64, mask="causal", told="function", peers=OURS_ALONE,
             beside=Workload("mask-built-in", MASKS, heads=8, tokens=2048, dim=64, mask="causal"), targets=BUILT_IN),
    Workload("score-function", MASKS, heads=8, tokens=2048, dim=64, score="alibi", told="function", peers=OURS_ALONE,
             beside=Workload("score-built-in", MASKS, heads=8, tokens=2048, dim=64, score="alibi"), targets=BUILT_IN),
    Workload("additive", FORWARD, heads=8, tokens=1024, dim=64, score="additive",
             targets=(Target("torch", at_least=3.0, of="× the speed of torch's usual code"),), headline=True),
    Workload("ragged", MASKS, batch=64, heads=4, tokens=2048, dim=64, mask="lengths", peers=OURS_ALONE, beside=DENSE,
             targets=(Target("beside", at_most=1.15, of="× the time of a dense batch, for the same arithmetic"),)),
    Workload("decode-grouped-float32", DECODE, heads=32, tokens=8192, dim=128, key_heads=8, queries=1, bound="bytes",
             targets=(Target("torch", at_least=4.0),), headline=True),
    Workload("decode-grouped-bfloat16", DECODE, heads=32, tokens=8192, dim=128, key_heads=8, queries=1,
             dtype="bfloat16", bound="bytes", targets=(Target("torch", at_least=20.0),)),
    Workload("decode-heads-float32", DECODE, heads=8, tokens=16_384, dim=128, key_heads=8, queries=1, bound="bytes",
             targets=(Target("limit", at_least=0.85, of=" of the read bandwidth"),)),
    Workload("decode-heads-bfloat16", DECODE, heads=8, tokens=16_384, dim=128, key_heads=8, queries=1,
             dtype="bfloat16", bound="bytes", targets=(Target("limit", at_least=0.75, of=" of the read bandwidth"),)),
    Workload("decode-one", DECODE, heads=1, key_heads=1, tokens=65_536, dim=128, queries=1, bound="bytes", threads=2,
             targets=(Target("limit", at_least=0.80, of=" of the read bandwidth"),)),
    Workload("measures-riding", MEASURES, heads=8, tokens=4096, dim=64, mask="causal", asks="riding", peers=("naive",),
             beside=CAUSAL, targets=(Target("beside", at_most=1.15, of=PLAIN),), headline=True),
    Workload("measures-all", MEASURES, heads=8, tokens=4096, dim=64, mask="causal", asks="all", peers=OURS_ALONE,
             beside=CAUSAL, targets=(Target("beside", at_most=1.8, of=PLAIN),), headline=True),
    Workload("measures-alone", MEASURES, heads=8, tokens=4096, dim=64, mask="causal", asks="alone", peers=("naive",),
             beside=CAUSAL, targets=(Target("beside", at_most=1.8, of=PLAIN),
                                     Target("naive", at_least=10.0, of="× the speed of NumPy with the matrix"))),
    Workload("backward-1024", BACKWARD, heads=8, tokens=1024, dim=64, mask="causal", way="both", peers=("torch",),
             targets=(Target("torch", at_least=1.4),), headline=True),
    Workload("backward-4096", BACKWARD, heads=8, tokens=4096, dim=128, mask="causal", way="both", peers=("torch",),
             targets=(Target("torch", at_least=1.4),)),
    Workload("backward-one", BACKWARD, heads=1, tokens=8192, dim=64, mask="causal", way="both", peers=("torch",),
             targets=(Target("torch", at_least=2.0),)),
    Workload("backward-bfloat16", BACKWARD, heads=8, tokens=1024, dim=64, dtype="bfloat16", mask="causal", way="both",
             peers=("torch",), targets=(Target("torch", at_least=1.5),)),
    Workload("backward-float16", BACKWARD, heads=8, tokens=1024, dim=64, dtype="float16", mask="causal", way="both",
             peers=("torch",), targets=(Target("torch", at_least=8.0),)),
    Workload("backward-additive", BACKWARD, batch=32, heads=1, tokens=40, dim=128, score="additive", way="both",
             peers=("torch",), targets=(Target("torch", at_least=2.0, of="× the speed of torch's usual code"),)),
    Workload("worked", SMALL, heads=1, tokens=3, dim=4, dtype="float64", given="tutorial", peers=("naive",),
             targets=(Target("over naive", at_most=2.0),)),
    Workload("worked-weights", SMALL, heads=1, tokens=3, dim=4, dtype="float64", given="tutorial", peers=("naive",),
             call="scaled_dot_product_attention", targets=(Target("over naive", at_most=2.0),)),
    Workload("drop-in", SMALL, heads=4, tokens=16, dim=32, call="drop-in", peers=("torch",),
             targets=(Target("over torch", at_most=3.0),)),
    Workload("memory", ("memory",), heads=1, tokens=131_072, dim=64, mask="causal", measures="memory",
             peers=("torch",), targets=(Target("bytes", at_most=64e6),), headline=True),
    Workload("backward-memory", ("memory", *BACKWARD), heads=1, tokens=65_536, dim=64, mask="causal", way="both",
             measures="memory", peers=("torch",), targets=(Target("bytes", at_most=96e6),)),
    Workload("additive-memory", ("memory",), heads=8, tokens=4096, dim=64, score="additive", measures="memory",
             peers=OURS_ALONE, beside=ADDITIVE,
             targets=(Target("beside", at_most=1.1, of="× the memory a token that a quarter as many take"),)),
    ModelRun("model-prefill", MODELS, "SmolLM2, prefill of 2,048 tokens", "prefill", 2048,
             targets=(Target("torch", at_least=1.0, of=WHOLE),), headline=True),
    ModelRun("model-generate-float32", MODELS, "SmolLM2, 128 tokens after 2,048", "generate", 2048, 128,
             targets=(Target("torch", at_least=1.0, of=WHOLE), Target("attention", at_least=2.0)), headline=True),
    ModelRun("model-generate-bfloat16", MODELS, "SmolLM2, 128 tokens after 2,048, bfloat16", "generate", 2048, 128,
             "bfloat16", targets=(Target("torch", at_least=1.0, of=WHOLE), Target("attention", at_least=2.0))),
    ModelRun("model-train", MODELS, "a training step of a GPT, 6 × 384, 512 tokens", "train", 512, 200, most=200,
             targets=(Target("torch", at_least=1.0, of="× the speed with torch's attention"),
                      Target("apart", at_most=1e-3)), headline=True),
    Start("import", ("start",), "import clearhead, over import numpy", "import clearhead", beside="import numpy",
          targets=(Target("seconds", at_most=0.050),)),
    Start("first-warm", ("start",), "first call of a process, kernels on disk", CALL,
          targets=(Target("seconds", at_most=0.8),), headline=True),
    Start("first-cold", ("start",), "first call of all, kernels to be compiled", CALL, cold=True,
          targets=(Target("seconds", at_most=6.0),), headline=True),
)  # fmt: skip


def choose(names: list[str]) -> list[Row]:
    """The rows of these names and groups, in the table's order; all where none is named.

    Raises ValueError for a name that is neither.
    """
    known = {row.name for row in ROWS} | {group for row in ROWS for group in row.groups}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no workload or group {', '.join(unknown)}: known are {', '.join(sorted(known))}")
    return [row for row in ROWS if not names or row.name in names or set(row.groups) & set(names)]


def find(name: str) -> Workload:
    """The workload of that name, a row or what one is set beside."""
    return next(workload for workload in _all() if workload.name == name)


def _all() -> Iterator[Workload]:
    for row in ROWS:
        if isinstance(row, Workload):
            yield row
            if row.beside is not None:
                yield row.beside

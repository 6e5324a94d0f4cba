"""Whole models on Clearhead's attention beside torch's: in a process of their own, step by step in turn.

    python benchmarks/models.py ROW THREADS REPEATS

prints one line of JSON for each repetition, and then how far the results of the two are apart. A repetition runs the
same work with either attention, in an order that turns. Models are SmolLM2 over Python's language reference, and the
small GPT of ``examples/train_tiny_gpt.py``. Attention's own seconds are those inside of the function that the model
calls for it.
"""

from __future__ import annotations

import copy
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import paired
from peers import OURS
from targets import Target

THEIRS = "torch"
IMPLEMENTATIONS = {OURS: "clearhead", THEIRS: "sdpa"}
# How far logits may be apart, as a share of their norm; training is judged by a target of its own.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}

CHILD = Path(__file__)
Turn = dict[str, dict[str, float]]  # of each: its seconds, and attention's own


@dataclass(frozen=True)
class ModelRun:
    """``work`` of a whole model: to "prefill" a prompt of ``tokens``, to "generate" ``steps`` more after it, or to
    "train" for so many ``steps``, on texts of ``tokens``.

    most : repetitions, of which training's are its steps.
    """

    name: str
    groups: tuple[str, ...]
    title: str
    work: Literal["prefill", "generate", "train"]
    tokens: int
    steps: int = 1
    dtype: str = "float32"
    most: int = 3
    threads: int = 0
    peers: tuple[str, ...] = (THEIRS,)
    targets: tuple[Target, ...] = ()
    headline: bool = False
    measures: str = "model"


def measure(row: ModelRun, threads: int, repeats: int) -> dict[str, Any]:
    """Every repetition, and medians. Interrupted, those so far; then it says ``stopped``."""
    most = row.most if row.work == "train" else min(repeats, row.most)
    command = [sys.executable, str(CHILD), row.name, str(threads), str(most)]
    lines: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        lines.extend(json.loads(line) for line in child.stdout)
        _, errors = child.communicate()
        if child.returncode:
            reason = next(reversed(errors.strip().splitlines()), f"exit code {child.returncode}")
            return {"lacks": {OURS: reason}, "median": {}}
    except KeyboardInterrupt:
        child.terminate()
        child.communicate()
        found["stopped"] = True
        if not lines:
            raise
    return found | summary(row, lines)


def summary(row: ModelRun, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What the lines of a child say."""
    turns = [line for line in lines if OURS in line]
    apart = next((line["apart"] for line in lines if "apart" in line), None)
    seconds, attention = (
        {name: [turn[name][what] for turn in turns] for name in IMPLEMENTATIONS} for what in ("seconds", "attention")
    )
    found: dict[str, Any] = {
        "seconds": seconds, "attention": attention,
        "median": {name: statistics.median(took) for name, took in seconds.items()},
        "median_attention": {name: statistics.median(took) for name, took in attention.items()},
        "times_ours": {THEIRS: _ratio(seconds)}, "figures": {},
    }  # fmt: skip
    if row.work == "train":
        found["figures"] = {} if apart is None else {"apart": apart}
    else:
        found["figures"]["attention"] = _ratio(attention)
        found["difference"] = {OURS: apart}
        if apart is not None and not apart <= TOLERANCE[row.dtype]:
            found["disagree"] = [OURS]
    return found


def _ratio(took: dict[str, list[float]]) -> float:
    return statistics.median(theirs / ours for ours, theirs in zip(took[OURS], took[THEIRS], strict=True))


# what the child does


def main(name: str, threads: int, most: int) -> None:
    import torch

    import clearhead
    from workloads import choose

    torch.set_num_threads(threads)
    clearhead.set_num_threads(threads)
    (row,) = choose([name])
    assert isinstance(row, ModelRun)
    lines = train(row, most) if row.work == "train" else smollm2(row, most)
    for line in lines:
        print(json.dumps(line), flush=True)


def smollm2(row: ModelRun, most: int) -> Iterator[dict[str, Any]]:
    """Each repetition, then how far the first logits are apart: 1 if, in float32, other tokens come out."""
    import torch

    from clearhead.cli.demo import language_reference
    from clearhead.torch import huggingface
    from clearhead.trace import load, tokenize

    huggingface.register()
    model = load("smollm2", writing=True)
    network = model.network.to(getattr(torch, row.dtype))
    ids = torch.tensor([tokenize(model.tokenizer, language_reference(), row.tokens).ids])
    clock = Clock()

    def read(name: str) -> Any:
        network.set_attn_implementation(IMPLEMENTATIONS[name])
        with torch.no_grad():
            return network(input_ids=ids, logits_to_keep=1)

    first = {name: read(name) for name in IMPLEMENTATIONS}
    results: dict[str, Any] = {}

    def write(name: str) -> Callable[[], None]:
        cache, token = copy.deepcopy(first[name].past_key_values), first[name].logits[:, -1:].argmax(dim=-1)
        network.set_attn_implementation(IMPLEMENTATIONS[name])

        def steps() -> None:
            now, written = token, [token]
            with torch.no_grad():
                for _ in range(row.steps):
                    now = network(input_ids=now, cache=cache).logits[:, -1:].argmax(dim=-1)
                    written.append(now)
            results[name] = torch.cat(written, dim=1)

        return steps

    if row.work == "generate":
        for name in IMPLEMENTATIONS:
            write(name)()
        yield from turns(write, clock, most)
    else:
        yield from turns(lambda name: lambda: read(name), clock, most)
    ours, theirs = (first[name].logits.float() for name in (OURS, THEIRS))
    apart = float((ours - theirs).norm() / theirs.norm())
    same = row.dtype != "float32" or not results or bool(torch.equal(results[OURS], results[THEIRS]))
    yield {"apart": apart if same else 1.0}


def train(row: ModelRun, most: int) -> Iterator[dict[str, Any]]:
    """Each step of the two, then the largest difference of their losses."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import train_tiny_gpt as example

    options = example.parse(["--tokens", str(row.tokens), "--steps", str(most)])
    trainings = {name: example.Training(options, example.ATTENTION[name]) for name in IMPLEMENTATIONS}
    losses: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}

    def ready(name: str) -> Callable[[], None]:
        return lambda: losses[name].append(trainings[name].step())

    yield from turns(ready, None, most)
    yield {"apart": max(abs(a - b) for a, b in zip(*losses.values(), strict=True))}


class Clock:
    """Seconds spent inside of the attention functions of transformers, since they were last asked for."""

    def __init__(self) -> None:
        from transformers import AttentionInterface

        self._seconds, known = 0.0, AttentionInterface()
        for name in IMPLEMENTATIONS.values():
            AttentionInterface.register(name, self._timed(known[name]))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self._seconds += time.perf_counter() - start

        return timed

    def read(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def turns(ready: Callable[[str], Callable[[], Any]], clock: Clock | None, most: int) -> Iterator[Turn]:
    """Each repetition of both, in an order that turns; what it needs is made ready before its time counts."""
    names = list(IMPLEMENTATIONS)
    for turn in range(most):
        found: Turn = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            work = ready(name)
            paired.settle()
            if clock:
                clock.read()
            start = time.perf_counter()
            work()
            found[name] = {"seconds": time.perf_counter() - start, "attention": clock.read() if clock else 0.0}
        yield found


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

"""Train a small GPT on the documentation that comes with Python, with Clearhead's attention, torch's, or both in turn.

    .venv/bin/python examples/train_tiny_gpt.py --steps 200 --attention clearhead
    .venv/bin/python examples/train_tiny_gpt.py --steps 200 --attention both --json out/gpt.json

The model is plain torch: a decoder with learned positions, pre-normalized blocks and bytes for tokens. Only the one
line that attends differs. With ``both``, two models begin with the same numbers, see the same batches and are trained
step by step in turn, so that whatever disturbs the machine meets both; their losses should stay the same, and the
times of their steps are compared pair by pair. Ctrl-C ends the training and keeps what there is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead.torch import attention

CAUSAL = ch.masks.causal()
ATTENTION: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "clearhead": lambda query, key, value: attention(query, key, value, mask=CAUSAL),
    "torch": lambda query, key, value: F.scaled_dot_product_attention(query, key, value, is_causal=True),
}


class Block(nn.Module):
    """Attention and a perceptron, each added to what comes in."""

    def __init__(self, width: int, heads: int, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.split, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.split(self.before(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, dim), where it lies
        mixed = self.attend(query, key, value).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.join(mixed)
        return x + self.perceptron(self.between(x))


class GPT(nn.Module):
    """Bytes in, the logits of the next byte out."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int, attend: Any) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attend) for _ in range(layers)))
        self.last = nn.LayerNorm(width)
        for name, weights in self.named_parameters():
            if weights.dim() == 2:
                residual = name.endswith(("join.weight", "perceptron.2.weight"))
                nn.init.normal_(weights, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.byte(ids) + self.place.weight[: ids.shape[1]]
        return self.last(self.blocks(x)) @ self.byte.weight.T


class Training:
    """One model, its optimizer and its batches: the same for the same seed, whatever attends."""

    def __init__(self, options: argparse.Namespace, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        torch.manual_seed(options.seed)
        self.options, self.text = options, documentation()
        self.model = GPT(options.layers, options.width, options.heads, options.tokens, attend)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.rate, betas=(0.9, 0.95))
        self.chance = torch.Generator().manual_seed(options.seed)
        self.done = 0

    def step(self) -> float:
        """One step; the loss before it, in nats a byte."""
        ids = self.batch()
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.rate * min(1.0, (self.done + 1) / 20)  # slowly at first
        logits = self.model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.done += 1
        return loss.item()

    def batch(self) -> Tensor:
        """(batch, tokens + 1) bytes, from anywhere in the text."""
        length = self.options.tokens + 1
        first = torch.randint(len(self.text) - length, (self.options.batch,), generator=self.chance)
        return torch.stack([self.text[n : n + length] for n in first.tolist()]).long()


def documentation() -> Tensor:
    """The bytes of Python's language reference, as ``help()`` shows it: some 700,000."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
        ch.set_num_threads(options.threads)
    names = list(ATTENTION) if options.attention == "both" else [options.attention]
    found: dict[str, Any] = {
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        "losses": {name: [] for name in names}, "seconds": {name: [] for name in names}, "stopped": False,
    }  # fmt: skip
    try:
        train({name: Training(options, ATTENTION[name]) for name in names}, options, found)
    except KeyboardInterrupt:
        found["stopped"] = True
        print("stopped before the end")
    print(summary(found))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 130 if found["stopped"] else 0


def train(trainings: dict[str, Training], options: argparse.Namespace, found: dict[str, Any]) -> None:
    """All steps of all, in turn; a step that is interrupted counts for none of them."""
    names = list(trainings)
    for step in range(options.steps):
        losses, seconds = {}, {}
        for name in names if step % 2 == 0 else names[::-1]:
            start = time.perf_counter()
            losses[name] = trainings[name].step()
            seconds[name] = time.perf_counter() - start
        for name in names:
            found["losses"][name].append(losses[name])
            found["seconds"][name].append(seconds[name])
        if step % options.every == 0 or step == options.steps - 1:
            rate = {name: options.batch * options.tokens / seconds[name] for name in names}
            told = ", ".join(f"{name} {losses[name]:.4f} ({rate[name]:,.0f} tokens/s)" for name in names)
            print(f"step {step + 1:>{len(str(options.steps))}}: loss {told}", flush=True)


def summary(found: dict[str, Any]) -> str:
    """What came out, in a line for each, and of both how far apart they are."""
    steps, tokens = min(map(len, found["losses"].values())), found["options"]["batch"] * found["options"]["tokens"]
    if not steps:
        return "no step was finished"
    lines = [
        f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f} in {steps} step{'s' * (steps != 1)}, "
        f"{tokens / statistics.median(found['seconds'][name]):,.0f} tokens/s (median)"
        for name, losses in found["losses"].items()
    ]
    if len(found["losses"]) == 2:
        ours, theirs = (found["losses"][name] for name in ("clearhead", "torch"))
        apart = found["apart"] = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        times = zip(*(found["seconds"][name] for name in ("torch", "clearhead")), strict=True)
        ratio = found["ratio"] = statistics.median(a / b for a, b in times)
        lines.append(f"losses differ by {apart:.1e} at most; a step with torch's attention takes {ratio:.3f}× as long")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's own documentation.")
    parser.add_argument("--attention", choices=[*ATTENTION, "both"], default="clearhead", help="default: clearhead")
    for name, default, what in (
        ("steps", 200, "training steps"), ("layers", 6, "blocks of the model"), ("width", 384, "of the model"),
        ("heads", 6, "in each block"), ("tokens", 512, "of a text"), ("batch", 1, "texts in a step"),
        ("every", 10, "steps between two lines"), ("threads", 0, "0: as torch and Clearhead choose"),
        ("seed", 0, "of weights and batches"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    parser.add_argument("--rate", type=float, default=5e-4, metavar="X", help="learning rate (default: 0.0005)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the curve goes")
    options = parser.parse_args(argv)
    small = [name for name in ("steps", "layers", "width", "heads", "tokens", "batch", "every")
             if getattr(options, name) < 1]  # fmt: skip
    if small:
        parser.error(f"--{small[0]} takes 1 or more")
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not a multiple of --heads {options.heads}")
    if options.threads < 0:
        parser.error("--threads takes 0 or more")
    return options


if __name__ == "__main__":
    sys.exit(main())

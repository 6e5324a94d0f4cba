"""What a row should reach, as data, and whether it did.

A target names a figure of its row and the number that it should be at least, or at most. Figures are ratios within
repetitions wherever two things are compared; ``FIGURES`` says what each of them is. What is not named there is the
name of a peer: how many times our time it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# What each figure is, as it follows "at least 0.80" or "at most 1.30".
FIGURES = {
    "limit": "of what this machine can do",
    "fastest": "× the speed of the fastest peer",
    "beside": "× the time of what it is set beside, for the same arithmetic",
    "over naive": "× the time of naive NumPy",
    "over torch": "× the time of torch",
    "bytes": "MB beyond inputs and outputs",
    "seconds": "s",
    "attention": "× the speed of sdpa, attention alone",
    "apart": "nats between the losses of the two",
}


@dataclass(frozen=True)
class Target:
    """``figure`` should be ``at_least`` or ``at_most`` a number. ``of`` says in words what it is compared with."""

    figure: str
    at_least: float | None = None
    at_most: float | None = None
    of: str = ""

    @property
    def title(self) -> str:
        """``at least 1.25× the speed of the fastest peer``."""
        bound, number = ("at least", self.at_least) if self.at_least is not None else ("at most", self.at_most)
        assert number is not None
        shown = number / 1e6 if self.figure == "bytes" else number
        return f"{bound} {shown:g}{self.of or self._words}"

    @property
    def _words(self) -> str:
        words = FIGURES.get(self.figure, f"× the speed of {self.figure}")
        return words if words.startswith("×") else f" {words}"

    def met(self, reached: float) -> bool:
        return reached >= self.at_least if self.at_least is not None else reached <= (self.at_most or 0.0)


def judge(targets: tuple[Target, ...], row: dict[str, Any]) -> list[dict[str, Any]]:
    """Each target with what the row reached (None where it was not measured), and whether that is short of it.

    ``limit`` is what would be reached by computing at the machine's limit, measured in the same repetitions, with
    nothing for the softmax: no program can do better, so a target beyond it cannot be met on this machine.
    """
    found = []
    for target in targets:
        reached, whose = _figure(target.figure, row)
        found.append({
            "target": target.title,
            "figure": target.figure,
            "bound": target.at_least if target.at_least is not None else target.at_most,
            "reached": reached,
            "whose": whose,
            "limit": _at_limit(target.figure, whose, row),
            "short": reached is not None and not target.met(reached),
        })  # fmt: skip
    return found


def written(figure: str, number: float) -> str:
    """A figure as people read it.

    >>> written("bytes", 64e6), written("seconds", 0.05), written("limit", 0.8), written("torch", 1.25)
    ('64.0 MB', '0.050 s', '0.80', '1.25×')
    """
    match figure:
        case "bytes":
            return f"{number / 1e6:.1f} MB"
        case "seconds":
            return f"{number:.3f} s"
        case "limit":
            return f"{number:.2f}"
        case "apart":
            return f"{number:.1e}"
    return f"{number:.2f}×"


def _at_limit(figure: str, whose: str, row: dict[str, Any]) -> float | None:
    """The figure of a program that is as fast as the machine; None where that is no question of speed."""
    if figure == "limit":
        return 1.0
    share = row.get("share", {}).get(whose if figure == "fastest" else figure)
    return None if share is None else 1 / share


def _figure(figure: str, row: dict[str, Any]) -> tuple[float | None, str]:
    """The figure of a row, and whose it is where that is a question."""
    times = row.get("times_ours", {})
    if figure == "fastest":
        fastest = min(times, key=times.__getitem__, default="")
        return times.get(fastest), fastest
    if figure in ("over naive", "over torch"):
        peer = figure.removeprefix("over ")
        return (1 / times[peer] if peer in times else None), ""
    if figure in FIGURES:
        return row.get("figures", {}).get(figure), ""
    return times.get(figure), ""

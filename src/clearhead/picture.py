"""One attention map as a picture: queries downwards, keys to the right, light where the weight is.

Needs matplotlib (``pip install 'clearhead[plot]'``), and leaves its global state alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
MOST_NAMED = 64  # tokens; more have no room beside the axes
CRISP = 4  # pixels a cell, from which on cells are drawn with sharp and equal sides
SMALLEST = 300  # pixels
DPI = 100
# What surrounds the map, in pixels: left, top, right, bottom. Tokens need more room than positions.
MARGIN = (74, 56, 104, 60)
MARGIN_NAMED = (126, 56, 104, 126)
INK, FAINT, PAPER = "#1f2430", "#8a91a0", "#ffffff"
HIDDEN = "#eef0f4"  # cells that nobody may look at


def resolution(size: int, tokens: int) -> int:
    """How many rows and columns to pool a map of so many tokens to, for a picture ``size`` pixels wide.

    One per pixel of the room that is left for the map, and never more than there are tokens.
    """
    return min(tokens, _room(size, tokens))


def draw(
    map: ArrayLike,
    path: str | PathLike[str],
    *,
    tokens: Sequence[str] | int,
    keys: Sequence[str] | int | None = None,
    title: str = "",
    size: int = 900,
    hidden: ArrayLike | None = None,
) -> Path:
    """Draw one map to a PNG or SVG file, by the suffix of ``path``.

    Parameters
    ----------
    map : array (rows, columns)
        Mean weights, as from ``weights.pooled(rows, columns)``; :func:`resolution` says how many suit the
        size.
    tokens : sequence of str, or int
        The text's tokens, or how many there are. Up to 64 stand beside the axes; longer texts show positions.
    keys : sequence of str, or int, optional
        Those of the keys where queries look at another text than their own; ``tokens`` are then the queries'.
    size : int
        Width of the picture in pixels; it is nearly square. (An SVG has the same proportions.)
    hidden : array (rows, columns) of booleans, optional
        Cells that a mask hides, left light. Where it is not given, those of weight 0, which may also be weights too
        small for a number.

    Returns the path. Each pixel shows the mean weight of the part of the matrix that it covers, on a
    logarithmic scale: maps of long texts hold weights from 1 down to a millionth.

    Raises ValueError for another suffix, a map that is not 2-D or not finite, ``hidden`` of another shape, or a picture
    of less than 300 pixels; ImportError where matplotlib is missing; OSError as the file system does. The file is whole
    or not there.

    >>> draw(np.tril(np.full((3, 3), 0.5)), "map.png", tokens=["a", "b", "c"])          # doctest: +SKIP
    """
    path = Path(path)
    rows = np.asarray(map, np.float64)
    sides = [tokens, tokens if keys is None else keys]
    counts = [side if isinstance(side, int) else len(side) for side in sides]
    unseen = rows <= 0 if hidden is None else np.asarray(hidden, bool)
    _check(rows, unseen, path, size)
    figure, axes = _figure(rows, size, max(counts))
    _show(figure, axes, rows, unseen, counts)
    _label(axes, [[] if isinstance(side, int) else list(side) for side in sides], counts)
    axes.set_title(title, loc="left", fontsize=11.5, color=INK, pad=12)
    _save(figure, path)
    return path


def _check(rows: NDArray[np.float64], unseen: NDArray[np.bool_], path: Path, size: int) -> None:
    check_suffix(path)
    if rows.ndim != 2 or not rows.size or not np.isfinite(rows).all():
        raise ValueError(f"map must be (rows, columns) of finite numbers, got shape {rows.shape}")
    if unseen.shape != rows.shape:
        raise ValueError(f"hidden has shape {unseen.shape}, and the map {rows.shape}: they must agree")
    if size < SMALLEST:
        raise ValueError(f"size is {size}: a picture needs {SMALLEST} pixels or more to hold its axes and a map")


def check_suffix(path: Path) -> None:
    """Raise ValueError unless the name ends as a picture's does."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path} must end in {' or '.join(SUFFIXES)}: that says which kind of picture to draw")


def _margin(tokens: int) -> tuple[int, int, int, int]:
    return MARGIN_NAMED if tokens <= MOST_NAMED else MARGIN


def _room(size: int, tokens: int) -> int:
    """The side of the square that is left for the map, in pixels."""
    left, _, right, _ = _margin(tokens)
    return size - left - right


def _figure(rows: NDArray[np.float64], size: int, tokens: int) -> tuple[Figure, Axes]:
    """A figure and the axes for its map, both whole numbers of pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    left, top, _, bottom = _margin(tokens)
    side = _room(size, tokens)
    if side // max(rows.shape) >= CRISP:
        side -= side % max(rows.shape)  # cells that can be counted have equal sizes
    height = side + top + bottom
    figure = Figure(figsize=(size / DPI, height / DPI), dpi=DPI, facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure, figure.add_axes((left / size, bottom / height, side / size, side / height))


def spread(rows: NDArray[np.float64], side: int) -> NDArray[np.float64]:
    """The map on ``side`` x ``side`` pixels: each has the mean of the cells it covers, by area.

    >>> spread(np.array([[0.0, 3.0, 6.0]]), 2).tolist()
    [[1.0, 5.0], [1.0, 5.0]]
    """
    down, across = (_shares(cells, side) for cells in rows.shape)
    return np.asarray(down @ rows @ across.T)


def _shares(cells: int, side: int) -> NDArray[np.float64]:
    """(side, cells): which part of each pixel lies in each cell."""
    edges, cell = np.linspace(0, cells, side + 1), np.arange(cells)
    covered = np.minimum(edges[1:, None], cell + 1) - np.maximum(edges[:-1, None], cell)
    return np.asarray(np.maximum(covered, 0) * (side / cells))


def _show(figure: Figure, axes: Axes, rows: NDArray[np.float64], unseen: NDArray[np.bool_], counts: list[int]) -> None:
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter

    top = float(rows.max())
    side = round(axes.get_window_extent().width)
    floor = _floor(rows)
    # The darkest colour is also that of weights which are too small for a number, or for the logarithm.
    pixels = np.maximum(spread(rows, side), floor)
    image = axes.imshow(
        np.ma.masked_array(pixels, spread((~unseen).astype(np.float64), side) == 0),
        cmap=_colours(),
        norm=LogNorm(vmin=floor, vmax=top, clip=True) if top > 0 else None,
        interpolation="nearest",
        extent=(-0.5, counts[1] - 0.5, counts[0] - 0.5, -0.5),
        aspect="auto",
    )
    axes.set_facecolor(HIDDEN)
    box = axes.get_position()
    bar = figure.colorbar(image, cax=figure.add_axes((box.x1 + 0.022, box.y0, 0.016, box.height)))
    bar.set_label("mean weight", color=INK, fontsize=10)
    bar.formatter = FuncFormatter(lambda value, _: f"{value:g}")
    bar.ax.tick_params(labelsize=8.5, color=FAINT, labelcolor=INK, length=3)
    bar.outline.set_visible(False)
    bar.ax.minorticks_off()


def _floor(rows: NDArray[np.float64]) -> float:
    """Where colour begins: at a tenth of what an evenly spread row has, at most five decades down."""
    return float(np.clip(0.1 / rows.shape[1], rows.max() * 1e-5, rows.max() / 10))


def _colours() -> Any:
    """From near black through violet and orange to light yellow: few bright cells stand out in the dark."""
    from matplotlib.colors import LinearSegmentedColormap

    stops = ["#0b0d1a", "#1d1f4d", "#4a2a80", "#8f2f86", "#d4476b", "#f4854e", "#fcc65d", "#fcfbd0"]
    return LinearSegmentedColormap.from_list("clearhead", stops, N=512).with_extremes(bad=HIDDEN)


def _label(axes: Axes, tokens: list[list[str]], counts: list[int]) -> None:
    """Names of queries and keys, and of the tokens of each where there is room, else their numbers."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel("key", color=INK, fontsize=11)
    axes.set_ylabel("query", color=INK, fontsize=11)
    left, _, _, bottom = _margin(max(counts))
    box = axes.get_window_extent()
    axes.xaxis.set_label_coords(0.5, -(bottom - 22) / box.height)
    axes.yaxis.set_label_coords(-(left - 22) / box.width, 0.5)
    axes.tick_params(length=3, color=FAINT, labelcolor=INK, labelsize=8.5)
    for side in axes.spines.values():
        side.set_visible(False)
    for axis, named, count, turned in zip((axes.yaxis, axes.xaxis), tokens, counts, (0, 90), strict=True):
        if named and max(counts) <= MOST_NAMED:
            points = min(9.0, 0.62 * box.height / count)
            axis.set_ticks(range(count), [readable(token) for token in named], rotation=turned, fontsize=points)
            axis.set_tick_params(length=0, pad=3)
            continue
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{int(value):,}"))


def readable(token: str, longest: int = 10) -> str:
    """A token as a label: white space made visible where it is all there is, long tokens cut.

    >>> readable(" cat"), readable("\\n\\n"), readable("  "), readable("internationalization")
    ('cat', '⏎⏎', '␣␣', 'internatio…')
    """
    text = token.strip() or token.replace("\n", "⏎").replace(" ", "␣").replace("\t", "⇥")
    text = "".join(character if character.isprintable() else "·" for character in text)
    return text if len(text) <= longest + 1 else text[:longest] + "…"


def _save(figure: Figure, path: Path) -> None:
    """Write to a temporary name, then rename. Characters that no font has are drawn as boxes."""
    import warnings

    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
            figure.savefig(temporary, format=path.suffix.lower()[1:], dpi=DPI, facecolor=PAPER)
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # of a name that its user knows
    finally:
        temporary.unlink(missing_ok=True)

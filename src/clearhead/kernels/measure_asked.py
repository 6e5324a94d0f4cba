"""What a pass of measures is asked for, as plain numbers, and what a thread works on meanwhile. See ``measure``."""

from typing import Any, NamedTuple

from clearhead.kernels.addresses import address_of
from clearhead.kernels.cache import step
from clearhead.kernels.tiles import FLOAT64

# What is kept of each row; weights on keys at a certain offset follow. SEES: 1 if the row sees anything, else 0.
ENTROPY, MASS, DISTANCE, SPREAD, SINK, LARGEST, SEES, OFFSETS = range(8)


class Asked(NamedTuple):
    """What is asked for. Addresses are 0, and counts too, where it is not.

    chunks : of each head. aligned : query i stands at key i + aligned. sink : how many first keys count as the sink.
    spread : whether SPREAD is wanted, the sum of weight times distance without its sign.
    offsets : address of ``offset_count`` int64, how many keys back.
    received : address of (batch * heads, chunks, vectors, keys), float64: sums over rows of weight times factor.
    factors : address of (batch * heads, vectors, queries), in the type computed in; 0: all are 1. With factors, nothing
    else may be asked for: tiles whose rows have none but 0 are left out.
    seen : address of (batch * heads, chunks, keys), int64: how many rows may see each key.
    grid : address of (batch * heads, grid_rows + chunks, grid_columns), float64: sums of weights, or the largest.
    The row of the grid that a chunk begins in may have begun in another: what it adds there lies in grid_rows + chunk.
    top : how many largest weights. top_weights, top_keys : addresses of (batch * heads, queries, top), the former in
    the type computed in, the latter int64.
    folds : address of ``fold_count`` times FOLD int64, see there. first_query, first_key : numbers by which the user's
    functions, and top_keys, know the first of either.
    """

    chunks: int
    aligned: int
    sink: int
    spread: int
    offsets: int
    offset_count: int
    received: int
    vectors: int
    factors: int
    seen: int
    grid: int
    grid_rows: int
    grid_columns: int
    grid_largest: int
    top: int
    top_weights: int
    top_keys: int
    folds: int
    fold_count: int
    first_query: int
    first_key: int


# One of the user's folds: address of the compiled function, how many numbers it keeps a row, address of (batch * heads,
# queries, keeps) float64 where they go, address of its data and of the data's shape.
FUNCTION, KEEPS, KEPT, DATA, SHAPE = range(5)
FOLD = 5


class Desk(NamedTuple):
    """What a thread keeps of a tile of queries while it goes through the keys, as pointers."""

    sums: Any  # (OFFSETS + offsets, rows), float64
    factors: Any  # (vectors, rows)
    columns: Any  # (BLOCK,)
    best: Any  # (top, rows), scores
    places: Any  # (top, rows), their keys, integers as wide as scores
    strip: Any  # (grid columns, rows) and a vector's more of columns
    turned: Any  # (rows, grid columns and a vector's more)
    kept: Any  # (rows, keeps) of each of the user's folds, float64


@step
def desk(places, like, index_like):
    """A desk's places as pointers; ``like`` is a number of the type computed in, ``index_like`` an integer as wide."""
    return Desk(
        address_of(places[0], 0, FLOAT64),
        address_of(places[1], 0, like),
        address_of(places[2], 0, like),
        address_of(places[3], 0, like),
        address_of(places[4], 0, index_like),
        address_of(places[5], 0, like),
        address_of(places[6], 0, like),
        address_of(places[7], 0, FLOAT64),
    )


@step
def asked_for(a):
    """The numbers as ``Asked``."""
    return Asked(
        a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16],
        a[17], a[18], a[19], a[20],
    )  # fmt: skip

"""A grid laid over the matrix of weights: each block's sum, or its largest weight.

Of a tile of queries, a strip keeps for each row what falls into each column of the grid; when the tile is done, it is
turned and added to the rows of the grid that its queries belong to.
"""

from clearhead.kernels.addresses import address_of, pointer
from clearhead.kernels.cache import step
from clearhead.kernels.folds import largest_of_keys, sum_keys, turn_columns
from clearhead.kernels.tiles import FLOAT64, REACH_HIGH, REACH_LOW, fill


@step
def column_of(x, a, key):
    """Which column of the grid a key belongs to: column c begins at key c * keys // columns."""
    return ((key + 1) * a.grid_columns - 1) // x.keys


@step
def row_of_grid(x, a, query):
    """Which row of the grid a query belongs to."""
    return ((query + 1) * a.grid_rows - 1) // x.queries


@step
def add_strip(x, w, a, d, first, keys):
    """Of each row, what falls into each column of the grid."""
    column, begin = column_of(x, a, first), 0
    while begin < keys:
        end = min(keys, (column + 1) * x.keys // a.grid_columns - first)
        part, out = pointer(w.scores, begin * x.rows), pointer(d.strip, column * x.rows)
        if a.grid_largest:
            largest_of_keys(part, end - begin, out)
        else:
            sum_keys(part, end - begin, out)
        column, begin = column + 1, end


@step
def finish_grid(x, w, a, d, sequence, chunk, here):
    """Add the strip to the rows of the grid that the tile's queries belong to, and clear it."""
    low, high = w.reach[REACH_LOW], w.reach[REACH_HIGH]
    if high <= low:
        return
    begin, end = column_of(x, a, low), column_of(x, a, high - 1) + 1
    width = a.grid_columns + x.lanes
    turn_columns(d.strip, begin, end - begin, d.turned, width)
    fill(pointer(d.strip, begin * x.rows), (end - begin) * x.rows, 0.0)
    tiles = (x.queries + x.rows - 1) // x.rows
    shared = row_of_grid(x, a, tiles * chunk // a.chunks * x.rows)
    for r in range(here):
        row = row_of_grid(x, a, w.queries[r])
        row = a.grid_rows + chunk if row == shared else row
        out = address_of(a.grid, (sequence * (a.grid_rows + a.chunks) + row) * a.grid_columns, FLOAT64)
        own = pointer(d.turned, r * width)
        if a.grid_largest:
            for c in range(begin, end):
                if not own[c] <= out[c]:
                    out[c] = own[c]
        else:
            for c in range(begin, end):
                out[c] += own[c]

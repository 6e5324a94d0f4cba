"""The backward pass: gradients of query, key, value and of what scores are made of, from the output's gradient.

Weights are recomputed from scores and logsumexp, tile by tile, and never kept: memory is linear in tokens. This is Dao
et al. 2022, *FlashAttention*, algorithm 4, with keys in the outer loop: dO is grad_output, D is own, dV is grad_value,
dP and dS are changes before and after ``change_tile``.

A work item is a part of the keys of a key head, with all queries of its group of heads. It is done in turns of TURN
keys, whose gradients are summed on the thread's desk and written once. Those of queries are summed over turns in
memory, for each part apart, and over the parts afterwards: no two items write to the same place, and what each adds
up, and in which order, depends on no number of threads.
"""

from typing import Any, NamedTuple

import numpy as np

from clearhead.kernels.addresses import address_of, call_at, narrow, number_for, pointer
from clearhead.kernels.arguments import COMPUTED, unpack
from clearhead.kernels.backward_tiles import (
    additive_back,
    change2_tile,
    change_tile,
    gather_narrow_tile,
    gather_tile,
    multiply_tile,
    uncap_tile,
)
from clearhead.kernels.cache import kernel, step
from clearhead.kernels.microkernels import finite_row, mix_tile, score_tile, turn_in
from clearhead.kernels.tiles import (
    CHANGE,
    FACTOR,
    FLOAT64,
    FOLDS,
    HIGH,
    INT64,
    LOW,
    POSITION,
    REACH_HIGH,
    REACH_LOW,
    copy_rows,
    fill,
    find_reach,
    is_natural,
    load_queries,
    look,
    part_seen,
    room,
    score_keys,
    take_tile,
    whole_micro,
)
from clearhead.kernels.visible import HIDDEN, WHOLLY
from clearhead.kernels.weights import load_logsumexp

TURN = 256  # keys whose gradients are summed at a time: with their own, 256 KB at dim 64, in the second-level cache
STEP = 64  # keys in a tile: two tiles of scores are at work, and half as high they stay in the first-level cache
OWN = FOLDS  # of Scratch.lanes: the row's dL/do . o - dL/dl
SOFTCAP, ALIBI = range(2)  # of an item's sums; the first is of its key head, the second of each head of its group


class Back(NamedTuple):
    """Where gradients come from and go to; 0 where one is not wanted, or where there is none.

    grad_output : address of (batch, heads, queries, out_width), made up with 0 to whole vectors. own : of (batch,
    heads, queries), the row's dL/do . o - dL/dl. grad_query : of (parts, batch, heads, tiles, key_width, rows).
    grad_key, grad_value : of (batch, key heads, keys, dim). grad_bias : of an array with these steps for part, head,
    query and key, and offsets for each batch entry, at an address. derivative : address of the compiled derivative of
    the user's function. sums : of (items, 1 + group), float64, see SOFTCAP and ALIBI. grad_vector : of (items, dim),
    float64. All but those are in the type computed in, grad_bias in its own, and grad_key and grad_value in that of
    ``like``, which may have 16 bits.
    """

    batch: int
    parts: int
    tiles: int
    key_width: int
    value_width: int
    query_width: int
    out_width: int
    grad_output: int
    own: int
    grad_query: int
    grad_key: int
    grad_value: int
    grad_bias: int
    bias_offsets: int
    bias_part: int
    bias_head: int
    bias_query: int
    bias_key: int
    derivative: int
    sums: int
    grad_vector: int


class Desk(NamedTuple):
    """What a thread works on beside its scratch, as pointers to numbers of the type computed in."""

    key: Any  # (TURN, key_width)
    value: Any  # (TURN, value_width)
    grad_key: Any  # (TURN, query_width); of the additive score (dim, TURN)
    grad_value: Any  # (TURN, out_width)
    query: Any  # (rows, query_width), unscaled
    turned: Any  # (out_width, rows): the output's gradient
    changes: Any  # (STEP, rows): gradients of weights, then of scores
    scaled: Any  # (STEP, rows): scores before the softcap
    bent: Any  # (STEP, rows): and after it
    added: Any  # (STEP, rows): before the user's function, then its derivative
    vector: Any  # (dim, rows): gradients of the additive score's vector
    softcap: Any  # (rows,): and of the softcap


def desk_sizes(b: Back, dim: int, rows: int) -> tuple[int, ...]:
    """How many numbers each part of a desk has."""
    tile = STEP * rows
    return (TURN * b.key_width, TURN * b.value_width, TURN * max(b.query_width, dim), TURN * b.out_width,
            rows * b.query_width, b.out_width * rows, tile, tile, tile, tile, max(dim, 1) * rows, rows)  # fmt: skip


@step
def back_of(a):
    """The numbers as ``Back``."""
    return Back(
        a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16],
        a[17], a[18], a[19], a[20],
    )  # fmt: skip


@step
def desk_of(p, like):
    """A desk's places as pointers."""
    return Desk(
        address_of(p[0], 0, like), address_of(p[1], 0, like), address_of(p[2], 0, like), address_of(p[3], 0, like),
        address_of(p[4], 0, like), address_of(p[5], 0, like), address_of(p[6], 0, like), address_of(p[7], 0, like),
        address_of(p[8], 0, like), address_of(p[9], 0, like), address_of(p[10], 0, like), address_of(p[11], 0, like),
    )  # fmt: skip


@kernel
def backward(numbers, likes, places, back_numbers, bias_like, like, desk_places, items, first, last, turn):
    """One turn of each of items[first ... last-1]: item n is part ``n % parts`` of key head ``n // parts`` of the
    flattened batch. False where none has so many turns.

    Arguments are packed, places are a workspace's; x.logsumexp is the forward pass's.
    """
    x, w = unpack(pointer(numbers, 0), likes), room(places, likes[COMPUTED])
    b, d = back_of(pointer(back_numbers, 0)), desk_of(desk_places, likes[COMPUTED])
    turns, more = (x.keys + TURN - 1) // TURN, False
    for n in range(first, last):
        item = items[n]
        part = item % b.parts
        begin, end = turns * part // b.parts, turns * (part + 1) // b.parts
        if begin + turn < end:
            take_turn(x, w, b, d, bias_like, like, item, (begin + turn) * TURN)
            more = True
    return more


@step
def take_turn(x, w, b, d, bias_like, like, item, low):
    """Keys low ... low+TURN-1 of an item, with all queries that see some of them."""
    key_heads, count = x.heads // x.group, min(TURN, x.keys - low)
    sequence = item // b.parts
    batch, key_head = sequence // key_heads, sequence % key_heads
    copy_rows(x.key, batch, key_head, low, count, x.dim, d.key, b.key_width)
    copy_rows(x.value, batch, key_head, low, count, x.value_dim, d.value, b.value_width)
    finite = True
    for j in range(count):
        finite = finite and finite_row(pointer(d.key, j * b.key_width), x.dim)
        finite = finite and finite_row(pointer(d.value, j * b.value_width), x.value_dim)
    fill(d.grad_key, TURN * max(b.query_width, x.dim), 0.0)
    fill(d.grad_value, TURN * b.out_width, 0.0)
    for member in range(x.group):
        head = key_head * x.group + member
        for tile in range(b.tiles):
            here = take_tile(x, w, tile)
            find_reach(x, w, batch, head, here)
            if w.reach[REACH_HIGH] <= low or w.reach[REACH_LOW] >= low + count:
                continue
            go_back(x, w, b, d, bias_like, item, batch, head, member, tile, here, low, count, finite)
    write_turn(x, b, d, like, sequence, low, count)


@step
def go_back(x, w, b, d, bias_like, item, batch, head, member, tile, here, low, count, finite):
    """One tile of queries, with the keys of this turn."""
    rows, natural = x.rows, is_natural(x)
    row = (batch * x.heads + head) * x.queries + tile * rows
    out = address_of(b.grad_output, row * b.out_width, d.turned)
    load_queries(x, w, batch, head)
    load_logsumexp(x, w, batch, head, here)
    copy_rows(x.query, batch, head, tile * rows, here, x.dim, d.query, b.query_width)
    for r in range(rows):
        w.spans[r] = min(r, here - 1)
    turn_in(out, b.out_width, w.spans, d.turned, b.out_width, number_for(d.turned, 1.0))
    own, given = pointer(w.lanes, OWN * rows), address_of(b.own, row, d.turned)
    for r in range(rows):
        own[r] = given[min(r, here - 1)]
        w.lanes[FACTOR * rows + r] = 1.0
    fill(d.softcap, rows, 0.0)
    if x.vector:
        fill(d.vector, x.dim * rows, 0.0)
    for r in range(here):
        finite = finite and finite_row(pointer(d.query, r * b.query_width), x.dim)
        finite = finite and finite_row(pointer(out, r * b.out_width), x.value_dim)
    slope, grad_query = 0.0, d.turned
    if b.grad_query:
        place = ((item % b.parts * b.batch + batch) * x.heads + head) * b.tiles + tile
        grad_query = address_of(b.grad_query, place * b.key_width * rows, d.turned)
    for first in range(low, low + count, STEP):
        begin, keys = part_seen(x, w, first, min(STEP, low + count - first))
        if keys <= 0:
            continue
        first += begin
        shown, marked = look(x, w, batch, head, first, keys)
        if marked == HIDDEN:
            continue
        key = pointer(d.key, (first - low) * b.key_width)
        value = pointer(d.value, (first - low) * b.value_width)
        shown = score_keys(x, w, batch, head, first, keys, key, b.key_width, value, b.value_width, shown, marked, d)
        careful, padded = shown != WHOLLY and not finite, whole_micro(x, keys)
        if careful:
            for i in range(keys * rows):
                w.visible[i] = w.scores[i] != -np.inf
        score_tile(value, b.value_width, value, b.value_width, d.turned, d.changes, x.value_dim, padded,
                   pointer(w.lanes, CHANGE * rows))  # fmt: skip
        high, lower = pointer(w.lanes, HIGH * rows), pointer(w.lanes, LOW * rows)
        if natural:
            change_tile(w.scores, d.changes, padded, high, lower, own)
        else:
            change2_tile(w.scores, d.changes, padded, high, lower, own)
        if b.grad_value:
            grad_value = pointer(d.grad_value, (first - low) * b.out_width)
            if careful:
                gather_seen(x, w, w.scores, keys, here, out, b.out_width, grad_value, b.out_width, x.value_dim)
            else:
                gather(x, w.scores, padded, here, out, b.out_width, grad_value, b.out_width)
        if natural:
            slope += unbend(x, w, b, d, bias_like, item, batch, head, first, keys, here)
        if x.vector:
            additive_back(key, b.key_width, w.query, address_of(x.vector, 0, d.turned), d.changes, x.dim, keys,
                          grad_query, pointer(d.grad_key, first - low), TURN, d.vector)  # fmt: skip
            continue
        if b.grad_key:
            grad_key = pointer(d.grad_key, (first - low) * b.query_width)
            if careful:
                gather_seen(x, w, d.changes, keys, here, d.query, b.query_width, grad_key, b.query_width, x.dim)
            else:
                gather(x, d.changes, padded, here, d.query, b.query_width, grad_key, b.query_width)
        if b.grad_query:
            if careful:
                mix_seen(x, w, d.changes, keys, here, key, b.key_width, grad_query)
            else:
                for i in range(0, b.key_width, x.micro):
                    mix_tile(key, i, b.key_width, d.changes, pointer(grad_query, i * rows), keys,
                             pointer(w.lanes, FACTOR * rows))  # fmt: skip
    sums = address_of(b.sums, item * (1 + x.group), FLOAT64)
    sums[ALIBI + member] -= slope
    for r in range(here):
        sums[SOFTCAP] += d.softcap[r]
    if x.vector and b.grad_vector:
        total = address_of(b.grad_vector, item * x.dim, FLOAT64)
        for h in range(x.dim):
            for r in range(here):
                total[h] += d.vector[h * rows + r]


@step
def unbend(x, w, b, d, bias_like, item, batch, head, first, keys, here):
    """d.changes, from gradients of final scores back to those of matches; the sum of each times its distance."""
    rows, slope = x.rows, 0.0
    if b.derivative:
        if call_at(b.derivative, d.added, rows, w.queries, first, keys, batch, head) != 1:
            w.failed[0] = 1
        multiply_tile(d.changes, keys, d.added)
    if x.slopes:
        for j in range(keys):
            for r in range(here):
                change = d.changes[j * rows + r]
                if change != 0:
                    slope += change * abs(w.lanes[POSITION * rows + r] - first - j)
    if b.grad_bias:
        add_bias(x, w, b, d, bias_like, item, batch, head, first, keys, here)
    if x.softcap > 0:
        uncap_tile(d.changes, keys, d.bent, d.scaled, number_for(d.bent, x.softcap), d.softcap)
    return slope


@step
def add_bias(x, w, b, d, bias_like, item, batch, head, first, keys, here):
    """The tile, to the gradient of the bias."""
    base = address_of(b.bias_offsets, batch, INT64)[0] + item % b.parts * b.bias_part + head * b.bias_head
    for r in range(here):
        row = address_of(b.grad_bias, base + w.queries[r] * b.bias_query + first * b.bias_key, bias_like)
        for j in range(keys):
            row[j * b.bias_key] += d.changes[j * x.rows + r]


@step
def gather(x, weights, keys, here, source, stride, out, width):
    """out[keys, width] += weights[keys, here] @ source[here, width]; width is of whole vectors."""
    done = 0
    while done + x.rows <= width:
        gather_tile(weights, keys, pointer(source, done), stride, here, pointer(out, done), width)
        done += x.rows
    while done < width:
        gather_narrow_tile(weights, keys, pointer(source, done), stride, here, pointer(out, done), width)
        done += x.lanes


@step
def gather_seen(x, w, weights, keys, here, source, stride, out, width, dim):
    """The same where something is not finite: each number reaches only those that see it."""
    for j in range(keys):
        for r in range(here):
            if w.visible[j * x.rows + r]:
                for i in range(dim):
                    out[j * width + i] += weights[j * x.rows + r] * source[r * stride + i]


@step
def mix_seen(x, w, weights, keys, here, key, step, out):
    """out[dim, rows] += key[keys, dim]^T @ weights[keys, rows], likewise."""
    for j in range(keys):
        for r in range(here):
            if w.visible[j * x.rows + r]:
                for i in range(x.dim):
                    out[i * x.rows + r] += weights[j * x.rows + r] * key[j * step + i]


@step
def write_turn(x, b, d, like, sequence, low, count):
    """Gradients of keys and values, done."""
    if b.grad_key:
        out = address_of(b.grad_key, (sequence * x.keys + low) * x.dim, like)
        if x.vector:
            for j in range(count):
                for i in range(x.dim):
                    out[j * x.dim + i] = narrow(out, d.grad_key[i * TURN + j])
        else:
            scale = number_for(d.key, x.scale)
            for j in range(count):
                for i in range(x.dim):
                    out[j * x.dim + i] = narrow(out, d.grad_key[j * b.query_width + i] * scale)
    if b.grad_value:
        out = address_of(b.grad_value, (sequence * x.keys + low) * x.value_dim, like)
        for j in range(count):
            for i in range(x.value_dim):
                out[j * x.value_dim + i] = narrow(out, d.grad_value[j * b.out_width + i])

"""What may be done to a tile of scores between matching and softmax: bent, added to, hidden; and its maximum then.

Tiles and pointers are those of ``microkernels``. Each function is one pass over a tile that is hot in the cache; plain
scores take none of them.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from clearhead.kernels.vectors import Vectors, at, i8, loop

void, index = types.void, types.int64
bytes_at, indices_at = types.CPointer(types.uint8), types.CPointer(types.int32)


@intrinsic
def cap_tile(typingctx, scores, keys, softcap):
    """scores = softcap * tanh(scores / softcap)"""

    def generate(context, b, signature, arguments):
        scores, keys, softcap = arguments
        v = Vectors(b, signature.args[0].dtype)
        cap = v.splat(softcap)

        def one_key(i, _):
            row = v.row(scores, i)
            v.store_all([b.fmul(cap, v.tanh(b.fdiv(s, cap))) for s in v.load_all(row)], row)
            return []

        loop(b, keys, [], one_key)
        return context.get_dummy_value()

    return void(scores, index, scores.dtype), generate


@intrinsic
def add_tile(typingctx, scores, keys, bias):
    """scores += bias, a tile of the same shape"""

    def generate(context, b, signature, arguments):
        scores, keys, bias = arguments
        v = Vectors(b, signature.args[0].dtype)

        def one_key(i, _):
            row = v.row(scores, i)
            v.store_all([b.fadd(s, x) for s, x in zip(v.load_all(row), v.load_all(v.row(bias, i)), strict=True)], row)
            return []

        loop(b, keys, [], one_key)
        return context.get_dummy_value()

    return void(scores, index, scores), generate


@intrinsic
def slope_tile(typingctx, scores, keys, first, position, slope):
    """scores -= slope * |position - key|: position[rows] in keys, as numbers; first is the tile's first key."""

    def generate(context, b, signature, arguments):
        scores, keys, first, position, slope = arguments
        v = Vectors(b, signature.args[0].dtype)
        positions, down = v.load_all(position), v.splat(b.fneg(slope))

        def one_key(i, _):
            row, k = v.row(scores, i), v.splat(b.sitofp(b.add(first, i), v.scalar))
            v.store_all(
                [v.fma(v.abs(b.fsub(p, k)), down, s) for p, s in zip(positions, v.load_all(row), strict=True)],
                row,
            )
            return []

        loop(b, keys, [], one_key)
        return context.get_dummy_value()

    return void(scores, index, index, scores, scores.dtype), generate


@intrinsic
def hide_outside(typingctx, scores, keys, first, start, stop):
    """scores = -inf where the key is not in start[rows] ... stop[rows]-1; first is the tile's first key."""

    def generate(context, b, signature, arguments):
        scores, keys, first, start, stop = arguments
        v = Vectors(b, signature.args[0].dtype)
        low, high = ([v.load_indices(at(b, p, c * v.lanes)) for c in range(v.count)] for p in (start, stop))

        def one_key(i, _):
            row, k = v.row(scores, i), v.splat(b.trunc(b.add(first, i), ir.IntType(32)))
            out = []
            for c, s in enumerate(v.load_all(row)):
                seen = b.and_(b.icmp_signed("<=", low[c], k), b.icmp_signed("<", k, high[c]))
                out.append(b.select(seen, s, v.const(float("-inf"))))
            v.store_all(out, row)
            return []

        loop(b, keys, [], one_key)
        return context.get_dummy_value()

    return void(scores, index, index, indices_at, indices_at), generate


@intrinsic
def hide_tile(typingctx, scores, keys, visible):
    """scores = -inf where the tile of bytes ``visible`` is 0"""

    def generate(context, b, signature, arguments):
        scores, keys, visible = arguments
        v = Vectors(b, signature.args[0].dtype)
        none = ir.Constant(ir.VectorType(i8, v.lanes), [0] * v.lanes)

        def one_key(i, _):
            row, seen = v.row(scores, i), v.row(visible, i)
            out = []
            for c, s in enumerate(v.load_all(row)):
                byte = v.load_bytes(at(b, seen, c * v.lanes))
                out.append(b.select(b.icmp_unsigned("!=", byte, none), s, v.const(float("-inf"))))
            v.store_all(out, row)
            return []

        loop(b, keys, [], one_key)
        return context.get_dummy_value()

    return void(scores, index, bytes_at), generate


@intrinsic
def top_tile(typingctx, scores, keys, top):
    """top[rows] = max(top, scores), NaN left aside"""

    def generate(context, b, signature, arguments):
        scores, keys, top = arguments
        v = Vectors(b, signature.args[0].dtype)

        def one_key(i, running):
            return [v.max(s, m) for s, m in zip(v.load_all(v.row(scores, i)), running, strict=True)]

        v.store_all(loop(b, keys, v.load_all(top), one_key), top)
        return context.get_dummy_value()

    return void(scores, index, scores), generate

"""What may be done to a tile of scores between matching and softmax: bent, added to, hidden; and its maximum then.

Tiles and pointers are those of ``microkernels``. Each function is one pass over a tile that is hot in the cache; plain
scores take none of them.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from clearhead.kernels.vectors import Vectors, at, i8, i64, loop

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
def turn_bytes(typingctx, source, step, queries, out, keys, scores):
    """out[j, r] = source[queries[r] * step + j], bytes, for as many of the keys as fill whole vectors; how many.

    ``scores`` points at numbers of the type computed in, which says how many lanes there are.
    """

    def generate(context, b, signature, arguments):
        source, step, queries, out, keys, _ = arguments
        v = Vectors(b, signature.args[5].dtype)
        kind, lanes = ir.VectorType(i8, v.lanes).as_pointer(), ir.Constant(i64, v.lanes)
        whole = b.sdiv(keys, lanes)
        for c in range(v.count):
            rows = [b.gep(source, [b.mul(b.load(at(b, queries, c * v.lanes + r)), step)]) for r in range(v.lanes)]

            def square(n, _, c=c, rows=rows):
                first = b.mul(n, lanes)
                for i, column in enumerate(v.transpose([v.load_bytes(b.gep(row, [first])) for row in rows])):
                    place = at(b, v.row(out, first), i * v.rows + c * v.lanes)
                    b.store(column, b.bitcast(place, kind)).align = 1
                return []

            loop(b, whole, [], square)
        return b.mul(whole, lanes)

    return index(source, index, types.CPointer(types.int64), bytes_at, index, scores), generate


@intrinsic
def some_and_all(typingctx, seen, keys, scores):
    """(whether any, whether all) of the bytes seen[keys, rows], each 0 or 1, are 1; ``scores`` as above."""

    def generate(context, b, signature, arguments):
        seen, keys, _ = arguments
        v = Vectors(b, signature.args[2].dtype)
        kind, whole = ir.VectorType(i8, v.lanes), ir.IntType(8 * v.lanes)

        def one_key(i, found):
            some, every = found
            row = v.row(seen, i)
            for c in range(v.count):
                byte = v.load_bytes(at(b, row, c * v.lanes))
                some, every = b.or_(some, byte), b.and_(every, byte)
            return [some, every]

        none, full = (ir.Constant(kind, [n] * v.lanes) for n in (0, 1))
        some, every = loop(b, keys, [none, full], one_key)
        any_one = b.icmp_unsigned("!=", b.bitcast(some, whole), ir.Constant(whole, 0))
        all_ones = b.icmp_unsigned("==", b.bitcast(every, whole), b.bitcast(full, whole))
        return context.make_tuple(b, signature.return_type, [any_one, all_ones])

    return types.UniTuple(types.boolean, 2)(seen, index, scores), generate


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

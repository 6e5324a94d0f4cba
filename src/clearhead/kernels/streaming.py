"""The inner loops of ``decode``: a few rows of queries against keys and values that stream by, dim in the lanes.

Each comes for 1, 2, 4 and 8 rows, so that a key, once loaded (and widened from 16 bits), serves all rows from a
register. dim is a multiple of the lanes, and rows of keys and values are contiguous.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from clearhead.kernels.vectors import Vectors, at, i64, loop

void, index = types.void, types.int64
LINE = 64  # bytes that memory gives at once
# How far ahead of its use a line is asked for, in bytes: early into the second-level cache, where more lines may be
# on their way at once than into the first, then into the first. With the second alone, at 4,096, groups of 4 rows took
# 1.4 times as long.
FAR, NEAR = 16_384, 2_048


def _ask(v, address, stored, place):
    """Ask for what lies ahead of vector number ``place`` of a row: near and far, a line each time it has one more."""
    vectors = max(1, LINE // (v.lanes * (2 if stored in (types.int16, types.uint16) else v.size)))  # in a line
    if vectors == 1:
        v.prefetch(address, FAR, into=2)
        v.prefetch(address, NEAR)
    elif place % vectors == 0:
        v.prefetch(address, NEAR)
    elif place % vectors == 1:
        v.prefetch(address, FAR, into=2)


def _match(rows):
    @intrinsic
    def match(typingctx, key, stride, count, query, dim, scores, room):
        """scores[r, j] = query[r] . key[j] for j < count. query : (rows, dim), scores : (rows, room).

        As many keys at once as fill the lanes with sums. In the last turn, places past the end repeat its last key.
        """

        def generate(context, b, signature, arguments):
            key, stride, count, query, dim, scores, room = arguments
            stored, v = signature.args[0].dtype, Vectors(b, signature.args[3].dtype)
            keys = max(1, v.lanes // rows)  # at once
            lanes, last = ir.Constant(i64, v.lanes), b.sub(count, ir.Constant(i64, 1))
            turns = b.sdiv(b.add(count, ir.Constant(i64, keys - 1)), ir.Constant(i64, keys))

            def some_keys(n, _):
                done, places = b.mul(n, ir.Constant(i64, keys)), []
                for u in range(keys):
                    j = b.add(done, ir.Constant(i64, u))
                    j = b.select(b.icmp_signed("<", j, count), j, last)
                    places.append(b.gep(key, [b.mul(j, stride)]))

                def one_part(i, sums, number=0):
                    offset, out = b.mul(i, lanes), list(sums)
                    q = [v.load(b.gep(query, [b.add(b.mul(ir.Constant(i64, r), dim), offset)])) for r in range(rows)]
                    for u, place in enumerate(places):
                        _ask(v, b.gep(place, [offset]), stored, number)
                        k = v.load_stored(b.gep(place, [offset]), stored)
                        for r in range(rows):
                            out[r * keys + u] = v.fma(k, q[r], sums[r * keys + u])
                    return out

                def two_parts(n, sums):
                    i = b.mul(n, two)
                    return one_part(b.add(i, ir.Constant(i64, 1)), one_part(i, sums), 1)

                parts, two = b.sdiv(dim, lanes), ir.Constant(i64, 2)
                sums = loop(b, b.sdiv(parts, two), [v.const(0.0)] * (rows * keys), two_parts)
                even = b.and_(parts, ir.Constant(i64, ~1))
                sums = loop(b, b.sub(parts, even), sums, lambda i, sums: one_part(b.add(even, i), sums))
                for first in range(0, rows * keys, v.lanes):
                    whole = v.sum_each(sums[first : first + v.lanes])
                    for r in range(first // keys, (first + v.lanes) // keys):
                        begin = r * keys - first
                        part = v.slice(whole, begin, keys)
                        v.store_part(part, b.gep(scores, [b.add(b.mul(ir.Constant(i64, r), room), done)]))
                return []

            loop(b, turns, [], some_keys)
            return context.get_dummy_value()

        return void(key, index, index, query, index, query, index), generate

    return match


def _mix(rows):
    @intrinsic
    def mix(typingctx, value, stride, keys, weights, room, output, dim):
        """output[r] += sum over j of weights[r, j] * value[j]. weights : (rows, room), output : (rows, dim)."""

        def generate(context, b, signature, arguments):
            value, stride, keys, weights, room, output, dim = arguments
            stored, v = signature.args[0].dtype, Vectors(b, signature.args[3].dtype)
            most = 16 if v.registers > 16 else 8  # accumulators

            def columns(count):
                def some(n, _):
                    offset = b.mul(n, ir.Constant(i64, count * v.lanes))
                    starts = [b.gep(output, [b.add(b.mul(ir.Constant(i64, r), dim), offset)]) for r in range(rows)]
                    places = [at(b, start, c * v.lanes) for start in starts for c in range(count)]

                    def one_key(j, sums):
                        row, out = b.gep(value, [b.add(b.mul(j, stride), offset)]), list(sums)
                        for c in range(count):
                            _ask(v, at(b, row, c * v.lanes), stored, c)
                        x = [v.load_stored(at(b, row, c * v.lanes), stored) for c in range(count)]
                        for r in range(rows):
                            w = v.splat(b.load(b.gep(weights, [b.add(b.mul(ir.Constant(i64, r), room), j)])))
                            for c in range(count):
                                out[r * count + c] = v.fma(w, x[c], sums[r * count + c])
                        return out

                    # These keys' own sum begins at 0, so that the running one is a short chain of additions.
                    sums = loop(b, keys, [v.const(0.0)] * len(places), one_key)
                    for place, total in zip(places, sums, strict=True):
                        v.store(b.fadd(v.load(place), total), place)
                    return []

                return some

            # Columns in groups that fill the accumulators, then what is left one vector at a time.
            count = max(1, min(8, most // rows))
            vectors = b.sdiv(dim, ir.Constant(i64, v.lanes))
            groups = b.sdiv(vectors, ir.Constant(i64, count))
            loop(b, groups, [], columns(count))
            done = b.mul(groups, ir.Constant(i64, count))
            single = columns(1)
            loop(b, b.sub(vectors, done), [], lambda n, _: single(b.add(n, done), []))
            return context.get_dummy_value()

        return void(value, index, index, weights, index, weights, index), generate

    return mix


match_1, match_2, match_4, match_8 = (_match(rows) for rows in (1, 2, 4, 8))
mix_1, mix_2, mix_4, mix_8 = (_mix(rows) for rows in (1, 2, 4, 8))


@intrinsic
def exp_row(typingctx, scores, count):
    """scores = 2**(scores - top); returns (top, sum of them). Up to a whole vector past count is read and written."""

    def generate(context, b, signature, arguments):
        scores, count = arguments
        v = Vectors(b, signature.args[0].dtype)
        lanes, none = ir.Constant(i64, v.lanes), v.const(float("-inf"))
        turns = b.sdiv(b.add(count, ir.Constant(i64, v.lanes - 1)), lanes)
        tops = loop(b, turns, [none], lambda n, m: [v.max(v.load(b.gep(scores, [b.mul(n, lanes)])), m[0])])
        top = v.max_lanes(tops[0])
        base = v.splat(
            b.select(b.fcmp_ordered("==", top, ir.Constant(v.scalar, float("-inf"))), ir.Constant(v.scalar, 0.0), top)
        )

        def one(n, sums):
            place = b.gep(scores, [b.mul(n, lanes)])
            e = v.exp2(b.fsub(v.load(place), base))
            v.store(e, place)
            return [b.fadd(sums[0], e)]

        total = v.sum_lanes(loop(b, turns, [v.const(0.0)], one)[0])
        return context.make_tuple(b, signature.return_type, [top, total])

    kind = scores.dtype
    return types.UniTuple(kind, 2)(scores, index), generate

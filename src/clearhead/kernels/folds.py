"""The inner loops of measures, on one tile: weights folded into numbers for each row, each key or each cell of a grid.

Tiles and pointers are those of ``microkernels``. Sums over keys stay in the lanes; sums over rows cross them, sixteen
keys at once.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from clearhead.kernels.vectors import LOG2E, Vectors, at, i64, loop

void, index = types.void, types.int64
LOWEST = -2000.0  # stands for the logarithm of a weight of 0: 0 * -2000 is 0, as its share of entropy should be


def _weigh_and_fold(natural):
    @intrinsic
    def weigh_and_fold(typingctx, scores, keys, high, low, folds):
        """scores = the weights; folds[0] = -sum w*log2(w), folds[1] = sum w*k, folds[2] = sum w, by row.

        logsumexp is high + low, as in ``microkernels.weigh_tile``; k counts from the tile's first key.
        """

        def generate(context, b, signature, arguments):
            scores, keys, high, low, folds = arguments
            v = Vectors(b, signature.args[0].dtype)
            n, big, small = v.count, v.load_all(high), v.load_all(low)

            def one_key(i, carried):
                row, k = v.row(scores, i), v.splat(b.sitofp(i, v.scalar))
                logs = [b.fsub(b.fsub(s, h), r) for s, h, r in zip(v.load_all(row), big, small, strict=True)]
                logs = [b.fmul(x, v.const(LOG2E)) if natural else x for x in logs]
                w = [v.exp2(x) for x in logs]
                v.store_all(w, row)
                return fold_row(v, carried, w, logs, k)

            out = loop(b, keys, [v.const(0.0)] * (3 * n), one_key)
            for fold in range(3):
                part = out[fold * n : (fold + 1) * n]
                v.store_all([b.fneg(x) for x in part] if fold == 0 else part, at(b, folds, fold * v.rows))
            return context.get_dummy_value()

        return void(scores, index, scores, scores, scores), generate

    return weigh_and_fold


def fold_row(v, carried, weights, logs, k):
    """Sums of w*log2(w), w*k and w, one key further."""
    n = v.count
    logs = [v.max(x, v.const(LOWEST)) for x in logs]
    terms = [v.fma(w, x, e) for w, x, e in zip(weights, logs, carried[:n], strict=True)]
    places = [v.fma(w, k, p) for w, p in zip(weights, carried[n : 2 * n], strict=True)]
    return terms + places + [v.b.fadd(m, w) for m, w in zip(carried[2 * n :], weights, strict=True)]


weigh2_and_fold = _weigh_and_fold(natural=False)
weigh_and_fold = _weigh_and_fold(natural=True)


def _exp_and_fold(natural):
    @intrinsic
    def exp_and_fold(typingctx, scores, keys, old_top, top, total, change, terms, places, position, away):
        """As ``microkernels.exp_tile``, to the bit; and terms = terms' + sum w*(score - top), places = places*change +
        sum w*(position + away - k), by row: terms' is what terms are under the new top, see ``riding``."""

        def generate(context, b, signature, arguments):
            scores, keys, old_top, top, total, change, terms, places, position, away = arguments
            v = Vectors(b, signature.args[0].dtype)
            n, new = v.count, v.load_all(top)
            base = [b.select(b.fcmp_ordered("==", m, v.const(float("-inf"))), v.const(0.0), m) for m in new]

            def power(difference):
                return v.exp2(b.fmul(difference, v.const(LOG2E)) if natural else difference)

            def some_keys(i, carried):
                first = b.mul(i, ir.Constant(i64, v.at_once))
                for j in range(v.at_once):
                    row = at(b, v.row(scores, first), j * v.rows)
                    k = v.splat(b.sitofp(b.add(first, ir.Constant(i64, j)), v.scalar))
                    less = [b.fsub(s, m) for s, m in zip(v.load_all(row), base, strict=True)]
                    weights = [power(x) for x in less]
                    v.store_all(weights, row)
                    carried = fold_row(v, carried, weights, less, k)
                return carried

            out = loop(b, b.sdiv(keys, ir.Constant(i64, v.at_once)), [v.const(0.0)] * (3 * n), some_keys)
            new_terms, new_places, sums = out[:n], out[n : 2 * n], out[2 * n :]
            rise = [b.fsub(o, m) for o, m in zip(v.load_all(old_top), base, strict=True)]
            factors, before = [power(x) for x in rise], v.load_all(total)
            fallen = [
                v.fma(v.max(x, v.const(LOWEST)), t, e) for x, t, e in zip(rise, before, v.load_all(terms), strict=True)
            ]
            v.store_all([v.fma(e, f, t) for e, f, t in zip(fallen, factors, new_terms, strict=True)], terms)
            stand = [b.fadd(p, v.splat(away)) for p in v.load_all(position)]
            apart = [b.fsub(b.fmul(p, s), k) for p, s, k in zip(stand, sums, new_places, strict=True)]
            v.store_all([v.fma(p, f, x) for p, f, x in zip(v.load_all(places), factors, apart, strict=True)], places)
            v.store_all([v.fma(t, f, s) for t, f, s in zip(before, factors, sums, strict=True)], total)
            v.store_all(new, old_top)
            v.store_all(factors, change)
            return context.get_dummy_value()

        return void(scores, index, scores, scores, scores, scores, scores, scores, scores, scores.dtype), generate

    return exp_and_fold


exp2_and_fold = _exp_and_fold(natural=False)
exp_and_fold = _exp_and_fold(natural=True)


@intrinsic
def sum_rows(typingctx, weights, keys, factors, sums):
    """sums[key] = sum over rows of factors[row] * weights[key, row]. Keys are made up to whole vectors of them."""

    def generate(context, b, signature, arguments):
        weights, keys, factors, sums = arguments
        v = Vectors(b, signature.args[0].dtype)
        lanes, f = ir.Constant(i64, v.lanes), v.load_all(factors)

        def some_keys(t, _):
            first = b.mul(t, lanes)
            parts = []
            for j in range(v.lanes):
                w = v.load_all(at(b, v.row(weights, first), j * v.rows))
                total = b.fmul(w[0], f[0])
                for c in range(1, v.count):
                    total = v.fma(w[c], f[c], total)
                parts.append(total)
            v.store(v.sum_each(parts), at(b, sums, first))
            return []

        whole = b.sdiv(b.add(keys, ir.Constant(i64, v.lanes - 1)), lanes)
        loop(b, whole, [], some_keys)
        return context.get_dummy_value()

    return void(weights, index, weights, weights), generate


def _join_keys(largest):
    @intrinsic
    def join_keys(typingctx, weights, keys, out):
        """out[row] += sum over keys of weights[key, row]; or the largest of all."""

        def generate(context, b, signature, arguments):
            weights, keys, out = arguments
            v = Vectors(b, signature.args[0].dtype)

            def join(w, carried):
                if not largest:
                    return b.fadd(w, carried)
                # NaN is kept, whichever of the two it is.
                taken = b.or_(b.fcmp_ordered(">", w, carried), b.fcmp_unordered("uno", w, w))
                return b.select(taken, w, carried)

            def one_key(i, carried):
                return [join(w, x) for w, x in zip(v.load_all(v.row(weights, i)), carried, strict=True)]

            v.store_all(loop(b, keys, v.load_all(out), one_key), out)
            return context.get_dummy_value()

        return void(weights, index, weights), generate

    return join_keys


sum_keys = _join_keys(largest=False)
largest_of_keys = _join_keys(largest=True)


@intrinsic
def turn_columns(typingctx, tile, first, columns, out, width):
    """out[row, c] = tile[c, row] for c = first ... first+columns-1, made up to whole vectors; ``width`` apart."""

    def generate(context, b, signature, arguments):
        tile, first, columns, out, width = arguments
        v = Vectors(b, signature.args[0].dtype)
        lanes = ir.Constant(i64, v.lanes)

        def square(n, _):
            begin = b.add(first, b.mul(n, lanes))
            for c in range(v.count):
                rows = [v.load(at(b, v.row(tile, begin), j * v.rows + c * v.lanes)) for j in range(v.lanes)]
                for r, row in enumerate(v.transpose(rows)):
                    v.store(row, b.gep(at(b, out, b.mul(width, ir.Constant(i64, c * v.lanes + r))), [begin]))
            return []

        whole = b.sdiv(b.add(columns, ir.Constant(i64, v.lanes - 1)), lanes)
        loop(b, whole, [], square)
        return context.get_dummy_value()

    return void(tile, index, index, tile, index), generate


@intrinsic
def keep_largest(typingctx, scores, keys, first, best, places, count):
    """best[count, rows] and places, the keys they belong to, take in these scores: the largest first, of equal ones
    the key that came first. ``first`` is the number of the tile's first key; -inf and NaN are never taken in.

    A key that none of a vector's rows wants costs one comparison; else it sinks through all ``count``, in every lane
    at once, however scores are ordered.
    """

    def generate(context, b, signature, arguments):
        scores, keys, first, best, places, count = arguments
        v = Vectors(b, signature.args[0].dtype)
        whole = b.bitcast(places, v.integer.as_pointer())
        worst = v.row(best, b.sub(count, ir.Constant(i64, 1)))

        def one_key(i, _):
            row = v.row(scores, i)
            for c in range(v.count):
                s = v.load(at(b, row, c * v.lanes))
                wanted = b.fcmp_ordered(">", s, v.load(at(b, worst, c * v.lanes)))
                some = b.icmp_unsigned(
                    "!=", b.bitcast(wanted, ir.IntType(v.lanes)), ir.Constant(ir.IntType(v.lanes), 0)
                )
                with b.if_then(some, likely=False):
                    key = v.splat(b.trunc(b.add(first, i), v.integer) if v.size == 4 else b.add(first, i))
                    kind = v.integers.as_pointer()

                    def sink(p, carried, c=c, s=s, kind=kind):
                        here = at(b, v.row(best, p), c * v.lanes)
                        there = b.bitcast(at(b, v.row(whole, p), c * v.lanes), kind)
                        old, old_place = v.load(here), b.load(there)
                        old_place.align = v.size
                        before = b.fcmp_ordered(">", s, old)
                        v.store(b.select(before, carried[0], old), here)
                        b.store(b.select(before, carried[1], old_place), there).align = v.size
                        return [b.select(before, old, carried[0]), b.select(before, old_place, carried[1])]

                    loop(b, count, [s, key], sink)
            return []

        loop(b, keys, [], one_key)
        return context.get_dummy_value()

    return void(scores, index, index, scores, places, index), generate


@intrinsic
def any_above(typingctx, first, second):
    """Whether any row's number in the first is larger than in the second."""

    def generate(context, b, signature, arguments):
        v = Vectors(b, signature.args[0].dtype)
        x, y = (v.load_all(place) for place in arguments)
        found = [b.fcmp_ordered(">", p, q) for p, q in zip(x, y, strict=True)]
        some = found[0]
        for other in found[1:]:
            some = b.or_(some, other)
        return b.icmp_unsigned("!=", b.bitcast(some, ir.IntType(v.lanes)), ir.Constant(ir.IntType(v.lanes), 0))

    return types.boolean(first, first), generate

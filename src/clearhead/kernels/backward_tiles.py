"""The inner loops of going back, on one tile: from scores and what the output's gradient says of each weight, to the
gradients of scores; and from those to the gradients of what is matched and mixed.

Tiles and pointers are those of ``microkernels``: (keys, rows), a query in each lane.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from clearhead.kernels.vectors import LOG2E, Vectors, at, i64, loop

void, index = types.void, types.int64


def _change_tile(natural):
    @intrinsic
    def change_tile(typingctx, scores, changes, keys, high, low, own):
        """scores = weights = exp(scores - high - low); changes = weights * (changes - own), 0 where the weight is.

        Before, changes hold value . grad_output of each cell; logsumexp is high + low, in the scores' unit.
        """

        def generate(context, b, signature, arguments):
            scores, changes, keys, high, low, own = arguments
            v = Vectors(b, signature.args[0].dtype)
            big, small, owns = v.load_all(high), v.load_all(low), v.load_all(own)
            zero = v.const(0.0)

            def one_key(i, _):
                row, out = v.row(scores, i), v.row(changes, i)
                logs = [b.fsub(b.fsub(s, h), r) for s, h, r in zip(v.load_all(row), big, small, strict=True)]
                weights = [v.exp2(b.fmul(x, v.const(LOG2E)) if natural else x) for x in logs]
                v.store_all(weights, row)
                changed = [b.fmul(w, b.fsub(c, o)) for w, c, o in zip(weights, v.load_all(out), owns, strict=True)]
                # Of a hidden cell's value nothing may be left, not even NaN.
                v.store_all([b.select(b.fcmp_ordered("==", w, zero), zero, c)
                             for w, c in zip(weights, changed, strict=True)], out)  # fmt: skip
                return []

            loop(b, keys, [], one_key)
            return context.get_dummy_value()

        return void(scores, scores, index, scores, scores, scores), generate

    return change_tile


change2_tile = _change_tile(natural=False)  # scores in units of log2
change_tile = _change_tile(natural=True)


@intrinsic
def multiply_tile(typingctx, changes, keys, factors):
    """changes *= factors, a tile of the same shape; what is 0 stays 0, whatever its factor."""

    def generate(context, b, signature, arguments):
        changes, keys, factors = arguments
        v = Vectors(b, signature.args[0].dtype)
        zero = v.const(0.0)

        def one_key(i, _):
            row = v.row(changes, i)
            pairs = zip(v.load_all(row), v.load_all(v.row(factors, i)), strict=True)
            v.store_all([b.select(b.fcmp_ordered("==", c, zero), zero, b.fmul(c, f)) for c, f in pairs], row)
            return []

        loop(b, keys, [], one_key)
        return context.get_dummy_value()

    return void(changes, index, changes), generate


@intrinsic
def uncap_tile(typingctx, changes, keys, bent, scaled, softcap, sums):
    """From gradients of softcap * tanh(scaled / softcap), which is bent, to those of scaled.

    sums[rows] += the share of each in the gradient of the softcap itself.
    """

    def generate(context, b, signature, arguments):
        changes, keys, bent, scaled, softcap, sums = arguments
        v = Vectors(b, signature.args[0].dtype)
        cap, one, zero = v.splat(softcap), v.const(1.0), v.const(0.0)

        def one_key(i, carried):
            row, out, after = v.row(changes, i), [], []
            parts = zip(v.load_all(row), v.load_all(v.row(bent, i)), v.load_all(v.row(scaled, i)), carried, strict=True)
            for c, t, s, total in parts:
                ratio, none = b.fdiv(t, cap), b.fcmp_ordered("==", c, zero)
                flat = b.fsub(one, b.fmul(ratio, ratio))
                share = b.fmul(c, b.fsub(ratio, b.fmul(b.fdiv(s, cap), flat)))
                after.append(b.fadd(total, b.select(none, zero, share)))
                out.append(b.select(none, zero, b.fmul(c, flat)))
            v.store_all(out, row)
            return after

        v.store_all(loop(b, keys, v.load_all(sums), one_key), sums)
        return context.get_dummy_value()

    return void(changes, index, changes, changes, changes.dtype, changes), generate


def _gather_tile(narrow):
    @intrinsic
    def gather_tile(typingctx, weights, keys, source, stride, rows, out, width):
        """out[keys, some columns] += weights[keys, rows] @ source[rows, some columns]; ``stride`` apart are source's
        rows, ``width`` those of out.

        keys is a multiple of the micro-tile's. Columns ride in the lanes: as many vectors as a tile has, or one.
        """

        def generate(context, b, signature, arguments):
            weights, keys, source, stride, rows, out, width = arguments
            v = Vectors(b, signature.args[0].dtype)
            count = 1 if narrow else v.count
            # Where few accumulators would wait for each other, several sums go on side by side.
            sums = max(1, v.count // count)
            step = v.keys * count

            def some_keys(t, _):
                first = b.mul(t, ir.Constant(i64, v.keys))
                tops = [at(b, v.row(weights, first), r * v.rows) for r in range(v.keys)]

                def one_row(i, accumulators):
                    place = b.gep(source, [b.mul(i, stride)])
                    x = [v.load(at(b, place, c * v.lanes)) for c in range(count)]
                    new = []
                    for r, top in enumerate(tops):
                        w = v.splat(b.load(at(b, top, i)))
                        new += [v.fma(w, x[c], accumulators[r * count + c]) for c in range(count)]
                    return new

                def some_rows(i, carried):
                    begin, new = b.mul(i, ir.Constant(i64, sums)), []
                    for s in range(sums):
                        new += one_row(b.add(begin, ir.Constant(i64, s)), carried[s * step : (s + 1) * step])
                    return new

                turns = b.sdiv(rows, ir.Constant(i64, sums))
                carried = loop(b, turns, [v.const(0.0)] * (step * sums), some_rows)
                done, total = b.mul(turns, ir.Constant(i64, sums)), carried[:step]
                for s in range(1, sums):
                    total = [b.fadd(x, y) for x, y in zip(total, carried[s * step : (s + 1) * step], strict=True)]
                total = loop(b, b.sub(rows, done), total, lambda i, a: one_row(b.add(done, i), a))
                for r in range(v.keys):
                    place = b.gep(out, [b.mul(b.add(first, ir.Constant(i64, r)), width)])
                    for c in range(count):
                        into = at(b, place, c * v.lanes)
                        v.store(b.fadd(v.load(into), total[r * count + c]), into)
                return []

            loop(b, b.sdiv(keys, ir.Constant(i64, v.keys)), [], some_keys)
            return context.get_dummy_value()

        return void(weights, index, source, index, index, out, index), generate

    return gather_tile


gather_tile = _gather_tile(narrow=False)
gather_narrow_tile = _gather_tile(narrow=True)


@intrinsic
def additive_back(typingctx, key, stride, query, vector, changes, hidden, keys, grad_query, grad_key, width, sums):
    """From gradients of sum over h of vector[h] * tanh(key[j, h] + query[h, r]), in changes, to those of query
    (hidden, rows), key (hidden, keys; rows are ``width`` apart) and, for each row, vector: sums (hidden, rows). All are
    added to."""

    def generate(context, b, signature, arguments):
        key, stride, query, vector, changes, hidden, keys, grad_query, grad_key, width, sums = arguments
        v = Vectors(b, signature.args[0].dtype)
        zero, one = v.const(0.0), v.const(1.0)

        def one_hidden(h, _):
            q, weight = v.load_all(v.row(query, h)), v.splat(b.load(at(b, vector, h)))
            own = b.gep(grad_key, [b.mul(h, width)])

            def one_key(j, carried):
                k = v.splat(b.load(at(b, key, b.mul(j, stride), h)))
                asked, direct, whole = [], [], zero
                for c, (change, x) in enumerate(zip(v.load_all(v.row(changes, j)), q, strict=True)):
                    none, t = b.fcmp_ordered("==", change, zero), v.tanh(b.fadd(k, x))
                    part = b.fmul(b.fmul(change, b.fsub(one, b.fmul(t, t))), weight)
                    part = b.select(none, zero, part)
                    asked.append(b.fadd(carried[c], part))
                    direct.append(b.fadd(carried[v.count + c], b.select(none, zero, b.fmul(change, t))))
                    whole = b.fadd(whole, part)
                into = b.gep(own, [j])
                b.store(b.fadd(b.load(into), v.sum_lanes(whole)), into)
                return asked + direct

            into, total = v.row(grad_query, h), v.row(sums, h)
            out = loop(b, keys, v.load_all(into) + v.load_all(total), one_key)
            v.store_all(out[: v.count], into)
            v.store_all(out[v.count :], total)
            return []

        loop(b, hidden, [], one_hidden)
        return context.get_dummy_value()

    return void(key, index, query, query, changes, index, index, query, query, index, query), generate

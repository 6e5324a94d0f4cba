"""The inner loops, on one tile: ``rows`` queries, which ride in the vector lanes, by some keys.

A tile of scores is an array (keys, rows). Keys and values are read where they lie, a scalar at a time, and
broadcast over the lanes; sums and maxima over keys therefore never cross lanes. Each function is one step of
``forward.attend`` and its kin, named after what it does to the tile. Pointers are made by ``addresses.pointer``.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from clearhead.kernels.vectors import LOG2E, Vectors, at, i64, loop

void, index = types.void, types.int64


@intrinsic
def turn_in(typingctx, source, step, queries, out, dim, factor):
    """out[d, r] = factor * source[queries[r] * step + d]: rows of queries become columns. dim is of whole vectors."""

    def generate(context, b, signature, arguments):
        source, step, queries, out, dim, factor = arguments
        v = Vectors(b, signature.args[3].dtype)
        stored, scale, lanes = signature.args[0].dtype, v.splat(factor), ir.Constant(i64, v.lanes)
        for c in range(v.count):
            first = [b.load(at(b, queries, c * v.lanes + r)) for r in range(v.lanes)]
            rows = [b.gep(source, [b.mul(n, step)]) for n in first]

            def square(n, _, c=c, rows=rows):
                d = b.mul(n, lanes)
                columns = v.transpose([v.load_stored(b.gep(row, [d]), stored) for row in rows])
                for i, column in enumerate(columns):
                    v.store(b.fmul(column, scale), at(b, v.row(out, d), i * v.rows + c * v.lanes))
                return []

            loop(b, b.sdiv(dim, lanes), [], square)
        return context.get_dummy_value()

    return void(source, index, types.CPointer(types.int64), out, index, out.dtype), generate


@intrinsic
def turn_out(typingctx, tile, factor, queries, out, step, dim):
    """out[queries[r] * step + d] = tile[d, r] * factor[r]: columns become rows again. dim is of whole vectors."""

    def generate(context, b, signature, arguments):
        tile, factor, queries, out, step, dim = arguments
        v, stored = Vectors(b, signature.args[0].dtype), signature.args[3].dtype
        lanes, factors = ir.Constant(i64, v.lanes), v.load_all(factor)
        for c in range(v.count):
            first = [b.load(at(b, queries, c * v.lanes + r)) for r in range(v.lanes)]
            rows = [b.gep(out, [b.mul(n, step)]) for n in first]

            def square(n, _, c=c, rows=rows):
                d = b.mul(n, lanes)
                columns = [v.load(at(b, v.row(tile, d), i * v.rows + c * v.lanes)) for i in range(v.lanes)]
                for row, numbers in zip(rows, v.transpose([b.fmul(x, factors[c]) for x in columns]), strict=True):
                    v.store_stored(numbers, b.gep(row, [d]), stored)
                return []

            loop(b, b.sdiv(dim, lanes), [], square)
        return context.get_dummy_value()

    return void(tile, tile, types.CPointer(types.int64), out, index, index), generate


@intrinsic
def score_tile(typingctx, key, stride, value, value_stride, query, scores, dim, keys, top):
    """scores[keys, rows] = key[keys, dim] @ query[dim, rows]; top[rows] = max(top, scores).

    keys is a multiple of the micro-tile's. One micro-tile's scores fill the accumulators over the whole of dim. In as
    many parts as there are rows to be used next, keys and these keys' values, a row is asked for, line by line.
    """

    def generate(context, b, signature, arguments):
        key, stride, value, value_stride, query, scores, dim, keys, top = arguments
        v = Vectors(b, signature.args[0].dtype)
        count, parts = ir.Constant(i64, v.keys), ir.Constant(i64, 2 * v.keys)
        # Each part goes in steps, which ask for 2 * v.keys numbers per one of dim: so many of dim that these are a
        # line, where registers are left for it.
        full = v.registers - v.keys * v.count < 2 * v.count
        lines, dims = max(1, 2 * v.keys * v.size // 64), 1 if full else max(1, 64 // (2 * v.keys * v.size))
        part = b.sdiv(dim, ir.Constant(i64, 2 * v.keys * dims))  # steps

        def some_keys(t, running):
            first = b.mul(t, count)
            rows = [at(b, key, b.mul(stride, b.add(first, ir.Constant(i64, r)))) for r in range(v.keys)]
            next_keys = at(b, key, b.mul(stride, b.add(first, count)))
            values = at(b, value, b.mul(value_stride, first))

            def one_dim(i, accumulators):
                q = v.load_all(v.row(query, i))
                out = []
                for r in range(v.keys):
                    k = v.splat(b.load(at(b, rows[r], i)))
                    out += [v.fma(k, q[c], accumulators[r * v.count + c]) for c in range(v.count)]
                return out

            def some_dims(n, accumulators):
                late = b.icmp_signed(">=", n, count)
                key_row, value_row = b.mul(n, stride), b.mul(b.sub(n, count), value_stride)
                ahead = b.select(late, b.gep(values, [value_row]), b.gep(next_keys, [key_row]))
                begin = b.mul(n, part)

                def step(i, accumulators):
                    place = b.gep(ahead, [b.mul(i, ir.Constant(i64, 2 * v.keys * dims))])
                    for line in range(lines):
                        v.prefetch(place, 64 * line)
                    first = b.mul(b.add(begin, i), ir.Constant(i64, dims))
                    for d in range(dims):
                        accumulators = one_dim(b.add(first, ir.Constant(i64, d)), accumulators)
                    return accumulators

                return loop(b, part, accumulators, step)

            s = loop(b, parts, [v.const(0.0)] * (v.keys * v.count), some_dims)
            done = b.mul(part, ir.Constant(i64, 2 * v.keys * dims))
            s = loop(b, b.sub(dim, done), s, lambda i, accumulators: one_dim(b.add(done, i), accumulators))
            for r in range(v.keys):
                row = s[r * v.count : (r + 1) * v.count]
                v.store_all(row, at(b, v.row(scores, first), r * v.rows))
                running = [v.max(x, m) for x, m in zip(row, running, strict=True)]
            return running

        v.store_all(loop(b, b.sdiv(keys, count), v.load_all(top), some_keys), top)
        return context.get_dummy_value()

    return void(key, index, key, index, query, scores, index, index, top), generate


@intrinsic
def additive_tile(typingctx, key, stride, query, vector, scores, hidden, keys):
    """scores[keys, rows] = sum over h of vector[h] * tanh(key[keys, h] + query[h, rows]). keys is even."""

    def generate(context, b, signature, arguments):
        key, stride, query, vector, scores, hidden, keys = arguments
        v = Vectors(b, signature.args[0].dtype)

        def some_keys(t, _):
            first = b.mul(t, ir.Constant(i64, v.at_once))
            rows = [at(b, key, b.mul(stride, b.add(first, ir.Constant(i64, r)))) for r in range(v.at_once)]

            def one_hidden(i, sums):
                q, weight, out = v.load_all(v.row(query, i)), v.splat(b.load(at(b, vector, i))), []
                for r, row in enumerate(rows):
                    k = v.splat(b.load(at(b, row, i)))
                    out += [v.fma(weight, v.tanh(b.fadd(x, k)), sums[r * v.count + c]) for c, x in enumerate(q)]
                return out

            s = loop(b, hidden, [v.const(0.0)] * (v.at_once * v.count), one_hidden)
            for r in range(v.at_once):
                v.store_all(s[r * v.count : (r + 1) * v.count], at(b, v.row(scores, first), r * v.rows))
            return []

        loop(b, b.sdiv(keys, ir.Constant(i64, v.at_once)), [], some_keys)
        return context.get_dummy_value()

    return void(key, index, query, query, scores, index, index), generate


def _exp_tile(natural):
    @intrinsic
    def exp_tile(typingctx, scores, keys, old_top, top, total, change):
        """scores = exp(scores - top); change = exp(old_top - top); total = total*change + sum; old_top = top."""

        def generate(context, b, signature, arguments):
            scores, keys, old_top, top, total, change = arguments
            v = Vectors(b, signature.args[0].dtype)
            new = v.load_all(top)
            # A row that has seen nothing yet has top -inf: subtract 0, so that its scores stay -inf and not NaN.
            base = [b.select(b.fcmp_ordered("==", m, v.const(float("-inf"))), v.const(0.0), m) for m in new]

            def power(difference):
                return v.exp2(b.fmul(difference, v.const(LOG2E)) if natural else difference)

            def some_keys(i, sums):
                sums = list(sums)
                for r in range(v.at_once):
                    row = at(b, v.row(scores, b.mul(i, ir.Constant(i64, v.at_once))), r * v.rows)
                    weights = [power(b.fsub(s, m)) for s, m in zip(v.load_all(row), base, strict=True)]
                    v.store_all(weights, row)
                    sums = [b.fadd(a, w) for a, w in zip(sums, weights, strict=True)]
                return sums

            sums = loop(b, b.sdiv(keys, ir.Constant(i64, v.at_once)), [v.const(0.0)] * v.count, some_keys)
            factors = [power(b.fsub(o, m)) for o, m in zip(v.load_all(old_top), base, strict=True)]
            v.store_all([v.fma(t, c, s) for t, c, s in zip(v.load_all(total), factors, sums, strict=True)], total)
            v.store_all(new, old_top)
            v.store_all(factors, change)
            return context.get_dummy_value()

        return void(scores, index, scores, scores, scores, scores), generate

    return exp_tile


exp2_tile = _exp_tile(natural=False)  # scores are in units of log2: the factor log2(e) is in the query already
exp_tile = _exp_tile(natural=True)


@intrinsic
def mix_tile(typingctx, value, column, stride, weights, output, keys, change):
    """output = output*change[rows] + value[keys, column:column+n]^T @ weights[keys, rows], n the micro-tile's keys.

    The tile's own sum begins at 0 and joins what was there last: one long chain of additions rounds twice as badly.
    """

    def generate(context, b, signature, arguments):
        value, column, stride, weights, output, keys, change = arguments
        v = Vectors(b, signature.args[0].dtype)

        def one_key(i, accumulators):
            w, row, out = v.load_all(v.row(weights, i)), at(b, value, column, b.mul(i, stride)), []
            for r in range(v.keys):
                x = v.splat(b.load(at(b, row, r)))
                out += [v.fma(x, w[c], accumulators[r * v.count + c]) for c in range(v.count)]
            return out

        total = loop(b, keys, [v.const(0.0)] * (v.keys * v.count), one_key)
        factors = v.load_all(change)
        for r in range(v.keys):
            place, sums = at(b, output, r * v.rows), total[r * v.count : (r + 1) * v.count]
            v.store_all([v.fma(o, f, s) for o, f, s in zip(v.load_all(place), factors, sums, strict=True)], place)
        return context.get_dummy_value()

    return void(value, index, index, value, value, index, value), generate


def _weigh_tile(natural):
    @intrinsic
    def weigh_tile(typingctx, scores, keys, high, low, logs):
        """logs = log2 of the weights = scores - logsumexp; scores = the weights.

        logsumexp is high + low, both in the scores' unit: two numbers, so that large scores lose nothing.
        """

        def generate(context, b, signature, arguments):
            scores, keys, high, low, logs = arguments
            v = Vectors(b, signature.args[0].dtype)
            big, small = v.load_all(high), v.load_all(low)

            def one_key(i, _):
                row = v.row(scores, i)
                out = [b.fsub(b.fsub(s, h), r) for s, h, r in zip(v.load_all(row), big, small, strict=True)]
                out = [b.fmul(x, v.const(LOG2E)) if natural else x for x in out]
                v.store_all(out, v.row(logs, i))
                v.store_all([v.exp2(x) for x in out], row)
                return []

            loop(b, keys, [], one_key)
            return context.get_dummy_value()

        return void(scores, index, scores, scores, scores), generate

    return weigh_tile


weigh2_tile = _weigh_tile(natural=False)
weigh_tile = _weigh_tile(natural=True)


@intrinsic
def fold_tile(typingctx, weights, logs, keys, folds):
    """folds[0] -= sum w*log2(w); folds[1] += sum w*k with k counted from the tile's first key; folds[2] += sum w."""

    def generate(context, b, signature, arguments):
        weights, logs, keys, folds = arguments
        v = Vectors(b, signature.args[0].dtype)
        n = v.count

        def one_key(i, carried):
            w, k = v.load_all(v.row(weights, i)), v.splat(b.sitofp(i, v.scalar))
            # Hidden cells have weight 0 and logarithm -inf: 0 * -2000 is 0, as their share should be.
            t = [v.max(x, v.const(-2000.0)) for x in v.load_all(v.row(logs, i))]
            bits = [b.fsub(e, b.fmul(x, y)) for e, x, y in zip(carried[:n], w, t, strict=True)]
            places = [v.fma(x, k, p) for p, x in zip(carried[n : 2 * n], w, strict=True)]
            return bits + places + [b.fadd(m, x) for m, x in zip(carried[2 * n :], w, strict=True)]

        start = [x for fold in range(3) for x in v.load_all(at(b, folds, fold * v.rows))]
        out = loop(b, keys, start, one_key)
        for fold in range(3):
            v.store_all(out[fold * n : (fold + 1) * n], at(b, folds, fold * v.rows))
        return context.get_dummy_value()

    return void(weights, weights, index, weights), generate


@intrinsic
def finite_row(typingctx, row, count):
    """Whether all of the numbers row[0 ... count-1] are finite: x*0 is NaN where x is not."""

    def generate(context, b, signature, arguments):
        row, count = arguments
        v = Vectors(b, signature.args[0].dtype)
        zero = v.const(0.0)
        whole = b.sdiv(count, ir.Constant(i64, v.lanes))
        sums = loop(b, whole, [zero], lambda i, c: [
            v.fma(v.load(b.gep(row, [b.mul(i, ir.Constant(i64, v.lanes))])), zero, c[0])
        ])  # fmt: skip
        done = b.mul(whole, ir.Constant(i64, v.lanes))
        rest = loop(b, b.sub(count, done), [ir.Constant(v.scalar, 0.0)], lambda i, c: [
            b.fadd(c[0], b.fmul(b.load(b.gep(row, [b.add(done, i)])), ir.Constant(v.scalar, 0.0)))
        ])  # fmt: skip
        strange = b.fcmp_unordered("uno", sums[0], sums[0])
        mask = b.bitcast(strange, ir.IntType(v.lanes))
        some = b.icmp_unsigned("!=", mask, ir.Constant(ir.IntType(v.lanes), 0))
        return b.not_(b.or_(some, b.fcmp_unordered("uno", rest[0], rest[0])))

    return types.boolean(row, index), generate

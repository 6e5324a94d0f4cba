"""The inner loops on a matrix unit: products of tiles of bfloat16, summed in float32 (Intel's AMX).

One instruction multiplies 16 x 32 numbers by 32 x 16. Its first operand is rows as they lie in memory: 16 keys by 32 of
dim, or, of values turned, 16 of value dim by 32 keys. Its second is *pairs*: two numbers that follow each other along
the summed axis share 32 bits, and the 16 columns lie side by side, as queries do in the lanes. Products of bfloat16
are exact in float32; weights come as the sum of two bfloat16, which leaves 2**-16 of each: products and sums of float32
in all but name. The unit takes subnormal numbers for 0, so ``calm`` says where numbers are far from that.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18 (TILECFG, TMUL).
"""

import ctypes
import platform
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from clearhead.kernels.target import features
from clearhead.kernels.vectors import LOG2E, Vectors, at, i64, loop

void, index = types.void, types.int64
i8, bytes_at = ir.IntType(8), ir.IntType(8).as_pointer()
TILES = 8
ROWS, PAIRS = 16, 16  # of a tile: rows, and pairs along the summed axis
DEPTH = 2 * PAIRS  # numbers along the summed axis: keys of a micro-tile come in as many
ARCH_PRCTL, REQUEST, TILE_DATA = 158, 0x1023, 18  # Linux asks to be asked before a process uses the unit
CALM_LOW, CALM_HIGH = (
    127 - 60,
    127 + 60,
)  # biased exponents: products and sums of such numbers neither vanish nor overflow


@cache
def available() -> bool:
    """Whether this process can use a matrix unit (NUMBA_CPU_FEATURES is heeded)."""
    if not {"avx512f", "amx-tile", "amx-bf16"} <= features() or platform.system() != "Linux":
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST, TILE_DATA) == 0


def configuration() -> Any:
    """What the unit is told before it is used: eight tiles of 16 rows of 64 bytes."""
    told = np.zeros(64, np.uint8)
    told[0] = 1  # the only palette there is
    told[16:32].view(np.uint16)[:] = 4 * PAIRS
    told[48:56] = ROWS
    return told


class Unit:
    """The unit's instructions; tiles have numbers from 0 to 7."""

    def __init__(self, builder):
        self.b = builder

    def _call(self, name, *arguments):
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        self.b.call(cgutils.get_or_insert_function(self.b.module, kind, f"llvm.x86.{name}"), arguments)

    def configure(self, address):
        self._call("ldtilecfg", self.b.bitcast(address, bytes_at))

    def release(self):
        self._call("tilerelease")

    def zero(self, tile):
        self._call("tilezero", ir.Constant(i8, tile))

    def load(self, tile, address, step):
        """Rows ``step`` bytes apart."""
        self._call("tileloadd64", ir.Constant(i8, tile), self.b.bitcast(address, bytes_at), step)

    def store(self, tile, address, step):
        self._call("tilestored64", ir.Constant(i8, tile), self.b.bitcast(address, bytes_at), step)

    def multiply_add(self, total, rows, pairs):
        """total += rows @ pairs"""
        self._call("tdpbf16ps", *(ir.Constant(i8, tile) for tile in (total, rows, pairs)))


def pairs_of(v):
    """Which tile holds the pairs of each column of queries: the first ones hold sums, the next the rows."""
    return lambda column: v.count + 1 + column % (TILES - v.count - 1)


@intrinsic
def configure(typingctx, told):
    """Begin to use the unit: see ``configuration``."""

    def generate(context, b, signature, arguments):
        Unit(b).configure(arguments[0])
        return context.get_dummy_value()

    return void(told), generate


@intrinsic
def release(typingctx):
    """No more of it: the thread's registers are small again."""

    def generate(context, b, signature, arguments):
        Unit(b).release()
        return context.get_dummy_value()

    return void(), generate


@intrinsic
def match_pairs(typingctx, key, stride, query, scores, dim, keys, factor, top):
    """scores[keys, rows] = factor * key[keys, dim] @ query, top[rows] = max(top, scores).

    key : bfloat16, rows ``stride`` numbers apart. query : pairs (dim / 2, rows). dim and keys are multiples of DEPTH.
    """

    def generate(context, b, signature, arguments):
        key, stride, query, scores, dim, keys, factor, top = arguments
        v, unit = Vectors(b, signature.args[3].dtype), Unit(b)
        own = pairs_of(v)
        columns, wide = range(v.count), ir.Constant(i64, 4 * v.rows)
        step, scale = b.mul(stride, ir.Constant(i64, 2)), v.splat(factor)

        def some_keys(t, running):
            first = b.mul(t, ir.Constant(i64, ROWS))
            row, out = b.gep(key, [b.mul(first, stride)]), v.row(scores, first)
            for c in columns:
                unit.zero(c)

            def some_dims(n, _):
                unit.load(v.count, b.gep(row, [b.mul(n, ir.Constant(i64, DEPTH))]), step)
                pairs = b.gep(query, [b.mul(n, ir.Constant(i64, PAIRS * v.rows))])
                for c in columns:
                    unit.load(own(c), at(b, pairs, c * v.lanes), wide)
                    unit.multiply_add(c, v.count, own(c))
                return []

            loop(b, b.sdiv(dim, ir.Constant(i64, DEPTH)), [], some_dims)
            for c in columns:
                unit.store(c, at(b, out, c * v.lanes), wide)

            def one_key(i, running):
                place = v.row(out, i)
                values = [b.fmul(x, scale) for x in v.load_all(place)]
                v.store_all(values, place)
                return [v.max(x, m) for x, m in zip(values, running, strict=True)]

            return loop(b, ir.Constant(i64, ROWS), running, one_key)

        v.store_all(loop(b, b.sdiv(keys, ir.Constant(i64, ROWS)), v.load_all(top), some_keys), top)
        return context.get_dummy_value()

    return void(key, index, query, scores, index, index, scores.dtype, scores), generate


def _exp_pairs(natural):
    @intrinsic
    def exp_pairs(typingctx, scores, keys, old_top, top, total, change, high, low):
        """As ``microkernels.exp_tile``, but weights go to high + low, pairs (keys / 2, rows) of bfloat16, and top rises
        only where it has risen by more than FAR: until then, weights of up to 2**FAR do no harm, and what was summed
        need not be scaled down. Returns whether any change is not 1.
        """

        def generate(context, b, signature, arguments):
            scores, keys, old_top, top, total, change, high, low = arguments
            v = Vectors(b, signature.args[0].dtype)
            upper, sixteen = v.ints(0xFFFF0000), v.ints(16)
            infinite, far = v.const(float("-inf")), v.const(FAR)
            old, new = v.load_all(old_top), v.load_all(top)
            raised = [b.fcmp_unordered(">", x, b.fadd(o, far)) for x, o in zip(new, old, strict=True)]
            new = [b.select(r, x, o) for r, x, o in zip(raised, new, old, strict=True)]
            base = [b.select(b.fcmp_ordered("==", m, infinite), v.const(0.0), m) for m in new]

            def power(difference):
                return v.exp2(b.fmul(difference, v.const(LOG2E)) if natural else difference)

            def bits(x):
                return b.bitcast(x, v.integers)

            def two_keys(i, sums):
                first = v.row(scores, b.mul(i, ir.Constant(i64, 2)))
                one, other = (
                    [power(b.fsub(s, m)) for s, m in zip(v.load_all(at(b, first, r * v.rows)), base, strict=True)]
                    for r in range(2)
                )
                sums = [b.fadd(a, b.fadd(x, y)) for a, x, y in zip(sums, one, other, strict=True)]
                for c, (x, y) in enumerate(zip(one, other, strict=True)):
                    tops = [b.and_(bits(z), upper) for z in (x, y)]
                    rest = [bits(b.fsub(z, b.bitcast(t, v.vector))) for z, t in zip((x, y), tops, strict=True)]
                    for place, (p, q) in ((high, tops), (low, rest)):
                        pair = b.or_(b.lshr(p, sixteen), b.and_(q, upper))
                        there = at(b, v.row(place, i), c * v.lanes)
                        b.store(pair, b.bitcast(there, v.integers.as_pointer())).align = 4
                return sums

            sums = loop(b, b.sdiv(keys, ir.Constant(i64, 2)), [v.const(0.0)] * v.count, two_keys)
            factors = [power(b.fsub(o, m)) for o, m in zip(old, base, strict=True)]
            factors = [b.select(r, f, v.const(1.0)) for r, f in zip(raised, factors, strict=True)]
            v.store_all([v.fma(t, c, s) for t, c, s in zip(v.load_all(total), factors, sums, strict=True)], total)
            v.store_all(new, old_top)
            v.store_all(new, top)
            v.store_all(factors, change)
            some = raised[0]
            for r in raised[1:]:
                some = b.or_(some, r)
            return b.icmp_unsigned("!=", b.bitcast(some, ir.IntType(v.lanes)), ir.Constant(ir.IntType(v.lanes), 0))

        return types.boolean(scores, index, scores, scores, scores, scores, high, high), generate

    return exp_pairs


FAR = 8.0  # in the scores' unit
exp2_pairs, exp_pairs = _exp_pairs(natural=False), _exp_pairs(natural=True)


@intrinsic
def scale_rows(typingctx, output, columns, change):
    """output[columns, rows] *= change[rows]"""

    def generate(context, b, signature, arguments):
        output, columns, change = arguments
        v = Vectors(b, signature.args[0].dtype)
        factors = v.load_all(change)

        def one(i, _):
            row = v.row(output, i)
            v.store_all([b.fmul(x, f) for x, f in zip(v.load_all(row), factors, strict=True)], row)
            return []

        loop(b, columns, [], one)
        return context.get_dummy_value()

    return void(output, index, output), generate


@intrinsic
def mix_pairs(typingctx, value, stride, high, low, output, columns, keys):
    """output[columns, rows] += value[columns, keys] @ (high + low).

    value : bfloat16, turned, rows ``stride`` numbers apart. high, low : pairs (keys / 2, rows). columns is a
    multiple of ROWS, keys of DEPTH.
    """

    def generate(context, b, signature, arguments):
        value, stride, high, low, output, columns, keys = arguments
        v, unit = Vectors(b, signature.args[4].dtype), Unit(b)
        own = pairs_of(v)
        step, wide = b.mul(stride, ir.Constant(i64, 2)), ir.Constant(i64, 4 * v.rows)

        def some_columns(t, _):
            first = b.mul(t, ir.Constant(i64, ROWS))
            row, out = b.gep(value, [b.mul(first, stride)]), v.row(output, first)
            for c in range(v.count):
                unit.load(c, at(b, out, c * v.lanes), wide)

            def some_keys(n, _):
                unit.load(v.count, b.gep(row, [b.mul(n, ir.Constant(i64, DEPTH))]), step)
                for part in (high, low):
                    pairs = b.gep(part, [b.mul(n, ir.Constant(i64, PAIRS * v.rows))])
                    for c in range(v.count):
                        unit.load(own(c), at(b, pairs, c * v.lanes), wide)
                        unit.multiply_add(c, v.count, own(c))
                return []

            loop(b, b.sdiv(keys, ir.Constant(i64, DEPTH)), [], some_keys)
            for c in range(v.count):
                unit.store(c, at(b, out, c * v.lanes), wide)
            return []

        loop(b, b.sdiv(columns, ir.Constant(i64, ROWS)), [], some_columns)
        return context.get_dummy_value()

    return void(value, index, high, high, output, index, index), generate


@intrinsic
def turn_values(typingctx, value, stride, keys, columns, out, width):
    """out[columns, width] = value[keys, columns] turned, for keys and columns that are multiples of DEPTH.

    Two keys' numbers are joined to pairs, which turn as numbers of 32 bits do.
    """

    def generate(context, b, signature, arguments):
        value, stride, keys, columns, out, width = arguments
        v = Vectors(b, types.float32)
        half, sixteen = ir.VectorType(ir.IntType(16), v.lanes), v.ints(16)
        lanes = ir.Constant(i64, v.lanes)

        def some_keys(t, _):
            first = b.mul(t, ir.Constant(i64, 2 * v.lanes))

            def some_columns(n, _):
                column = b.mul(n, lanes)
                pairs = []
                for r in range(v.lanes):
                    parts = []
                    for s in range(2):
                        j = b.add(first, ir.Constant(i64, 2 * r + s))
                        place = b.gep(value, [b.add(b.mul(j, stride), column)])
                        loaded = b.load(b.bitcast(place, half.as_pointer()))
                        loaded.align = 2
                        parts.append(b.zext(loaded, v.integers))
                    pairs.append(b.bitcast(b.or_(parts[0], b.shl(parts[1], sixteen)), v.vector))
                for c, turned in enumerate(v.transpose(pairs)):
                    row = b.mul(b.add(column, ir.Constant(i64, c)), width)
                    place = b.gep(out, [b.add(row, first)])
                    b.store(turned, b.bitcast(place, v.vector.as_pointer())).align = 2
                return []

            loop(b, b.sdiv(columns, lanes), [], some_columns)
            return []

        loop(b, b.sdiv(keys, ir.Constant(i64, 2 * v.lanes)), [], some_keys)
        return context.get_dummy_value()

    return void(value, index, index, index, out, index), generate


@intrinsic
def turn_pairs(typingctx, source, step, queries, out, dim, computed):
    """out[dim / 2, rows] = the rows source[queries[r] * step ...], turned, two numbers at a time. dim : of DEPTH.

    ``computed`` points at numbers of the type computed in.
    """

    def generate(context, b, signature, arguments):
        source, step, queries, out, dim, _ = arguments
        v = Vectors(b, signature.args[5].dtype)
        for c in range(v.count):
            first = [b.load(at(b, queries, c * v.lanes + r)) for r in range(v.lanes)]
            rows = [b.gep(source, [b.mul(n, step)]) for n in first]

            def square(n, _, c=c, rows=rows):
                pairs = b.mul(n, ir.Constant(i64, v.lanes))
                offset = b.mul(n, ir.Constant(i64, 2 * v.lanes))
                loaded = []
                for row in rows:
                    vector = b.load(b.bitcast(b.gep(row, [offset]), v.vector.as_pointer()))
                    vector.align = 2
                    loaded.append(vector)
                for i, column in enumerate(v.transpose(loaded)):
                    place = at(b, v.row(out, pairs), i * v.rows + c * v.lanes)
                    b.store(column, b.bitcast(place, v.vector.as_pointer())).align = 4
                return []

            loop(b, b.sdiv(dim, ir.Constant(i64, 2 * v.lanes)), [], square)
        return context.get_dummy_value()

    return void(source, index, queries, out, index, computed), generate


@intrinsic
def calm(typingctx, rows, stride, count, dim):
    """Whether rows[count, dim], bfloat16, hold only 0 and numbers of exponents CALM_LOW ... CALM_HIGH."""

    def generate(context, b, signature, arguments):
        rows, stride, count, dim = arguments
        lanes = 2 * Vectors(b, types.float32).lanes
        kind = ir.VectorType(ir.IntType(16), lanes)

        def const(number):
            return ir.Constant(kind, [number] * lanes)

        def one_row(j, found):
            row = b.gep(rows, [b.mul(j, stride)])

            def some(n, found):
                most, least = found
                loaded = b.load(b.bitcast(b.gep(row, [b.mul(n, ir.Constant(i64, lanes))]), kind.as_pointer()))
                loaded.align = 2
                size = b.and_(loaded, const(0x7FFF))
                below = b.sub(size, const(1))  # of 0, this is the largest number there is
                most = b.select(b.icmp_unsigned(">", size, most), size, most)
                return [most, b.select(b.icmp_unsigned("<", below, least), below, least)]

            return loop(b, b.sdiv(dim, ir.Constant(i64, lanes)), found, some)

        most, least = loop(b, count, [const(0), const(0xFFFF)], one_row)
        high = b.icmp_unsigned(">", most, const(((CALM_HIGH + 1) << 7) - 1))
        low = b.icmp_unsigned("<", least, const((CALM_LOW << 7) - 1))
        whole = ir.IntType(lanes)
        return b.icmp_unsigned("==", b.bitcast(b.or_(high, low), whole), ir.Constant(whole, 0))

    return types.boolean(rows, index, index, index), generate

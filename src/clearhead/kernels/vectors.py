"""LLVM vectors inside Numba: the words in which the micro-kernels are written.

``Vectors`` is a small vocabulary (load, store, fma, exp2, select ...) for one element type on this machine;
``loop`` is a counted loop whose carried values stay in registers.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from clearhead.kernels.addresses import narrow_bits, widen_bits
from clearhead.kernels.target import host

i8, i32, i64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
LOG2E = 1.4426950408889634074
LN2 = 0.69314718055994530942

# 2**f = 1 + f*(c0 + f*(c1 + ...)), minimax in relative error on [-1/2, 1/2]: highest power first. Degree 6 errs by
# 2.6e-9 (float32 rounds at 6e-8), degree 11 by 1.8e-17 (float64 rounds at 1.1e-16).
EXP2_FLOAT32 = (1.55946781613266193e-4, 1.34066439023517592e-3, 9.61769297299306232e-3, 5.55031055101379717e-2,
                2.40226527828877374e-1, 6.93147214968027899e-1)  # fmt: skip
EXP2_FLOAT64 = (4.07807192958833667e-10, 7.07257041281442351e-9, 1.01806476592341389e-7, 1.32154426753298221e-6,
                1.52527273851938682e-5, 1.54035304415721303e-4, 1.33335581534399647e-3, 9.61812910760700238e-3,
                5.55041086647903946e-2, 2.4022650695910098e-1, 6.93147180559945697e-1)  # fmt: skip


class Vectors:
    """Vector operations on ``float32`` or ``float64``, as wide as this machine's registers."""

    def __init__(self, builder, dtype):
        self.b = builder
        wide = dtype == types.float64
        if not wide and dtype != types.float32:
            raise TypeError(f"kernels compute in float32 and float64, not {dtype}")
        self.scalar = ir.DoubleType() if wide else ir.FloatType()
        self.size = 8 if wide else 4
        self.lanes = host().lanes(f"f{self.size}")
        self.count = host().vectors
        self.rows = self.lanes * self.count
        self.keys = host().keys
        self.at_once = max(1, 6 // self.count)  # keys in a turn of loops that need no accumulator for each
        self.registers = host().registers
        self.vector = ir.VectorType(self.scalar, self.lanes)
        self.integer = i64 if wide else i32
        self.integers = ir.VectorType(self.integer, self.lanes)
        self.indices = ir.VectorType(i32, self.lanes)
        self.mantissa, self.bias = (52, 1023) if wide else (23, 127)
        self.exp2_powers = EXP2_FLOAT64 if wide else EXP2_FLOAT32

    # constants and broadcasts

    def const(self, number):
        return ir.Constant(self.vector, [ir.Constant(self.scalar, number)] * self.lanes)

    def ints(self, number):
        return ir.Constant(self.integers, [number] * self.lanes)

    def splat(self, number):
        kind = ir.VectorType(number.type, self.lanes)
        undefined = ir.Constant(kind, ir.Undefined)
        one = self.b.insert_element(undefined, number, ir.Constant(i32, 0))
        return self.b.shuffle_vector(one, undefined, ir.Constant(self.indices, [0] * self.lanes))

    # memory

    def load(self, address):
        value = self.b.load(self.b.bitcast(address, self.vector.as_pointer()))
        value.align = self.size
        return value

    def load_stored(self, address, stored):
        """A vector of numbers that are stored in this type, or in 16 bits: see ``widen``."""
        if stored not in (types.int16, types.uint16):
            return self.load(address)
        half = ir.VectorType(ir.IntType(16), self.lanes)
        bits = self.b.load(self.b.bitcast(address, half.as_pointer()))
        bits.align = 2
        return widen_bits(self.b, bits, stored == types.int16)

    def store_stored(self, value, address, stored):
        """The same way back, rounded to nearest, ties to even: see ``narrow``."""
        if stored not in (types.int16, types.uint16):
            return self.store(value, address)
        half = ir.VectorType(ir.IntType(16), self.lanes)
        bits = narrow_bits(self.b, value, stored == types.int16)
        self.b.store(bits, self.b.bitcast(address, half.as_pointer())).align = 2
        return None

    def prefetch(self, address, ahead, into=3):
        """Ask for the cache line ``ahead`` bytes from an address; one that is not there does no harm.

        ``into`` : 3 is the first-level cache, 2 the second.
        """
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
        fetch = cgutils.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0")
        there = self.b.gep(self.b.bitcast(address, byte), [ir.Constant(i64, ahead)])
        self.b.call(fetch, [there, ir.Constant(i32, 0), ir.Constant(i32, into), ir.Constant(i32, 1)])

    def sum_each(self, vectors):
        """One vector of the sums of as many vectors as it has lanes, in their order."""
        b, width = self.b, self.lanes
        while len(vectors) > 1:
            # Each vector holds blocks of ``width`` lanes, one for each of its sources: halve the blocks of two
            # vectors by adding their halves, and lay them side by side.
            half, pick = width // 2, []
            for block in range(0, self.lanes, width):
                for source in (block, block + self.lanes):
                    pick += range(source, source + half)
            low = ir.Constant(self.indices, pick)
            high = ir.Constant(self.indices, [i + half for i in pick])
            pairs = zip(vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :], strict=True)
            vectors = [b.fadd(b.shuffle_vector(x, y, low), b.shuffle_vector(x, y, high)) for x, y in pairs]
            width = half
        return vectors[0]

    def transpose(self, vectors):
        """As many vectors as lanes, taken for the rows of a square: its columns.

        Interleaving row i with row i + half, for all i, is a perfect shuffle of the square's index bits; as many of
        them as the lanes have bits exchange row and column.
        """
        b, half = self.b, self.lanes // 2
        low = ir.Constant(self.indices, [i // 2 + self.lanes * (i % 2) for i in range(self.lanes)])
        high = ir.Constant(self.indices, [half + i // 2 + self.lanes * (i % 2) for i in range(self.lanes)])
        for _ in range(self.lanes.bit_length() - 1):
            pairs = zip(vectors[:half], vectors[half:], strict=True)
            vectors = [b.shuffle_vector(x, y, pick) for x, y in pairs for pick in (low, high)]
        return vectors

    def sum_lanes(self, vector):
        """The sum over the lanes, pairwise."""
        return self._across(vector, self.b.fadd)

    def max_lanes(self, vector):
        """The largest of the lanes."""
        return self._across(vector, self.max)

    def _across(self, vector, join):
        b, width = self.b, self.lanes
        undefined = ir.Constant(self.vector, ir.Undefined)
        while width > 1:
            width //= 2
            swap = [(i + width) if i < width else i for i in range(self.lanes)]
            vector = join(vector, b.shuffle_vector(vector, undefined, ir.Constant(self.indices, swap)))
        return b.extract_element(vector, ir.Constant(i32, 0))

    def slice(self, vector, first, count):
        """Some neighbouring lanes, as a shorter vector."""
        undefined = ir.Constant(self.vector, ir.Undefined)
        pick = ir.Constant(ir.VectorType(i32, count), list(range(first, first + count)))
        return self.b.shuffle_vector(vector, undefined, pick)

    def store_part(self, part, address):
        """Store a shorter vector."""
        self.b.store(part, self.b.bitcast(address, part.type.as_pointer())).align = self.size

    def store(self, value, address):
        self.b.store(value, self.b.bitcast(address, self.vector.as_pointer())).align = self.size

    def load_all(self, address):
        """The vectors of one row of a tile."""
        return [self.load(at(self.b, address, v * self.lanes)) for v in range(self.count)]

    def store_all(self, values, address):
        for v, value in enumerate(values):
            self.store(value, at(self.b, address, v * self.lanes))

    def load_indices(self, address):
        value = self.b.load(self.b.bitcast(address, self.indices.as_pointer()))
        value.align = 4
        return value

    def load_bytes(self, address):
        value = self.b.load(self.b.bitcast(address, ir.VectorType(i8, self.lanes).as_pointer()))
        value.align = 1
        return value

    def row(self, address, index, of=None):
        """The address of row ``index`` of a tile (or of ``of`` elements a row)."""
        stride = ir.Constant(i64, self.rows) if of is None else of
        return self.b.gep(address, [self.b.mul(index, stride)])

    # arithmetic

    def fma(self, x, y, z):
        """x*y + z in one rounding where the machine can."""
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        name = f"llvm.fmuladd.v{self.lanes}f{self.size * 8}"
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), [x, y, z])

    def abs(self, x):
        kind = ir.FunctionType(self.vector, [self.vector])
        name = f"llvm.fabs.v{self.lanes}f{self.size * 8}"
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), [x])

    def max(self, x, y):
        """The larger; y where x is NaN."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def split_exp2(self, x):
        """(2**f - 1, 2**n) with x = n + f, n whole, |f| <= 1/2: meant for x within the exponent's range."""
        magic = self.const(1.5 * 2.0**self.mantissa)
        shifted = self.b.fadd(x, magic)
        f = self.b.fsub(x, self.b.fsub(shifted, magic))
        p = self.const(self.exp2_powers[0])
        for c in self.exp2_powers[1:]:
            p = self.fma(p, f, self.const(c))
        n = self.b.add(self.b.bitcast(shifted, self.integers), self.ints(self.bias))
        return f, p, self.b.bitcast(self.b.shl(n, self.ints(self.mantissa)), self.vector)

    def exp2(self, x):
        """2**x for x <= 0; exactly 0 where the result would be subnormal; NaN stays NaN."""
        f, p, power = self.split_exp2(x)
        value = self.b.fmul(self.fma(p, f, self.const(1.0)), power)
        normal = self.b.fcmp_unordered(">=", x, self.const(1.0 - self.bias))
        return self.b.select(normal, value, self.const(0.0))

    def tanh(self, x):
        """(e - 1) / (e + 1) with e = exp(2x), through expm1, which keeps small x exact to rounding."""
        far = 10.0 if self.size == 4 else 20.0
        y = self.max(x, self.const(-far))
        y = self.b.select(self.b.fcmp_ordered(">", y, self.const(far)), self.const(far), y)
        f, p, power = self.split_exp2(self.b.fmul(y, self.const(2.0 * LOG2E)))
        e = self.fma(self.b.fmul(p, f), power, self.b.fsub(power, self.const(1.0)))
        t = self.b.fdiv(e, self.b.fadd(e, self.const(2.0)))
        return self.b.select(self.b.fcmp_unordered("uno", x, x), x, t)


def at(builder, address, *offsets):
    for offset in offsets:
        address = builder.gep(address, [ir.Constant(i64, offset) if isinstance(offset, int) else offset])
    return address


def loop(builder, count, carried, body):
    """for i in range(count): carried = body(i, carried). Returns what is carried out, also when count is 0."""
    b, before = builder, builder.block
    test, block, after = (b.function.append_basic_block(name) for name in ("test", "loop", "after"))
    b.branch(test)
    b.position_at_end(test)
    i = b.phi(i64)
    i.add_incoming(ir.Constant(i64, 0), before)
    phis = []
    for value in carried:
        phi = b.phi(value.type)
        phi.add_incoming(value, before)
        phis.append(phi)
    b.cbranch(b.icmp_signed("<", i, count), block, after)
    b.position_at_end(block)
    new = body(i, list(phis))
    i.add_incoming(b.add(i, ir.Constant(i64, 1)), b.block)
    for phi, value in zip(phis, new, strict=True):
        phi.add_incoming(value, b.block)
    b.branch(test)
    b.position_at_end(after)
    return phis

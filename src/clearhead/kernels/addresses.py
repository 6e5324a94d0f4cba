"""Numbers and addresses inside Numba: what steps are written in where NumPy's arrays would be counted.

A pointer is Numba's, to numbers of one type. 16 bits go by the name of integers, uint16 for bfloat16 and int16 for
float16: ``widen`` turns them into numbers to compute with, ``narrow`` rounds back.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from clearhead.kernels.target import converts_float16

i32, i64 = ir.IntType(32), ir.IntType(64)


def _element(kind):
    """What an array or a pointer holds; a number's own type."""
    return getattr(kind, "dtype", kind)


@intrinsic
def pointer(typingctx, array, offset):
    """The address of the element ``offset`` elements after the first of a contiguous array, or after a pointer."""

    def generate(context, builder, signature, arguments):
        kind, first = signature.args[0], arguments[0]
        data = context.make_array(kind)(context, builder, first).data if isinstance(kind, types.Array) else first
        return builder.gep(data, [arguments[1]])

    return types.CPointer(array.dtype)(array, types.int64), generate


@intrinsic
def address_of(typingctx, address, offset, like):
    """The number ``address`` as a pointer to elements of the type of ``like`` (a number, or a pointer to such),
    ``offset`` elements further."""
    kind = _element(like)

    def generate(context, builder, signature, arguments):
        there = context.get_data_type(kind).as_pointer()
        return builder.gep(builder.inttoptr(arguments[0], there), [arguments[1]])

    return types.CPointer(kind)(types.int64, types.int64, like), generate


@intrinsic
def seen_as(typingctx, place, like):
    """The same address as a pointer to numbers of the type of ``like``."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(place, like), generate


@intrinsic
def number_for(typingctx, place, number):
    """A number as the type that a pointer points at."""

    def generate(context, builder, signature, arguments):
        return context.cast(builder, arguments[1], signature.args[1], signature.return_type)

    return place.dtype(place, number), generate


@intrinsic
def largest(typingctx, place):
    """The largest finite number of the type that a pointer points at."""
    kind = place.dtype
    most = float(np.finfo(str(kind)).max)
    return kind(place), lambda context, builder, signature, arguments: context.get_constant(kind, most)


@intrinsic
def holds(typingctx, like, place):
    """Whether a pointer points at numbers of this type: known when compiling."""
    same = like == place.dtype

    def generate(context, builder, signature, arguments):
        return context.get_constant(types.boolean, same)

    return types.boolean(like, place), generate


@intrinsic
def call_at(typingctx, function, tile, lanes, queries, first, keys, batch, head):
    """Call the compiled function at an address on a tile: see ``functions``. Returns 1, or 0 if it raised an error."""

    def generate(context, builder, signature, arguments):
        kinds = [context.get_value_type(kind) for kind in signature.args[1:]]
        kind = ir.FunctionType(i64, kinds).as_pointer()
        return builder.call(builder.inttoptr(arguments[0], kind), arguments[1:])

    whole = types.int64
    return whole(whole, tile, whole, types.CPointer(whole), whole, whole, whole, whole), generate


@intrinsic
def call_fold(typingctx, function, tile, rows, here, queries, first_query, first, keys, first_key, batch, head, kept,
              data, shape):  # fmt: skip
    """Call one of the user's folds, at an address, on a tile of weights. Returns 1, or 0 if it raised an error."""

    def generate(context, builder, signature, arguments):
        kinds = [context.get_value_type(kind) for kind in signature.args[1:]]
        kind = ir.FunctionType(i64, kinds).as_pointer()
        return builder.call(builder.inttoptr(arguments[0], kind), arguments[1:])

    whole = types.int64
    places = types.CPointer(whole), whole, whole, whole, whole, whole, whole
    return whole(whole, tile, whole, whole, *places, kept, whole, whole), generate


def widen_bits(b, bits, half):
    """16 bits (or a vector of them) as float32.

    Shifted left by 16, a bfloat16 is a float32. A float16's exponent and mantissa, shifted left by 13, are a float32
    that is too small by 2**112; infinity and NaN need the top exponent set.
    """
    kind = _alike(bits.type)
    if half and converts_float16():
        return b.fpext(b.bitcast(bits, kind(ir.HalfType())), kind(ir.FloatType()))
    wide, floats = kind(i32), kind(ir.FloatType())

    def const(of, number):
        return ir.Constant(of, [number] * of.count if isinstance(of, ir.VectorType) else number)

    bits = b.zext(bits, wide)
    if not half:
        return b.bitcast(b.shl(bits, const(wide, 16)), floats)
    size = b.shl(b.and_(bits, const(wide, 0x7FFF)), const(wide, 13))
    value = b.bitcast(b.fmul(b.bitcast(size, floats), const(floats, 2.0**112)), wide)
    special = b.icmp_unsigned(">=", size, const(wide, 0x7C00 << 13))
    value = b.select(special, b.or_(size, const(wide, 0x7F800000)), value)
    sign = b.shl(b.and_(bits, const(wide, 0x8000)), const(wide, 16))
    return b.bitcast(b.or_(value, sign), floats)


def narrow_bits(b, value, half):
    """float32 (or a vector) as 16 bits, rounded to nearest, ties to even. float16 only where ``converts_float16``.

    Half of the last place that stays, less one, and that place's own bit are added before a bfloat16 is cut off: the
    carry rounds. A NaN would carry into infinity, and is given a bit that stays instead.
    """
    kind = _alike(value.type)
    if half:
        return b.bitcast(b.fptrunc(value, kind(ir.HalfType())), kind(ir.IntType(16)))
    wide = kind(i32)

    def const(number):
        return ir.Constant(wide, [number] * wide.count if isinstance(wide, ir.VectorType) else number)

    bits = b.bitcast(value, wide)
    odd = b.and_(b.lshr(bits, const(16)), const(1))
    rounded = b.add(bits, b.add(odd, const(0x7FFF)))
    strange = b.fcmp_unordered("uno", value, value)
    bits = b.select(strange, b.or_(bits, const(0x400000)), rounded)
    return b.trunc(b.lshr(bits, const(16)), kind(ir.IntType(16)))


def _alike(kind):
    """From the type of an element to that of as many of them as in ``kind``."""
    return (lambda one: ir.VectorType(one, kind.count)) if isinstance(kind, ir.VectorType) else (lambda one: one)


@intrinsic
def widen(typingctx, number):
    """A stored number as one to compute with: uint16 holds a bfloat16, int16 a float16, the others themselves."""
    if number in (types.float32, types.float64):
        return number(number), lambda context, builder, signature, arguments: arguments[0]

    def generate(context, builder, signature, arguments):
        return widen_bits(builder, arguments[0], number == types.int16)

    if number not in (types.int16, types.uint16):
        return None
    return types.float32(number), generate


@intrinsic
def narrow(typingctx, place, number):
    """A number as one to be stored where a pointer points: ``widen``'s way back."""
    if place.dtype == number:
        return number(place, number), lambda context, builder, signature, arguments: arguments[1]
    if number != types.float32 or place.dtype not in (types.int16, types.uint16):
        return None

    def generate(context, builder, signature, arguments):
        return narrow_bits(builder, arguments[1], place.dtype == types.int16)

    return place.dtype(place, number), generate

"""Dual numbers in Numba: a value and its slope, which every operation carries along by the chain rule.

A user's function of a score, compiled again for a dual number of slope 1, so gives its exact derivative, branches and
all. (Griewank & Walther 2008, *Evaluating Derivatives*, section 3.1, the forward mode.) Importing this file teaches
Numba the type and what ``math``, ``numpy`` and Python's operators do with it; what it was not taught, Numba refuses as
it refuses any function that does not take such arguments.

Both parts are float64. What jumps (``floor``, ``round``, comparisons) gives ordinary numbers. At a kink the slope is
that of the side that is taken: of ``max(score, 0.0)`` at 0, which is its first argument, 1; of ``abs`` at 0 it is 0. A
slope of 0 stays 0 whatever it is multiplied with, so that a branch not taken leaves no NaN.
"""

import math
import operator

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.core.typeconv import Conversion
from numba.core.typing.builtins import NumberClassAttribute
from numba.core.typing.templates import infer_getattr, make_callable_template
from numba.extending import (
    intrinsic,
    lower_builtin,
    lower_cast,
    make_attribute_wrapper,
    models,
    overload,
    register_model,
)

from clearhead.kernels.cache import step


class DualType(types.Type):  # type: ignore[misc]
    """Any real number is one, of slope 0: where an ``if`` gives now the one, now the other."""

    def __init__(self):
        super().__init__("Dual")

    def can_convert_from(self, typingctx, other):
        return Conversion.safe if is_real(other) else None

    def unify(self, typingctx, other):
        return self if is_real(other) else None


dual_type = DualType()
float64 = types.float64


@register_model(DualType)
class _DualModel(models.StructModel):  # type: ignore[misc]
    def __init__(self, manager, kind):
        super().__init__(manager, kind, [("value", float64), ("slope", float64)])


make_attribute_wrapper(DualType, "value", "value")
make_attribute_wrapper(DualType, "slope", "slope")


def is_real(kind):
    """Whether a type is that of real numbers other than dual ones."""
    return isinstance(kind, types.Integer | types.Float | types.Boolean)


def is_dual(kind):
    """Whether a type is that of dual numbers."""
    return isinstance(kind, DualType)


def are_dual(*kinds):
    """Whether some of these types are, and all others of real numbers."""
    return any(map(is_dual, kinds)) and all(is_dual(kind) or is_real(kind) for kind in kinds)


def _made(context, builder, value, slope):
    made = cgutils.create_struct_proxy(dual_type)(context, builder)
    made.value, made.slope = value, slope
    return made._getvalue()


@intrinsic
def dual(typingctx, value, slope):
    """The dual number of these two parts."""
    return dual_type(float64, float64), lambda context, builder, signature, parts: _made(context, builder, *parts)


@lower_cast(types.Integer, DualType)
@lower_cast(types.Float, DualType)
@lower_cast(types.Boolean, DualType)
def _from_real(context, builder, kind, dual_kind, number):
    value = context.cast(builder, number, kind, float64)
    return _made(context, builder, value, context.get_constant(float64, 0.0))


def value_of(x):
    """The value of a dual number, or a real one, in float64 if it is no integer."""


def slope_of(x):
    """The slope of a dual number; that of a real one is 0."""


def as_dual(x):
    """Either as a dual number."""


@overload(value_of)
def _value_of(x):
    if is_dual(x):
        return lambda x: x.value
    return (lambda x: float64(x)) if isinstance(x, types.Float) else (lambda x: x)


@overload(slope_of)
def _slope_of(x):
    return (lambda x: x.slope) if is_dual(x) else (lambda x: 0.0)


@overload(as_dual)
def _as_dual(x):
    return (lambda x: x) if is_dual(x) else (lambda x: dual(x, 0.0))


def derivative(cell):
    """The derivative by score of a compiled function (score, batch, head, query, key), to be compiled likewise."""

    @numba.njit(error_model="numpy")
    def derivative(score, batch, head, query, key):
        return slope_of(cell(dual(score, 1.0), batch, head, query, key))

    return derivative


@step
def chain(slope, rate):
    """slope * rate, but 0 where the slope is."""
    return 0.0 if slope == 0 else slope * rate


def _bends(rate, *functions):
    """Teach these functions of one number, which are one and the same: ``rate(x, y)`` is their slope at x, where they
    are y."""
    function, rate = functions[0], step(rate)

    def bend(x):
        y = function(x.value)
        return dual(y, chain(x.slope, rate(x.value, y)))

    def of_dual(x):
        return bend if is_dual(x) else None

    for each in functions:
        overload(each)(of_dual)


def _meets(by_first, by_second, *functions):
    """Teach these functions of two numbers x and y: ``by_first(x, y)`` is their slope by x, ``by_second`` by y."""
    function, by_first, by_second = functions[0], step(by_first), step(by_second)

    def meet(x, y):
        a, b = value_of(x), value_of(y)
        return dual(function(a, b), chain(slope_of(x), by_first(a, b)) + chain(slope_of(y), by_second(a, b)))

    def of_duals(x, y):
        return meet if are_dual(x, y) else None

    for each in functions:
        overload(each)(of_duals)


def _jumps(*functions):
    """Teach these functions, of one number or of two, whose slope is 0 wherever they have one."""
    for function in functions:
        _jumps_alone(function)
        _jumps_together(function)


def _jumps_alone(function):
    @overload(function)
    def of_dual(x):
        return (lambda x: function(x.value)) if is_dual(x) else None


def _jumps_together(function):
    @overload(function)
    def of_duals(x, y):
        return (lambda x, y: function(value_of(x), value_of(y))) if are_dual(x, y) else None


def _powered(x, y):
    """The slope of x ** y by x."""
    return 0.0 if y == 0 else y * x ** (y - 1)


def _power_by(x, y):
    """And by y."""
    return 0.0 if x == 0 and y > 0 else x**y * math.log(x)


_bends(lambda x, y: 1.0, operator.pos, np.positive, float)
_bends(lambda x, y: -1.0, operator.neg, np.negative)
_bends(lambda x, y: np.sign(x), abs, math.fabs, np.absolute, np.fabs)
_bends(lambda x, y: 2.0 * x, np.square)
_bends(lambda x, y: -y * y, np.reciprocal)
_bends(lambda x, y: 0.5 / y, math.sqrt, np.sqrt)
_bends(lambda x, y: 1 / (3 * y * y), np.cbrt)
_bends(lambda x, y: y, math.exp, np.exp)
_bends(lambda x, y: y * math.log(2.0), np.exp2)
_bends(lambda x, y: y + 1.0, math.expm1, np.expm1)
_bends(lambda x, y: 1.0 / x, math.log, np.log)
_bends(lambda x, y: 1.0 / (x * math.log(2.0)), math.log2, np.log2)
_bends(lambda x, y: 1.0 / (x * math.log(10.0)), math.log10, np.log10)
_bends(lambda x, y: 1.0 / (1.0 + x), math.log1p, np.log1p)
_bends(lambda x, y: math.cos(x), math.sin, np.sin)
_bends(lambda x, y: -math.sin(x), math.cos, np.cos)
_bends(lambda x, y: 1.0 + y * y, math.tan, np.tan)
_bends(lambda x, y: 1.0 / math.sqrt((1.0 - x) * (1.0 + x)), math.asin, np.arcsin)
_bends(lambda x, y: -1.0 / math.sqrt((1.0 - x) * (1.0 + x)), math.acos, np.arccos)
_bends(lambda x, y: 1.0 / (1.0 + x * x), math.atan, np.arctan)
_bends(lambda x, y: math.cosh(x), math.sinh, np.sinh)
_bends(lambda x, y: math.sinh(x), math.cosh, np.cosh)
_bends(lambda x, y: (1.0 - y) * (1.0 + y), math.tanh, np.tanh)
_bends(lambda x, y: 1.0 / math.sqrt(x * x + 1.0), math.asinh, np.arcsinh)
_bends(lambda x, y: 1.0 / math.sqrt((x - 1.0) * (x + 1.0)), math.acosh, np.arccosh)
_bends(lambda x, y: 1.0 / ((1.0 - x) * (1.0 + x)), math.atanh, np.arctanh)
_bends(lambda x, y: 2.0 / math.sqrt(math.pi) * math.exp(-x * x), math.erf)
_bends(lambda x, y: -2.0 / math.sqrt(math.pi) * math.exp(-x * x), math.erfc)
_bends(lambda x, y: 180.0 / math.pi, math.degrees, np.degrees, np.rad2deg)
_bends(lambda x, y: math.pi / 180.0, math.radians, np.radians, np.deg2rad)

_meets(lambda x, y: 1.0, lambda x, y: 1.0, operator.add, operator.iadd, np.add)
_meets(lambda x, y: 1.0, lambda x, y: -1.0, operator.sub, operator.isub, np.subtract)
_meets(lambda x, y: y, lambda x, y: x, operator.mul, operator.imul, np.multiply)
_meets(lambda x, y: 1.0 / y, lambda x, y: -x / (y * y), operator.truediv, operator.itruediv, np.true_divide)
_meets(_powered, _power_by, operator.pow, operator.ipow, pow, math.pow, np.power)
_meets(lambda x, y: 1.0, lambda x, y: -np.floor(x / y), operator.mod, operator.imod, np.remainder)
_meets(lambda x, y: 1.0, lambda x, y: -np.trunc(x / y), np.fmod)
_meets(lambda x, y: 1.0 / (1.0 + math.exp(y - x)), lambda x, y: 1.0 / (1.0 + math.exp(x - y)), np.logaddexp)
_meets(lambda x, y: x / math.hypot(x, y), lambda x, y: y / math.hypot(x, y), math.hypot, np.hypot)
_meets(lambda x, y: y / (x * x + y * y), lambda x, y: -x / (x * x + y * y), math.atan2, np.arctan2)
_meets(lambda x, y: math.copysign(1.0, x) * math.copysign(1.0, y), lambda x, y: 0.0, math.copysign, np.copysign)
_meets(lambda x, y: 0.0 if y > x else 1.0, lambda x, y: 1.0 if y > x else 0.0, max)
_meets(lambda x, y: 0.0 if y < x else 1.0, lambda x, y: 1.0 if y < x else 0.0, min)
_meets(lambda x, y: 0.0 if y > x or y != y else 1.0, lambda x, y: 1.0 if y > x or y != y else 0.0, np.maximum)
_meets(lambda x, y: 0.0 if y < x or y != y else 1.0, lambda x, y: 1.0 if y < x or y != y else 0.0, np.minimum)
_meets(lambda x, y: 0.0 if y > x or x != x else 1.0, lambda x, y: 1.0 if y > x or x != x else 0.0, np.fmax)
_meets(lambda x, y: 0.0 if y < x or x != x else 1.0, lambda x, y: 1.0 if y < x or x != x else 0.0, np.fmin)

_jumps(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne, operator.floordiv)
_jumps(operator.ifloordiv, operator.not_, int, round, math.floor, math.ceil, math.trunc, np.sign)
_jumps(np.floor, np.ceil, np.trunc, np.rint, math.isnan, math.isinf, math.isfinite, np.isnan, np.isinf, np.isfinite)


@overload(operator.truth)
def _truth(x):
    return (lambda x: x.value != 0) if is_dual(x) else None


@lower_builtin(bool, DualType)
def _bool(context, builder, signature, arguments):
    value = builder.extract_value(arguments[0], 0)
    return builder.fcmp_unordered("!=", value, value.type(0.0))


def _several(function):
    @overload(function)
    def of_several(x, y, z, *more):
        return (lambda x, y, z, *more: function(function(x, y), z, *more)) if are_dual(x, y, z, *more) else None


_several(max)
_several(min)


@overload(np.where)
def _where(condition, x, y):
    return (lambda condition, x, y: as_dual(x) if condition else as_dual(y)) if are_dual(x, y) else None


@overload(np.clip)
def _clip(a, a_min, a_max):
    return (lambda a, a_min, a_max: min(max(a, a_min), a_max)) if is_dual(a) else None


class _Cast(NumberClassAttribute):  # type: ignore[misc]
    """np.float32(x) and np.float64(x): a dual number keeps all its bits."""

    def resolve___call__(self, kind):
        ours = make_callable_template(key=kind.instance_type, typer=lambda x: dual_type if is_dual(x) else None)
        return types.Function([*super().resolve___call__(kind).templates, ours])


for _float in (types.float32, types.float64):
    infer_getattr(type("_CastTo", (_Cast,), {"key": types.NumberClass(_float)}))

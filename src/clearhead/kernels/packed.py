"""Numbers that lie one after another in memory, read by name: what steps hand each other instead of tuples.

A tuple of sixty numbers is taken apart and put together at every call of a step, when compiling as much as when
running; here a step gets one address, and reads what it names. They must not change while a kernel runs.
"""

from llvmlite import ir
from numba import types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, lower_getattr_generic, models, register_model

i64 = ir.IntType(64)


class Packed(types.Type):  # type: ignore[misc]
    """``fields`` : (name, type) in their order. A type is a number's (8 bytes) or a pointer's, a tuple of such, another
    Packed, which lies inside this one, or a ``Like``, which takes no place."""

    def __init__(self, fields):
        self.fields = tuple(fields)
        self.kinds = {name: kind.of if isinstance(kind, Like) else kind for name, kind in self.fields}
        self.places, place = {}, 0
        for name, kind in self.fields:
            self.places[name] = place
            place += size_of(kind)
        self.size = place
        super().__init__(f"Packed({', '.join(f'{name}: {kind}' for name, kind in self.fields)})")


class Like:
    """The type of a number that is always 0 and stored nowhere: it tells of what type others are."""

    def __init__(self, of):
        self.of = of

    def __str__(self):
        return f"like {self.of}"


def size_of(kind):
    """How many numbers of 8 bytes it takes."""
    if isinstance(kind, Packed):
        return kind.size
    return 0 if isinstance(kind, Like) else sum(map(size_of, kind.types)) if isinstance(kind, types.BaseTuple) else 1


@register_model(Packed)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager, kind):
        super().__init__(manager, kind, i64.as_pointer())


@infer_getattr
class _Fields(AttributeTemplate):  # type: ignore[misc]
    key = Packed

    def generic_resolve(self, kind, name):
        return kind.kinds.get(name)


@lower_getattr_generic(Packed)
def _read(context, b, kind, address, name):
    stored = dict(kind.fields)[name]
    if isinstance(stored, Like):
        return context.get_constant(stored.of, 0)
    return _read_at(context, b, stored, address, kind.places[name])


def _read_at(context, b, kind, address, place):
    if isinstance(kind, types.BaseTuple):
        parts, items = [], kind.types
        for item in items:
            parts.append(_read_at(context, b, item, address, place))
            place += size_of(item)
        return context.make_tuple(b, kind, parts)
    there = b.gep(address, [ir.Constant(i64, place)])
    if isinstance(kind, Packed):
        return there
    number = b.load(b.bitcast(there, context.get_value_type(kind).as_pointer()))
    number.set_metadata("invariant.load", b.module.add_metadata([]))
    return number

"""What a kernel is called with: the problem as places and numbers, packed into one array for the way.

Numba takes 13 microseconds to pick sixty numbers out of Python's tuples, and one for an array; so ``pack`` lays them
out, and in the kernel ``unpack`` reads them there by name: see ``packed``. None of it is an array: arrays are counted,
atomically, each time a step picks one up, which was a tenth of a kernel's time.
"""

import struct
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from clearhead.kernels.packed import Like, Packed


class Strided(NamedTuple):
    """An array (batch, a, b, c) of any strides, as the kernels see it: one type for every memory layout.

    Element (n, i, j, k) lies ``offsets[n] + i*steps[0] + j*steps[1] + k*steps[2]`` elements from ``address``;
    ``offsets`` is itself the address of 64-bit integers. ``like`` is a number of its type: float32, float64, bool,
    int64, or 16 bits as uint16 (bfloat16) and int16 (float16). ``size`` 0: there is none.
    """

    like: Any
    address: int
    offsets: int
    steps: tuple[int, int, int]
    size: int


class Arguments(NamedTuple):
    """A problem in the kernels' terms. What is optional is 0, or of size 0, where there is none.

    query, key, value : (batch, heads, tokens, dim). start, stop : (batch, heads, queries, 1), the first visible key and
    one past the last; (0, 0) sees nothing. bias : (batch, heads, queries, keys). output, logsumexp : where results go,
    or come from, see each kernel. program : address of the rest of the mask, ``steps`` steps, see ``visible``.
    slopes, sinks : addresses of (heads,), float64. vector : address of (dim,), of the additive score, whose projected
    queries and keys are query and key. function : the address of the user's.
    unit : of scores, in nats: ln 2 where log2(e) can be folded into the query, 1 where scores are bent or added to.
    scale : of the match. offset : of query 0 among the keys. rows : queries in a tile. micro : keys in a micro-tile.
    lanes : of a vector.
    """

    query: Strided
    key: Strided
    value: Strided
    bias: Strided
    output: Strided
    start: Strided
    stop: Strided
    logsumexp: Strided
    program: int
    steps: int
    slopes: int
    sinks: int
    vector: int
    function: int
    unit: float
    scale: float
    softcap: float
    offset: int
    heads: int
    group: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    rows: int
    micro: int
    lanes: int


# Numbers of the types that arguments come in, the last one of the type that is computed in: types travel beside.
Likes = tuple[Any, Any, Any, Any, Any, Any]
LIKES, COMPUTED = ("query", "key", "value", "bias", "output"), 5
PLACE = 6  # numbers of a Strided: address, offsets, steps, size
_CODES = {Strided: "q" * PLACE, int: "q", float: "d"}
_LAYOUT = struct.Struct("=" + "".join(_CODES[kind] for kind in Arguments.__annotations__.values()))
_STARTS = np.cumsum([0, *(len(_CODES[kind]) for kind in Arguments.__annotations__.values())])
# Where in a packed array each field begins: of one that is a place, its address.
ADDRESS = {name: int(at) for name, at in zip(Arguments._fields, _STARTS, strict=False)}
MICRO = ADDRESS["micro"]


def pack(x: Arguments) -> NDArray[np.int64]:
    """The numbers in their order, floats by their bits."""
    flat: list[Any] = []
    for item in x:
        if type(item) is Strided:
            flat += (item.address, item.offsets, *item.steps, item.size)
        else:
            flat.append(item)
    return np.array(np.frombuffer(_LAYOUT.pack(*flat), np.int64))


def likes(x: Arguments, computed: np.dtype[Any]) -> Likes:
    """What ``unpack`` must know of types."""
    return x.query.like, x.key.like, x.value.like, x.bias.like, x.output.like, computed.type(0)


@intrinsic
def unpack(typingctx, numbers, likes):
    """The Arguments that ``pack`` laid out here: a pointer."""
    kinds = {name: likes.types[n] for n, name in enumerate(LIKES)}
    kinds |= {"start": types.int64, "stop": types.int64, "logsumexp": types.float64}
    whole = Packed((name, _field(kind, kinds.get(name))) for name, kind in Arguments.__annotations__.items())
    return whole(numbers, likes), lambda context, b, signature, arguments: arguments[0]


def _field(annotation, like):
    """The type of a field of Arguments; ``like`` is that of an array's numbers."""
    if annotation is not Strided:
        return types.float64 if annotation is float else types.int64
    steps, whole = types.UniTuple(types.int64, 3), types.int64
    kinds = {"like": Like(like), "address": whole, "offsets": whole, "steps": steps, "size": whole}
    return Packed((name, kinds[name]) for name in Strided._fields)

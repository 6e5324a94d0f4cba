"""The machine code of the micro-kernels, read and not run: whole vectors, nothing spilled, no calls.

A tile's shape is chosen so that its accumulators fit the registers (see target.py); whether a compiler keeps them there
on processors that nobody here has, only the code that it writes can tell. Whole kernels are read in test_targets.py.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from numba import types

from assembly import MACHINES, Machine, build, fmas, inner_loops, is_whole, products, spills
from clearhead.kernels import microkernels

# The arguments of each: p is a pointer to numbers, i a whole number. And how many inner loops multiply: score_tile has
# one more for what is left of dim.
PRODUCTS = {"score_tile": "pipippiip", "mix_tile": "piippip"}
LOOPS = {"score_tile": 2, "mix_tile": 1}
POWERS = {"exp2_tile": "pipppp", "exp_tile": "pipppp"}
DEGREE = {types.float32: 6, types.float64: 11}  # of exp2's polynomial


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Machine:
    found = MACHINES[request.param]
    if found.row.name == "scalar":
        pytest.skip("this processor has no vectors that the table knows")
    return found


@pytest.fixture(params=[types.float32, types.float64], ids=str)
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


def arguments(letters: str, dtype: Any) -> tuple[Any, ...]:
    return tuple({"p": types.CPointer(dtype), "i": types.int64}[letter] for letter in letters)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_keep_a_micro_tile_in_registers(
    name: str, machine: Machine, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In inner loops every other instruction multiplies and adds whole vectors, and none is fetched from the stack."""
    row = machine.row
    written = build(getattr(microkernels, name), arguments(PRODUCTS[name], dtype), row, monkeypatch)
    loops = products(machine.compile(written), row)
    assert len(loops) == LOOPS[name]
    for loop in loops:
        assert all(is_whole(line, row) for line in fmas(loop))
        assert not spills(loop)
        assert len(loop) <= 2 * len(fmas(loop)) + 1  # the last two, compare and jump, are one to an x86 processor


@pytest.mark.parametrize("name", POWERS)
def test_pytorch_151441_115151_exponentials_are_vector_arithmetic(
    name: str, machine: Machine, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pt#151441, pt#115151: exp took half the time. Here it is a polynomial on whole vectors, and calls nothing."""
    row = machine.row
    written = build(getattr(microkernels, name), arguments(POWERS[name], dtype), row, monkeypatch)
    assembly = machine.compile(written)
    steps = [line for loop in inner_loops(assembly) for line in fmas(loop)]
    assert len(steps) >= DEGREE[dtype] * row.vectors * max(1, 6 // row.vectors)
    assert all(is_whole(line, row) for line in steps)
    assert not re.search(r"^\t(callq?|blr?)\s", assembly, flags=re.MULTILINE)

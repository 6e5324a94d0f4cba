"""What tests need to read machine code: compile for any processor, none of it is run, and find the inner loops."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import pytest

from clearhead.kernels.target import TARGETS, Target, host

ROWS = {row.name: row for row in TARGETS}
ARM, X86 = "aarch64-unknown-linux-gnu", "x86_64-unknown-linux-gnu"
FMA = re.compile(r"v?fn?m(add|la|sub|ls)")
OTHER_ARITHMETIC = re.compile(r"v?f?(add|sub|mul|div|max|min)([ps][sd]|\s)")
STORE = re.compile(r"st[pru1]|stur|vmov\w+\s+%[xyz]mm\d+, .*\(")
STACK = re.compile(r"\[sp\b|\(%rsp\b")
VECTOR = re.compile(r"%[xyz]mm\d|\b[qv]\d")
WHOLE = {"AVX-512": re.compile(r"%zmm\d"), "AVX2": re.compile(r"%ymm\d"), "NEON": re.compile(r"\bv\d+\.(4s|2d)")}


@dataclass(frozen=True)
class Machine:
    """A processor, and the row of the table that it is served by."""

    row: Target
    triple: str
    cpu: str
    features: str = ""

    def compile(self, text: str) -> str:
        """Assembly of a module of LLVM's language, fully optimized for this processor."""
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        try:
            target = llvm.Target.from_triple(self.triple)
        except RuntimeError:
            pytest.skip(f"this llvmlite writes no code for {self.triple}")
        machine = target.create_target_machine(cpu=self.cpu, features=self.features, opt=3, reloc="pic")
        module = llvm.parse_assembly(portable(text))
        module.triple, module.data_layout = self.triple, str(machine.target_data)
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        passes.getModulePassManager().run(module, passes)
        return str(machine.emit_assembly(module))


def this_machine() -> Machine:
    features = ",".join(("+" if has else "-") + name for name, has in llvm.get_host_cpu_features().items())
    return Machine(host(), llvm.get_process_triple(), llvm.get_host_cpu_name(), features)


MACHINES = {
    "AVX-512, skylake": Machine(ROWS["AVX-512"], X86, "skylake-avx512"),
    "AVX-512, zen 4": Machine(ROWS["AVX-512"], X86, "znver4"),
    "AVX2, haswell": Machine(ROWS["AVX2"], X86, "haswell"),
    "AVX2, zen 3": Machine(ROWS["AVX2"], X86, "znver3"),
    "NEON, neoverse-v1": Machine(ROWS["NEON"], ARM, "neoverse-v1"),
    "NEON, neoverse-n1": Machine(ROWS["NEON"], ARM, "neoverse-n1"),
    "NEON, cortex-a72": Machine(ROWS["NEON"], ARM, "cortex-a72"),
    "NEON, apple-m1": Machine(ROWS["NEON"], ARM, "apple-m1"),
    "this machine": this_machine(),
}


def portable(text: str) -> str:
    """A module without the names of the processor it was made for, and without Numba's reference counts, in which its
    optimizer has left an instruction of that processor's."""
    text = re.sub(r'^target (triple|datalayout) = ".*"$', "", text, flags=re.MULTILINE)
    text = re.sub(r'"(target-cpu|target-features|tune-cpu)"="[^"]*"', "", text)
    text = re.sub(r"(?ms)^define [^\n]*?(\S+ @NRT_\w+\([^\n]*\))[^\n]*\{\n.*?^\}\n", r"declare \1\n", text)
    assert not re.search(r"call .*@llvm\.(x86|aarch64)\.", text), "an intrinsic of one processor alone"
    return text


def inner_loops(assembly: str) -> list[list[str]]:
    """The instructions of each block that jumps to itself, up to that jump."""
    found: list[list[str]] = []
    label, block = "", list[str]()
    for line in assembly.splitlines():
        begin = re.match(r"(\.?L\w+):", line)
        if begin:
            label, block = begin.group(1), []
        elif line.startswith("\t") and not line.startswith("\t."):
            block.append(line.strip())
            if label and re.search(rf"\s{re.escape(label)}$", line):
                found.append(block)
                label, block = "", []
    return found


def fmas(loop: list[str]) -> list[str]:
    """The instructions that multiply and add."""
    return [line for line in loop if FMA.match(line)]


def products(assembly: str, row: Target) -> list[list[str]]:
    """The inner loops of matrix products: whole micro-tiles of multiply-adds, no other arithmetic, and no results."""
    return [
        loop
        for loop in inner_loops(assembly)
        if fmas(loop)
        and len(fmas(loop)) % (row.keys * row.vectors) == 0
        and not any(OTHER_ARITHMETIC.match(line) and VECTOR.search(line) for line in loop if not FMA.match(line))
        and not any(STORE.match(line) and not STACK.search(line) for line in loop)
    ]


def spills(loop: list[str]) -> list[str]:
    """Vectors that go to the stack, or come from it."""
    return [line for line in loop if STACK.search(line) and VECTOR.search(line)]


def touches_the_stack(loop: list[str]) -> list[str]:
    """Spills, and addresses kept on the stack."""
    return [line for line in loop if STACK.search(line)]


def is_whole(line: str, row: Target) -> bool:
    """Whether an instruction works on vectors of the row's full width."""
    return bool(WHOLE[row.name].search(line))


def build(intrinsic: Any, types: tuple[Any, ...], row: Target, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of one function, written by an intrinsic for this row of the table. Pointers are Numba's CPointer."""
    from llvmlite import ir
    from numba import types as nb

    from clearhead.kernels import vectors

    monkeypatch.setattr(vectors, "host", lambda: row)
    numbers = {nb.float32: ir.FloatType(), nb.float64: ir.DoubleType(), nb.int64: ir.IntType(64)}
    kinds = [numbers[t.dtype].as_pointer() if isinstance(t, nb.CPointer) else numbers[t] for t in types]
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), "micro")
    builder = ir.IRBuilder(function.append_basic_block())
    signature, generate = intrinsic._defn(None, *types)
    generate(_NoContext(), builder, signature, list(function.args))
    builder.ret_void()
    return str(module)


class _NoContext:
    """All that the micro-kernels ask Numba's context for."""

    def get_dummy_value(self) -> None:
        return None

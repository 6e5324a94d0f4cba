"""The ``kernel`` decorator (and ``step``, for its parts): compile without the GIL, and keep the machine code on disk.

Numba's own cache watches the one file that holds a function; a kernel also depends on the files that make its
vectors. Here the folder's name is a hash of every source in this package and of the versions that compile them, so
that any change means a new folder, and old ones are never wrong. Where no folder can be written, kernels
are compiled anew in each process, after one warning.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, _CacheLocator
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from platformdirs import user_cache_path


def kernel(function: Callable[..., Any]) -> Any:
    """Compile ``function`` on first use: no GIL, IEEE division, machine code kept on disk."""
    compiled = numba.njit(nogil=True, error_model="numpy")(function)
    if folder() is not None:
        compiled._cache = _Cache(function)
    return compiled


def step(function: Callable[..., Any]) -> Any:
    """Compile ``function`` as a part of kernels: without what it takes to call it from Python."""
    return numba.njit(
        nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=_StepCompiler
    )(function)


@cache
def folder() -> Path | None:
    """Where this version's machine code is kept, or None if nowhere can be written.

    ``CLEARHEAD_CACHE_DIR`` moves it.
    """
    base = Path(os.environ.get("CLEARHEAD_CACHE_DIR") or user_cache_path("clearhead")) / "kernels"
    place = base / stamp()
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            return place
    except OSError as error:
        warnings.warn(
            f"kernels will be compiled anew in every process: {base} cannot be written ({error.strerror}). "
            f"Set CLEARHEAD_CACHE_DIR to a folder that can",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


@cache
def stamp() -> str:
    """A hash of the sources and versions that machine code depends on. (The processor is in Numba's own key.)"""
    digest = hashlib.sha256()
    for version in (numba.__version__, llvmlite.__version__, np.__version__):
        digest.update(version.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


class _StepLibrary(JITCodeLibrary):  # type: ignore[misc]
    """A step's code, to be linked into kernels: LLVM optimizes it there, once. Numba would also do so here, and make
    machine code that nobody calls: that took half of a kernel's time to compile."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        """Where Numba would note the globals of a function that Python can call: nowhere."""
        return _Nowhere


class _Nowhere:
    @staticmethod
    def set_env(name: str, env: Any) -> None:
        pass


class _StepCompiler(Compiler):  # type: ignore[misc]
    """Numba's compiler with such a library."""

    def __init__(self, typing: Any, target: Any, library: Any, *rest: Any) -> None:
        super().__init__(typing, target, _StepLibrary(target.codegen(), "step"), *rest)


class _Locator(_CacheLocator):  # type: ignore[misc]
    """Tells Numba to look in our folder, and that the folder's name is all that can change."""

    def __init__(self, function: Callable[..., Any], source: str) -> None:
        self._name = f"{function.__module__}.{function.__qualname__}"
        self._py_file = source

    def get_cache_path(self) -> str:
        return str(folder())

    def get_source_stamp(self) -> str:
        return stamp()

    def get_disambiguator(self) -> str:
        return hashlib.sha256(self._name.encode()).hexdigest()[:8]

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator:
        return cls(py_func, py_file)


class _Impl(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [_Locator]  # noqa: RUF012


class _Files(IndexDataCacheFile):  # type: ignore[misc]
    """One file per signature, named by it. (Numba's own index numbers its files, and two processes that compile
    different signatures at once can give both the same number.)"""

    def save(self, key: Any, data: Any) -> None:
        self._save_data(self._name_of(key), data)

    def load(self, key: Any) -> Any:
        try:
            return self._load_data(self._name_of(key))
        except OSError:
            return None

    def _name_of(self, key: Any) -> str:
        return str(self._data_name_pattern).format(number=int(hashlib.sha256(repr(key).encode()).hexdigest()[:12], 16))


class _Cache(FunctionCache):  # type: ignore[misc]
    _impl_class = _Impl

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = _Files(self._cache_path, self._impl.filename_base, stamp())

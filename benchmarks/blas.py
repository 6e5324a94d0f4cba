"""The BLAS inside NumPy: which one it is, what it takes this machine for, and its number of threads.

NumPy's wheels carry OpenBLAS, which can be asked and told; other builds are described as far as NumPy knows them, and
keep the number of threads that their environment variables say.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

# What makes OpenBLAS use other kernels or threads than it would choose; it is worth knowing when NumPy is slow.
VARIABLES = (
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
    "OPENBLAS_THREAD_TIMEOUT",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)


def set_threads(count: int) -> bool:
    """Whether NumPy's products now use ``count`` threads."""
    library = _openblas()
    if library is None:
        return False
    library.scipy_openblas_set_num_threads64_(count)
    return bool(library.scipy_openblas_get_num_threads64_() == count)


def describe() -> dict[str, str]:
    """Name, version and core of the BLAS, and the environment variables that steer it, where set."""
    config: Any = np.show_config(mode="dicts")
    built = config["Build Dependencies"]["blas"]
    found = {"name": str(built.get("name")), "version": str(built.get("version"))}
    library = _openblas()
    if library is not None:
        library.scipy_openblas_get_corename64_.restype = ctypes.c_char_p
        found["core"] = library.scipy_openblas_get_corename64_().decode()
    return found | {name: os.environ[name] for name in VARIABLES if name in os.environ}


@cache
def _openblas() -> Any:
    """The OpenBLAS that NumPy's wheel brought and has loaded, or None."""
    package = Path(np.__file__).parent
    for folder in (package.parent / "numpy.libs", package / ".dylibs"):
        for file in folder.glob("*openblas64_*"):
            library = ctypes.CDLL(str(file))
            if hasattr(library, "scipy_openblas_set_num_threads64_"):
                return library
    return None

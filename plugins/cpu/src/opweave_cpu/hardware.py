"""What is known about the CPU and the libraries that compute on it."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final

import numpy as np

from opweave.runtime.host.processor import cpu_fields

__all__ = ["cpu_features", "has_avx512", "has_openblas", "instruction_sets", "openblas_function"]

# The instruction sets that decide how fast vector code is, named as Linux spells them.
_VECTOR_SETS = (
    "sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_int8", "amx_bf16",
    "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip


def instruction_sets() -> tuple[str, ...]:
    """Vector instruction sets of the CPU, as far as the system lists them."""
    fields = cpu_fields()
    have = set((fields.get("flags") or fields.get("Features") or "").split())
    return tuple(name for name in _VECTOR_SETS if name in have)


@cache
def has_avx512() -> bool:
    """Whether NumPy computes in vectors of 512 bits, for which it has more functions, and f16."""
    return "avx512bw" in instruction_sets()


_AFFIXES: Final = (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", ""))
"""With what the names of functions begin and end in the libraries that NumPy is built with."""


@cache
def openblas_function(name: str) -> Any | None:
    """A function of an OpenBLAS with threads of its own, NumPy's if there are several; ``None`` where there is none.
    Called from Python it keeps the interpreter's lock."""
    from threadpoolctl import ThreadpoolController

    libraries = ThreadpoolController().select(internal_api="openblas").lib_controllers
    for library in sorted(libraries, key=lambda known: "numpy" not in known.filepath):
        if library.threading_layer == "pthreads":
            loaded = ctypes.PyDLL(library.filepath)
            for prefix, suffix in _AFFIXES:
                found = getattr(loaded, f"{prefix}{name}{suffix}", None)
                if found is not None:
                    return found
    return None


@cache
def has_openblas() -> bool:
    """Whether NumPy was built for OpenBLAS, as its wheels for Linux and Windows are."""
    known = np.show_config(mode="dicts") or {}
    return "openblas" in str(known.get("Build Dependencies", {}).get("blas", {}).get("name", ""))


def cpu_features() -> dict[str, Any]:
    """NumPy's version; name, version, kernel and threads of the BLAS libraries in the process; instruction sets."""
    from threadpoolctl import threadpool_info

    features: dict[str, Any] = {"numpy": np.__version__}
    libraries = [info for info in threadpool_info() if info["user_api"] == "blas"]
    if libraries:
        features["blas"] = " ".join(f"{info['internal_api']} {info.get('version') or ''}".strip() for info in libraries)
        kernels = [str(info["architecture"]) for info in libraries if info.get("architecture")]
        if kernels:
            features["blas_kernel"] = " ".join(kernels)
        features["blas_threads"] = max(info["num_threads"] for info in libraries)
    return {**features, "instructions": instruction_sets()}

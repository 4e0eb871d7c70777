"""A product with quantized weights by ggml, as llama-cpp-python brings it, through its C interface.

To be built for the processor it runs on: ``CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python
llama-cpp-python``. `features` tells what it was built with.

On processors with AMX this takes GCC 11.5, 12.4, 13.3, or 14 and later, or Clang: earlier ones leave out stores into
the configuration of tiles (https://gcc.gnu.org/bugzilla/show_bug.cgi?id=114098), so that ggml's products with them end
the process. `crashing` finds that out in another process.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Callable
from ctypes import c_bool, c_char, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

__all__ = ["crashing", "features", "products", "quantized", "version"]

Array = np.ndarray[Any, Any]

TYPES: Final = {"f32": 0, "q4_0": 2, "q8_0": 8, "q4_k": 12, "q6_k": 14}
FEATURES: Final = ("avx", "avx2", "avx_vnni", "avx512", "avx512_vbmi", "avx512_vnni", "avx512_bf16", "amx_int8", "fma",
                   "f16c", "neon", "dotprod", "matmul_int8", "sve")  # fmt: skip


class _Settings(ctypes.Structure):
    """``struct ggml_init_params``."""

    _fields_ = (("size", c_size_t), ("buffer", c_void_p), ("no_alloc", c_bool))


class _Pool(ctypes.Structure):
    """``struct ggml_threadpool_params``."""

    _fields_ = (
        ("cpumask", c_bool * 512), ("n_threads", c_int), ("priority", c_int), ("poll", c_uint32),
        ("strict_cpu", c_bool), ("paused", c_bool),
    )  # fmt: skip


def _folder() -> Path:
    found = find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise ImportError("llama-cpp-python is not installed")
    return Path(found.origin).parent / "lib"


@cache
def _library() -> tuple[Any, Any]:
    """ggml's base library and that of its CPU backend, with the types of the functions that are used."""
    folder = _folder()
    base, cpu = (ctypes.CDLL(str(folder / f"lib{name}.so"), ctypes.RTLD_GLOBAL) for name in ("ggml-base", "ggml-cpu"))
    pointers = {
        base: ("ggml_init", "ggml_new_tensor_2d", "ggml_mul_mat", "ggml_new_graph", "ggml_backend_get_device",
               "ggml_backend_dev_buffer_type", "ggml_backend_dev_backend_reg", "ggml_backend_reg_get_proc_address",
               "ggml_backend_alloc_ctx_tensors_from_buft"),
        cpu: ("ggml_backend_cpu_init", "ggml_threadpool_new"),
    }  # fmt: skip
    for library, names in pointers.items():
        for name in names:
            getattr(library, name).restype = c_void_p
    base.ggml_init.argtypes = [_Settings]
    base.ggml_new_tensor_2d.argtypes = [c_void_p, c_int, c_int64, c_int64]
    base.ggml_backend_reg_get_proc_address.argtypes = [c_void_p, c_char_p]
    base.ggml_backend_dev_supports_op.restype = c_bool
    base.ggml_backend_buft_name.restype = c_char_p
    for name in ("ggml_backend_tensor_set", "ggml_backend_tensor_get"):
        getattr(base, name).argtypes = [c_void_p, c_void_p, c_size_t, c_size_t]
    return base, cpu


def _call(function: Any, *pointers: int | None) -> Any:
    return function(*[c_void_p(p) for p in pointers])


@cache
def features() -> str:
    """The features of processors that ggml was built to use."""
    cpu = _library()[1]
    cpu.ggml_cpu_init()
    return " ".join([name for name in FEATURES if getattr(cpu, f"ggml_cpu_has_{name}")()])


def version() -> str:
    """The version of llama-cpp-python."""
    from importlib.metadata import version as installed

    return installed("llama-cpp-python")


@cache
def crashing() -> bool:
    """Whether products with weights in memory of the kind ``AMX`` end the process."""
    if "amx_int8" not in features():
        return False
    return subprocess.run([sys.executable, __file__], capture_output=True, check=False).returncode != 0


class _Tiles:
    """The configuration of AMX's tiles in the threads that ggml computes in.

    ggml configures them once for each thread. Other libraries configure and release them at each of their products, in
    the thread that runs graphs and in those of OpenMP, of which torch and ggml have the same: after that, an
    instruction of ggml's is illegal. So ggml's configuration is loaded again before each of its runs, which takes a
    microsecond.
    """

    LOAD: Final = bytes.fromhex("c4e2784907c3")  # ldtilecfg [rdi]; ret
    STORE: Final = bytes.fromhex("c4e2794907c3")  # sttilecfg [rdi]; ret

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._memory.write(self.LOAD + self.STORE)
        start = ctypes.addressof(c_char.from_buffer(self._memory))
        self._load = c_void_p(start)
        self._store = ctypes.CFUNCTYPE(None, c_void_p)(start + len(self.LOAD))
        self._config = ctypes.create_string_buffer(64)
        self._in_all_threads = ctypes.CDLL("libgomp.so.1").GOMP_parallel

    def load(self, threads: int) -> None:
        """Load the configuration, if there is one, in as many threads as ggml computes in."""
        if self._config.raw[0]:
            self._in_all_threads(self._load, self._config, threads, 0)

    def keep(self) -> None:
        """Keep the configuration that ggml's first product with tiles has loaded."""
        if not self._config.raw[0]:
            self._store(self._config)


@cache
def _tiles() -> _Tiles:
    return _Tiles()


def quantized(number: int, values: Array, importance: Array | None, nbytes: int) -> Array:
    """Rows quantized by ``ggml_quantize_chunk`` to the type of that number, of so many bytes altogether."""
    chunk = ctypes.CDLL(str(next(_folder().glob("libggml-base.*")))).ggml_quantize_chunk
    chunk.restype, chunk.argtypes = c_size_t, (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p)
    out = np.empty(nbytes, np.uint8)
    weights = None if importance is None else importance.ctypes.data
    chunk(number, values.ctypes.data, out.ctypes.data, 0, *values.shape, weights)
    return out


def products(name: str, data: Array, x: Array, threads: int) -> dict[str, Callable[[], Array]]:
    """Runs of ``x @ w.T`` by kind of memory of the weights: ordinary, and those in which ggml repacks them for its
    faster kernels, as far as it has some for the type, and but for AMX where it is `crashing`. All runs of a process
    are to be made by one thread.

    Args:
        data: ``uint8``, shape (out, bytes of a row).
        x: f32, shape (rows, in). Copied at each run, as `Program.run` copies it.
    """
    base, cpu = _library()
    backend = cpu.ggml_backend_cpu_init()
    settings = _Pool(n_threads=threads, poll=50)
    pool = cpu.ggml_threadpool_new(ctypes.byref(settings))
    _call(cpu.ggml_backend_cpu_set_threadpool, backend, pool)
    cpu.ggml_backend_cpu_set_n_threads(c_void_p(backend), threads)
    device = _call(base.ggml_backend_get_device, backend)
    registry = _call(base.ggml_backend_dev_backend_reg, device)
    ordinary = _call(base.ggml_backend_dev_buffer_type, device)
    kinds = [ordinary]
    found = base.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if found:
        listed = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(found)(device)
        i = 0
        while listed and listed[i]:
            kinds.append(listed[i])
            i += 1
    runs: dict[str, Callable[[], Array]] = {}
    for kind in kinds:
        label = _call(base.ggml_backend_buft_name, kind).decode()
        multiplies_tiles = label == "AMX" and len(x) > 1  # a single row ggml multiplies by other instructions
        if not multiplies_tiles or __name__ == "__main__" or not crashing():
            run = _product(base, backend, device, kind, ordinary, name, data, x)
            if run is not None:
                runs[label] = partial(_run_with_tiles, run, threads) if multiplies_tiles else run
    return runs


def _product(
    base: Any, backend: int, device: int, kind: int, ordinary: int, name: str, data: Array, x: Array
) -> Callable[[], Array] | None:
    rows, columns = x.shape
    outputs = len(data)

    def context() -> int:
        made: int = base.ggml_init(_Settings(1 << 20, None, True))
        return made

    weights, others = context(), context()
    w = base.ggml_new_tensor_2d(weights, TYPES[name], columns, outputs)
    a = base.ggml_new_tensor_2d(others, TYPES["f32"], columns, rows)
    if not _call(base.ggml_backend_alloc_ctx_tensors_from_buft, weights, kind):
        return None
    node = _call(base.ggml_mul_mat, others, w, a)
    if not _call(base.ggml_backend_dev_supports_op, device, node):
        return None
    graph = _call(base.ggml_new_graph, others)
    _call(base.ggml_build_forward_expand, graph, node)
    _call(base.ggml_backend_alloc_ctx_tensors_from_buft, others, ordinary)
    base.ggml_backend_tensor_set(w, data.ctypes.data, 0, data.nbytes)
    out = np.empty((rows, outputs), np.float32)
    compute, graph_of = base.ggml_backend_graph_compute, (c_void_p(backend), c_void_p(graph))
    sizes = (x.ctypes.data, 0, x.nbytes), (out.ctypes.data, 0, out.nbytes)

    def run() -> Array:
        base.ggml_backend_tensor_set(a, *sizes[0])
        compute(*graph_of)
        base.ggml_backend_tensor_get(node, *sizes[1])
        return out

    run.keep = (data, x)  # type: ignore[attr-defined]
    return run


def _run_with_tiles(run: Callable[[], Array], threads: int) -> Array:
    _tiles().load(threads)
    out = run()
    _tiles().keep()
    return out


def _try_tiles() -> None:
    """A product with tiles."""
    for run in products("q8_0", np.zeros((32, 34 * 8), np.uint8), np.zeros((16, 256), np.float32), 1).values():
        run()


if __name__ == "__main__":
    _try_tiles()

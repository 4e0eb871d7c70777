"""A stack of products on ggml's RPC server, for `benchmarks.remote`: its client, and the server as a process.

Needs ggml with its RPC backend: ``CMAKE_ARGS=-DGGML_RPC=ON pip install --no-binary llama-cpp-python llama-cpp-python``,
or the folder of such libraries in ``GGML_FOLDER``. As a program: ``python -m benchmarks._ggml_rpc PORT THREADS``, the
server. It asks nobody for a token, so it listens on loopback only.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["stack", "start_server", "why_not"]

Array = np.ndarray[Any, Any]

_F32 = 0


class _Settings(ctypes.Structure):
    """``struct ggml_init_params``."""

    _fields_ = (("size", c_size_t), ("buffer", c_void_p), ("no_alloc", c_bool))


def _folder() -> Path:
    given = os.environ.get("GGML_FOLDER")
    if given:
        return Path(given)
    found = find_spec("llama_cpp")
    return Path(found.origin).parent / "lib" if found is not None and found.origin is not None else Path()


def why_not() -> str:
    """Why there is no server to compare with; ``""``: there is one."""
    return "" if (_folder() / "libggml-rpc.so").exists() else "no ggml with GGML_RPC=ON is installed"


def _libraries() -> tuple[Any, Any, Any]:
    found = [ctypes.CDLL(str(_folder() / f"libggml-{n}.so"), ctypes.RTLD_GLOBAL) for n in ("base", "cpu", "rpc")]
    base, cpu, rpc = found
    for name in ("ggml_init", "ggml_new_tensor_2d", "ggml_mul_mat", "ggml_new_graph", "ggml_backend_get_device",
                 "ggml_backend_alloc_ctx_tensors_from_buft"):  # fmt: skip
        getattr(base, name).restype = c_void_p
    base.ggml_init.argtypes = [_Settings]
    base.ggml_new_tensor_2d.argtypes = [c_void_p, c_int, c_int64, c_int64]
    for name in ("ggml_backend_tensor_set", "ggml_backend_tensor_get"):
        getattr(base, name).argtypes = [c_void_p, c_void_p, c_size_t, c_size_t]
    cpu.ggml_backend_cpu_init.restype = c_void_p
    rpc.ggml_backend_rpc_init.restype = rpc.ggml_backend_rpc_buffer_type.restype = c_void_p
    rpc.ggml_backend_rpc_init.argtypes = rpc.ggml_backend_rpc_buffer_type.argtypes = [c_char_p, c_uint32]
    rpc.ggml_backend_rpc_start_server.argtypes = [c_char_p, c_char_p, c_size_t, c_size_t, c_void_p]
    return base, cpu, rpc


def start_server(threads: int) -> tuple[subprocess.Popen[bytes], str]:
    """A server on loopback, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "benchmarks._ggml_rpc", str(port), str(threads)]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.05)
        else:
            return process, f"127.0.0.1:{port}"
    process.kill()
    raise RuntimeError("ggml's server does not listen")


def stack(address: str, weights: Sequence[Array], x: Array) -> Callable[[], Array]:
    """Runs of ``x @ w.T`` for one of ``weights`` after the other; all f32, of shape (out, in). ``x`` is sent and the
    result fetched by each run."""
    base, _, rpc = _libraries()
    backend = c_void_p(rpc.ggml_backend_rpc_init(address.encode(), 0))
    kind = c_void_p(rpc.ggml_backend_rpc_buffer_type(address.encode(), 0))
    kept, others = (c_void_p(base.ggml_init(_Settings(1 << 20, None, True))) for _ in range(2))
    made = [base.ggml_new_tensor_2d(kept, _F32, w.shape[1], w.shape[0]) for w in weights]
    first = base.ggml_new_tensor_2d(others, _F32, x.shape[1], x.shape[0])
    node = first
    for w in made:
        node = base.ggml_mul_mat(others, c_void_p(w), c_void_p(node))
    graph = c_void_p(base.ggml_new_graph(others))
    base.ggml_build_forward_expand(graph, c_void_p(node))
    for context in (kept, others):
        base.ggml_backend_alloc_ctx_tensors_from_buft(context, kind)
    for tensor, w in zip(made, weights, strict=True):
        base.ggml_backend_tensor_set(tensor, w.ctypes.data, 0, w.nbytes)
    out = np.empty((len(x), len(weights[-1])), np.float32)

    def run() -> Array:
        base.ggml_backend_tensor_set(first, x.ctypes.data, 0, x.nbytes)
        if base.ggml_backend_graph_compute(backend, graph):
            raise RuntimeError("ggml's server failed")
        base.ggml_backend_tensor_get(node, out.ctypes.data, 0, out.nbytes)
        return out

    return run


def _serve(port: str, threads: str) -> None:
    base, cpu, rpc = _libraries()
    device = (c_void_p * 1)(base.ggml_backend_get_device(c_void_p(cpu.ggml_backend_cpu_init())))
    rpc.ggml_backend_rpc_start_server(f"127.0.0.1:{port}".encode(), None, int(threads), 1, device)


if __name__ == "__main__":
    _serve(*sys.argv[1:3])

"""What an OpenCL processor's memory and arithmetic allow, and which share of it operations reach.

Each operation works on at least 64 MiB; its bytes are those of every input and output of the graph, once. The bounds
are kernels written for nothing else, on the same device, which take turns with the operation in one process:

- ``memory``: reading as many bytes into sums, or, where the operation writes too, copying half as many.
- ``arithmetic``: as much arithmetic on numbers in the first cache: a multiplication and addition for each operation of
  a chain and of a norm, exp for softmax, and for quantized weights what the formula of a block says: half bytes to
  floats (or signed bytes), times a scale, minus an offset, and a multiplication and addition. Unpacking scales is not
  in it.

The allowed time is the longer of the two. Figures are minima; target: at least 0.7 of what is allowed. The device is
the first of kind CPU; ``OPWEAVE_OPENCL_DEVICES`` selects another one.

- ``chain N``: N multiplications and additions in turns, of two tensors of 16 Mi floats.
- ``softmax``, ``layer_norm``, ``rms_norm`` along rows of 4,096 floats.
- ``linear q4_0`` ...: one row times weights of 8,192 columns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import opweave as ow

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, interleaved, options

ROWS = COLUMNS = 4096
SHARE = 0.7
GROUPS = 256
INPUTS, OUTPUTS = 8192, 16384
SCALES = {"q4_0": (0,), "q8_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
"""Where in a block its f16 scales lie."""

Call = Callable[[], Any]

BOUNDS = """
typedef float16 Loose __attribute__((aligned(4)));
typedef uchar16 Bytes __attribute__((aligned(1)));
typedef char16 Chars __attribute__((aligned(1)));

// Work-items share the memory evenly; n is in vectors of 16 floats.
#define SHARE(i) (n * (i) / get_global_size(0))
#define MINE const long first = SHARE(get_global_id(0)), last = SHARE(get_global_id(0) + 1)

__kernel void read(__global float *out, __global const float *in, const long n)
{
    MINE;
    float16 a = 0, b = 0, c = 0, d = 0;
    long i = first;
    for (; i + 4 <= last; i += 4) {
        a += ((__global const Loose *)in)[i], b += ((__global const Loose *)in)[i + 1];
        c += ((__global const Loose *)in)[i + 2], d += ((__global const Loose *)in)[i + 3];
    }
    ((__global Loose *)out)[get_global_id(0)] = a + b + c + d;
}

__kernel void copy(__global float *out, __global const float *in, const long n)
{
    MINE;
    for (long i = first; i < last; i++) ((__global Loose *)out)[i] = ((__global const Loose *)in)[i];
}

// Arithmetic on n vectors, of numbers that always lie in the first cache.
#define EIGHT(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#define ARITHMETIC(name, type, wide, EXPRESSION) \\
    __kernel void name(__global float *out, __global const type *in, const long n) \\
    { \\
        MINE; \\
        float16 s[8] = {0, 0, 0, 0, 0, 0, 0, 0}; \\
        for (long i = first; i < last; i += 8) { \\
            __global const wide *at = (__global const wide *)(in + (i & 8) * 16); \\
            const float16 x = *(__global const Loose *)(out + (i & 8) * 16); \\
            EIGHT(EXPRESSION) \\
        } \\
        ((__global Loose *)out)[512 + get_global_id(0)] = s[0] + s[1] + s[2] + s[3] + s[4] + s[5] + s[6] + s[7]; \\
    }

#define MULTIPLY(k) s[k] += x * at[k];
ARITHMETIC(multiply, float, Loose, MULTIPLY)
#define POWER(k) s[k] += exp(at[k]);
ARITHMETIC(power, float, Loose, POWER)
#define NIBBLES(k) (k & 1 ? at[k / 2] >> (uchar)4 : at[k / 2] & (uchar)15)
#define HALVES(k) s[k] += x * (out[k] * convert_float16(NIBBLES(k)) - out[9]);
ARITHMETIC(halves, uchar, Bytes, HALVES)
#define SIGNED(k) s[k] += x * (out[k] * convert_float16(at[k]));
ARITHMETIC(whole, char, Chars, SIGNED)
"""


class Bounds:
    """The kernels of the bounds, on one device."""

    def __init__(self, device: Any) -> None:
        import pyopencl as cl

        self.queue = cl.CommandQueue(device.context, device.cl_device)
        self.program = cl.Program(device.context, BOUNDS).build(devices=[device.cl_device])
        largest = 4 * ROWS * COLUMNS * 2
        self.memory = [cl.Buffer(device.context, cl.mem_flags.READ_WRITE, largest) for _ in range(2)]
        for mem in self.memory:
            cl.enqueue_fill_buffer(self.queue, mem, np.zeros(4, np.uint8), 0, largest)
        self.queue.finish()

    def call(self, kernel: str, vectors: int) -> Call:
        """The call of a bound on so many vectors of 16."""
        import pyopencl as cl

        bound = cl.Kernel(self.program, kernel)
        bound.set_args(*self.memory, np.int64(vectors))

        def run() -> None:
            cl.enqueue_nd_range_kernel(self.queue, bound, (GROUPS,), (1,))
            self.queue.finish()

        return run


class Case(NamedTuple):
    """An operation and its bounds: which kernels, on how many vectors of 16."""

    name: str
    result: ow.Tensor
    nbytes: int
    memory: tuple[str, int]
    arithmetic: tuple[str, int]


def floats(*shape: int, seed: int = 0) -> ow.Tensor:
    return ow.weights({"x": np.random.default_rng(seed).standard_normal(shape, np.float32)})["x"]


def chains(lengths: tuple[int, ...]) -> list[Case]:
    x, y = floats(ROWS, COLUMNS), floats(ROWS, COLUMNS, seed=1)
    cases = []
    for length in lengths:
        h = x
        for i in range(length):
            h = h * y if i % 2 == 0 else h + y
        vectors = ROWS * COLUMNS // 16
        nbytes = 3 * 4 * ROWS * COLUMNS
        cases.append(Case(f"chain {length}", h, nbytes, ("copy", vectors * 3 // 2), ("multiply", vectors * length)))
    return cases


def rows() -> list[Case]:
    x, w = floats(ROWS, COLUMNS), floats(COLUMNS, seed=1)
    vectors = ROWS * COLUMNS // 16
    memory, nbytes = ("copy", vectors), 2 * 4 * ROWS * COLUMNS
    return [
        Case("softmax", ow.softmax(x), nbytes, memory, ("power", vectors)),
        Case("layer_norm", ow.layer_norm(x, w, w), nbytes, memory, ("multiply", 4 * vectors)),
        Case("rms_norm", ow.rms_norm(x, w), nbytes, memory, ("multiply", 3 * vectors)),
    ]


def products(name: str) -> Case:
    """A row times quantized weights of at least 64 MiB."""
    dtype = ow.as_dtype(name)
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (OUTPUTS, INPUTS // dtype.block, dtype.itemsize), np.uint8)
    for at in SCALES[name]:
        raw[..., at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
    leaves = ow.weights(
        {
            "x": rng.standard_normal((1, INPUTS), np.float32),
            "w": ow.Blocks(raw.reshape(OUTPUTS, -1), (OUTPUTS, INPUTS), dtype),
        }
    )
    decoding = "whole" if name == "q8_0" else "halves"
    vectors = OUTPUTS * INPUTS // 16
    result = ow.linear(leaves["x"], leaves["w"])
    return Case(f"linear {name}", result, raw.nbytes, ("read", raw.nbytes // 64), (decoding, vectors))


def main() -> None:
    given = options(__doc__.splitlines()[0])
    device = next((d for d in ow.devices() if d.name.startswith("opencl:") and d.kind is ow.Kind.CPU), None)
    if device is None:
        sys.exit("no OpenCL device of kind CPU here: pip install 'opweave-opencl[pocl]'")
    report = Report("opencl_bandwidth", given)
    bounds = Bounds(device)
    makers: list[Callable[[], list[Case]]] = [partial(chains, (1, 4) if given.quick else (1, 2, 4, 8, 16)), rows]
    makers += [partial(lambda name: [products(name)], name) for name in (("q4_0",) if given.quick else SCALES)]
    for make in makers:
        for case in make():
            scheduler = ow.Scheduler(device)
            run = scheduler.build(ow.flatten(case.result)[:1]).run
            calls = {"opweave": run, "memory": bounds.call(*case.memory), "arithmetic": bounds.call(*case.arithmetic)}
            times = {n: min(s) for n, s in interleaved(calls, 5 if given.quick else 15).items()}
            allowed = max(times["memory"], times["arithmetic"])
            report.row(
                operation=case.name,
                MiB=case.nbytes / 2**20,
                **{f"{n}_ms": t * 1e3 for n, t in times.items()},
                gb_per_s=case.nbytes / times["opweave"] / 1e9,
                bound="memory" if allowed == times["memory"] else "arithmetic",
                share=allowed / times["opweave"],
            )
            report.target(f"{case.name}, time over what is allowed", times["opweave"] / allowed, 1 / SHARE, "times")
    report.finish("Shares of what memory and arithmetic allow on an OpenCL processor (minima)")


if __name__ == "__main__":
    main()

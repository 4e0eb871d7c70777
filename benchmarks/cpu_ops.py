"""Every family of operations on ``cpu``, beside plain NumPy and torch.

Sizes are those of models. The contestants take turns in one process, on all cores:

- ``numpy``: the best plain formulation: results go into arrays made beforehand (``out=``), without temporaries where
  NumPy can avoid them, and without tiles or threads of one's own. BLAS uses all cores.
- ``kernel``: what a program calls for the operation. Its operands are weights, its result lies in planned memory.
- ``run``: a program of the one operation, which costs 1.3 µs by itself, and more when the operation's data have driven
  it out of the caches. `dispatch.py` and `decode.py` look into that.
- ``torch``: eager, in inference mode, with ``out=`` where the function has it. Nothing where torch lacks the operation.

All have to agree on the result first. All arrays begin at a page, and each contest is set up several times: where they
happen to lie decides over up to a quarter of a short pass. Times are minima, which other work on the machine disturbs
least; a ratio is that of the minima in one place, and the median of all places.

Targets: no kernel slower than plain NumPy, up to ``NOISE``, by which two measurements of one call may differ; products
at most 1.05 times ``np.matmul``; where ``opweave-cpu[jit]`` compiles, no run beyond 1.8 times torch's time. Rows that
miss the first are marked. ``OPWEAVE_CPU_JIT=0`` measures NumPy's kernels where llvmlite is installed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from contextvars import copy_context
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

import opweave as ow
from opweave_cpu.jit.compiler import why_not
from opweave_cpu.threads import set_up_numpy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, interleaved, machine, median, parser, seconds

NOISE = 1.03
PRODUCTS = 1.05
SAMPLE_SECONDS = 3e-3
"""A sample of short calls: so short that some samples escape the other work of a busy machine."""
FEWEST, MOST = 3, 20
"""How many samples of long and of short calls there are in each place."""
PLACES = 9
"""How many times a contest is set up, each time in other memory."""

F = np.float32
BF = ml_dtypes.bfloat16
Array = np.ndarray[Any, Any]
Call = Callable[[], Any]
Peer = Callable[[Any], Call]
"""torch -> the call; the call returns a tensor."""


class Contest(NamedTuple):
    """One operation, ready to be called: ours as a tensor over weights, the others as calls that return the result."""

    ours: ow.Tensor
    plain: Call
    peer: Peer | None


class Case(NamedTuple):
    op: str
    size: str
    limit: float
    maker: Callable[..., Contest]
    args: tuple[Any, ...]


CASES: list[Case] = []


def case(op: str, size: str, *args: Any, limit: float = NOISE) -> Callable[[Callable[..., Contest]], Any]:
    """Enter a contest of the decorated maker, called with ``args``."""

    def enter(make: Callable[..., Contest]) -> Callable[..., Contest]:
        # Decorators apply from the last to the first.
        place = next((i for i, other in enumerate(CASES) if other.maker is make), len(CASES))
        CASES.insert(place, Case(op, size, limit, make, args))
        return make

    return enter


PAGE = 4096


def empty(shape: int | tuple[int, ...], dtype: Any) -> Array:
    """An array that begins at a page, for NumPy too: its own begin anywhere, which costs passes up to a quarter."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    room = np.empty(size + PAGE, np.uint8)
    skip = -room.ctypes.data % PAGE
    result: Array = room[skip : skip + size].view(dtype).reshape(shape)
    return result


def empty_like(x: Array) -> Array:
    return empty(x.shape, x.dtype)


def placed(x: Array) -> Array:
    """A copy that begins at a page."""
    result = empty_like(x)
    result[...] = x
    return result


def array(*shape: int, seed: int = 0) -> Array:
    return placed(np.random.default_rng(seed).standard_normal(shape, F))


def leaf(value: Any) -> ow.Tensor:
    return ow.weights({"w": value})["w"]


def calls(out: Any, *steps: Call) -> Call:
    """The call that makes ``steps`` and returns ``out``."""

    def call() -> Any:
        for step in steps:
            step()
        return out

    return call


# --- element by element ---------------------------------------------------------------------------------------------

SMALL, LARGE = (128, 1536), (2048, 2048)


@case("add", "128x1536", "add", SMALL)
@case("add", "2048x2048", "add", LARGE)
@case("mul", "128x1536", "multiply", SMALL)
@case("mul", "2048x2048", "multiply", LARGE)
def two_sided(name: str, shape: tuple[int, ...]) -> Contest:
    a, b = array(*shape), array(*shape, seed=1)
    ours = {"add": ow.add, "multiply": ow.mul}[name]
    return Contest(
        ours(leaf(a), leaf(b)),
        partial(getattr(np, name), a, b, empty_like(a)),
        lambda torch: partial(getattr(torch, name), *map(torch.from_numpy, (a, b)), out=torch.empty(shape)),
    )


@case("exp", "128x1536", SMALL)
@case("exp", "2048x2048", LARGE)
def exp(shape: tuple[int, ...]) -> Contest:
    x = array(*shape)
    peer: Peer = lambda torch: partial(torch.exp, torch.from_numpy(x), out=torch.empty(shape))  # noqa: E731
    return Contest(ow.exp(leaf(x)), partial(np.exp, x, empty_like(x)), peer)


@case("silu", "128x1536", SMALL)
@case("silu", "2048x2048", LARGE)
def silu(shape: tuple[int, ...]) -> Contest:
    x = array(*shape)
    out = empty_like(x)
    plain = calls(
        out,
        partial(np.negative, x, out),
        partial(np.exp, out, out),
        partial(np.add, out, F(1), out),
        partial(np.divide, x, out, out),
    )
    return Contest(ow.silu(leaf(x)), plain, lambda torch: partial(torch.nn.functional.silu, torch.from_numpy(x)))


@case("gelu_tanh", "128x1536", SMALL)
@case("gelu_tanh", "2048x2048", LARGE)
def gelu_tanh(shape: tuple[int, ...]) -> Contest:
    x = array(*shape)
    out = empty_like(x)

    def plain() -> Array:
        np.multiply(x, x, out)
        np.multiply(out, F(math.sqrt(2 / math.pi) * 0.044715), out)
        np.add(out, F(math.sqrt(2 / math.pi)), out)
        np.multiply(out, x, out)
        np.tanh(out, out)
        np.add(out, F(1), out)
        np.multiply(out, x, out)
        return np.multiply(out, F(0.5), out)

    peer: Peer = lambda torch: partial(torch.nn.functional.gelu, torch.from_numpy(x), approximate="tanh")  # noqa: E731
    return Contest(ow.gelu_tanh(leaf(x)), plain, peer)


@case("gelu", "128x1536", SMALL)
@case("gelu", "2048x2048", LARGE)
def gelu(shape: tuple[int, ...]) -> Contest:
    """NumPy has no erf: formula 7.1.26 of Abramowitz and Stegun, good to 1.5e-7."""
    x = array(*shape)
    out, z, t = empty_like(x), empty_like(x), empty_like(x)
    factors = [F(c) for c in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)]

    def plain() -> Array:
        np.multiply(x, F(math.sqrt(0.5)), z)
        np.absolute(z, t)
        np.multiply(t, F(0.3275911), t)
        np.add(t, F(1), t)
        np.reciprocal(t, t)
        np.multiply(t, factors[0], out)
        for c in factors[1:]:
            np.add(out, c, out)
            np.multiply(out, t, out)
        np.multiply(z, z, t)
        np.negative(t, t)
        np.exp(t, t)
        np.multiply(out, t, out)
        np.subtract(F(1), out, out)
        np.copysign(out, x, out)
        np.add(out, F(1), out)
        np.multiply(out, x, out)
        return np.multiply(out, F(0.5), out)

    return Contest(ow.gelu(leaf(x)), plain, lambda torch: partial(torch.nn.functional.gelu, torch.from_numpy(x)))


@case("swiglu", "128x2x1536", 128, 1536)
@case("swiglu", "1024x2x2048", 1024, 2048)
def swiglu(rows: int, columns: int) -> Contest:
    x = array(rows, 2 * columns)
    gate, value, out = x[:, :columns], x[:, columns:], empty((rows, columns), F)
    plain = calls(
        out,
        partial(np.negative, gate, out),
        partial(np.exp, out, out),
        partial(np.add, out, F(1), out),
        partial(np.divide, gate, out, out),
        partial(np.multiply, out, value, out),
    )

    def peer(torch: Any) -> Call:
        g, v = torch.from_numpy(x).chunk(2, -1)
        return lambda: torch.nn.functional.silu(g) * v

    return Contest(ow.swiglu(leaf(x)), plain, peer)


# --- rows -----------------------------------------------------------------------------------------------------------

ROWS, MANY_ROWS = (128, 384), (2048, 1024)


@case("softmax", "12x128x128", (12, 128, 128))
@case("softmax", "2048x1024", MANY_ROWS)
@case("softmax", "8x32000", (8, 32000))
def softmax(shape: tuple[int, ...]) -> Contest:
    x = array(*shape)
    out, stat = empty_like(x), empty((*shape[:-1], 1), F)
    plain = calls(
        out,
        partial(np.max, x, -1, stat, True),
        partial(np.subtract, x, stat, out),
        partial(np.exp, out, out),
        partial(np.sum, out, -1, None, stat, True),
        partial(np.divide, out, stat, out),
    )
    peer: Peer = lambda torch: partial(torch.softmax, torch.from_numpy(x), -1, out=torch.empty(shape))  # noqa: E731
    return Contest(ow.softmax(leaf(x)), plain, peer)


@case("layer_norm", "128x384", ROWS)
@case("layer_norm", "2048x1024", MANY_ROWS)
def layer_norm(shape: tuple[int, int]) -> Contest:
    x, w, b = array(*shape), array(shape[1], seed=1), array(shape[1], seed=2)
    out, stat = empty_like(x), empty((len(x), 1), F)

    def plain() -> Array:
        np.mean(x, -1, out=stat, keepdims=True)
        np.subtract(x, stat, out)
        np.vecdot(out, out, stat[:, 0])
        np.divide(stat, F(shape[1]), stat)
        np.add(stat, F(1e-5), stat)
        np.sqrt(stat, stat)
        np.divide(out, stat, out)
        np.multiply(out, w, out)
        return np.add(out, b, out)

    def peer(torch: Any) -> Call:
        weight, bias = torch.from_numpy(w), torch.from_numpy(b)
        return partial(torch.nn.functional.layer_norm, torch.from_numpy(x), (shape[1],), weight, bias)

    return Contest(ow.layer_norm(leaf(x), leaf(w), leaf(b)), plain, peer)


@case("rms_norm", "128x384", ROWS)
@case("rms_norm", "2048x1024", MANY_ROWS)
def rms_norm(shape: tuple[int, int]) -> Contest:
    x, w = array(*shape), array(shape[1], seed=1)
    out, stat = empty_like(x), empty((len(x), 1), F)

    def plain() -> Array:
        np.vecdot(x, x, stat[:, 0])
        np.divide(stat, F(shape[1]), stat)
        np.add(stat, F(1e-6), stat)
        np.sqrt(stat, stat)
        np.divide(x, stat, out)
        return np.multiply(out, w, out)

    def peer(torch: Any) -> Call:
        return partial(torch.nn.functional.rms_norm, torch.from_numpy(x), (shape[1],), torch.from_numpy(w), 1e-6)

    return Contest(ow.rms_norm(leaf(x), leaf(w)), plain, peer)


@case("sum", "rows of 2048x1024", "sum", -1)
@case("sum", "columns of 2048x1024", "sum", 0)
@case("mean", "rows of 2048x1024", "mean", -1)
@case("mean", "columns of 2048x1024", "mean", 0)
@case("max", "rows of 2048x1024", "max", -1)
@case("max", "columns of 2048x1024", "max", 0)
@case("argmax", "rows of 2048x1024", "argmax", -1)
@case("argmax", "columns of 2048x1024", "argmax", 0)
def reduction(name: str, axis: int) -> Contest:
    x = array(*MANY_ROWS)
    out = empty(MANY_ROWS[0 if axis else 1], np.int64 if name == "argmax" else F)
    torchs = {"max": "amax"}.get(name, name)
    return Contest(
        getattr(ow, name)(leaf(x), axis),
        partial(getattr(np, name), x, axis, out=out),
        lambda torch: partial(getattr(torch, torchs), torch.from_numpy(x), axis),
    )


@case("cumsum", "rows of 512x1024", (512, 1024))
@case("cumsum", "8x32000", (8, 32000))
def cumsum(shape: tuple[int, int]) -> Contest:
    x = array(*shape)
    peer: Peer = lambda torch: partial(torch.cumsum, torch.from_numpy(x), -1, out=torch.empty(shape))  # noqa: E731
    return Contest(ow.cumsum(leaf(x)), partial(np.cumsum, x, -1, out=empty_like(x)), peer)


@case("argsort", "256x1024", (256, 1024))
@case("argsort", "4x32000", (4, 32000))
def argsort(shape: tuple[int, int]) -> Contest:
    """No two elements are equal, so there is one right order."""
    x = placed(np.random.default_rng(0).permuted(np.broadcast_to(np.arange(shape[1], dtype=F), shape), axis=1))
    return Contest(
        ow.argsort(leaf(x)), partial(np.argsort, x, -1), lambda torch: partial(torch.argsort, torch.from_numpy(x), -1)
    )


@case("top_k", "40 of 32000, 4 rows", 4, 32000, 40)
@case("top_k", "2 of 64, 512 rows", 512, 64, 2)
def top_k(rows: int, n: int, k: int) -> Contest:
    x = array(rows, n)

    def plain() -> Array:
        ids = np.argpartition(x, n - k, -1)[:, n - k :]
        values = np.take_along_axis(x, ids, -1)
        order = np.argsort(values, -1)[:, ::-1]
        np.take_along_axis(ids, order, -1)
        return np.take_along_axis(values, order, -1)

    def peer(torch: Any) -> Call:
        tensor = torch.from_numpy(x)
        return lambda: torch.topk(tensor, k).values

    return Contest(ow.top_k(leaf(x), k)[0], plain, peer)


# --- products -------------------------------------------------------------------------------------------------------


@case("matmul", "512x512x512", (512, 512), (512, 512), limit=PRODUCTS)
@case("matmul", "1024x1024x1024", (1024, 1024), (1024, 1024), limit=PRODUCTS)
@case("matmul", "12 of 128x64x128", (12, 128, 64), (12, 64, 128), limit=PRODUCTS)
def matmul(m: tuple[int, ...], n: tuple[int, ...]) -> Contest:
    a, b = array(*m), array(*n, seed=1)
    shape = (*m[:-1], n[-1])
    return Contest(
        leaf(a) @ leaf(b),
        partial(np.matmul, a, b, empty(shape, F)),
        lambda torch: partial(torch.matmul, torch.from_numpy(a), torch.from_numpy(b), out=torch.empty(shape)),
    )


@case("linear", "128x384 -> 1536, bias", 128, limit=PRODUCTS)
@case("linear", "16x384 -> 1536, bias", 16, limit=PRODUCTS)
@case("linear", "1x384 -> 1536, bias", 1, limit=PRODUCTS)
def linear(rows: int) -> Contest:
    x, w, b = array(rows, 384), array(1536, 384, seed=1), array(1536, seed=2)
    out = empty((rows, 1536), F)
    plain = calls(out, partial(np.matmul, x, w.T, out), partial(np.add, out, b, out))
    peer: Peer = lambda torch: partial(torch.nn.functional.linear, *map(torch.from_numpy, (x, w, b)))  # noqa: E731
    return Contest(ow.linear(leaf(x), leaf(w), leaf(b)), plain, peer)


@case("linear", "128x384 -> 1536, bf16", 128)
@case("linear", "16x384 -> 1536, bf16", 16)
@case("linear", "1x384 -> 1536, bf16", 1)
def linear_of_halves(rows: int) -> Contest:
    x, w = (placed(a.astype(BF)) for a in (array(rows, 384), array(1536, 384, seed=1)))
    wide_x, wide_w = empty(x.shape, F), empty(w.shape, F)
    wide, out = empty((rows, 1536), F), empty((rows, 1536), BF)
    plain = calls(
        out,
        partial(np.copyto, wide_x, x),
        partial(np.copyto, wide_w, w),
        partial(np.matmul, wide_x, wide_w.T, wide),
        partial(np.copyto, out, wide, "unsafe"),
    )

    def peer(torch: Any) -> Call:
        tensors = (torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) for a in (x, w))
        return partial(torch.nn.functional.linear, *tensors)

    return Contest(ow.linear(leaf(x), leaf(w)), plain, peer)


def q8_0(w: Array) -> tuple[Array, Call]:
    """Random blocks of 8 bits for a matrix as ``w``: its bytes, and the call that decodes them into ``w``."""
    rng = np.random.default_rng(3)
    blocks = empty((len(w), w.shape[1] // 32), [("d", "f2"), ("q", "i1", 32)])
    blocks["d"], blocks["q"] = rng.uniform(0.01, 0.02, blocks.shape), rng.integers(-128, 128, (*blocks.shape, 32))
    tiles = w.reshape(*blocks.shape, 32)
    return blocks, lambda: np.multiply(blocks["q"], blocks["d"][..., None].astype(F), tiles)


def q4_0(w: Array) -> tuple[Array, Call]:
    """The same of 4 bits: the low halves of 16 bytes, then the high ones, less 8."""
    rng = np.random.default_rng(3)
    blocks = empty((len(w), w.shape[1] // 32), [("d", "f2"), ("q", "u1", 16)])
    blocks["d"], blocks["q"] = rng.uniform(0.1, 0.2, blocks.shape), rng.integers(0, 256, (*blocks.shape, 16))
    tiles = w.reshape(*blocks.shape, 2, 16)
    halves = empty((*blocks.shape, 2, 16), np.uint8)

    def decode() -> None:
        np.bitwise_and(blocks["q"], 15, halves[..., 0, :])
        np.right_shift(blocks["q"], 4, halves[..., 1, :])
        np.subtract(halves, F(8), tiles)
        np.multiply(tiles, blocks["d"][..., None, None].astype(F), tiles)

    return blocks, decode


@case("linear", "128x384 -> 1536, q8_0", "q8_0", 128)
@case("linear", "16x384 -> 1536, q8_0", "q8_0", 16)
@case("linear", "1x384 -> 1536, q8_0", "q8_0", 1)
@case("linear", "128x384 -> 1536, q4_0", "q4_0", 128)
@case("linear", "1x384 -> 1536, q4_0", "q4_0", 1)
def linear_of_blocks(kind: str, rows: int) -> Contest:
    x, w, out = array(rows, 384), empty((1536, 384), F), empty((rows, 1536), F)
    blocks, decode = {"q8_0": q8_0, "q4_0": q4_0}[kind](w)
    weight = leaf(ow.Blocks(blocks.view(np.uint8).reshape(-1), w.shape, kind))
    return Contest(ow.linear(leaf(x), weight), calls(out, decode, partial(np.matmul, x, w.T, out)), None)


@case("expert_linear", "128x256 -> 512, 2 of 8", 128, 256, 512, 8, 2)
def expert_linear(tokens: int, n: int, m: int, experts: int, used: int) -> Contest:
    x, w = array(tokens, n), array(experts, m, n, seed=1)
    ids = np.argsort(array(tokens, experts, seed=2), -1)[:, :used].copy()
    out = empty((tokens * used, m), F)

    def plain() -> Array:
        flat = ids.reshape(-1)
        for e in range(experts):
            rows = np.nonzero(flat == e)[0]
            out[rows] = x[rows // used] @ w[e].T
        return out.reshape(tokens, used, m)

    def peer(torch: Any) -> Call:
        a, b, flat = torch.from_numpy(x), torch.from_numpy(w), torch.from_numpy(ids).view(-1)
        result = torch.empty(tokens * used, m)

        def call() -> Any:
            for e in range(experts):
                rows = torch.nonzero(flat == e)[:, 0]
                result[rows] = a[rows // used] @ b[e].T
            return result.view(tokens, used, m)

        return call

    return Contest(ow.expert_linear(leaf(x), leaf(w), leaf(ids)), plain, peer)


# --- moving ---------------------------------------------------------------------------------------------------------


@case("embedding", "512 of 30522x384")
def embedding() -> Contest:
    table, ids = array(30522, 384), np.random.default_rng(1).integers(0, 30522, 512)
    out = empty((512, 384), F)

    def refuse() -> None:
        # The operation refuses ids out of range. What NumPy offers for that, mode "raise", buffers all of the output.
        if ids.min() < 0 or ids.max() >= len(table):
            raise IndexError

    return Contest(
        ow.embedding(leaf(table), leaf(ids)),
        calls(out, refuse, partial(np.take, table, ids, 0, out, "clip")),
        lambda torch: partial(torch.nn.functional.embedding, torch.from_numpy(ids), torch.from_numpy(table)),
    )


@case("concat", "1024x512 twice, columns", 1)
@case("concat", "1024x512 twice, rows", 0)
def concat(axis: int) -> Contest:
    a, b = array(1024, 512), array(1024, 512, seed=1)
    shape = (1024, 1024) if axis else (2048, 512)

    def peer(torch: Any) -> Call:
        return partial(torch.cat, [torch.from_numpy(a), torch.from_numpy(b)], axis, out=torch.empty(shape))

    return Contest(ow.concat([leaf(a), leaf(b)], axis), partial(np.concatenate, [a, b], axis, empty(shape, F)), peer)


@case("contiguous", "1024x1024 transposed", (1024, 1024), (1, 0))
@case("contiguous", "1x512x12x64, heads first", (1, 512, 12, 64), (0, 2, 1, 3))
def contiguous(shape: tuple[int, ...], axes: tuple[int, ...]) -> Contest:
    x = array(*shape)
    view = x.transpose(axes)
    out = empty(view.shape, F)

    def peer(torch: Any) -> Call:
        target, source = torch.empty(view.shape), torch.from_numpy(x).permute(axes)
        return lambda: target.copy_(source)

    return Contest(ow.contiguous(ow.transpose(leaf(x), axes)), calls(out, partial(np.copyto, out, view)), peer)


# --- attention ------------------------------------------------------------------------------------------------------


@case("rope", "1x32x512x128, halves", 512)
@case("rope", "1x32x1x128, halves", 1)
def rope(tokens: int) -> Contest:
    x, positions = array(1, 32, tokens, 128), np.arange(100, 100 + tokens)
    frequencies = (10000.0 ** (-np.arange(64) / 64)).astype(F)
    out, rest = empty_like(x), empty((1, 32, tokens, 64), F)
    angle = empty((tokens, 64), F)
    cos, sin = empty_like(angle), empty_like(angle)

    def plain() -> Array:
        np.multiply(positions[:, None], frequencies, angle, casting="unsafe")
        np.cos(angle, cos)
        np.sin(angle, sin)
        a, b, c, d = x[..., :64], x[..., 64:], out[..., :64], out[..., 64:]
        np.multiply(a, cos, c)
        np.multiply(b, sin, rest)
        np.subtract(c, rest, c)
        np.multiply(a, sin, d)
        np.multiply(b, cos, rest)
        np.add(d, rest, d)
        return out

    def peer(torch: Any) -> Call:
        t, places, speeds = torch.from_numpy(x), torch.from_numpy(positions), torch.from_numpy(frequencies)

        def call() -> Any:
            angles = places[:, None] * speeds
            c, s = angles.cos(), angles.sin()
            a, b = t.chunk(2, -1)
            return torch.cat([a * c - b * s, a * s + b * c], -1)

        return call

    return Contest(ow.rope(leaf(x), leaf(positions), pairing="half"), plain, peer)


@case("attention", "12 heads, 128 tokens", 12, 12, 128, 128, 64, False)
@case("attention", "prefill, 16/4 heads, 512 tokens", 16, 4, 512, 512, 128, True)
@case("attention", "decode, 32/8 heads, 1024 keys", 32, 8, 1, 1024, 128, True)
def attention(heads: int, groups: int, tokens: int, keys: int, size: int, causal: bool) -> Contest:
    q, k, v = array(1, heads, tokens, size), array(1, groups, keys, size, seed=1), array(1, groups, keys, size, seed=2)
    together = q.reshape(1, groups, heads // groups * tokens, size)
    scaled, scores = empty_like(together), empty((1, groups, heads // groups * tokens, keys), F)
    hidden = np.triu(np.full((tokens, keys), -np.inf, F), keys - tokens + 1)
    stat, out = empty((*scores.shape[:-1], 1), F), empty_like(together)
    split = scores.reshape(1, groups, heads // groups, tokens, keys)

    def plain() -> Array:
        np.multiply(together, F(1 / math.sqrt(size)), scaled)
        np.matmul(scaled, k.swapaxes(2, 3), scores)
        if causal and tokens > 1:
            np.add(split, hidden, split)
        np.max(scores, -1, stat, True)
        np.subtract(scores, stat, scores)
        np.exp(scores, scores)
        np.sum(scores, -1, None, stat, True)
        np.matmul(scores, v, out)
        np.divide(out, stat, out)
        return out.reshape(q.shape)

    def peer(torch: Any) -> Call:
        return partial(
            torch.nn.functional.scaled_dot_product_attention,
            *map(torch.from_numpy, (q, k, v)),
            is_causal=causal and tokens > 1,
            enable_gqa=heads != groups,
        )

    return Contest(ow.attention(leaf(q), leaf(k), leaf(v), causal=causal), plain, peer)


# --- images ---------------------------------------------------------------------------------------------------------


def framed(x: Array, value: float) -> Array:
    """``x`` with a frame of one element around its images."""
    return np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=value)


@case("conv2d", "3x3, 64 -> 64, 56x56")
def conv2d() -> Contest:
    """Its window elements as columns, and one product."""
    x, w = array(1, 64, 56, 56), array(64, 64, 3, 3, seed=1)
    frame, out = framed(x, 0), empty((64, 56 * 56), F)
    columns = empty((64, 3, 3, 56, 56), F)
    windows = np.lib.stride_tricks.sliding_window_view(frame[0], (56, 56), (1, 2))

    def plain() -> Array:
        np.copyto(frame[:, :, 1:-1, 1:-1], x)
        np.copyto(columns, windows)
        np.matmul(w.reshape(64, -1), columns.reshape(-1, 56 * 56), out)
        return out.reshape(x.shape)

    peer: Peer = lambda torch: partial(torch.conv2d, torch.from_numpy(x), torch.from_numpy(w), padding=1)  # noqa: E731
    return Contest(ow.conv2d(leaf(x), leaf(w), padding=1), plain, peer)


@case("conv2d", "3x3 depthwise, 128, 56x56")
def depthwise() -> Contest:
    x, w = array(1, 128, 56, 56), array(128, 1, 3, 3, seed=1)
    frame, out, term = framed(x, 0), empty_like(x), empty_like(x)

    def plain() -> Array:
        np.copyto(frame[:, :, 1:-1, 1:-1], x)
        np.multiply(frame[:, :, :-2, :-2], w[:, 0, 0, 0, None, None], out)
        for i in range(1, 9):
            r, c = divmod(i, 3)
            np.multiply(frame[:, :, r : r + 56, c : c + 56], w[:, 0, r, c, None, None], term)
            np.add(out, term, out)
        return out

    def peer(torch: Any) -> Call:
        return partial(torch.conv2d, torch.from_numpy(x), torch.from_numpy(w), padding=1, groups=128)

    return Contest(ow.conv2d(leaf(x), leaf(w), padding=1, groups=128), plain, peer)


@case("max_pool2d", "3x3, stride 2, 64, 112x112")
def max_pool2d() -> Contest:
    x = array(1, 64, 112, 112)
    frame, out = framed(x, -np.inf), empty((1, 64, 56, 56), F)
    places = [frame[:, :, r : r + 112 : 2, c : c + 112 : 2] for r in range(3) for c in range(3)]

    def plain() -> Array:
        np.copyto(frame[:, :, 1:-1, 1:-1], x)
        np.maximum(places[0], places[1], out=out)
        for place in places[2:]:
            np.maximum(out, place, out=out)
        return out

    peer: Peer = lambda torch: partial(torch.nn.functional.max_pool2d, torch.from_numpy(x), 3, 2, 1)  # noqa: E731
    return Contest(ow.max_pool2d(leaf(x), 3, 2, 1), plain, peer)


@case("interpolate", "nearest, 64, 56x56 -> 112x112", "nearest")
@case("interpolate", "bilinear, 64, 56x56 -> 112x112", "bilinear")
def interpolate(mode: Literal["nearest", "bilinear"]) -> Contest:
    """Nearest: broadcast into pairs. Bilinear: between neighbours at a quarter and three quarters, axis by axis."""
    x = array(1, 64, 56, 56)
    out = empty((1, 64, 112, 112), F)
    pairs = out.reshape(1, 64, 56, 2, 56, 2)
    tall, part = empty((1, 64, 112, 56), F), empty_like(x)

    def doubled(source: Array, target: Array, axis: int, near: Array, far: Array) -> None:
        source, target = source.swapaxes(axis, 0), target.swapaxes(axis, 0)
        near, far = near.swapaxes(axis, 0), far.swapaxes(axis, 0)
        np.multiply(source, F(0.75), near)
        np.multiply(source, F(0.25), far)
        np.add(near[1:], far[:-1], target[2::2])
        np.add(near[:-1], far[1:], target[1:-1:2])
        target[0], target[-1] = source[0], source[-1]

    part_far, wide, wide_far = empty_like(x), empty_like(tall), empty_like(tall)

    def plain() -> Array:
        if mode == "nearest":
            np.copyto(pairs, x[:, :, :, None, :, None])
        else:
            doubled(x, tall, 2, part, part_far)
            doubled(tall, out, 3, wide, wide_far)
        return out

    def peer(torch: Any) -> Call:
        return partial(torch.nn.functional.interpolate, torch.from_numpy(x), scale_factor=2, mode=mode)

    return Contest(ow.interpolate(leaf(x), scale_factor=2, mode=mode), plain, peer)


# --- state space ----------------------------------------------------------------------------------------------------


@case("selective_scan", "512 channels, 16 states, 256 tokens", 256)
@case("selective_scan", "512 channels, 16 states, 1 token", 1)
def selective_scan(tokens: int) -> Contest:
    """Token by token, the state in place."""
    u, delta = array(1, 512, tokens), np.abs(array(1, 512, tokens, seed=1))
    a, b, c = -np.abs(array(512, 16, seed=2)), array(1, 16, tokens, seed=3), array(1, 16, tokens, seed=4)
    h, term, grown, out = empty((512, 16), F), empty((512, 16), F), empty((512, tokens), F), empty_like(u)

    def plain() -> Array:
        h[:] = 0
        np.multiply(delta[0], u[0], grown)
        for t in range(tokens):
            np.multiply(delta[0, :, t, None], a, term)
            np.exp(term, term)
            np.multiply(h, term, h)
            np.multiply(grown[:, t, None], b[0, :, t], term)
            np.add(h, term, h)
            np.matmul(h, c[0, :, t], out[0, :, t])
        return out

    def peer(torch: Any) -> Call:
        tensors = map(torch.from_numpy, (u[0], delta[0], a, b[0], c[0]))
        values, steps, decay, into, out_of = tensors
        result = torch.empty(1, 512, tokens)

        def call() -> Any:
            state = torch.zeros(512, 16)
            inflow = steps * values
            for t in range(tokens):
                state.mul_(torch.exp(steps[:, t, None] * decay)).addcmul_(inflow[:, t, None], into[:, t])
                result[0, :, t] = state @ out_of[:, t]
            return result

        return call

    return Contest(ow.selective_scan(leaf(u), leaf(delta), leaf(a), leaf(b), leaf(c)), plain, peer)


# --- running them ---------------------------------------------------------------------------------------------------


def import_torch() -> Any:
    """torch on as many threads as there are cores, or `None` where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(int(machine()["cores"]))
    return torch


def contestants(name: str, contest: Contest, scheduler: ow.Scheduler, torch: Any) -> dict[str, Call]:
    """Calls by name, which agree on the result. A run hands out one element, to leave the result where it is."""
    ours = contest.ours
    want = np.array(contest.plain(), np.float64)
    limit = (1e-2 if ours.dtype.is_half else 1e-4) * np.abs(want).max()
    found = {"run": scheduler.build(ours).run()}
    program = scheduler.build(ow.flatten(ours)[:1])
    result = {"numpy": contest.plain, "kernel": kernel_of(program), "run": program.run}
    if torch is not None and contest.peer is not None:
        result["torch"] = contest.peer(torch)
        found["torch"] = result["torch"]().double().numpy()
    for other, value in found.items():
        if value.shape != want.shape or not np.abs(value.astype(np.float64) - want).max() <= limit:
            raise AssertionError(f"{name}: {other} and numpy disagree")
    return result


def kernel_of(program: ow.Program) -> Call:
    """The call of the compiled plan, with NumPy set up as a stream does it; all of them, where there are several."""
    steps = [call for plan in program.run_lists[0].plans for call in plan.calls]
    context = copy_context()
    context.run(set_up_numpy)
    return partial(context.run, steps[0] if len(steps) == 1 else calls(None, *steps))


def compete(case: Case, torch: Any, budget: float, report: Report) -> None:
    """One row of the report, in about ``budget`` seconds beside setting it up."""
    name = f"{case.op} {case.size}"
    places: list[dict[str, list[float]]] = []
    alive = []  # until the end, so that no two contests lie in the same place
    with ExitStack() as stack:
        for _ in range(PLACES):
            rivals = contestants(name, case.maker(*case.args), stack.enter_context(ow.Scheduler("cpu")), torch)
            alive.append(rivals)
            turn = sum(max(SAMPLE_SECONDS, seconds(call)) for call in rivals.values())
            samples = max(FEWEST, min(MOST, round(budget / PLACES / turn)))
            places.append(interleaved(rivals, samples, SAMPLE_SECONDS))

    def over(one: str, other: str) -> float:
        return median([min(times[one]) / min(times[other]) for times in places])

    ratios = {"kernel_over_numpy": over("kernel", "numpy"), "run_over_numpy": over("run", "numpy")}
    if "torch" in places[0]:
        ratios["run_over_torch"] = over("run", "torch")
    report.row(
        operation=case.op,
        size=case.size,
        **{f"{n}_ms": min(min(times[n]) for times in places) * 1e3 for n in places[0]},
        **ratios,
        slower="slower" if ratios["kernel_over_numpy"] > case.limit else "",
    )
    report.target(f"{name}, kernel over numpy", ratios["kernel_over_numpy"], case.limit, "times")
    if "run_over_torch" in ratios and why_not() is None:
        report.target(f"{name}, run over torch", ratios["run_over_torch"], 1.8, "times")


def main() -> None:
    command = parser(__doc__.splitlines()[0])
    command.add_argument("--only", metavar="PATTERN", default="*", help="glob on the operation, e.g. '*_norm'")
    given = command.parse_args()
    report = Report("cpu_ops", given)
    torch = import_torch()
    chosen = [c for c in CASES if fnmatch(c.op, given.only) or fnmatch(f"{c.op} {c.size}", given.only)]
    if not chosen:
        command.error(f"no operation matches {given.only!r}: {', '.join(dict.fromkeys(c.op for c in CASES))}")
    budget = 0.5 if given.quick else 4.0
    with torch.inference_mode() if torch else nullcontext():
        for case in chosen:
            compete(case, torch, budget, report)
    report.finish("Operations on cpu")


if __name__ == "__main__":
    main()

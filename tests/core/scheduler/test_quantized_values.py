"""Quantized values that programs compute, move, write into states and read, on every device that is here."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from opweave.contract.kernels import KernelTable
from opweave.graph.dtypes import DTYPES, as_dtype
from opweave.ops.encoding import ENCODED, OF_ENTRIES
from tests.support.devices import Separate, reference_kernel
from tests.support.evaluate import evaluate

F = np.float32
DEVICES = ["host", "cpu", "opencl", "torch", "ort host", "cpu opencl", "torch cpu"]


@pytest.fixture(params=DEVICES)
def devices(request):
    try:
        return [ow.device(name) for name in request.param.split()]
    except (ow.UnknownNameError, ow.PluginError) as missing:
        pytest.skip(str(missing))


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


def check(devices, outputs, fed, states=(), atol=1e-4, **options):
    """A second run of a program, with other values than the first one, gives what references give one after the
    other."""
    before = {s: ow.read(s) for s in states}
    with ow.Scheduler(devices, **options) as scheduler:
        program = scheduler.build(outputs)
        program.run({x.leaf.name: 2 * array if array.dtype == F else array for x, array in fed.items()})
        for s, array in before.items():
            ow.write(s, ow.Blocks(array, s.shape, s.dtype))
        got = program.run({x.leaf.name: array for x, array in fed.items()})
        known = dict(before)
        want = [evaluate(output, {**fed, **before}, known) for output in outputs]
        for output, g, w in zip(outputs, got, want, strict=True):
            if output.dtype.is_quantized or output.op.name == "dequantize":
                np.testing.assert_array_equal(g, w)
            else:
                np.testing.assert_allclose(g, w, rtol=1e-3, atol=atol)
    return program


@pytest.mark.parametrize("name", ENCODED)
def test_values_are_encoded_moved_and_decoded(devices, name):
    if name in OF_ENTRIES:
        devices = [*devices, *{ow.device("host")} - {*devices}]  # to these GPUs do not encode
    n = as_dtype(name).block
    x, y = ow.input("x", (2, 3, 2 * n)), ow.input("y", (2, 4, 2 * n))
    a, b = ow.quantize(x, name), y.astype(name)
    both = ow.concat([a, b], 1)
    outputs = [
        a, both, both.astype("f32"), both[:, 1:5, n:].astype("f32"), ow.copy(both[1:, ::2]).astype("f16"),
        ow.dequantize(both.transpose(1, 0, 2)), both.reshape(7, 2, 2 * n),
    ]  # fmt: skip
    check(devices, outputs, {x: values(2, 3, 2 * n), y: values(2, 4, 2 * n, seed=1)})


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q5_1", "q4_k"])
def test_computed_blocks_multiply(devices, name):
    n = as_dtype(name).block
    x, w, ids = ow.input("x", (3, n)), ow.input("w", (5, n)), ow.input("ids", (4,), "i32")
    blocks = ow.quantize(w, name)
    outputs = [ow.linear(x, blocks), x @ blocks.T, ow.embedding(blocks, ids), ow.linear(x, blocks[1:4])]
    check(devices, outputs, {x: values(3, n), w: values(5, n, seed=1), ids: np.array([4, 0, 0, 2], np.int32)})


WRITTEN = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl"]
"""What ggml's ``set_rows`` and ``cpy`` write."""


@pytest.mark.parametrize("name", [*WRITTEN, "q6_k"])
def test_rows_are_written_into_states_of_blocks(devices, name):
    n = as_dtype(name).block
    state = ow.state(f"s {name} {len(devices)} {devices[0].name}", (6, 2, n), name)
    x, ids = ow.input("x", (3, 2, n)), ow.input("ids", (3,), "i64")
    first = ow.index_copy(state, ids, x)
    second = ow.assign(first[4:], ow.quantize(x, name)[:2])
    third = ow.index_copy(second[1:], ids[:1] * 0, second[5:].astype("f32"))
    outputs = [state.astype("f32"), first.astype("f32"), third, ow.dequantize(third[:, 1])]
    check(devices, outputs, {x: values(3, 2, n), ids: np.array([5, 0, 3])}, [state])
    written = ow.read(state)
    assert written.shape == (6, 2, as_dtype(name).itemsize)
    np.testing.assert_array_equal(
        written[1], ow.quantize(ow.dequantize(ow.Blocks(written[5], (2, n), name)), name).data
    )
    ow.write(state, ow.quantize(np.ones((6, 2, n)), name))
    check(devices, [(state.astype("f32") + 1).sum()], {}, [state], atol=1e-2)


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_attention_reads_blocks(devices, name):
    q, k, v = ow.input("q", (2, 4, 3, 64)), ow.input("k", (2, 2, 5, 64)), ow.input("v", (2, 2, 5, 32))
    arrays = {q: values(2, 4, 3, 64), k: values(2, 2, 5, 64, seed=1), v: values(2, 2, 5, 32, seed=2)}
    got = ow.attention(q, k.astype(name), ow.quantize(v, name), causal=True)
    check(devices, [got], arrays, atol=1e-3)
    decoded = [ow.dequantize(ow.quantize(arrays[x], name)) for x in (k, v)]
    with ow.Scheduler(devices) as scheduler:
        want = scheduler.build(ow.attention(q, *decoded, causal=True)).run({"q": arrays[q]})
        np.testing.assert_allclose(
            scheduler.build(got).run({"q": arrays[q], "k": arrays[k], "v": arrays[v]}), want, atol=1e-3
        )


ENCODES = ["quantize", "scale", "index_copy", "concat", "copy", "contiguous", "cast"]
DECODES = ["dequantize", "linear", "add", "embedding"]


def with_all_types(name, ops):
    device = Separate(name)
    device.kernels = KernelTable(DTYPES.values(), "strided")
    device.kernels(*ops)(reference_kernel)
    return device


@pytest.mark.parametrize("name", ["q8_0", "q4_1", "q3_k"])
def test_blocks_are_transferred_between_memories(name):
    n = as_dtype(name).block
    one, two = with_all_types("one", ENCODES), with_all_types("two", DECODES)
    x, w = ow.input("x", (4, 2 * n)), ow.input("w", (6, 2 * n))
    blocks = ow.quantize(w, name)
    state = ow.state("cache", (8, 2 * n), name, device=one)
    new = ow.index_copy(state, np.array([1, 7, 2, 0]), x + 1)
    outputs = [ow.linear(x, blocks), ow.dequantize(blocks[1:3, n:]), ow.linear(x, new), ow.concat([blocks, new[2:4]])]
    program = check([one, two], outputs, {x: values(4, 2 * n), w: values(6, 2 * n, seed=1)}, [state])
    moved = {c.tensor: c.nbytes for c in program.explain().copies if c.tensor in ("quantize", "index_copy")}
    assert moved["quantize"] in (6 * as_dtype(name).row_bytes(2 * n), 2 * as_dtype(name).row_bytes(n))


def test_temporaries_take_the_bytes_of_blocks():
    blocks = ow.quantize(ow.input("x", (1024, 1024)), "q4_0")
    with ow.Scheduler("host") as scheduler:
        program = scheduler.build(ow.linear(ow.input("y", (1, 1024)), blocks))
        fed = 4 * 1024 * 1024 + 4 * 1024
        assert fed + blocks.nbytes <= program.memory["host"].temporaries < fed + blocks.nbytes + 8192
        assert blocks.nbytes == 1024 * 1024 // 32 * 18


def test_overlapping_runs_have_blocks_of_their_own():
    x = ow.input("x", (4, 64))
    y = ow.dequantize(ow.quantize(x, "q8_0")) * 2
    with ow.Scheduler("cpu", parallel=True) as scheduler:
        program = scheduler.build(y)
        fed = [values(4, 64, seed=i) for i in range(6)]
        runs = [program.submit(x=array) for array in fed]
        for array, run in zip(fed, runs, strict=True):
            np.testing.assert_array_equal(run.result(), ow.dequantize(ow.quantize(array, "q8_0")) * 2)


def test_what_is_refused():
    s, x = ow.state("s", (4, 64), "q8_0"), ow.input("x", (2, 64))
    ids = np.array([0, 1])
    with pytest.raises(ow.LayoutError, match="cuts a block of 32 q8_0"):
        ow.index_copy(s[:, :16], ids, x[:, :16])
    with pytest.raises(ow.LayoutError, match="rows would cut the blocks of"):
        ow.index_copy(ow.state("flat", 64, "q8_0"), ids, x[0, :2])
    with pytest.raises(ow.LayoutError, match="transpose of a quantized matrix"):
        ow.index_copy(s.T, ids, x)
    with pytest.raises(ow.DTypeError, match="index_copy does not take q4_0"):
        ow.index_copy(s, ids, x.astype("q4_0"))
    with pytest.raises(ow.DTypeError, match="accumulate does not take q8_0"):
        ow.accumulate(s, 1.0)
    with pytest.raises(ow.DTypeError, match="takes blocks of q8_0, not of q4_0"):
        ow.write(s, ow.quantize(np.ones((4, 64)), "q4_0"))
    with pytest.raises(ow.ShapeError, match="do not fit"):
        ow.write(s, ow.quantize(np.ones((2, 64)), "q8_0"))
    with pytest.raises(ow.LayoutError, match="only serves as the right operand of matmul"):
        ow.Graph(ow.quantize(x, "q8_0").T)


def test_quantized_inputs_take_blocks(devices):
    array = values(4, 64)
    blocks = ow.quantize(array, "q8_0")
    x = ow.input("x", (4, 64), "q8_0")
    want = ow.dequantize(blocks)
    with ow.Scheduler(list(dict.fromkeys([*devices, ow.device("host")]))) as scheduler:
        program = scheduler.build(x.astype("f32"))
        for fed in (blocks, blocks.data.reshape(4, -1)):
            assert np.array_equal(program.run(x=fed), want)
            assert np.array_equal(program.submit(x=fed).result(), want)
        assert np.array_equal(program.run({x: blocks._replace(data=blocks.data.ravel())}), want)


def test_blocks_that_do_not_fit_are_refused_with_the_input_named():
    blocks = ow.quantize(values(4, 64), "q8_0")
    with ow.Scheduler("host") as scheduler:
        run = scheduler.build(ow.input("x", (4, 64), "q8_0").astype("f32")).run
        with pytest.raises(ow.DTypeError, match=r"'x' q8_0.* takes q8_0, not q4_0"):
            run(x=ow.quantize(values(4, 64), "q4_0"))
        with pytest.raises(ow.ShapeError, match=r"'x' q8_0.* takes other shapes than q8_0\[8, 32\]"):
            run(x=ow.quantize(values(8, 32), "q8_0"))
        with pytest.raises(ow.ShapeError, match=r"cannot feed input 'x'.* takes 272 bytes, not 271"):
            run(x=blocks._replace(data=blocks.data.ravel()[1:]))
        with pytest.raises(ow.DTypeError, match=r"'y' f32.* takes f32, not q8_0"):
            scheduler.build(ow.input("y", (4, 64)) * 2.0).run(y=blocks)

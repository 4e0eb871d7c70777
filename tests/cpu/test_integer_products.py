"""Products with quantized weights on ``cpu`` whose integers compiled functions unpack: in ``int8``, and exactly."""

from __future__ import annotations

import ctypes
import mmap
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Arg, Step
from opweave.contract.kernels import Kernel
from opweave.graph.dtypes import as_dtype
from opweave.graph.layout import dense_strides
from opweave.graph.precision import Precision
from opweave.runtime.host.cache import FileCache
from opweave_cpu.device import CpuDevice
from opweave_cpu.tunables import TILE_ROWS

pytest.importorskip("llvmlite")
gguf = pytest.importorskip("gguf")

from opweave_cpu.jit import activations, amx, compiler, integer_products, integers, tile_products  # noqa: E402
from opweave_cpu.jit.supported import BLOCKS  # noqa: E402
from opweave_cpu.kernels import experts  # noqa: E402
from opweave_cpu.kernels.integer_products import exact_linear_of_integers  # noqa: E402
from tests.cpu.conftest import place  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiling")

Array = np.ndarray[Any, Any]

PROCESSORS = {
    "haswell": "avx2 f16c fma",
    "skylake-avx512": "avx2 f16c fma avx512f avx512bw avx512vl",
    "alderlake": "avx2 f16c fma avxvnni",
    "znver4": "avx2 f16c fma avx512f avx512bw avx512vl avx512vnni",
    "znver5": "avx2 f16c fma avx512f avx512bw avx512vl avx512vnni avxvnni",
    "sapphirerapids": "avx2 f16c fma avx512f avx512bw avx512vl avx512vnni avxvnni amx-tile amx-int8",
}
"""Some of what LLVM says of a processor."""

needs_bytes = pytest.mark.skipif(not integers.multiplies_bytes(), reason="no instructions for products of bytes")


def random_blocks(name: str, outputs: int, inputs: int, rng: np.random.Generator) -> Array:
    """Blocks of weights, shape (outputs, bytes of a row), all of whose f16 numbers are finite."""
    dtype = as_dtype(name)
    data = rng.integers(0, 256, (outputs, inputs // dtype.block, dtype.itemsize)).astype(np.uint8)
    for at in (0, 2, 208) if name == "q6_k" else (0, 2):
        data[..., at + 1 : at + 2] &= 0x3F
    return data.reshape(outputs, -1)


def rounded(x: Array) -> Array:
    """Activations as bytes and a factor for each 32, and back."""
    groups = x.astype(np.float32).reshape(-1, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(all="ignore"):
        whole = np.rint(groups * np.where(largest > 0, np.float32(127) / largest, 0).astype(np.float32))
    return (whole.astype(np.float64) * largest / 127).reshape(x.shape)


def product(name: str, rows: int, inputs: int, outputs: int, **options: Any) -> tuple[Array, Array, Array]:
    """A product in int8, the same computed in f64 from the rounded activations, and the sizes of what is added up."""
    rng = np.random.default_rng(rows)
    data = random_blocks(name, outputs, inputs, rng)
    into = options.pop("into", "f32")
    dtype = as_dtype(into).numpy
    a, b = rng.standard_normal((rows, inputs)).astype(dtype), rng.standard_normal(outputs).astype(dtype)
    x, bias = ow.input("int8_x", a.shape, into), ow.input("int8_b", b.shape, into)
    w = ow.weights({"w": ow.Blocks(data, (outputs, inputs), name)})["w"]
    program = ow.Scheduler(options.pop("device", "cpu")).build(ow.linear(x, w, bias), precision="int8")
    values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name.upper()]).astype(np.float64)
    near = rounded(a)
    got = program.run({x: a, bias: b}).astype(np.float64)
    return got, near @ values.T + b.astype(np.float64), np.abs(near) @ np.abs(values.T) + 1


@needs_bytes
@pytest.mark.parametrize("name", sorted(BLOCKS))
@pytest.mark.parametrize("rows", [1, 5, 6, 130])
def test_a_product_is_that_of_rounded_activations(name: str, rows: int) -> None:
    length = 512 if as_dtype(name).block == 256 else 32 * 19  # of blocks of 32 also a part of a stretch
    got, want, size = product(name, rows, length, 37)
    assert (np.abs(got - want) <= 4e-6 * size).all()


@needs_bytes
@pytest.mark.parametrize("into", ["f16", "bf16"])
@pytest.mark.parametrize("rows", [2, 9])
def test_rows_and_results_of_half_types(into: str, rows: int) -> None:
    got, want, size = product("q4_0", rows, 288, 33, into=into)
    unit = 2.0**-11 if into == "f16" else 2.0**-8
    assert (np.abs(got - want) <= unit * np.abs(want) + 4e-6 * size).all()


@needs_bytes
@pytest.mark.parametrize("outputs", [16, 31, 32, 48, 65])
def test_rows_of_weights_that_are_no_whole_blocks(outputs: int) -> None:
    got, want, size = product("q4_1", 17, 512, outputs)
    assert (np.abs(got - want) <= 4e-6 * size).all()


@needs_bytes
@pytest.mark.parametrize("rows", [1, 40])
def test_threads_compute_parts(rows: int) -> None:
    one, two = (product("q4_k", rows, 1024, 1040, device=ow.open_device(f"cpu?threads={n}"))[0] for n in (1, 2))
    np.testing.assert_array_equal(one, two)


@needs_bytes
@pytest.mark.parametrize("rows", [4, 7])
def test_warming_compiles_all_that_a_product_calls(rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler.target(), "cache", FileCache("", "", tmp_path, checked=True))
    weights = ow.weights({"w": ow.Blocks(random_blocks("q5_0", 17, 64, np.random.default_rng(0)), (17, 64), "q5_0")})
    x = ow.input("warmed_x", (rows, 64))
    program = ow.Scheduler(CpuDevice()).build(ow.linear(x, weights["w"]), precision="int8")
    program.warm()
    monkeypatch.setattr(compiler.target(), "compile", None)
    program.run({x: np.ones(x.shape, np.float32)})


@needs_bytes
@pytest.mark.parametrize("rows", [1, 7])
def test_rows_of_zeros_and_of_numbers_that_are_none(rows: int) -> None:
    data = random_blocks("q8_0", 16, 64, np.random.default_rng(0))
    a = np.zeros((rows, 64), np.float32)
    x = ow.input("special_x", a.shape)
    w = ow.weights({"w": ow.Blocks(data, (16, 64), "q8_0")})["w"]
    program = ow.Scheduler("cpu").build(ow.linear(x, w), precision="int8")
    assert not program.run({x: a}).any()
    for special in (np.nan, np.inf):
        a[0, 40] = special
        got = program.run({x: a})
        assert not np.isfinite(got[0]).any()
        assert not got[1:].any()


def kernel_for(rows: int, outputs: int, name: str = "q8_0", allowed: Precision = "int8") -> Kernel:
    """The kernel of ``cpu`` for a product."""
    dtype = as_dtype(name)
    shapes = [((rows, 64), as_dtype("f32")), ((outputs, 64), dtype)]
    x, w = [Arg(None, 0, kind, shape, dense_strides(shape, kind)) for shape, kind in shapes]
    out = Arg(None, 0, as_dtype("f32"), (rows, outputs), (4 * outputs, 4))
    blocks = {"blocks": dtype} if dtype.is_quantized else {}
    kernel = CpuDevice().kernels.find(Step("linear", out, (x, w), blocks, precision=allowed))
    assert kernel is not None
    return kernel


@needs_bytes
def test_what_is_not_computed_in_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_for(3, 16).precision == "int8"
    others = [kernel_for(3, 16, allowed="bf16"), kernel_for(3, 15), kernel_for(5000, 16)]
    others += [kernel_for(3, 16, "f32"), kernel_for(3, 16, "mxfp4")]
    monkeypatch.setenv(compiler.VARIABLE, "0")
    assert {kernel.precision for kernel in (*others, kernel_for(3, 16))} == {"exact"}


# --- exactly --------------------------------------------------------------------------------------------------------


LIMIT = 1.6e-11
"""The normalized mean squared error that `ow.linear` allows in f32."""


def exact_product(name: str, a: Array, device: CpuDevice | None = None) -> tuple[Array, Array, Array]:
    """A product at full precision, the same computed in f64, and the sizes of what is added up."""
    data = random_blocks(name, 21, a.shape[1], np.random.default_rng(7))
    x = ow.input("exact_x", a.shape, str(as_dtype(a.dtype)))
    w = ow.weights({"w": ow.Blocks(data, (21, a.shape[1]), name)})["w"]
    program = ow.Scheduler(device or CpuDevice()).build(ow.linear(x, w))
    values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name.upper()]).astype(np.float64)
    wide = a.astype(np.float64)
    with np.errstate(all="ignore"):
        return program.run({x: a}).astype(np.float64), wide @ values.T, np.abs(wide) @ np.abs(values.T)


@needs_bytes
@pytest.mark.parametrize("name", sorted(BLOCKS))
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("mean", [0, 4])
def test_an_exact_product(name: str, rows: int, mean: float) -> None:
    inputs = 512 if as_dtype(name).block == 256 else 32 * 19
    a = np.random.default_rng(7).normal(mean, 1, (rows, inputs)).astype(np.float32)
    got, want, size = exact_product(name, a)
    assert (np.abs(got - want) <= 1e-6 * size).all()
    assert np.square(got - want).sum() <= LIMIT * np.square(want).sum()


@needs_bytes
@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q6_k"])
@pytest.mark.parametrize("rows", [3, 9])
def test_small_whole_numbers_are_multiplied_without_errors(name: str, rows: int) -> None:
    a = np.random.default_rng(7).integers(-3, 4, (rows, 256)).astype(np.float32)
    a[:, ::7] *= 64
    data = np.zeros((16, 256 // as_dtype(name).block, as_dtype(name).itemsize), np.uint8)
    data[...] = np.arange(data.shape[-1])
    scale = np.array([0.5], np.float16).view(np.uint8)
    at = 208 if name == "q6_k" else 0
    data[..., at : at + 2] = scale
    data = data.reshape(16, -1)
    x, w = ow.input("whole_x", a.shape), ow.weights({"w": ow.Blocks(data, (16, 256), name)})["w"]
    values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name.upper()]).astype(np.float64)
    np.testing.assert_array_equal(ow.Scheduler("cpu").build(ow.linear(x, w)).run({x: a}), a @ values.T)


@needs_bytes
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("special", [np.inf, np.nan, 1e-42, 1e36])
def test_magnitudes_that_integers_cannot_express(rows: int, special: float) -> None:
    a = np.random.default_rng(1).standard_normal((rows, 256)).astype(np.float32)
    if abs(special) < 1:
        a[0] = 0
    a[-1, 3:6] = a[0, 3:6] = special
    got, want, size = exact_product("q4_0", a)
    usual = np.isfinite(want)
    np.testing.assert_array_equal(got[~usual], want[~usual])
    assert (np.abs(got[usual] - want[usual]) <= 2e-6 * size[usual] + 5e-45).all()


@needs_bytes
def test_exact_rows_and_results_of_half_types() -> None:
    a = np.random.default_rng(1).standard_normal((2, 288)).astype(as_dtype("bf16").numpy)
    got, want, size = exact_product("q5_0", a)
    assert (np.abs(got - want) <= 2.0**-8 * np.abs(want) + 1e-6 * size).all()


@needs_bytes
def test_which_exact_products_are_those_of_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_for(3, 16, allowed="exact").factory is exact_linear_of_integers
    assert kernel_for(3, 15, allowed="exact").factory is not exact_linear_of_integers
    monkeypatch.setattr(compiler.target(), "features", frozenset())
    assert kernel_for(3, 16, allowed="exact").factory is not exact_linear_of_integers


# --- tiles ----------------------------------------------------------------------------------------------------------

needs_tiles = pytest.mark.skipif(
    not integers.multiplies_bytes() or not amx.has_tiles("int8"), reason="no products of tiles"
)


@needs_tiles
@pytest.mark.parametrize("rows", [8, 31, 150])
@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_products_of_tiles_are_those_of_vectors(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TILE_ROWS, "value", 8)
    length = 512 if as_dtype(name).block == 256 else 32 * 19
    a = np.random.default_rng(7).standard_normal((rows, length)).astype(np.float32)
    of_tiles, exact_of_tiles = product(name, rows, length, 37)[0], exact_product(name, a)[0]
    monkeypatch.setattr(TILE_ROWS, "value", 1 << 20)
    of_vectors, want, size = product(name, rows, length, 37)
    np.testing.assert_allclose(of_tiles, of_vectors, rtol=0, atol=4e-6 * size.max())
    exact_of_vectors, want, _ = exact_product(name, a)
    assert np.square(exact_of_tiles - exact_of_vectors).sum() <= LIMIT * np.square(want).sum()


@needs_tiles
def test_rows_of_tiles_that_do_not_exist_have_no_numbers() -> None:
    device, form, kind = CpuDevice(), integers.form_of("q4_0"), as_dtype("q4_0")
    digits = activations.digits_of(form, "int8")
    memory = np.ones(16 * digits.record_bytes(form), np.uint8)  # subnormal as f32
    x, records = place(device, np.ones((3, 256), np.float32)), place(device, memory)
    activations.bind_records(device.open(), form, digits, x, kind, records, None, padded=16, order="interleaved")()
    scalars = records.view[16 * 256 :].view(np.float32).reshape(16, 16)
    assert scalars[:, :3].all()
    assert not scalars[:, 3:].any()


@needs_tiles
def test_tiles_of_other_libraries_stay_configured() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(bytes.fromhex("c4e2784907c3") + bytes.fromhex("c4e2794907c3"))
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    load, store = (ctypes.CFUNCTYPE(None, ctypes.c_void_p)(start + at) for at in (0, 6))  # ldtilecfg, sttilecfg
    given, found = (ctypes.create_string_buffer(64) for _ in range(2))
    given[0], given[16], given[48] = b"\1", b"\14", b"\3"  # palette 1; tile 0 has 3 rows of 12 bytes
    load(given)
    product("q4_0", 16, 256, 32)
    store(found)
    assert found.raw == given.raw
    load(ctypes.create_string_buffer(64))


# --- other processors -----------------------------------------------------------------------------------------------


@needs_bytes
@pytest.mark.parametrize("processor", ["haswell", "skylake-avx512"])
@pytest.mark.parametrize("name", ["q8_0", "q5_k", "q6_k"])
@pytest.mark.parametrize("rows", [2, 20])
def test_without_instructions_for_dot_products(
    processor: str, name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = frozenset(PROCESSORS[processor].split())
    if not features <= compiler.target().features:
        pytest.skip("this processor has less")
    # Functions that were compiled for either are not found on disk by the other.
    for some in (compiler.target().features, features, compiler.target().features, features):
        monkeypatch.setattr(compiler.target(), "features", some)
        got, want, size = product(name, rows, 512, 37, device=CpuDevice())
        assert (np.abs(got - want) <= 4e-6 * size).all()
    got, want, size = exact_product(name, np.random.default_rng(3).standard_normal((rows, 512)).astype(np.float32))
    assert np.square(got - want).sum() <= LIMIT * np.square(want).sum()


@pytest.mark.parametrize("processor", PROCESSORS)
def test_code_for_other_processors(processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from llvmlite import binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(cpu=processor, opt=3)
    written: list[str] = []

    class Machine:
        def __getattr__(self, name: str) -> Any:
            return getattr(machine, name)

        def emit_object(self, module: Any) -> bytes:
            written.append(machine.emit_assembly(module))
            return b""

    here = compiler.target()
    monkeypatch.setattr(here, "features", frozenset(PROCESSORS[processor].split()))
    monkeypatch.setattr(integer_products, "MachineCode", here.compile)
    monkeypatch.setattr(activations, "MachineCode", here.compile)
    monkeypatch.setattr(tile_products, "MachineCode", here.compile)
    f32, form = as_dtype("f32"), integers.form_of("q5_1")
    monkeypatch.setattr(here, "machine", Machine())
    monkeypatch.setattr(binding, "create_pass_builder", partial(_pass_builder, binding.create_pass_builder, machine))
    for precision in ("int8", "exact"):
        digits = activations.digits_of(form, precision)
        integer_products._few(form, digits, 32, 2, [], f32)
    integer_products._many(integers.form_of("q8_0"), activations.digits_of(form, "int8"), 0, [], f32)
    instructions = "vpdpbusd" if "vnni" in PROCESSORS[processor] else "vpmaddubsw"
    assert all(instructions in text for text in written)
    if "amx" in PROCESSORS[processor]:
        tile_products.multiply_tiles(form, digits, 32, [], f32)
        assert "tdpbssd" in written[-1]
    activations._records(form, digits, f32, 32, order="unpacked")
    assert not [line for text in written for line in text.splitlines() if line.startswith("\tcall")]


def _pass_builder(make: Any, machine: Any, _: Any, options: Any) -> Any:
    return make(machine, options)


# --- experts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "limit"), [("exact", 1e-5), ("int8", 0.02)])
@pytest.mark.parametrize("index", ["i32", "i64"])
@pytest.mark.parametrize("dtype", ["q8_0", "q4_k", "q6_k", "iq4_nl"])
def test_rows_are_multiplied_by_the_integers_of_their_experts(dtype, index, precision, limit):
    inputs = 512 if as_dtype(dtype).block == 256 else 288  # with a last stretch that is not whole
    rng = np.random.default_rng(0)
    w = ow.quantize(rng.standard_normal((5, 20, inputs)).astype(np.float32), dtype)
    values = ow.dequantize(w).astype(np.float64)
    weights = ow.weights({"w": w})
    for tokens, used, own in ((1, 2, False), (3, 2, True), (4, 3, False), (2, 1, True)):
        x = rng.standard_normal((tokens, used if own else 1, inputs)).astype(np.float32)
        ids = np.stack([rng.permutation(5)[:used] for _ in range(tokens)]).astype(as_dtype(index).numpy)
        node = ow.expert_linear(ow.input("x", x.shape), weights["w"], ow.input("ids", ids.shape, index))
        program = ow.Scheduler("cpu", precision=precision).build(node)
        want = np.einsum("tui,tuoi->tuo", np.broadcast_to(x, (tokens, used, inputs)), values[ids])
        assert np.abs(program.run(x=x, ids=ids) - want).max() < limit * np.abs(want).max()
        x[-1, 0, 7] = np.inf  # integers cannot represent it
        assert not np.isfinite(program.run(x=x, ids=ids)[-1, 0]).any()
        with pytest.raises(ow.ExecutionError, match="expert_linear"):
            program.run(x=x, ids=ids + 5)


@needs_bytes
def test_experts_with_many_rows_are_multiplied_at_once():
    def factory(rows, precision="int8"):
        shapes = {"out": ("f32", (rows, 2, 32)), "x": ("f32", (rows, 1, 256)), "w": ("q8_0", (4, 32, 256)),
                  "ids": ("i64", (rows, 2))}  # fmt: skip
        out, *srcs = (
            Arg(None, 0, as_dtype(d), shape, dense_strides(shape, as_dtype(d))) for d, shape in shapes.values()
        )
        step = Step("expert_linear", out, tuple(srcs), {"blocks": as_dtype("q8_0")}, precision=precision)
        kernel = CpuDevice().kernels.find(step)
        return kernel and kernel.factory

    assert factory(1) is experts.expert_linear_in_int8
    assert factory(2048) is experts.expert_linear_in_int8
    assert factory(2049) is experts.compiled_expert_linear
    assert factory(8, "exact") is experts.expert_linear_of_integers
    assert factory(9, "exact") is experts.compiled_expert_linear

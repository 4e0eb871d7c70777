"""Levels 1 and 2: memory that stores tensors in a form of its own keeps them bit for bit, and kernels read it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np

from opweave.contract import BufferType, Kind, Usage
from opweave.errors import UnsupportedOpError
from opweave.graph.blocks import Blocks
from opweave.graph.dtypes import QUANTIZED, as_dtype
from opweave.graph.graph import Graph
from opweave.graph.leaf import Spec
from opweave.graph.precision import Precision
from opweave.graph.tensor import Tensor
from opweave.graph.tensor import input as leaf
from opweave.leaf_memory import read_leaf
from opweave.leaves import weights
from opweave.ops import contiguous, exp, linear
from opweave.runtime.host.device import HostDevice
from opweave.scheduler import Scheduler
from opweave_conformance.case import Operand
from opweave_conformance.checklist import Checklist, Subject, expect, expect_equal, expect_raises, inapplicable
from opweave_conformance.comparison import compare
from opweave_conformance.tolerances import limits
from opweave_conformance.values import make_values

__all__ = ["MEMORY", "PRODUCTS"]

memory = Checklist(1, "memory")
products = Checklist(2, "kinds")

SHAPES: Final = ((256,), (64, 256), (48, 512), (3, 8, 256))
"""Of tensors that are tried; rows hold whole blocks of every type."""

DTYPES: Final = ("f32", "bf16", "f16", *[dtype.name for dtype in QUANTIZED])


def _kinds(subject: Subject) -> list[BufferType]:
    kinds = [kind for kind in subject.device.buffer_types if not kind.is_raw]
    if not kinds:
        inapplicable("it offers no memory that stores tensors in a form of its own")
    return kinds


def _tensors(subject: Subject, kind: BufferType) -> Iterator[tuple[Tensor, np.ndarray[Any, Any], Any]]:
    """Tensors that a kind of memory keeps, with their bytes, and as `weights` takes them."""
    for name in DTYPES:
        dtype = as_dtype(name)
        for shape in SHAPES:
            tensor = leaf("t", shape, dtype) if not dtype.is_quantized else _blocks_leaf(shape, name)
            if kind.why_not(tensor) is None:
                values = make_values(subject.rng, Operand(shape, name), shape, dtype)
                given = Blocks(values, shape, dtype) if dtype.is_quantized else values
                yield tensor, values, given


def _blocks_leaf(shape: tuple[int, ...], name: str) -> Tensor:
    return weights({"t": Spec(shape, as_dtype(name))})["t"]


@memory("kinds-whole")
def _(subject: Subject) -> None:
    """Memory with a form of its own gives back the bytes of each tensor that it keeps, whole and in part."""
    for kind in _kinds(subject):
        for tensor, values, _ in _tensors(subject, kind):
            what = f"{kind.name}: {tensor.dtype}{list(tensor.shape)}"
            size, raw = kind.alloc_size(tensor), np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            expect(size >= tensor.nbytes, f"{what}: alloc_size gives {size} bytes for {tensor.nbytes}")
            at = -(-size // kind.alignment) * kind.alignment
            with kind.alloc(at + size, next(iter(kind.usages))) as buffer:
                for offset in (0, at):
                    buffer.init(tensor, offset)
                    buffer.upload(offset, raw)
                if not tensor.dtype.is_quantized:
                    buffer.upload(0, raw[64:128])
                changed = raw.copy()
                changed[:64] = raw[64:128] if not tensor.dtype.is_quantized else raw[:64]
                expect_equal(buffer.read(0, tensor.nbytes), changed, f"{what}, after a part was written")
                expect_equal(buffer.read(at, tensor.nbytes), raw, what)
                first, last = tensor.nbytes // 3, tensor.nbytes // 2
                expect_equal(buffer.read(at + first, last - first), raw[first:last], f"{what}, a part")


@memory("kinds-refused")
def _(subject: Subject) -> None:
    """Memory that does not keep a tensor, or is not for a usage, refuses it with an UnsupportedOpError."""
    for kind in _kinds(subject):
        for usage in Usage:
            if not kind.holds(usage):
                expect_raises(UnsupportedOpError, f"{kind.name} for {usage}", partial(kind.alloc, 64, usage))
        for shape in SHAPES:
            tensor = contiguous(leaf("t", shape, "i32"))
            if kind.why_not(tensor) is not None:
                with kind.alloc(2 * tensor.nbytes, next(iter(kind.usages))) as buffer:
                    what = f"placing {tensor.dtype}{list(shape)} in {kind.name}"
                    expect_raises(UnsupportedOpError, what, partial(buffer.init, tensor, 0))


@products("products")
def _(subject: Subject) -> None:
    """Products with weights in memory with a form of its own are as close to the reference as those with others."""
    asked = 0
    for kind in _kinds(subject):
        for tensor, _, given in _tensors(subject, kind):
            if tensor.shape != SHAPES[1]:
                continue
            plain, here = weights({"w": given})["w"], weights({"w": given}, buffer_type=kind)["w"]
            for dtype, rows, precision in PRODUCED:
                asked += _product(subject, plain, here, dtype, rows, precision)
    expect(asked, "no product reads memory that it offers for weights")


PRODUCED: Final[tuple[tuple[str, int, Precision], ...]] = (
    ("f32", 1, "exact"), ("f32", 5, "exact"), ("f32", 70, "exact"), ("bf16", 5, "exact"), ("f32", 5, "bf16"),
    ("f32", 1, "int8"),
)  # fmt: skip
"""Dtype and number of rows that weights are multiplied by, and the precision that is allowed."""


def _product(subject: Subject, plain: Tensor, here: Tensor, dtype: str, rows: int, precision: Precision) -> bool:
    """Compare one product; returns whether a kernel of the device read the memory as it is."""
    host = HostDevice()
    devices = [subject.device] if subject.device.kind is Kind.HOST else [subject.device, host]
    x = leaf("x", (rows, here.shape[1]), dtype)
    values = subject.rng.standard_normal(x.shape).astype(x.dtype.numpy)
    bias = weights({"b": subject.rng.standard_normal(here.shape[0]).astype(x.dtype.numpy)})["b"]
    want = linear(x, plain, bias)
    with Scheduler(host) as alone, Scheduler(devices, precision=precision, repack=False) as scheduler:
        expected = alone.build(want).run(x=values)
        program = scheduler.build(linear(x, here, bias))
        got = program.run(x=values)
    (node,) = [node for node in Graph(want).nodes if node.op is not None and node.op.name == "linear"]
    (item,) = [item for split in program.splits for item in split.steps if item.op == "linear"]
    result = compare(got, expected, limits(node, item.support.precision), exact=item.support.precision == "exact")
    assert here.leaf is not None
    assert here.leaf.placement is not None
    kind = here.leaf.placement.buffer.type
    expect(result.status == "passed", f"{kind.name} {here.dtype} with rows {dtype}{list(x.shape)}: {result.reason}")
    return kind not in item.support.unpacked


@products("copies")
def _(subject: Subject) -> None:
    """What does not read memory with a form of its own is given a copy in plain memory."""
    for kind in _kinds(subject):
        for tensor, _, given in _tensors(subject, kind):
            if isinstance(given, Blocks) or tensor.shape not in SHAPES[:2]:
                continue
            (here,) = weights({"w": given}, buffer_type=kind).values()
            with Scheduler([subject.device, HostDevice()]) as scheduler:
                got = scheduler.build(exp(here)).run()
            expect(np.allclose(got.astype(np.float64), np.exp(given.astype(np.float64)), 1e-2), f"{kind.name}: exp")
            expect_equal(read_leaf(here), given, f"{kind.name}: what was read after a run")


MEMORY: Final = memory.checks
PRODUCTS: Final = products.checks

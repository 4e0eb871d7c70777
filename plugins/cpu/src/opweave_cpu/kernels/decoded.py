"""Products with weights that are kept decoded (`opweave_cpu.decoded`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import as_dtype, f32
from opweave_cpu.decoded import DecodedType
from opweave_cpu.kernels.matmul import is_turned, lies_ready, store_calls, tile_product
from opweave_cpu.kernels.table import HALVES, KERNELS, QUANTIZED
from opweave_cpu.tiles import in_turn


def _why_not(step: Step) -> str | None:
    return None if isinstance(step.srcs[1].buffer_type, DecodedType) else "the weights are not decoded"


def _workspace(step: Step) -> Arrays:
    out, (x, w, *_) = step.out, step.srcs
    outputs, inputs = w.shape
    rows = x.size // inputs
    turned = is_turned(rows, inputs, outputs, f32)
    return {
        "packed": (f32, (0 if lies_ready(x, f32) else rows, inputs)),
        "results": (f32, (0 if lies_ready(out, f32) and not turned else rows * outputs,)),
        "ordered": (f32, (rows * outputs if turned and out.dtype is not f32 else 0,)),
    }


@KERNELS(
    "linear", dtypes=[*map(as_dtype, f"f32 {HALVES}".split()), *QUANTIZED], accepts=DecodedType, when=_why_not,
    workspace=_workspace,
)  # fmt: skip
def linear_of_decoded(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, blocks: Any = None, **scratch: Arg
) -> Call:
    packed, results, ordered = [scratch.get(name) for name in ("packed", "results", "ordered")]
    left, weight = (packed or x).view.reshape(-1, w.shape[1]), w.handle
    into = (results or out).view.reshape(-1)
    turned = is_turned(len(left), w.shape[1], w.shape[0], f32)
    lead = out.shape[:-1]

    def product() -> None:
        # Looked up in each run: weights that are written anew are decoded into other arrays.
        tile_product(stream, left, weight.value.values, into, lead, turned=turned)[0]()

    calls: list[Call] = [] if packed is None else [partial(np.copyto, left.reshape(x.shape), x.view)]
    calls.append(product)
    if results is not None:
        _, result = tile_product(stream, left, weight.value.values, into, lead, turned=turned)
        calls += store_calls(result, None if b is None else b.view, out.view, ordered)
    elif b is not None:
        calls.append(partial(np.add, out.view, b.view, out.view))
    return in_turn(calls)

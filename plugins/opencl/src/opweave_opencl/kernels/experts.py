"""Mixtures of experts: rows are first sorted by the expert that they are sent to, then each expert has a product."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opweave.contract import Arg, Call, Step
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType
from opweave_opencl.kernels.blocks import QUANTIZED, not_in_rows
from opweave_opencl.kernels.calls import in_order
from opweave_opencl.kernels.products import TYPES, Product, launch_product
from opweave_opencl.kernels.table import KERNELS
from opweave_opencl.layouts import coalesce, element_offset, element_strides, padded, padded_strides

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []


def _route(step: Step) -> Arrays:
    """Where the rows of each expert begin, where those of none begin and end; then the rows' numbers, by expert."""
    _, w, ids = step.srcs
    return {"route": ("i32", (w.shape[0] + 2 + ids.size,))}


def _why_not(step: Step) -> str | None:
    x, w, _ = step.srcs
    if w.dtype is not x.dtype and not w.dtype.is_quantized:
        return f"source 0 is {x.dtype}, source 1 {w.dtype}"
    return not_in_rows("source 0", x) or not_in_rows("the weights", w)


@KERNELS("expert_linear", dtypes=f"{TYPES} {QUANTIZED}", when=_why_not, workspace=_route)
def expert_linear(
    stream: OpenCLStream,
    op: str,
    out: Arg,
    x: Arg,
    w: Arg,
    ids: Arg,
    *,
    route: Arg,
    blocks: DType | None = None,
) -> Call:
    """A row whose index is not that of an expert becomes zeros."""
    o_steps, x_steps, i_steps = map(element_strides, (out, x, ids))
    w_steps = element_strides(w) if blocks is None else w.strides
    experts, outputs, inputs = w.shape
    check = stream.indices.bind(op, experts)
    words = [ids.size, ids.shape[1], experts, element_offset(ids), *i_steps, element_offset(route), *check.words]
    program = stream.target.programs.get("experts", {"ROUTE": "1", "ID": ids.dtype.name, **check.macros})
    sort = stream.launch(program, "sort_rows", (experts + 1,), (1,), (route, ids, *check.operands), words)
    product = Product(
        *(out, x, w, None),
        m=ids.size,
        n=outputs,
        k=inputs,
        out_m=o_steps[0],
        out_n=o_steps[2],
        a_m=x_steps[0],
        a_k=1,
        b_k=1,
        b_n=w_steps[1],
        batch=(experts,),
        steps=((0,), (0,), (w_steps[0],)),
        blocks=blocks,
        route=route,
        used=ids.shape[1],
        out_u=o_steps[1],
        a_u=x_steps[1] if x.shape[1] > 1 else 0,
    )
    return in_order([sort, launch_product(stream, product)])


@KERNELS("add_expert", dtypes=TYPES, inplace=True)
def add_expert(stream: OpenCLStream, op: str, out: Arg, x: Arg, table: Arg, ids: Arg) -> Call:
    """A row whose index is outside of the table is left as it is."""
    o_steps, x_steps = element_strides(out), element_strides(x)
    shape, lead = coalesce(ids.shape, [o_steps[:-1], x_steps[:-1], element_strides(ids)])
    words = [len(shape), *padded(shape, 1)]
    words += padded_strides(lead)
    words += [element_offset(arg) for arg in (out, x, table, ids)]
    check = stream.indices.bind(op, table.shape[0])
    words += [o_steps[-1], x_steps[-1], *element_strides(table), table.shape[0], *check.words]
    macros = {"ADD": "1", "T": x.dtype.name, "ID": ids.dtype.name, **check.macros}
    program = stream.target.programs.get("experts", macros)
    operands = (out, x, table, ids, *check.operands)
    return stream.launch(program, "add_rows", (table.shape[1], ids.size), (1, 1), operands, words)

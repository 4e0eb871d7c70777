"""Products in bf16, by compiled functions."""

from __future__ import annotations

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave_cpu.jit.compiler import why_not
from opweave_cpu.kernels.table import KERNELS
from opweave_cpu.tunables import PAIR_ROWS

__all__ = ["linear_of_pairs", "multiplies_halves"]


def _why_not(step: Step) -> str | None:
    x, w = step.srcs[:2]
    if len(w.shape) != 2 or w.shape[0] < 16 or w.shape[1] % 2 or x.size < PAIR_ROWS.value * w.shape[1]:
        return (
            f"it takes {PAIR_ROWS.value} rows and more, and a matrix of at least 16 rows of weights of an even length"
        )
    reason = why_not()
    if reason is not None:
        return reason
    from opweave_cpu.jit.half_products import multiplies_pairs

    return None if multiplies_pairs() else "the processor does not multiply pairs of bf16"


def _workspace(step: Step) -> Arrays:
    from opweave_cpu.jit.half_tiles import interleaved_bytes, multiplies_tiles

    x, w = step.srcs[:2]
    inputs = w.shape[1]
    return {"interleaved": ("u8", (interleaved_bytes(x.size // inputs, inputs) if multiplies_tiles(inputs) else 0,))}


@KERNELS("linear", dtypes="bf16", layout="dense", when=_why_not, workspace=_workspace)
def linear_of_pairs(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, interleaved: Arg | None = None
) -> Call:
    if interleaved is not None:
        from opweave_cpu.jit.half_tiles import bind_tile_product

        return bind_tile_product(stream, out, x, w, b, interleaved)
    from opweave_cpu.jit.half_products import bind_half_product

    return bind_half_product(stream, out, x, w, b)


def multiplies_halves(step: Step) -> bool:
    """Whether a step runs by the kernel of this module."""
    if step.srcs[1].dtype.name != "bf16":
        return False
    kernel = KERNELS.find(step)
    return kernel is not None and kernel.factory is linear_of_pairs

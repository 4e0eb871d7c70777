"""`evaluate`: the steps of a group as functions of arrays, views and states included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from opweave.errors import Broken
from opweave.graph.layout import array_shape
from opweave.graph.opdef import OPS

if TYPE_CHECKING:
    from opweave.contract.step import Arg, Step
    from opweave.functional.library import ArrayLibrary

__all__ = ["evaluate"]


def evaluate(
    library: ArrayLibrary,
    apply: Callable[..., Any],
    steps: Sequence[Step],
    inputs: Sequence[Arg],
    outputs: Sequence[Arg],
    arrays: Sequence[Any],
) -> list[Any]:
    """Compute the steps that ``_compile_functional`` got, for example while the library traces.

    Args:
        library: how to take windows of arrays.
        apply: ``apply(step, *sources)`` gives the result of a step, of the shape and dtype of ``step.out``. Sources
            have the shapes of ``step.srcs``. Of an operation that writes a state it is called with the present content
            of the region first, and gives the new one.
        steps, inputs, outputs: as given to ``_compile_functional``.
        arrays: one for each of the inputs.

    Returns:
        One array for each of the outputs, none of which is one of ``arrays``.

    Raises:
        Broken: a result that is no array, or has another shape than ``step.out``; or one memory used in two dtypes.
    """
    values = {arg.value: array for arg, array in zip(inputs, arrays, strict=True)}
    dtypes = {arg.value: arg.dtype for arg in inputs}
    sizes = {arg.value: arg.nbytes for arg in (*inputs, *outputs)}
    for step in steps:
        out, writes = step.out, OPS[step.op].writes
        for arg in (out, *step.srcs) if writes else step.srcs:
            if arg.dtype is not dtypes[arg.value]:
                raise Broken(f"{step.op} uses memory of {dtypes[arg.value]} as {arg.dtype}, which arrays cannot do")
        sources = [library.window(values[arg.value], arg) for arg in step.srcs]
        if writes:
            sources.insert(0, library.window(values[out.value], out))
        result = apply(step, *sources)
        shape = array_shape(out.shape, out.dtype)
        if not hasattr(result, "shape"):
            raise Broken(f"{step.op} gave an object of {type(result).__name__}, and no array")
        if tuple(result.shape) != shape:
            raise Broken(f"{step.op} gave an array of shape {tuple(result.shape)}, not {shape}")
        if out.offset or not out.is_dense or out.nbytes != sizes.setdefault(out.value, out.nbytes):
            result = library.with_window(values[out.value], out, result)
        values[out.value], dtypes[out.value] = result, out.dtype
    results: list[Any] = []
    taken = {id(array) for array in arrays}
    for out in outputs:
        array, shape = values[out.value], array_shape(out.shape, out.dtype)
        array = array if tuple(array.shape) == shape else library.reshape(array, shape)
        results.append(library.copy(array) if id(array) in taken else array)
        taken.add(id(array))
    return results

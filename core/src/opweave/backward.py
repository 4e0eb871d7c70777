"""`gradients`: the backward graph of a loss, an ordinary graph made of the gradients of its operations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import opweave.ops.gradients  # noqa: F401 - enters the gradients of opweave's own operations
from opweave import ops
from opweave.errors import DTypeError, GradientError, SchedulerError, ShapeError
from opweave.graph.graph import Graph
from opweave.graph.tensor import Tensor, with_sources
from opweave.ops.movement import after

__all__ = ["gradients"]


@overload
def gradients(loss: Tensor, params: Tensor, grad: Any = None) -> Tensor: ...
@overload
def gradients(loss: Tensor, params: Mapping[str, Tensor], grad: Any = None) -> dict[str, Tensor]: ...
@overload
def gradients(loss: Tensor, params: Sequence[Tensor], grad: Any = None) -> tuple[Tensor, ...]: ...
def gradients(loss: Tensor, params: Any, grad: Any = None) -> Any:
    """The gradients of a loss with respect to parameters, as tensors to compute with: by reverse accumulation
    (Griewank and Walther, "Evaluating Derivatives", 2008, chapter 3).

    Integers, and leaves that are not among the parameters, states too, have no gradient; nothing is computed for them.
    A write passes gradients to the values that it writes, and none to what it overwrites. A version of a state that is
    overwritten in the graph of the loss and that a gradient reads is copied before; `Program.explain` shows the copy.
    Values of parts that `opweave.recompute` built are computed again.
    At kinks and ties gradients are those of torch.

    Args:
        loss: one number of a float type; with ``grad`` any shape.
        params: tensors of float types that the loss depends on: states, inputs, constants, weights or what is computed;
            one, a sequence or a mapping of them.
        grad: the gradient of the loss itself, broadcast to its shape: a number or a tensor, e.g. the scale of the loss;
            1 by default.

    Returns:
        For each parameter a tensor of its shape and dtype, in the form of ``params``.

    Raises:
        GradientError: the loss does not depend on a parameter, or an operation between them has no gradient; the
            message shows the path.
        ShapeError: a loss of several elements without ``grad``, or a ``grad`` that does not broadcast to its shape.
        DTypeError: a loss or a parameter that is not of a float type.
        SchedulerError: something that is no tensor.
        HazardError: a loss that depends on ``index_copy`` with constant ids that repeat; other ids fail the run.
    """
    if isinstance(params, Mapping):
        return dict(zip(params, gradients(loss, tuple(params.values()), grad), strict=True))
    if isinstance(params, Tensor):
        return gradients(loss, (params,), grad)[0]
    wanted = tuple(params)
    for what, tensor in (("the loss", loss), *[("a parameter", p) for p in wanted]):
        if not isinstance(tensor, Tensor):
            raise SchedulerError(f"gradients: {what} is a tensor, not {tensor!r:.60}")
        if not tensor.dtype.is_float:
            raise DTypeError(f"gradients: {what} is of a float type, not {tensor.describe()}")
    if grad is None and loss.size != 1:
        raise ShapeError(f"gradients: a loss is one number; sum it up, or pass its gradient as grad: {loss.describe()}")
    first = ops.broadcast_to(
        ops.full((), 1, loss.dtype) if grad is None else ops.cast(_as_grad(grad, loss), loss.dtype), loss.shape
    )
    order = _order(loss)
    unrelated = [p for p in wanted if p not in order]
    if unrelated:
        raise GradientError(
            f"gradients: the loss does not depend on a parameter: {unrelated[0].describe()}", [loss.describe()]
        )
    found = _Backward(order, wanted).run(loss, first)
    return tuple([found[p] if p in found else ops.full(p.shape, 0, p.dtype) for p in wanted])


def _as_grad(grad: Any, loss: Tensor) -> Tensor:
    given: Tensor = grad if isinstance(grad, Tensor) else ops.full((), float(grad), loss.dtype)
    return given


def _order(loss: Tensor) -> dict[Tensor, None]:
    """Everything that the loss needs, sources first."""
    if loss.op is None:
        return {loss: None}
    graph = Graph(loss)
    return dict.fromkeys((*graph.leaves, *graph.nodes))


def _sources(tensor: Tensor) -> tuple[Tensor, ...]:
    """What a node has gradients for: for one that writes, first of all the whole version that it overwrites."""
    if tensor.op is not None and tensor.op.writes:
        return (tensor.srcs[0].root, *tensor.srcs[1:])
    return tensor.srcs


class _Backward:
    """One pass over a graph, from the loss to the parameters.

    Args:
        order: the tensors that the loss needs, sources first.
        wanted: the parameters.
    """

    def __init__(self, order: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
        self._order = tuple(order)
        self._wanted = set(wanted)
        self._overwritten = {t.srcs[0].root for t in self._order if t.op is not None and t.op.writes}
        self._readers: dict[Tensor, Tensor] = {}  # tensor -> the one through which the first gradient came
        self._leading: set[Tensor] = set()  # tensors that depend on a parameter
        self._again: dict[Tensor, Tensor] = {}  # tensors of parts to recompute -> what is computed again
        for tensor in self._order:
            leads = tensor in self._wanted or any(s in self._leading for s in _sources(tensor))
            if leads and tensor.dtype.is_float:
                self._leading.add(tensor)

    def run(self, loss: Tensor, first: Tensor) -> dict[Tensor, Tensor]:
        """The gradients of the parameters that have one which is not zero everywhere."""
        found = {loss: first}
        for tensor in reversed(self._order):
            grad = found.get(tensor)
            if (
                grad is None
                or tensor.op is None
                or not tensor.size
                or not any(s in self._leading for s in _sources(tensor))
            ):
                continue
            for source, part in zip(_sources(tensor), self._parts(tensor, grad), strict=True):
                if part is not None and source in self._leading:
                    self._readers.setdefault(source, tensor)
                    found[source] = ops.add(found[source], part) if source in found else part
        return {t: grad for t, grad in found.items() if t in self._wanted}

    def _parts(self, tensor: Tensor, grad: Tensor) -> list[Tensor | None]:
        """The gradient of each source, as the operation's definition builds it."""
        op = tensor.op
        assert op is not None
        if op.gradient is None:
            raise GradientError(
                f"gradients: the operation {op.name} between the loss and a parameter has no gradient; give it "
                "one (OpDef.gradient), or ask for gradients with respect to what it computes:",
                [t.describe() for t in self._path(tensor)],
            )
        if op.name == "recompute":
            self._recompute(tensor, grad)
        # Of the region that is written only its place matters.
        srcs = [s if op.writes and i == 0 else self._kept(s) for i, s in enumerate(tensor.srcs)]
        made = op.gradient(grad, self._again.get(tensor, tensor), *srcs, **tensor.attrs)
        parts = list(made) if isinstance(made, (tuple, list)) else [made]
        sources = _sources(tensor)
        if len(parts) != len(sources):
            raise GradientError(f"the gradient of {op.name} returned {len(parts)} tensors for {len(sources)} sources")
        return [
            None if part is None else self._checked(part, s, tensor) for part, s in zip(parts, sources, strict=True)
        ]

    def _kept(self, source: Tensor) -> Tensor:
        """The source, or a copy of it if it shows a version of a state that another node overwrites: the backward graph
        reads it later."""
        if source in self._again:
            return self._again[source]
        if source.root not in self._overwritten:
            return source
        return ops.copy(source).named(f"{source.name} before it is overwritten")

    def _recompute(self, part: Tensor, grad: Tensor) -> None:
        """Make the nodes between the sources and the result of a part anew, to be computed once ``grad`` is there."""
        out, *args = part.srcs
        again = {arg: after(self._unchanged(arg), [grad]) for arg in args}
        for tensor in _order(out):
            op = tensor.op
            if op is not None and tensor not in again and not op.writes and any(s in again for s in tensor.srcs):
                srcs = [again[s] if s in again else self._unchanged(s) for s in tensor.srcs]
                again[tensor] = with_sources(tensor, tuple(srcs))
        self._again |= again

    def _unchanged(self, source: Tensor) -> Tensor:
        """As `_kept`, in the window of the source: what is copied is all that it is a view of."""
        if source in self._again:
            return self._again[source]
        if source.root not in self._overwritten:
            return source
        if source is source.root:
            return ops.copy(source).named(f"{source.name} before it is overwritten")
        return with_sources(source, (self._unchanged(source.srcs[0]), *source.srcs[1:]))

    def _checked(self, part: Any, source: Tensor, tensor: Tensor) -> Tensor:
        if not isinstance(part, Tensor):
            raise GradientError(f"the gradient of {tensor.describe()} is made of tensors and None, not of {part!r:.60}")
        if part.shape != source.shape:
            raise ShapeError(
                f"the gradient of {tensor.describe()} has shape {part.shape} for its source {source.describe()}"
            )
        return ops.cast(part, source.dtype) if source.dtype.is_float else part

    def _path(self, tensor: Tensor) -> list[Tensor]:
        """The tensors from the loss over ``tensor`` to a parameter."""
        path = [tensor]
        while path[0] in self._readers:
            path.insert(0, self._readers[path[0]])
        while path[-1] not in self._wanted or path[-1] is tensor:
            onwards = [s for s in _sources(path[-1]) if s in self._leading]
            if not onwards:
                break
            path.append(onwards[0])
        return path

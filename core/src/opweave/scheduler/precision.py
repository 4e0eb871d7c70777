"""Graphs made anew with other leaves or types: `rebuilt`, and `with_products_in`, computing products in a half type."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from opweave.errors import DTypeError
from opweave.graph import opdef
from opweave.graph.dtypes import DType, as_dtype, bf16, f16, f32
from opweave.graph.graph import Graph
from opweave.graph.leaf import Leaf
from opweave.graph.tensor import Tensor, new_leaf, node, view_node
from opweave.leaves import weights

if TYPE_CHECKING:
    from opweave.graph.dtypes import DTypeLike

__all__ = ["check_compute_dtype", "converted_leaf", "rebuilt", "with_products_in"]

_CONVERTED: Final[WeakKeyDictionary[Tensor, dict[DType, Tensor]]] = WeakKeyDictionary()


def check_compute_dtype(dtype: DTypeLike) -> DType:
    """The type in which products are to be computed.

    Raises:
        DTypeError: none of f32, f16, bf16.
    """
    found = as_dtype(dtype)
    if found not in (f32, f16, bf16):
        raise DTypeError(f"products are computed in f32, f16 or bf16, not in {found}")
    return found


def rebuilt(
    outputs: Sequence[Tensor],
    known: Mapping[Tensor, Tensor],
    make: Callable[[Tensor, tuple[Tensor, ...]], Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """``outputs`` with other tensors in place of those in ``known`` and what follows from them.

    Args:
        known: tensor -> what stands in for it; everything behind it is left out.
        make: called with each node that is no view and its new sources; default: the same operation on these.
    """
    new: dict[Tensor, Tensor] = dict(known)
    for tensor in _behind(outputs, known):
        if tensor in new:
            continue
        if tensor.op is None:
            new[tensor] = tensor
        elif tensor.op.is_view:
            new[tensor] = view_again(tensor, new[tensor.srcs[0]], tuple([new[s] for s in tensor.srcs[1:]]))
        else:
            srcs = tuple([new[s] for s in tensor.srcs])
            new[tensor] = make(tensor, srcs) if make is not None else node(tensor.op, srcs, tensor.attrs)
    return tuple([new[output] for output in outputs])


def _behind(outputs: Sequence[Tensor], known: Mapping[Tensor, Tensor]) -> Iterable[Tensor]:
    """Everything that ``outputs`` need, sources first, up to what is known."""
    order: dict[Tensor, None] = {}
    stack = [(output, False) for output in reversed(outputs)]
    while stack:
        tensor, done = stack.pop()
        if done:
            order[tensor] = None
        elif tensor not in order and tensor not in known:
            stack.append((tensor, True))
            stack += [(source, False) for source in reversed(tensor.srcs)]
    return order


def view_again(view: Tensor, source: Tensor, after: tuple[Tensor, ...] = ()) -> Tensor:
    """The same view of another tensor, whose elements may have another size; ``after`` as for `view_node`."""
    assert view.op is not None
    size, old = source.dtype.itemsize, view.dtype.itemsize
    strides = tuple([s // old * size for s in view.strides])
    return view_node(view.op, source, view.attrs, view.shape, strides, view.offset // old * size, after)


def converted_leaf(leaf_tensor: Tensor, dtype: DType) -> Tensor:
    """A read-only leaf in another type, converted once; it lies where the original was asked to lie."""
    found = _CONVERTED.setdefault(leaf_tensor, {})
    known = found.get(dtype)
    if known is None:
        leaf = leaf_tensor.leaf
        assert leaf is not None
        if leaf.data is None:
            # Only planned with: so is this one.
            known = new_leaf(Leaf(leaf.kind, leaf.name, device=leaf.device, group=leaf.group), leaf_tensor.shape, dtype)
        else:
            data = {leaf.name: leaf.data.astype(dtype.numpy)}
            device = leaf.placement.buffer.device if leaf.placement is not None else None
            known = weights(data, device=device)[leaf.name]
        found[dtype] = known
    return known


def with_products_in(dtype: DTypeLike, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """``outputs`` with products (`OpDef.product`, attention and convolutions among them) of f32 operands in ``dtype``.

    Their operands are rounded to it, weights once and for all, and their results are stored rounded and widened again.
    Everything between them stays in f32, as in torch's autocast.

    Raises:
        DTypeError: as `check_compute_dtype`.
    """
    target = check_compute_dtype(dtype)
    if target is f32:
        return tuple(outputs)
    Graph(outputs)  # refuses what has no order, before anything is made

    def narrow(source: Tensor) -> Tensor:
        if source.dtype is not f32:
            return source
        root = source.root
        if root.leaf is not None and root.leaf.kind in ("weight", "constant"):
            return rebuilt((source,), {root: converted_leaf(root, target)})[0]
        cast: Tensor = opdef.build("cast", source, target)
        return cast

    def make(tensor: Tensor, srcs: tuple[Tensor, ...]) -> Tensor:
        assert tensor.op is not None
        if tensor.dtype is not f32 or not tensor.op.product:
            return node(tensor.op, srcs, tensor.attrs)
        result: Any = opdef.build("cast", node(tensor.op, tuple(map(narrow, srcs)), tensor.attrs), f32)
        made: Tensor = result
        return made

    return rebuilt(outputs, {}, make)

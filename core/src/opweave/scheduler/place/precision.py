"""Which nodes a program may compute less than exactly, and weights that are rounded once for all programs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from opweave.errors import SchedulerError, UnknownNameError
from opweave.graph.dtypes import DType, bf16
from opweave.graph.graph import rebuilt
from opweave.graph.leaf import Leaf
from opweave.graph.opdef import takes_precision
from opweave.graph.precision import PRECISIONS, Precision, check_precision
from opweave.graph.tensor import Tensor, new_leaf
from opweave.leaf_memory import read_leaf
from opweave.leaves import weights

__all__ = [
    "Allowed", "allowed_for", "checked_precision", "converted_leaf", "precisions_of", "rounded_sources",
    "stored_source",
]  # fmt: skip

Allowed = tuple[tuple[str, Precision], ...]
"""Patterns of node names, each with the precision that it allows; the first that matches counts. Empty: ``exact``."""


def converted_leaf(leaf_tensor: Tensor, dtype: DType) -> Tensor:
    """A read-only leaf in another type, converted once; it is placed on the device that was given for the original."""
    leaf = leaf_tensor.leaf
    assert leaf is not None
    known = leaf.converted.get(dtype)
    if known is None:
        if leaf.data is None and leaf.placement is None:
            # It has no bytes and only serves for planning: so does this one.
            known = new_leaf(Leaf(leaf.kind, leaf.name, device=leaf.device, group=leaf.group), leaf_tensor.shape, dtype)
        else:
            values = leaf.data if leaf.data is not None else read_leaf(leaf_tensor)
            data = {leaf.name: values.astype(dtype.numpy)}
            device = leaf.placement.buffer.device if leaf.placement is not None else None
            known = weights(data, device=device)[leaf.name]
            assert known.leaf is not None
            known.leaf.group = leaf.group  # leaves that share buffers share them when rounded, too
        leaf.converted[dtype] = known
    return known


def rounded_sources(node: Tensor, positions: Collection[int]) -> tuple[Tensor, ...]:
    """The sources of a node, those at ``positions``, which show read-only leaves, in bf16. Leaves are rounded once."""
    return tuple([_rounded(source) if i in positions else source for i, source in enumerate(node.srcs)])


def _rounded(source: Tensor) -> Tensor:
    return rebuilt((source,), {source.root: converted_leaf(source.root, bf16)})[0]


# --- what a program allows ------------------------------------------------------------------------------------------


def checked_precision(given: Any) -> Allowed:
    """What a caller gave as ``precision``: one for all products, or a mapping of patterns to precisions.

    Raises:
        UnknownNameError: no such precision.
        SchedulerError: neither a name nor a mapping, or a pattern that is no text.
    """
    if not isinstance(given, (str, Mapping)):
        raise SchedulerError(
            f"precision is one of {', '.join(PRECISIONS)}, or a mapping of node names (glob patterns) to these, "
            f"not {given!r:.60}"
        )
    if isinstance(given, str):
        return (("*", check_precision(given)),) if given != "exact" else ()
    for pattern in given:
        if not isinstance(pattern, str):
            raise SchedulerError(f"precision maps names of nodes (glob patterns) to precisions, not {pattern!r:.60}")
    return tuple([(pattern, check_precision(precision)) for pattern, precision in given.items()])


def precisions_of(nodes: Iterable[Tensor], allowed: Allowed) -> dict[Tensor, Precision]:
    """The nodes that may be computed less than exactly, and how roughly: by the first pattern that matches their name.

    Raises:
        UnknownNameError: a pattern that matches no node which could be computed less than exactly.
    """
    if not allowed:
        return {}
    products = [tensor for tensor in nodes if takes_precision(tensor)]
    names = [product.name for product in products]
    for pattern, _ in allowed:
        if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
            raise UnknownNameError("product", pattern, names, "It is a pattern of precision=, and matches none.")
    return {product: found for product in products if (found := allowed_for(product, allowed)) != "exact"}


def allowed_for(node: Tensor, allowed: Allowed) -> Precision:
    """How roughly a node may be computed. ``int8`` is for products with weights that are stored rounded, quantized or
    in bf16: others, also those with routers or norms in f32 beside them, stay exact."""
    if not takes_precision(node):
        return "exact"
    matching = (precision for pattern, precision in allowed if fnmatchcase(node.name, pattern))
    found: Precision = next(matching, "exact")
    return "exact" if found == "int8" and not any(map(_is_stored_rounded, node.srcs)) else found


def stored_source(source: Tensor) -> Tensor:
    """What a source of a product shows, or is converted from: a weight as it is stored."""
    root = source.root
    return root.srcs[0].root if root.op is not None and root.op.name in ("cast", "dequantize") else root


def _is_stored_rounded(source: Tensor) -> bool:
    dtype = stored_source(source).dtype
    return dtype.is_quantized or dtype is bf16

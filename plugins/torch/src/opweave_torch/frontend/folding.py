"""Constant folding: torch computes what depends on parameters and constants alone once, when a program is imported."""

from __future__ import annotations

import operator
from typing import Any, Final, NamedTuple

import torch

from opweave_torch.frontend.call import leaves_of
from opweave_torch.frontend.native import is_operator, overload, schema_of
from opweave_torch.frontend.source import Source

__all__ = ["FOLDED", "FoldedNorm", "fold", "fold_batch_norms", "is_pure", "on_host"]

FOLDED: Final = 1 << 20
"""Results of at most so many bytes, or no more than their operands have, are computed beforehand; larger ones are left
to the devices."""


def is_pure(target: Any) -> bool:
    """Whether an operator gives the same each time, so that torch may compute it beforehand."""
    if target is operator.getitem:
        return True
    return (
        is_operator(target)
        and not schema_of(target).is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and bool(schema_of(target).returns)
    )


def on_host(value: Any) -> Any:
    """Arguments with the host in place of other devices."""
    return torch.device("cpu") if isinstance(value, torch.device) else value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a value."""
    return leaves_of(value, lambda v: isinstance(v, torch.Tensor))


def fold(source: Source) -> dict[torch.fx.Node, Any]:
    """The values of nodes that only parameters, constants and unchanged buffers lead to.

    A view of one of them stays a node, and so does a result larger than `FOLDED` and than its operands.
    """
    known: dict[torch.fx.Node, Any] = {}
    folded: dict[torch.fx.Node, Any] = {}
    held = set()
    for node in source.graph.nodes:
        if node.op == "placeholder" and node.name in source.leaves and node.name not in source.states:
            known[node] = source.leaves[node.name][1].detach()
        elif node.op == "get_attr":
            value = source.attribute(node)
            if isinstance(value, torch.Tensor):
                known[node] = value.detach()
        if node in known:
            held.add(known[node].untyped_storage().data_ptr())
        if node.op != "call_function" or not is_pure(node.target) or not all(n in known for n in node.all_input_nodes):
            continue
        args = torch.fx.map_arg((node.args, node.kwargs), lambda n: known[n])
        args = torch.fx.node.map_aggregate(args, on_host)
        with torch.no_grad():
            value = node.target(*args[0], **args[1])
        made = tensors_in(value)
        size = sum([t.nbytes for t in made])
        limit = max(FOLDED, sum([t.nbytes for n in node.all_input_nodes for t in tensors_in(known[n])]))
        if size > limit or any(t.untyped_storage().data_ptr() in held and t.numel() for t in made):
            continue
        known[node] = folded[node] = value
    return folded


CONVOLUTIONS: Final = [overload(name) for name in ("convolution", "conv1d", "conv2d", "conv3d")]
BATCH_NORM: Final = overload("_native_batch_norm_legit_no_training")


class FoldedNorm(NamedTuple):
    """A convolution that computes what a batch norm behind it would.

    Attributes:
        conv: the node of the convolution.
        weight, bias: what it gets instead of its own.
    """

    conv: torch.fx.Node
    weight: torch.Tensor
    bias: torch.Tensor


def fold_batch_norms(source: Source) -> dict[torch.fx.Node, FoldedNorm]:
    """For batch norms with running statistics the convolutions before them, with weights into which the factors of the
    norm are multiplied, where nothing else reads what these compute (Jacob et al., "Quantization and Training of Neural
    Networks for Efficient Integer-Arithmetic-Only Inference", 2018, section 3.2)."""

    def values(node: Any) -> torch.Tensor | None:
        if not isinstance(node, torch.fx.Node) or node.name not in source.leaves or node.name in source.states:
            return None
        return source.leaves[node.name][1].detach().double()

    found = {}
    for norm in source.graph.nodes:
        conv = norm.args[0] if norm.op == "call_function" and norm.target is BATCH_NORM else None
        if not isinstance(conv, torch.fx.Node) or conv.target not in CONVOLUTIONS or len(conv.users) > 1 or conv.kwargs:
            continue
        bias = conv.args[2] if len(conv.args) > 2 else None
        w, b, gamma, beta, mean, var = (values(v) for v in (conv.args[1], bias, *norm.args[1:5]))
        if w is None or mean is None or var is None or (conv.target is CONVOLUTIONS[0] and conv.args[6]):
            continue
        if any(v is None and n is not None for v, n in ((b, bias), (gamma, norm.args[1]), (beta, norm.args[2]))):
            continue
        factor = torch.rsqrt(var + norm.args[6]) * (1 if gamma is None else gamma)
        shift = (0 if beta is None else beta) + ((0 if b is None else b) - mean) * factor
        weight = w * factor.reshape(-1, *[1] * (w.ndim - 1))
        kind = source.leaves[conv.args[1].name][1].dtype
        found[norm] = FoldedNorm(conv, weight.to(kind), shift.to(kind))
    return found

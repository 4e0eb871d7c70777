"""What attributes of nodes may be, for nodes that come from elsewhere: files, pickles and other processes.

Builders make attributes of what they are given, and check it on the way; shape rules and kernels rely on that. So the
attributes of a node that no builder made are checked here. A name means the same in all of opweave's own operations,
and one table has a rule for each. Those of third parties' operations are checked by their types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import Parameter, signature
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Final

from opweave.errors import FormatError, OpweaveError
from opweave.graph.arrays import host_array
from opweave.graph.dtypes import DType
from opweave.graph.opdef import OpDef

if TYPE_CHECKING:
    from opweave.graph.tensor import Tensor

__all__ = ["check_attributes"]

Rule = Callable[[Any, Mapping[str, Any], Sequence["Tensor"]], bool]
"""Whether a value may be that of an attribute, given all attributes and the sources. It may raise any exception for
what may not be."""


def check_attributes(op: OpDef, attrs: Mapping[str, Any], srcs: Sequence[Tensor]) -> None:
    """Refuse attributes that the builder of ``op`` does not make for such sources.

    Raises:
        FormatError: an attribute is missing, unknown, of another type or out of range.
    """
    declared = _declared(op)
    needed = {name for name, p in declared.items() if p.default is Parameter.empty} | set(op.attributes)
    if missing := needed - attrs.keys():
        raise FormatError(f"{op.name} lacks the attribute {min(missing)}")
    known = declared.keys() | needed
    if unknown := attrs.keys() - known:
        raise FormatError(f"{op.name} has no attribute {min(unknown)!r:.40}")
    for name in known:
        value = attrs[name] if name in attrs else declared[name].default
        kinds = _TYPES.get(declared[name].annotation) if name in declared else None
        rule = None if op.family == "third-party" else _RULES.get(name)
        try:
            good = (kinds is None or type(value) in kinds) and (rule is None or rule(value, attrs, srcs))
        except (OpweaveError, TypeError, ValueError, OverflowError, IndexError, AttributeError, KeyError):
            good = False
        if not good:
            raise FormatError(f"{op.name} cannot have the attribute {name}={value!r:.40}")


@cache  # as many as there are operations
def _declared(op: OpDef) -> dict[str, Parameter]:
    """The attributes that the shape rule names, or where it takes any, the reference."""
    rule, reference = (signature(f).parameters.values() for f in (op.infer, op.reference))
    both = [*rule, *reference] if any(p.kind is Parameter.VAR_KEYWORD for p in rule) else rule
    return {p.name: p for p in both if p.kind is Parameter.KEYWORD_ONLY}


_TYPES: Final[dict[Any, tuple[type, ...]]] = {
    "float": (float, int, bool), "bool": (bool,), "int": (int,), "str": (str,), "DType": (DType,),
}  # fmt: skip
"""The types of attributes by their annotation. An attribute annotated as float may be an integer or a bool: the value
that fills a tensor of integers or bools."""


def _is_int(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _flag(value: Any, attrs: Mapping[str, Any], srcs: Sequence[Tensor]) -> bool:
    return type(value) is bool


def _real(value: Any, attrs: Mapping[str, Any], srcs: Sequence[Tensor]) -> bool:
    return type(value) in (int, float)


def _fill(value: Any, attrs: Mapping[str, Any], srcs: Sequence[Tensor]) -> bool:
    """A number that the type of the result holds."""
    dtype = attrs["dtype"] if "dtype" in attrs else srcs[0].dtype
    if type(value) not in (bool, int, float):
        return False
    host_array(value, dtype, copy=False)
    return True


def _whole(least: int | None) -> Rule:
    return lambda value, attrs, srcs: type(value) is int and (least is None or value >= least)


def _one_of(*values: str) -> Rule:
    return lambda value, attrs, srcs: type(value) is str and value in values


def _wholes(least: int | None) -> Rule:
    """A tuple of integers."""
    return lambda value, attrs, srcs: (
        type(value) is tuple and all(type(v) is int and (least is None or v >= least) for v in value)
    )


def _window(least: int) -> Rule:
    """An integer for each axis along which windows move."""
    of_integers = _wholes(least)
    return lambda value, attrs, srcs: of_integers(value, attrs, srcs) and len(value) == len(attrs["stride"])


def _padding(value: Any, attrs: Mapping[str, Any], srcs: Sequence[Tensor]) -> bool:
    """An integer or a pair for each axis along which windows move."""
    each = [v if type(v) is tuple and len(v) == 2 else (v,) for v in value]
    return type(value) is tuple and len(each) == len(attrs["stride"]) and all(_is_int(n) for v in each for n in v)


def _axis(value: Any, attrs: Mapping[str, Any], srcs: Sequence[Tensor]) -> bool:
    return _is_int(value) and value < srcs[0].ndim


def _axes(value: Any, attrs: Mapping[str, Any], srcs: Sequence[Tensor]) -> bool:
    return type(value) is tuple and all(_axis(v, attrs, srcs) for v in value) and len(set(value)) == len(value)


def _pairs(value: Any, attrs: Mapping[str, Any], srcs: Sequence[Tensor]) -> bool:
    return len(value) == srcs[0].ndim and all(len(v) == 2 and all(map(_is_int, v)) for v in value)


def _blocks(value: Any, attrs: Mapping[str, Any], srcs: Sequence[Tensor]) -> bool:
    """The type of the source that is quantized."""
    return value is next((s.dtype for s in srcs if s.dtype.is_quantized), None)


def _factors(value: Any, attrs: Mapping[str, Any], srcs: Sequence[Tensor]) -> bool:
    return value is None or all(type(v) is float and v > 0 for v in value)


def _sections(value: Any, attrs: Mapping[str, Any], srcs: Sequence[Tensor]) -> bool:
    """Numbers of pairs, of all pairs together."""
    return type(value) is tuple and all(map(_is_int, value)) and (not value or 2 * sum(value) == attrs["dims"])


_PADS: Final = ("constant", "edge", "reflect", "wrap")
_RESAMPLINGS: Final = {1: ("nearest", "linear"), 2: ("nearest", "bilinear", "bicubic"), 3: ("nearest", "trilinear")}
"""Modes by the number of axes."""

_RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(
        ("align_corners", "biased", "bonus", "causal", "ceil_mode", "count_include_pad", "decay", "descending",
         "interleaved", "last", "masked", "removal", "skip", "softplus", "stable", "state", "unitriangular", "upper"),
        _flag,
    ),
    **dict.fromkeys(
        ("alpha", "alpha_n", "alpha_p", "attn_factor", "beta", "bias", "correction", "eps",
         "limit", "max_bias", "max_period", "negative_slope", "scale", "soft_cap", "start", "step"),
        _real,
    ),
    **dict.fromkeys(("base", "beta_fast", "beta_slow"), lambda value, attrs, srcs: 0 < value < inf),
    **dict.fromkeys(("max", "min", "value"), _fill),
    **dict.fromkeys(("count", "divisor", "n", "original_context"), _whole(0)),
    **dict.fromkeys(("dim", "groups", "iterations"), _whole(1)),
    **dict.fromkeys(("k", "offset"), _whole(None)),
    **dict.fromkeys(("kernel_size", "dilation", "stride"), _window(1)),
    "output_padding": _window(0), "padding": _padding, "size": _wholes(0), "shape": _wholes(0),
    "sections": _sections, "offsets": _wholes(0),
    "shifts": lambda value, attrs, srcs: _wholes(None)(value, attrs, srcs) and len(value) == srcs[0].ndim,
    "axis": _axis, "axes": _axes, "widths": _pairs, "blocks": _blocks, "scale_factor": _factors,
    # Pairs of elements, and a context whose logarithm is taken where frequencies are extrapolated.
    "dims": lambda value, attrs, srcs: _is_int(value, 2) and value % 2 == 0,
    "ext_factor": lambda value, attrs, srcs: (
        isfinite(value) and (not value or (attrs["original_context"] > 0 and attrs["base"] != 1))
    ),
    "approximate": _one_of("none", "tanh", "quick"),
    "pairing": _one_of("adjacent", "half"),
    "mode": lambda value, attrs, srcs: value in (_PADS if "widths" in attrs else _RESAMPLINGS[len(attrs["size"])]),
}  # fmt: skip
"""The rule of each attribute. Shape rules check the rest: whether they fit the shapes of the sources."""

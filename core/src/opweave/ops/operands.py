"""Functions that the builders of operations use: they make operands of the arguments, and raise errors that name the
operation and the operand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce, wraps
from operator import index as as_index
from typing import Any, ParamSpec, TypeVar

import numpy as np

from opweave.errors import BoundsError, DTypeError, LayoutError, OpweaveError, ShapeError
from opweave.graph import opdef
from opweave.graph.dtypes import DType, bool_, f32, f64, i32, i64, promote, wide_type
from opweave.graph.layout import Shape, broadcast_shapes, normalize_axis
from opweave.graph.opdef import OpDef, define_op
from opweave.graph.tensor import Tensor, as_tensor, constant, shows_columns_of_blocks

__all__ = [
    "Array", "Number", "added", "as_axis", "as_fill", "as_flag", "as_ids", "as_integer", "as_mask", "as_number",
    "broadcast_to", "builds", "cast", "check_shape_of", "composite", "explain", "float_and_number", "float_pair",
    "floating", "floats", "is_number", "make", "misfit", "no_bools", "optional_operands", "pair", "plain", "promoted",
    "rows", "shows_columns_of_blocks", "unquantized", "wide", "wide_weights", "widened",
]  # fmt: skip

Array = np.ndarray[Any, Any]
Number = bool | int | float
F = TypeVar("F", bound=Callable[..., Any])
E = TypeVar("E", bound=OpweaveError)
T = TypeVar("T")
P = ParamSpec("P")


def builds(op: OpDef) -> Callable[[F], F]:
    """Decorator: enters ``op`` into the table of operations, with the function as its public builder."""

    def register(function: F) -> F:
        define_op(op).build = function
        return function

    return register


def wide(x: Array) -> Array:
    """The array as references compute with it: float64 for floats, integers as they are."""
    return x if x.dtype.kind in "iub" else np.asarray(x, np.float64)


def wide_weights(w: Array, blocks: DType | None) -> Array:
    """`wide`, for weights that may be quantized: then ``blocks`` is their type, and ``w`` their bytes."""
    if blocks is None:
        return wide(w)
    from opweave.ops.blocks import dequantize  # most programs have no quantized weights

    return dequantize(w, blocks).astype(np.float64)


def optional_operands(rest: Sequence[T], has_first: bool) -> tuple[T | None, T | None]:
    """The two optional last operands of a node, ``None`` for those that it does not have.

    Args:
        rest: the sources after the required ones: none, one or both.
        has_first: the attribute that tells whether the first one is there: ``masked`` of attention (mask, sinks),
            ``biased`` of causal_conv1d (bias, the elements before), ``skip`` of selective_scan (D, state).
    """
    return rest[0] if has_first else None, rest[-1] if len(rest) > has_first else None


# --- messages -------------------------------------------------------------------------------------------------------


def explain(error: OpweaveError, op: str, *operands: Tensor) -> OpweaveError:
    """The same error with the operation and its operands named."""
    if isinstance(error, (ShapeError, DTypeError, LayoutError, BoundsError)):
        return type(error)(f"{op}: {error}; {_named(operands)}")
    return error


def _named(operands: tuple[Tensor, ...]) -> str:
    if len(operands) == 1:
        return f"the operand is {operands[0].describe()}"
    return "the operands are " + " and ".join(t.describe() for t in operands)


def misfit(op: str, needs: str, *operands: Tensor) -> ShapeError:
    """The error for operands that do not fit an operation; ``needs`` says which shapes would."""
    *first, last = [x.describe() for x in operands]
    return ShapeError(f"{op}: needs {needs}, not {', '.join(first)}{' and ' if first else ''}{last}")


def check_shape_of(op: str, what: str, x: Tensor | None, shape: Shape, why: str = "") -> None:
    """Refuse an optional operand, called ``what``, of another shape, which ``why`` explains; raises `ShapeError`."""
    if x is not None and x.shape != shape:
        raise ShapeError(f"{op}: {what} must have shape {shape}{', ' * bool(why)}{why}; got {x.describe()}")


def rows(op: str, *operands: Tensor) -> None:
    """Refuse the transpose of a quantized matrix: its blocks do not lie along the last axis.

    Raises:
        LayoutError: an operand is such a view.
    """
    for x in operands:
        if shows_columns_of_blocks(x):
            raise LayoutError(
                f"{op}: the transpose of a quantized matrix only serves as the right operand of matmul "
                f"(x @ w.T, which is linear(x, w)); {_named((x,))}"
            )


def plain(op: str, *operands: Tensor) -> None:
    """Refuse quantized operands.

    Raises:
        DTypeError: an operand is quantized.
        LayoutError: an operand is the transpose of a quantized matrix.
    """
    for x in operands:
        if x.dtype.block > 1:
            rows(op, x)
            raise DTypeError(
                f"{op} does not take {x.dtype}: quantized tensors enter linear and embedding, views and copy; "
                f"decode the weights before they become a tensor, or use linear(x, w); {_named((x,))}"
            )


def no_bools(op: str, *operands: Tensor) -> None:
    """Refuse operands of bool.

    Raises:
        DTypeError: an operand is bool.
    """
    if any(x.dtype is bool_ for x in operands):
        raise DTypeError(f"{op}: bool has no arithmetic; cast first, e.g. x.astype('i32'); {_named(operands)}")


# --- operands -------------------------------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    """Whether it is a Python number, which takes the dtype of the other operand."""
    return isinstance(value, (bool, int, float))


def float_and_number(a: Any, b: Any) -> tuple[Tensor, Number] | None:
    """A float tensor and a bare number, given in either order; ``None`` for all other operands."""
    for x, number in ((a, b), (b, a)):
        if isinstance(x, Tensor) and is_number(number) and x.dtype.is_float:
            return x, number
    return None


def as_number(op: str, what: str, value: Any) -> float:
    """``value`` as a Python float, for attributes.

    Raises:
        DTypeError: it is no number.
    """
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, OpweaveError):
        raise DTypeError(f"{op}: {what} is a number, not {value!r:.60}") from None


def as_integer(op: str, what: str, value: Any) -> int:
    """``value`` as a Python int, for attributes.

    Raises:
        ShapeError: it is no integer.
    """
    try:
        return int(as_index(value))
    except TypeError:
        raise ShapeError(f"{op}: {what} is an integer, not {value!r:.60}") from None


def as_flag(op: str, what: str, value: Any) -> bool:
    """``value`` as True or False, for attributes and options.

    Raises:
        DTypeError: it is neither, as an array of several elements.
    """
    try:
        return bool(value)
    except (TypeError, ValueError, OpweaveError):
        raise DTypeError(f"{op}: {what} is True or False, not {value!r:.60}") from None


def as_fill(op: str, value: Any, dtype: DType) -> Number:
    """``value`` as the Python number that fills a tensor of ``dtype``.

    Raises:
        DTypeError: it is no number, or none that ``dtype`` holds.
    """
    if dtype.is_float:
        return as_number(op, "the value", value)
    try:
        number = int(as_index(value))
    except TypeError:
        raise DTypeError(f"{op}: {value!r:.60} does not fit into {dtype}") from None
    if dtype is bool_:
        return bool(number)
    limits = np.iinfo(dtype.numpy)
    if not limits.min <= number <= limits.max:
        raise DTypeError(f"{op}: {number} does not fit into {dtype}")
    return number


def as_axis(op: str, axis: Any, x: Tensor) -> int:
    """``axis`` of ``x`` as a non-negative index.

    Raises:
        BoundsError: outside of the axes of ``x``.
        ShapeError: it is no integer.
    """
    try:
        return normalize_axis(axis, x.ndim)
    except OpweaveError as error:
        raise explain(error, op, x) from None
    except TypeError:
        raise ShapeError(f"{op}: an axis is an integer, not {axis!r}; {_named((x,))}") from None


def make(op: str, value: Any, like: Tensor | None = None) -> Tensor:
    """``value`` as a tensor. A Python number takes the dtype of ``like``; but beside integers and bools a float takes
    f32, and beside bools an integer takes i64.

    Raises:
        DTypeError: it is no array of numbers, or an integer that the dtype of ``like`` does not hold.
    """
    if isinstance(value, Tensor):
        return value
    if like is not None and isinstance(value, int) and not isinstance(value, bool):
        if like.dtype is bool_:
            return constant(value, i64)
        if like.dtype.is_integer:
            limits = np.iinfo(like.dtype.numpy)
            if not limits.min <= value <= limits.max:
                raise DTypeError(f"{op}: {value} does not fit into {like.dtype}; cast first; {_named((like,))}")
    try:
        return as_tensor(value, like if like is None or like.dtype.block == 1 else None)
    except DTypeError as error:
        raise DTypeError(f"{op}: {error}") from None


def unquantized(op: str, value: Any, like: Tensor | None = None) -> Tensor:
    """An operand that is no quantized tensor. Raises `DTypeError` for one, and for what is no array of numbers."""
    x = make(op, value, like)
    plain(op, x)
    return x


def as_ids(op: str, what: str, value: Any) -> Tensor:
    """An operand of indices.

    Raises:
        DTypeError: neither i32 nor i64.
    """
    ids = make(op, value)
    if ids.dtype is not i32 and ids.dtype is not i64:
        raise DTypeError(f"{op}: {what} are i32 or i64; cast them, e.g. ids.astype('i32'); {_named((ids,))}")
    return ids


def cast(x: Tensor, dtype: DType) -> Tensor:
    """``x`` in another type; itself if it has it."""
    return x if x.dtype is dtype else opdef.build("cast", x, dtype)


def composite(build: Callable[P, T]) -> Callable[P, T]:
    """Decorator for a function that makes one operation of several nodes: it computes as one node would. Operands of
    half types are f32 between the nodes, which neither overflow nor lose digits that one operation would keep, and a
    result in f32 is rounded once, to the common type of the operands of float types.

    Operands are the tensors among the arguments, and in lists and tuples among these. Results are a tensor, or a tuple
    or list of tensors and other values, which are returned as they are.
    """

    @wraps(build)
    def built(*args: P.args, **kwargs: P.kwargs) -> T:
        found = [t.dtype for t in _tensors((args, tuple(kwargs.values()))) if t.dtype.is_float and t.dtype.block == 1]
        if not any(dtype.is_half for dtype in found):
            return build(*args, **kwargs)
        common = reduce(promote, found)
        given: Any = [_each(a, widened) for a in args]
        named: Any = {name: _each(a, widened) for name, a in kwargs.items()}
        made: T = _each(build(*given, **named), lambda t: cast(t, common) if t.dtype is wide_type(common) else t)
        return made

    return built


def widened(x: Tensor) -> Tensor:
    """``x`` in f32 if it is of a half type, else itself."""
    return cast(x, wide_type(x.dtype)) if x.dtype.is_half else x


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in nested lists and tuples."""
    if isinstance(value, list) or type(value) is tuple:
        return [t for v in value for t in _tensors(v)]
    return [value] if isinstance(value, Tensor) else []


def _each(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with the function applied to the tensors in nested lists and tuples."""
    if isinstance(value, list):
        return [_each(v, function) for v in value]
    if type(value) is tuple:
        return tuple([_each(v, function) for v in value])
    return function(value) if isinstance(value, Tensor) else value


def broadcast_to(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``x`` seen in a larger shape; itself if it has it."""
    return x if x.shape == shape else opdef.build("broadcast_to", x, shape)


def floating(op: str, value: Any) -> Tensor:
    """An operand of a function on real numbers: integers and bools become f32. Raises `DTypeError` for a quantized
    operand, and for what is no array of numbers."""
    x = unquantized(op, value)
    return x if x.dtype.is_float else cast(x, f32)


def promoted(op: str, *operands: Tensor) -> tuple[Tensor, ...]:
    """The operands in their common type (`promote`).

    Raises:
        DTypeError: a quantized operand.
    """
    plain(op, *operands)
    common = operands[0].dtype
    for x in operands[1:]:
        common = promote(common, x.dtype)
    if common is f64:
        _warn_if_widened(operands)
    return tuple([cast(x, common) for x in operands])


def _warn_if_widened(operands: tuple[Tensor, ...]) -> None:
    """Warn where an array whose dtype nobody gave turns floats of other operands into f64."""
    if all(x.dtype is f64 or not x.dtype.is_float for x in operands):
        return
    for x in operands:
        leaf = x.memory.leaf
        if x.dtype is f64 and leaf is not None and leaf.inferred:
            from opweave.warning import warn_of_f64

            warn_of_f64(x.memory.describe())


def floats(op: str, *values: Any, optional: Sequence[Any] = ()) -> tuple[Tensor, ...]:
    """Operands of a function on real numbers in one float type; those of ``optional`` that are ``None`` are left out.
    Raises `DTypeError` for a quantized operand, and for ``None`` in ``values``."""
    given = [*values, *[value for value in optional if value is not None]]
    return tuple([floating(op, x) for x in promoted(op, *[make(op, value) for value in given])])


def added(op: str, what: str, value: Any, dtype: DType) -> Tensor:
    """An operand that is added to scores, such as a mask, cast to their type.

    Raises:
        DTypeError: it is not of a float type.
    """
    y = unquantized(op, value)
    if not y.dtype.is_float:
        raise DTypeError(
            f"{op}: the {what} must be of a float type, as it is added: 0 keeps, -inf hides; it is {y.describe()}"
        )
    return cast(y, dtype)


def as_mask(op: str, mask: Any, shape: Shape, x: Tensor, max_bias: float) -> Tensor:
    """A mask as it is added to scores of ``shape``: in the dtype of ``x``, from which the scores are computed, and
    broadcast. In a mask of bool, True becomes 0 and False -inf.

    Raises:
        ShapeError: it does not broadcast.
        DTypeError: it is of neither a float type nor bool; it is bool, and ``max_bias`` multiplies distances.
    """
    m = make(op, mask)
    if m.dtype is bool_:
        if max_bias:
            raise DTypeError(f"{op}: max_bias multiplies a mask that holds minus the distances, not {m.describe()}")
        m = opdef.build("where", m, constant(0.0, x.dtype), constant(-np.inf, x.dtype))
    elif not m.dtype.is_float and m.dtype.block == 1:
        raise DTypeError(
            f"{op}: the mask must be of bool (True takes part, False is hidden) or of a float type, which is added (0 "
            f"keeps, -inf hides); it is {m.describe()}: mask.astype('bool') if it holds 1 and 0"
        )
    try:
        return broadcast_to(added(op, "mask", m, x.dtype), shape)  # converted before it is repeated
    except ShapeError:
        raise ShapeError(
            f"{op}: the mask {m.describe()} does not broadcast to the shape of the scores, {shape}; {_named((x,))}"
        ) from None


def pair(op: str, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Two operands of one dtype and one shape: promoted, and broadcast as views.

    Raises:
        ShapeError: the shapes do not broadcast.
        DTypeError: a quantized operand, or something that is no array of numbers.
    """
    x, y = _meeting(op, a, b)
    return _of_one_shape(op, *(promoted(op, x, y) if x.dtype is not y.dtype or x.dtype.block > 1 else (x, y)))


def float_pair(op: str, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Two operands as `pair` makes them, in a float type: integers and bools become f32. Raises `ShapeError` for shapes
    that do not broadcast, `DTypeError` for quantized operands."""
    x, y = floats(op, *_meeting(op, a, b))
    return _of_one_shape(op, x, y)


def _meeting(op: str, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    x = make(op, a, b if isinstance(b, Tensor) else None)
    return x, make(op, b, x)


def _of_one_shape(op: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape != y.shape:
        try:
            shape = broadcast_shapes(x.shape, y.shape)
        except ShapeError as error:
            raise ShapeError(f"{op}: {error}; reshape one of them; {_named((x, y))}") from None
        x, y = broadcast_to(x, shape), broadcast_to(y, shape)
    return x, y

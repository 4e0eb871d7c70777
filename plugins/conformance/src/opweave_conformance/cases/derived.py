"""Cases that every operation gets, made from the ones that its family has.

Sizes: lengths around powers of two, where kernels change from whole tiles to remainders, and more than 2¹⁶ rows, which
launch grids and 16-bit counters do not reach. Integers: the whole range of each type that an operation takes; what does
not fit wraps around, as in NumPy. Attributes: with every number of operands, the value that the builder has by default,
and another one. Types: operands of another float type than the first one. Aliasing:
sources that are one value, sources that overlap, and writers whose source lies in the state that they write; what else
a scheduler may let share memory is tried with every case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from inspect import signature
from math import prod
from typing import Any, Final

from opweave.errors import OpweaveError
from opweave.graph.dtypes import as_dtype
from opweave.graph.layout import Shape
from opweave.graph.opdef import OPS
from opweave.graph.tensor import Tensor, node
from opweave.graph.tensor import input as leaf
from opweave_conformance.case import Case, Operand, case
from opweave_conformance.trial import the_node
from opweave_conformance.values import UNDEFINED

__all__ = ["derived"]

LENGTHS: Final = (2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 257, 512, 1023, 4097)
MANY_ROWS: Final = (1 << 16) + 65


def derived(cases: Iterable[Case]) -> Iterator[Case]:
    """Further cases of the operations in ``cases``. The first case of an operation that fits, in the order of its
    family, is the one that others are made from."""
    by_op: dict[str, list[Case]] = {}
    for known in cases:
        by_op.setdefault(known.op, []).append(known)
    yield from _products()
    for op, known_cases in by_op.items():
        packed = [c for c in known_cases if _is_packed(c)]
        plain = [c for c in packed if _is_plain(c)]
        yield from _sizes(plain)
        yield from _mixed(packed)
        yield from _ends(known_cases)
        yield from _attributes(op, [c for c in packed if all(o.values in ORDINARY for o in c.operands)])
        yield from _aliases(plain)
        yield from _within_the_state(plain)
        if OPS[op].nan and not any(o.values == "special" for c in known_cases for o in c.operands):
            yield from _special([*plain, *packed])


def _is_plain(candidate: Case) -> bool:
    """Whether a contiguous case has ordinary values."""
    return all(o.values in ("normal", "positive", "ids") for o in candidate.operands)


def _is_packed(candidate: Case) -> bool:
    """Whether all operands are contiguous, and of f32 but for indices and masks."""
    types = {o.dtype for o in candidate.operands}
    packed = all(o.layout == "contiguous" for o in candidate.operands)
    return packed and "f32" in types and types <= {"f32", "bool", "i32", "i64"}


# --- sizes ----------------------------------------------------------------------------------------------------------


def _sizes(plain: list[Case]) -> Iterator[Case]:
    """The first case on 3 rows of 5, on rows of other lengths and on many rows."""
    for template in plain:
        if template.operands[0].shape == (3, 5) and not template.operands[0].state:
            break
    else:
        return
    for rows, columns in (*((3, n) for n in LENGTHS), (MANY_ROWS, 3)):
        operands = tuple([o._replace(shape=_resized(o.shape, rows, columns)) for o in template.operands])
        sized = case(template.op, *operands, build=template.build, tag="sized")
        try:
            sized.build(*sized.tensors())
        except OpweaveError:
            continue  # its options belong to the template's own size
        yield sized


def _resized(shape: Shape, rows: int, columns: int) -> Shape:
    return tuple([{3: rows, 5: columns}.get(n, n) for n in shape])


def _products() -> Iterator[Case]:
    """Products and gathered rows, whose shapes are not rows and columns of the same lengths in all operands."""
    for n in LENGTHS:
        yield case("matmul", Operand((3, n)), Operand((n, 4)), tag="sized")
        yield case("matmul", Operand((n, 5)), Operand((5, 3)), tag="sized")
        yield case("linear", Operand((3, n)), Operand((4, n)), tag="sized")
        yield case("linear", Operand((3, 5)), Operand((n, 5)), Operand((n,)), tag="sized")
    yield case("matmul", Operand((MANY_ROWS, 3)), Operand((3, 2)), tag="sized")
    yield case("linear", Operand((MANY_ROWS, 3)), Operand((2, 3)), tag="sized")
    yield case("linear", Operand((2, 3)), Operand((MANY_ROWS, 3)), tag="sized")
    ids = Operand((MANY_ROWS,), "i64", values="ids", high=MANY_ROWS)
    yield case("embedding", Operand((MANY_ROWS, 3)), ids, tag="sized")
    state = Operand((MANY_ROWS, 3), state=True)
    yield case("index_copy", state, ids, Operand((MANY_ROWS, 3)), tag="sized")


# --- values ---------------------------------------------------------------------------------------------------------


def _special(known: list[Case]) -> Iterator[Case]:
    """NaN and infinities among the values of the first case that has room for them beside ordinary results."""
    for template in [c for c in known if c.op not in UNDEFINED]:
        for i, operand in enumerate(template.operands):
            wanted = (
                operand.dtype == "f32"
                and operand.values != "mask"
                and not operand.state
                and template.op not in UNDEFINED
            )
            if wanted and prod(operand.shape) >= 32 and template.build(*template.tensors()).size >= 16:
                special = operand._replace(values="special")
                operands = (*template.operands[:i], special, *template.operands[i + 1 :])
                yield case(template.op, *operands, build=template.build, tag="valued")
                return


ROOM: Final = 1100
"""Elements of the largest operand of a case of the whole range."""


def _ends(known: list[Case]) -> Iterator[Case]:
    """Integers of the whole range of their type, in the largest contiguous case of each choice of types."""
    largest: dict[tuple[str, ...], tuple[int, Case]] = {}
    for template in known:
        operands = template.operands
        sizes = [prod(o.shape) for o in operands]
        ordinary = all(o.layout == "contiguous" and o.values in ("normal", "positive", "ties", "ids") for o in operands)
        if not ordinary or not any(_is_number(o) for o in operands) or max(sizes) > ROOM:
            continue
        types = (*[o.dtype for o in operands], template.build(*template.tensors()).dtype.name)
        if sum(sizes) > largest.get(types, (-1, template))[0]:
            largest[types] = sum(sizes), template
    for _, template in largest.values():
        operands = tuple([o._replace(values="ends") if _is_number(o) else o for o in template.operands])
        yield case(template.op, *operands, build=template.build, tag=f"to-{template.build(*template.tensors()).dtype}")


def _is_number(operand: Operand) -> bool:
    """Whether an operand is integers that are no indices."""
    return operand.values != "ids" and as_dtype(operand.dtype).is_integer


# --- types ----------------------------------------------------------------------------------------------------------

MIXED: Final = (("f16", "f32"), ("bf16", "f32"), ("f32", "f16"))
"""Types of the first operand, and of another one: both wider and narrower."""


def _mixed(packed: list[Case]) -> Iterator[Case]:
    """Cases with the most operands, one of which has another type than the others: where an operation allows that, as
    for factors, biases and masks, each is read in its own.

    Builders convert most operands to one type; devices get such nodes from graphs that were made without them.
    """
    large = [c for c in packed if c.op != "custom" and c.build(*c.tensors()).size >= 16]
    large.sort(key=lambda c: -len(c.operands))
    for i in range(1, max([len(c.operands) for c in large], default=0)):
        yield from next(filter(None, (list(_mixed_in(c, i)) for c in large if i < len(c.operands))), ())


def _mixed_in(template: Case, i: int) -> Iterator[Case]:
    """Cases in which operand ``i`` has another type."""
    given = template.operands
    for first, other in MIXED if given[0].dtype == given[i].dtype == "f32" else ():
        operands = [o._replace(dtype=first) if o.dtype == "f32" else o for o in given]
        operands[i] = operands[i]._replace(dtype=other)
        mixed = case(template.op, *operands, build=partial(_unconverted, template.build, i, first), tag=f"mixed{i}")
        try:
            mixed.build(*mixed.tensors())
        except (OpweaveError, ValueError):
            continue  # the operation requires one type, or a view of the operand
        yield mixed


def _unconverted(build: Callable[..., Tensor], i: int, dtype: str, *xs: Tensor) -> Tensor:
    """What ``build`` makes of operands of one type, with operand ``i``, of another type, put in place of its own."""
    stand_in = leaf("stand-in", xs[i].shape, dtype)
    known = build(*xs[:i], stand_in, *xs[i + 1 :])
    assert known.op is not None
    srcs = list(known.srcs)
    srcs[[s is stand_in for s in srcs].index(True)] = xs[i]
    return node(known.op, tuple(srcs), known.attrs)


# --- attributes -----------------------------------------------------------------------------------------------------

WHOLE: Final = {"head_softmax": "softmax"}
"""Operations that another one's builder makes too, with the same attributes; so do those of gradients."""


def defaults(op: str) -> dict[str, Any]:
    """What the builder of an operation has by default, by the name of the attribute; without those that it works out
    from the operands (``None``)."""
    whole = OPS.get(WHOLE.get(op, op.removesuffix("_backward")))
    build = OPS[op].build or (None if whole is None else whole.build)
    parameters = {} if build is None else signature(build).parameters
    numbers = {name: p.default for name, p in parameters.items() if isinstance(p.default, (bool, int, float, str))}
    return {name: value for name, value in numbers.items() if not name.startswith("axis")}


ORDINARY: Final = ("normal", "positive", "negative", "fraction", "ids", "mask")
"""Values with which every attribute makes sense."""

OF_OTHERS: Final = {"max_bias", "interleaved"}
"""Attributes of which builders take no others than the default without a mask, or without sections."""


def is_default(value: Any, default: Any) -> bool:
    """Whether an attribute has the value that the builder has by default: one number for all axes, or for all sides."""
    return all(is_default(v, default) for v in value) if isinstance(value, tuple) else bool(value == default)


def _filled(value: Any, default: Any) -> Any:
    """The default in the form of ``value``."""
    return tuple([_filled(v, default) for v in value]) if isinstance(value, tuple) else default


def _attributes(op: str, ordinary: list[Case]) -> Iterator[Case]:
    """For each number of operands, and each attribute with a default, the default and another value, as far as the
    cases of the family leave them out. Other values are those of cases with other operands."""
    by_count: dict[int, list[tuple[Case, dict[str, Any]]]] = {}
    built = [(template, the_node(template.build(*template.tensors()))) for template in ordinary]
    built.sort(key=lambda pair: (pair[1].size > ROOM, -pair[1].size))  # one element tells little
    for template, found in built:
        by_count.setdefault(len(found.srcs), []).append((template, found.attrs))
    known = [attrs for group in by_count.values() for _, attrs in group]
    for count, group in by_count.items():
        for name, default in defaults(op).items():
            seen = [attrs[name] for _, attrs in group if name in attrs]
            others = [attrs[name] for attrs in known if name in attrs and not is_default(attrs[name], default)]
            wanted = [_filled(seen[0], default)] if seen and not any(is_default(v, default) for v in seen) else []
            masked = any(o.values == "mask" for o in group[0][0].operands)
            if seen and all(is_default(v, default) for v in seen) and (masked or name not in OF_OTHERS):
                wanted = others
            yield from _with_attribute([template for template, _ in group], name, wanted, f"{name}-{count}")


def _with_attribute(templates: list[Case], name: str, values: list[Any], tag: str) -> Iterator[Case]:
    """The first case that some value of an attribute fits."""
    for template in templates:
        for value in values:
            build = partial(_rebuilt, template.build, {name: value})
            try:
                build(*template.tensors())
            except (OpweaveError, ValueError):
                continue  # the value belongs to other operands
            yield case(template.op, *template.operands, build=build, tag=f"with-{tag}")
            return


def _rebuilt(build: Callable[..., Tensor], attrs: dict[str, Any], *xs: Tensor) -> Tensor:
    """The node that ``build`` makes, with other attributes."""
    known = the_node(build(*xs))
    assert known.op is not None
    return node(known.op, known.srcs, {**known.attrs, **attrs})


# --- aliasing -------------------------------------------------------------------------------------------------------


def _aliases(plain: list[Case]) -> Iterator[Case]:
    """The largest case with two equal operands: both are one value, or overlap."""
    fitting = [(c, pair) for c in plain if (pair := _equal_pair(c.operands)) is not None]
    if not fitting:
        return
    template, (i, j) = max(fitting, key=lambda found: prod(found[0].operands[found[1][0]].shape))
    operands, build = template.operands, template.build
    shape = operands[i].shape

    rest = operands[:j] + operands[j + 1 :]
    yield case(template.op, *rest, build=lambda *xs: build(*xs[:j], xs[i], *xs[j:]), tag="same")

    longer = operands[i]._replace(shape=(shape[0] + 1, *shape[1:]))
    rest = (*operands[:i], longer, *operands[i + 1 : j], *operands[j + 1 :])

    def overlapping(*xs: Tensor) -> Tensor:
        return build(*xs[:i], xs[i][:-1], *xs[i + 1 : j], xs[i][1:], *xs[j:])

    yield case(template.op, *rest, build=overlapping, tag="overlap")


def _equal_pair(operands: tuple[Operand, ...]) -> tuple[int, int] | None:
    for i, a in enumerate(operands):
        for j in range(i + 1, len(operands)):
            if a == operands[j] and a.shape and not a.state and a.values != "ids":
                return i, j
    return None


def _within_the_state(plain: list[Case]) -> Iterator[Case]:
    """A writer whose source is another part of the state that it writes."""
    for template in plain:
        state, build = template.operands[0], template.build
        if not (OPS[template.op].writes and state.state and len(state.shape) > 1):
            continue
        for k, source in enumerate(template.operands[1:], 1):
            if source.dtype == state.dtype and len(source.shape) > 1 and source.shape[1:] == state.shape[1:]:
                whole = state._replace(shape=(state.shape[0] + source.shape[0], *state.shape[1:]))
                others = (*template.operands[1:k], *template.operands[k + 1 :])
                yield case(template.op, whole, *others, build=_sharing(build, state.shape[0], k - 1), tag="within")
                return


def _sharing(build: Callable[..., Tensor], n: int, k: int) -> Callable[..., Tensor]:
    """A builder whose state is the first ``n`` rows of its first operand, and whose source ``k`` the rest of it."""
    return lambda x, *xs: build(x[:n], *xs[:k], x[n:], *xs[k:])

"""Chains of pointwise steps as one compiled loop each: every element is read once, and written where others need it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from opweave.contract import Arg, Call, Step, Stream
from opweave_cpu.jit.compiler import MachineCode
from opweave_cpu.jit.formulas import formula_of
from opweave_cpu.jit.vectors import Vector
from opweave_cpu.jit.walk import Operand, Prepared, walk_over
from opweave_cpu.jit.writer import Writer, compute_kind, takes
from opweave_cpu.tunables import COMPILED_WORK, limit

__all__ = ["bind_chain", "fits", "is_worth_compiling", "prepare_step", "work_of"]

WORTH_WORK: Final = limit("compiled_formula_work", 12, 1, 64)
"""Elementary operations from which on a single step is compiled: NumPy makes several passes, or none that is fast."""

_CHOICES: Final = frozenset({"copy", "contiguous", "where", "assign"})
"""Operations that keep every bit, those of a signalling NaN too, which converting a half type would change."""

_TRUTHS: Final = frozenset({"less", "less_equal", "equal", "not_equal", "where", "cast", "copy", "contiguous"})
"""Operations that read or write bool."""


def fits(step: Step) -> bool:
    """Whether a compiled chain may contain the step."""
    formula = formula_of(step.op, step.attrs)
    if formula is None:
        return False
    truths = step.op in _TRUTHS
    return all(
        truths and (arg.buffer_type is None or arg.buffer_type.is_raw)
        if arg.dtype.name == "bool"
        else takes(arg, wide=formula.wide)
        for arg in (step.out, *step.srcs)
    )


def is_worth_compiling(step: Step) -> bool:
    """Whether a step that fits is compiled on its own: where NumPy makes several passes, or compiled functions are
    shared among threads, as NumPy's passes are only when they are much larger. One in f32 always is, since it mostly
    lies between others that are, whose calls are then made as one (`opweave_cpu.jit.sequence`): a tenth of the time of
    a small decoder's step."""
    formula = formula_of(step.op, step.attrs)
    if formula is None:
        return False
    args = (step.out, *step.srcs)
    halves = any(arg.dtype.is_half for arg in args) and step.op not in _CHOICES
    if halves or formula.work >= WORTH_WORK.value:
        return True
    in_rows = all(arg.strides and arg.strides[-1] in (0, arg.dtype.itemsize) for arg in args)
    floats = all(arg.dtype.name == "f32" for arg in args)
    return in_rows and (floats or (formula.work + len(args)) * step.out.size >= COMPILED_WORK.value)


def work_of(step: Step) -> int:
    """Elementary operations for one element."""
    formula = formula_of(step.op, step.attrs)
    return 0 if formula is None else formula.work


class _Instruction(NamedTuple):
    """A step of a chain. Values have numbers: first the operands that are read, then the results of the steps.

    Attributes:
        formula: as `formula_of` takes it.
        form: the attribute ``approximate``, on which the formula depends too.
        sources: numbers of values.
        dtype: name of the type of the result.
        into: the operand that it is written to, or -1.
    """

    formula: str
    form: str
    sources: tuple[int, ...]
    dtype: str
    into: int


def _window(arg: Arg) -> Hashable:
    """A key that is equal for two operands of the same elements."""
    memory = arg.value if arg.buffer is None else (id(arg.buffer), arg.offset)
    return memory, arg.shape, arg.strides, arg.dtype


def prepare_step(stream: Stream, step: Step) -> Prepared:
    """The kernel for a bound step that fits; it takes the sources, then the result."""
    formula, result = formula_of(step.op, step.attrs), len(step.srcs)
    if formula is None or not formula.adds:
        return _prepared(stream, [step], step.srcs, [tuple(range(result))])
    places = [(number, 0) for number in (result, *range(result), result)]
    return _prepared(stream, [step], (step.out, *step.srcs), [tuple(range(result + 1))], places)


def bind_chain(stream: Stream, steps: Sequence[Step]) -> Call:
    """The call for bound steps over one output shape, as `opweave.contract.pointwise_groups` gives them. Results
    without memory are used by later ones of the steps only, and stay in registers."""
    values: dict[Hashable, int] = {}  # window -> number of an operand that is read; ~k: the result of step k
    reads: list[Arg] = []
    taken: list[tuple[int, ...]] = []
    for number, step in enumerate(steps):
        formula, numbers = formula_of(step.op, step.attrs), []
        for src in (step.out, *step.srcs) if formula is not None and formula.adds else step.srcs:
            window = _window(src)
            known = values.get(window)
            if known is None:
                known = values[window] = len(reads)
                reads.append(src)
            numbers.append(known)
        taken.append(tuple(numbers))
        values[_window(step.out)] = ~number
    args = [*reads, *[step.out for step in steps if step.out.buffer is not None]]
    choices = tuple([step.choice for step in steps])
    if None in choices:
        return _prepared(stream, steps, reads, taken).bind(stream, args)
    # Equal chains, as those of a model's layers, are prepared once.
    inner, strides = tuple([step.out.buffer is None for step in steps]), tuple([arg.strides for arg in args])
    key = "prepared", choices, inner, tuple(taken), strides
    return stream.artefact(key, partial(_prepared, stream, steps, reads, taken)).bind(stream, args)


def _prepared(
    stream: Stream,
    steps: Sequence[Step],
    reads: Sequence[Arg],
    taken: Sequence[Sequence[int]],
    places: Sequence[tuple[int, int]] | None = None,
) -> Prepared:
    """The kernel of steps, each of which takes operands of ``reads``, and for ~k the result of step k."""
    count, work = len(reads), 0
    args, numbers, instructions = [*reads], [], []
    for step, sources in zip(steps, taken, strict=True):
        formula, into = formula_of(step.op, step.attrs), -1
        assert formula is not None
        if step.out.buffer is not None:
            into = len(args)
            args.append(step.out)
        form, values = str(step.attrs.get("approximate", "")), tuple([n if n >= 0 else count + ~n for n in sources])
        instructions.append(_Instruction(step.op, form, values, step.out.dtype.name, into))
        work += formula.work
        numbers += [step.attrs[name] for name in formula.numbers]
    walk = walk_over(steps[0].out.shape, [arg.strides for arg in args])
    key = len(walk.lengths), walk.operands(args), count, tuple(instructions)
    code = stream.artefact(("chain", key), partial(_compiled, *key))
    return Prepared(code, walk, numbers, work=work + len(args), places=places)


def _compiled(axes: int, operands: Sequence[Operand], reads: int, instructions: Sequence[_Instruction]) -> MachineCode:
    writer = Writer(axes, operands)
    formulas = [formula_of(i.formula, {"approximate": i.form}) for i in instructions]
    numbers = []
    for instruction, formula in zip(instructions, formulas, strict=True):
        assert formula is not None
        kind = compute_kind(instruction.dtype)
        numbers.append([writer.scalar().to(kind) for _ in formula.numbers])
    used = {source for instruction in instructions for source in instruction.sources}
    with writer.rows() as rows:

        def element(i: Any, mask: Any, _: int) -> None:
            values = [writer.read(k, rows[k], i, mask) for k in range(reads)]
            for instruction, formula, extra in zip(instructions, formulas, numbers, strict=True):
                assert formula is not None
                sources = [values[s] for s in instruction.sources]
                value = _converted(formula.make(*sources, *extra), compute_kind(instruction.dtype))
                if len(values) in used:
                    value = writer.rounded(value, instruction.dtype)
                values.append(value)
            for number, instruction in enumerate(instructions, reads):
                if instruction.into >= 0:
                    writer.write(instruction.into, rows[instruction.into], i, values[number], mask)

        writer.elements(element)
    return MachineCode(writer.end())


def _converted(x: Vector, kind: str) -> Vector:
    return x.compare("!=", 0.0) if kind == "bool" and x.is_float else x.to(kind)

"""`KernelTable`: the kernels of a device and the operands they accept, which define what the device supports."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

from opweave.contract.step import Choice, scratch_args
from opweave.contract.workspace import Scratch, Workspace, scratch_of
from opweave.errors import UnsupportedOpError
from opweave.graph.dtypes import DType, as_dtype
from opweave.graph.layout import is_dense
from opweave.graph.opdef import OPS
from opweave.graph.precision import PRECISIONS, Precision, check_precision, is_within

if TYPE_CHECKING:
    from opweave.contract.step import Arg, Call, Group, Step
    from opweave.runtime.memory import BufferType
    from opweave.runtime.stream import Stream

__all__ = ["Kernel", "KernelTable", "LayoutRule", "import_kernels", "needs_dense_output", "of_other_type"]

LayoutRule = Literal["dense", "rows", "strided"]
"""``dense``: every operand is row-major without gaps. ``rows``: elements along the last axis are adjacent.
``strided``: any strides."""

Factory = Callable[..., "Call"]
"""``factory(stream, op, out, *srcs, **attrs)`` binds a kernel to its operands and returns a function without
arguments."""

F = TypeVar("F", bound=Factory)


def of_other_type(step: Step, *sources: int) -> str | None:
    """For ``when=``: a reason if one of the given sources has another dtype than source 0, else ``None``."""
    first = step.srcs[0].dtype
    for i in sources:
        if i < len(step.srcs) and step.srcs[i].dtype is not first:
            return f"source 0 is {first}, source {i} {step.srcs[i].dtype}"
    return None


def needs_dense_output(step: Step) -> str | None:
    """For ``when=``: a reason if the output is not dense, else ``None``."""
    return None if step.out.is_dense else "the output is not dense"


def import_kernels(package: str) -> None:
    """Import every module of a package, so that each module registers its kernels.

    Call it as ``import_kernels(__name__)`` in the ``__init__`` of a package with one module per family of operations.
    """
    for module in pkgutil.iter_modules(sys.modules[package].__path__):
        importlib.import_module(f"{package}.{module.name}")


class Kernel(NamedTuple):
    """A factory and the operands it accepts; fields as the arguments of `KernelTable.__call__`."""

    factory: Factory
    dtypes: frozenset[DType]
    indices: frozenset[DType]
    layout: LayoutRule
    inplace: bool
    when: Callable[[Step], str | None] | None
    workspace: Callable[[Step], Workspace] | None
    accepts: tuple[type[BufferType], ...] = ()
    precision: Precision = "exact"

    def bind(self, stream: Stream, step: Step, scratch: Arg | None) -> Call:
        """The call for a bound step. ``scratch`` has `KernelTable.workspace` bytes; ``None`` if that is 0."""
        if self.workspace is None:
            return self.factory(stream, step.op, step.out, *step.srcs, **step.attrs)
        args = scratch_args(self.scratch(step).arrays, scratch)
        return self.factory(stream, step.op, step.out, *step.srcs, **args, **step.attrs)

    def scratch(self, step: Step) -> Scratch:
        """The scratch memory that the kernel needs for ``step``."""
        choice = step.choice
        if choice is not None and choice.kernel is self:
            return choice.scratch
        return Scratch() if self.workspace is None else scratch_of(self.workspace(step), step.op)

    def why_not(self, step: Step) -> str | None:
        """Why the kernel does not support ``step``, or ``None`` if it does."""
        op = OPS.get(step.op)
        indices, index_out = ((), False) if op is None else (op.indices, op.index_out)
        skip = 1 if op is not None and op.writes else 0
        why = self._refuses("the output", step.out, index_out)
        for i, src in enumerate(step.srcs):
            why = why or self._refuses(f"source {i}", src, i + skip in indices)
        if why is None and self.when is not None:
            why = self.when(step)
            if why is not None and not isinstance(why, str):
                raise TypeError(f"when= must return a reason for refusing {step.op}, or None; not {why!r}")
        return why

    def _refuses(self, what: str, arg: Arg, is_index: bool) -> str | None:
        kind = arg.buffer_type
        if kind is not None and not kind.is_raw and not isinstance(kind, self.accepts):
            return f"{what} lies in {kind.name}, a format that the kernel does not read"
        accepted = self.indices if is_index else self.dtypes
        if arg.dtype not in accepted:
            return f"{what} is {arg.dtype}, not {' '.join(sorted(t.name for t in accepted))}"
        if self.layout == "dense":
            if not is_dense(arg.shape, arg.strides, arg.dtype):
                return f"{what} is not dense"
        elif self.layout == "rows" and arg.shape and arg.shape[-1] > 1 and arg.strides[-1] != arg.dtype.itemsize:
            return f"the rows of {what} have gaps"
        return None


class KernelTable:
    """The kernels of a device, registered by decorator::

        kernels = KernelTable(dtypes="f32", layout="dense")

        @kernels("add", "mul", inplace=True)
        def pointwise(stream, op, out, *srcs, **attrs):
            return stream.bind(f"{op}_f32", out.address, *(s.address for s in srcs), out.size)

    Several kernels for one operation are tried in the order of registration, those of ``parent`` last; the first that
    supports a step runs it. Where a program allows less than ``exact``, kernels of the roughest precision that it
    allows are tried before finer ones, because they are there for their speed. View operations, and steps whose result
    has no elements, are never passed to a kernel.

    Args:
        dtypes: default for ``dtypes`` of each kernel: types of data operands, e.g. ``"f32 f16"``.
        layout: default for ``layout`` of each kernel. If an operand has another layout, the core inserts a packed copy
            before the step.
        index: default for ``index`` of each kernel: types of index operands (ids, the output of argmax).
        parent: a table that is searched after this one, for devices that share most kernels.
    """

    def __init__(
        self,
        dtypes: str | Iterable[DType] = "f32",
        layout: LayoutRule = "dense",
        *,
        index: str | Iterable[DType] = "i32 i64",
        parent: KernelTable | None = None,
    ) -> None:
        self.dtypes: Final = _dtype_set(dtypes)
        self.index: Final = _dtype_set(index)
        self.layout: Final[LayoutRule] = layout
        self._parent: Final = parent
        self._kernels: Final[dict[str, list[Kernel]]] = {}
        self._found: tuple[Step, Kernel, Scratch | None] | None = None  # the latest answer; see `_search`

    def __call__(
        self,
        *ops: str,
        dtypes: str | Iterable[DType] | None = None,
        layout: LayoutRule | None = None,
        index: str | Iterable[DType] | None = None,
        inplace: bool = False,
        when: Callable[[Step], str | None] | None = None,
        workspace: Callable[[Step], Workspace] | None = None,
        accepts: type[BufferType] | Iterable[type[BufferType]] = (),
        precision: Precision = "exact",
    ) -> Callable[[F], F]:
        """Register a factory for the named operations.

        Args:
            dtypes, layout, index: replace the defaults of the table.
            inplace: the output may be the same memory as a source of the same layout.
            when: a further condition; returns a reason for refusing a step, or ``None``.
            workspace: returns the scratch memory that a step needs while it runs. Either named arrays,
                ``{"scores": ("f32", shape)}``: the factory receives each as a dense `Arg` by its name, ``scores=Arg``;
                give the parameter a default if some steps need none. Or a number of bytes: the factory receives
                ``workspace=Arg`` (u8; ``None`` for 0 bytes).
            accepts: buffer types with their own format (subclasses that override ``_init``) in which sources may be
                stored, besides plain memory; ``when`` can look at ``step.srcs[1].buffer_type``. For kernels that do
                not accept a type, the core inserts a copy into plain memory.
            precision: what the kernel computes in. Kernels at ``"bf16"`` and ``"int8"`` only get steps for which a
                program allows that (``step.precision``), which are products; register one where it is faster than
                the exact kernel, and let ``when`` refuse where it is not. A kernel at ``"bf16"`` that takes sources in
                bf16 beside a result in f32 gets read-only f32 sources, weights, rounded to bf16 once for all runs.

        Raises:
            TypeError: no operation was named.
            UnknownNameError: a dtype or a precision that does not exist.
        """
        check_precision(precision)
        if not ops:
            raise TypeError("name at least one operation")

        kinds = (accepts,) if isinstance(accepts, type) else tuple(accepts)

        def register(factory: F) -> F:
            kernel = Kernel(
                factory,
                self.dtypes if dtypes is None else _dtype_set(dtypes),
                self.index if index is None else _dtype_set(index),
                layout or self.layout,
                inplace,
                when,
                workspace,
                kinds,
                precision,
            )
            for op in ops:
                self._kernels.setdefault(op, []).append(kernel)
            self._found = None
            return factory

        return register

    def ops(self) -> set[str]:
        """The operations for which there is a kernel."""
        return set(self._kernels) | (self._parent.ops() if self._parent else set())

    def reads(self, kind: BufferType) -> bool:
        """Whether a kernel accepts operands in this buffer type, which stores tensors in its own format."""
        own = any(isinstance(kind, kernel.accepts) for kernels in self._kernels.values() for kernel in kernels)
        return own or (self._parent is not None and self._parent.reads(kind))

    def candidates(self, op: str) -> list[Kernel]:
        """The kernels registered for ``op``."""
        return self._kernels.get(op, []) + (self._parent.candidates(op) if self._parent else [])

    def find(self, step: Step) -> Kernel | None:
        """The first kernel that supports ``step``, or ``None``."""
        choice = step.choice
        if choice is not None and choice.kernel is not None:
            return choice.kernel
        found = self._found
        return found[1] if found is not None and found[0] is step else self._search(step)[0]

    def why_not(self, step: Step) -> str | None:
        """Why no kernel supports ``step``, or ``None`` if one does."""
        kernel, reasons = self._search(step)
        if kernel is None:
            none = f"no kernel for {step.op}" if self.ops() else "it has no kernels"
            return "; ".join(dict.fromkeys(reasons)) or none
        return None

    def _search(self, step: Step) -> tuple[Kernel | None, list[str]]:
        """The kernel that runs ``step``, and why those before it do not."""
        reasons: list[str] = []
        candidates = self.candidates(step.op)
        if len(candidates) > 1:
            candidates = sorted(candidates, key=lambda kernel: -PRECISIONS[kernel.precision])
        for kernel in candidates:
            if not is_within(kernel.precision, step.precision):
                continue
            why = kernel.why_not(step)
            if why is None:
                # A caller whose step is supported asks next for the kernel, its scratch memory, and whether it works in
                # place. Bound steps are not kept: they would keep their memory alive.
                if all(arg.buffer is None for arg in (step.out, *step.srcs)):
                    self._found = step, kernel, None
                return kernel, reasons
            reasons.append(why)
        reasons += [
            f"its kernel computes in {kernel.precision}, and {step.precision} is asked for"
            for kernel in candidates
            if not is_within(kernel.precision, step.precision) and (not reasons or kernel.why_not(step) is None)
        ]
        return None, reasons

    def workspace(self, step: Step) -> int:
        """Bytes of scratch memory that the kernel for ``step`` needs."""
        return self.scratch(step).size

    def scratch(self, step: Step) -> Scratch:
        """The scratch memory that the kernel for ``step`` needs. The answer for the latest step is kept."""
        kernel = self.find(step)
        if kernel is None or kernel.workspace is None:
            return Scratch()
        found = self._found
        if found is None or found[0] is not step:
            return kernel.scratch(step)
        if found[2] is not None:
            return found[2]
        scratch = kernel.scratch(step)
        self._found = step, kernel, scratch
        return scratch

    def choice(self, step: Step) -> Choice:
        """The kernel for ``step`` and its scratch memory, for all steps of its kind."""
        return Choice(self.find(step), self.scratch(step))

    def bind(self, stream: Stream, group: Group) -> Call:
        """The call for a group of one step; raises `UnsupportedOpError` if no kernel supports it."""
        step = group.steps[0]
        kernel = group.kernel or self.find(step)
        if kernel is None or len(group.steps) > 1:
            why = "fused groups need a stream that overrides _bind" if kernel else self.why_not(step)
            raise UnsupportedOpError(f"{stream.device.name} does not run {step.op}", {stream.device.name: str(why)})
        return kernel.bind(stream, step, group.scratch)


def _dtype_set(names: str | Iterable[Any]) -> frozenset[DType]:
    return frozenset(as_dtype(n) for n in (names.split() if isinstance(names, str) else names))

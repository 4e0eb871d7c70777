"""Groups as functions of immutable arrays: what a stream with ``_compile_functional`` runs.

The device's memory holds arrays (`opweave.functional.ArrayMemory`). A call takes the arrays that a group reads from
that memory, calls the function with them, and puts the results there: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from opweave.errors import Broken, DTypeError, LayoutError, UnknownNameError
from opweave.graph.dtypes import as_dtype, u8
from opweave.graph.layout import array_shape
from opweave.runtime.listing import Structure, structure_of

if TYPE_CHECKING:
    from opweave.contract.step import Arg, Group
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape
    from opweave.runtime.stream import Stream

__all__ = ["Cell", "Function", "FunctionCall", "bind_functional"]

Function = Callable[..., Sequence[Any]]
"""``f(*arrays) -> arrays``."""

ATTRIBUTES: Final[Mapping[str, type]] = {"wait": Callable, "remark": str, "library_bytes": int}  # type: ignore[dict-item]
"""The attributes that a function may have: name -> type."""


class Cell(Protocol):
    """A place in the memory of a device for one array of a dtype and a shape.

    Attributes:
        array: what lies there, ``None`` if the bytes are not there as such an array: `load` makes it then. Writing
            ``None`` forgets the array; its bytes are undefined from there on.
        borrowed: somebody else has the array too.
        placed: nothing else lies in these bytes, so that an array is put here by writing ``array`` and ``borrowed``.
    """

    array: Any
    borrowed: bool
    placed: bool

    def load(self) -> Any:
        """The array, made of the bytes that lie there."""

    def put(self, array: Any) -> None:
        """Let ``array`` lie there."""

    def owned(self) -> Any:
        """The array, or a copy of it if somebody else has it."""


class HoldsArrays(Protocol):
    """A handle of memory that holds arrays, such as `opweave.functional.ArrayMemory`."""

    def cell(self, offset: int, dtype: DType, shape: Shape) -> Cell:
        """The place for an array at byte ``offset``."""

    def zeros(self, dtype: DType, shape: Shape) -> Any:
        """A new array of zeros, which is not put into the memory."""


class CompiledFunction:
    """What an author's ``_compile_functional`` gave for a structure, and whether it was found to be as promised.

    Raises:
        Broken: it is no function, or one of its attributes has a wrong type.
    """

    __slots__ = ("checked", "device", "function", "structure", "wait")

    def __init__(self, structure: Structure, stream: Stream) -> None:
        inputs, outputs, donated = structure.inputs, structure.outputs, structure.donated
        self.function: Final = stream._compile_functional(structure.steps, inputs, outputs, donated)
        self.wait: Final[Callable[[Sequence[Any]], object] | None] = getattr(self.function, "wait", None)
        self.structure: Final = structure
        self.device: Final = stream.device.name
        self.checked = False
        if not callable(self.function):
            raise Broken(f"_compile_functional of {self.device} returned {_kind(self.function)}, and no function")
        for name, kind in ATTRIBUTES.items():
            value = getattr(self.function, name, None)
            if value is not None and not isinstance(value, kind):
                raise Broken(f"the attribute {name} of {self._what} is {_kind(value)}")

    @property
    def _what(self) -> str:
        return f"the function that _compile_functional of {self.device} returned"

    def check(self, arrays: Sequence[Any], results: Sequence[Any]) -> None:
        """Raise `Broken` unless ``results`` are new arrays with the number, shapes and dtypes of the outputs. Done for
        the first call only."""
        wanted, what = self.structure.outputs, self._what
        if not isinstance(results, (list, tuple)):
            raise Broken(f"{what} gave {_kind(results)}, and no list of {len(wanted)} arrays")
        if len(results) != len(wanted):
            raise Broken(f"{what} gave {len(results)} arrays for {len(wanted)} outputs")
        seen = {id(array) for array in arrays}
        for i, (result, out) in enumerate(zip(results, wanted, strict=True)):
            if not hasattr(result, "shape"):
                raise Broken(f"{what} gave {_kind(result)}, and no array, for output {i}")
            plain, dtype = out.dtype.block == 1, _dtype_of(result)
            shape = array_shape(out.shape, out.dtype)
            if tuple(result.shape) != shape:
                raise Broken(f"{what} gave an array of shape {tuple(result.shape)} for output {i}, which has {shape}")
            if dtype is not None and dtype is not (out.dtype if plain else u8):
                raise Broken(f"{what} gave an array of {dtype} for output {i}, which is {out.dtype}")
            if id(result) in seen:
                raise Broken(f"{what} gave an array for output {i} that is an input or another output",
                             remedy="return a copy: each place in memory needs an array of its own")  # fmt: skip
            seen.add(id(result))
        self.checked = True


class FunctionCall:
    """One call of a function with the arrays of a group."""

    __slots__ = ("compiled", "donated", "drops", "function", "memory", "reads", "wait", "writes")

    def __init__(self, compiled: CompiledFunction, group: Group) -> None:
        written = {(id(arg.buffer), arg.offset) for arg in group.writes}
        self.compiled: Final = compiled
        self.function: Final = compiled.function
        self.wait: Final = compiled.wait
        self.memory: Final[HoldsArrays] = _memory((*group.reads, *group.writes)[0])
        self.reads: Final = [_cell(arg) for arg in group.reads]
        self.writes: Final = [_cell(arg) for arg in group.writes]
        self.donated: Final = [(i, self.reads[i]) for i in compiled.structure.donated]
        gone = [i for i, arg in enumerate(group.reads) if i in group.dead or (id(arg.buffer), arg.offset) in written]
        kept = {id(cell) for cell in self.writes}
        self.drops: Final = [self.reads[i] for i in gone if id(self.reads[i]) not in kept]

    def __call__(self) -> None:
        # Written without calls of `Cell`: such a call takes as long as a tenth of a small function's dispatch.
        arrays = []
        for cell in self.reads:
            array = cell.array
            arrays.append(cell.load() if array is None else array)
        for i, cell in self.donated:
            if cell.borrowed:
                arrays[i] = cell.owned()
        results = self.function(*arrays)
        if not self.compiled.checked:
            self.compiled.check(arrays, results)
        for cell in self.drops:
            cell.array = None
        # Their number was checked when the function was first called; a keyword takes longer than the loop.
        for cell, array in zip(self.writes, results):  # noqa: B905
            if cell.placed:
                cell.array, cell.borrowed = array, False
            else:
                cell.put(array)
        if (wait := self.wait) is not None:  # last, because the library computes meanwhile
            wait(results)

    def warm(self) -> None:
        """Call the function with zeros, unless it has run before. It changes no memory."""
        if not self.compiled.checked:
            arrays = [self.memory.zeros(arg.dtype, arg.shape) for arg in self.compiled.structure.inputs]
            results = self.function(*arrays)
            if self.wait is not None:
                self.wait(results)
            self.compiled.check(arrays, results)

    @property
    def remark(self) -> str:
        return getattr(self.function, "remark", "")

    @property
    def library_bytes(self) -> int:
        return getattr(self.function, "library_bytes", 0)


def bind_functional(stream: Stream, group: Group) -> FunctionCall:
    """The call for a listed group.

    Raises:
        LayoutError: an operand in memory that does not hold arrays.
    """
    structure = structure_of(group)
    return FunctionCall(stream.artefact(structure.key, lambda: CompiledFunction(structure, stream)), group)


def _kind(value: Any) -> str:
    return "None" if value is None else f"an object of {type(value).__name__}"


def _dtype_of(array: Any) -> DType | None:
    """The type of a library's array, as far as it can be told by NumPy's."""
    try:
        return as_dtype(array.dtype)
    except (AttributeError, DTypeError, UnknownNameError):
        return None


def _memory(arg: Arg) -> HoldsArrays:
    memory: HoldsArrays = arg.mem
    if not hasattr(memory, "cell"):
        raise LayoutError(f"{arg!r} does not lie in memory of arrays, which _compile_functional needs; "
                          "let the device's _alloc return opweave.functional.ArrayMemory")  # fmt: skip
    return memory


def _cell(arg: Arg) -> Cell:
    return _memory(arg).cell(arg.offset, arg.dtype, arg.shape)

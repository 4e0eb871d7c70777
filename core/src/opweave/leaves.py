"""Making leaves with memory: `weights`, which nodes read, and `state`, which nodes also write.

Both may be placed on a device by name. If they are not, the first program that uses them places them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from opweave import registry
from opweave.contract.memory import Usage
from opweave.errors import DTypeError, SchedulerError, ShapeError, UnknownNameError
from opweave.graph.arrays import host_array
from opweave.graph.blocks import Blocks, checked_blocks
from opweave.graph.dtypes import DType, DTypeLike, as_dtype, f32
from opweave.graph.foreign import is_foreign
from opweave.graph.layout import check_shape
from opweave.graph.leaf import Leaf, Spec
from opweave.graph.tensor import Tensor, new_leaf
from opweave.leaf_memory import place_state, read_leaf, upload, values_for
from opweave.runtime.buffer import Buffer, MultiBuffer
from opweave.runtime.device import Device
from opweave.runtime.memory import BufferType

if TYPE_CHECKING:
    from opweave.sharding.placing import Sharded

__all__ = ["Blocks", "OptionalPattern", "Weights", "Where", "optional", "state", "weights"]

Where = str | Device | None
T = TypeVar("T")


class OptionalPattern(str):
    """A pattern that may match nothing. Made by `optional`."""

    __slots__ = ()


def optional(pattern: str) -> str:
    """A glob pattern that may match nothing, for ``device=``, ``buffer_type=`` and ``names=``: a map for several models
    names weights that only some of them have, ``{ow.optional("*experts*"): "cpu", "*": "opencl"}``. Other patterns that
    match nothing are an error, because they are mistyped more often than meant.

    Raises:
        DTypeError: not a text.
    """
    if not isinstance(pattern, str):
        raise DTypeError(f"a pattern is a text, not {pattern!r:.60}")
    return OptionalPattern(pattern)


class Weights(Mapping[str, Tensor]):
    """Read-only tensors by name, which share buffers. Made by `weights` and `opweave.load_weights`.

    Attributes:
        metadata: what the files that they were loaded from say beside the tensors; empty for weights made of arrays.
        buffers: the memory of the placed ones; one per device, in parts if it exceeds the largest buffer.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.metadata: Mapping[str, Any] = {}
        self.buffers: list[Buffer | MultiBuffer] = []

    def __reduce__(self) -> tuple[Any, ...]:
        # With values, in the memory of the host: buffers belong to this process.
        return _restore_weights, (self._tensors, dict(self.metadata))

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise UnknownNameError("weight", str(name), self._tensors) from None

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._tensors.values())

    def write(self, values: Mapping[str, Any]) -> None:
        """Give weights new values, between the runs of all programs that use them. Nothing is built anew.

        Copies on other devices, repacked and rounded forms get the new values too. Where a device uses an array in
        place that the weights were made of, the values are written to that array.

        Args:
            values: name -> array of the shape of the weight. Numbers are rounded to its float dtype; quantized weights
                take `Blocks` of their type.

        Raises:
            UnknownNameError: no such weight.
            ShapeError, DTypeError, LayoutError: values that do not fit. Nothing was written.
            HazardError: memory that nothing may write, as that of a mapped file; make weights of copies of such arrays,
                or keep them on a device with memory of its own. Nothing was written.
            SchedulerError: called from within a run.
            ExecutionError: queued work of a device failed.
        """
        from opweave.leaf_updates import rewrite  # weights of most programs never change

        arrays = {self[name]: _new_values(self[name], name, value) for name, value in values.items()}
        rewrite(arrays)

    def evict(self, device: str | Device) -> None:
        """Give back the memory that the weights have on a device, between runs. Their values stay on the host.

        Programs that use this memory can no longer run; building their outputs again places the weights where they are
        wanted. Without this, unplaced weights leave a device with the last program that uses them there, placed ones
        stay.

        Raises:
            UnknownNameError: no such device.
            SchedulerError: called from within a run.
            ExecutionError: queued work of the device failed.
        """
        from opweave.leaf_updates import evict  # weights of most programs stay

        where = _resolve(device)
        assert where is not None
        evict(self.values(), where)
        for buffer in self.buffers.copy():
            part = buffer.buffers[0] if isinstance(buffer, MultiBuffer) else buffer
            if part.device is where:
                buffer.free()
                self.buffers.remove(buffer)

    def __repr__(self) -> str:
        return f"<Weights: {len(self)} tensors, {self.nbytes:,} bytes>"


def _restore_weights(tensors: dict[str, Tensor], metadata: dict[str, Any]) -> Weights:
    group = Weights(tensors)
    group.metadata = metadata
    return group


def weights(
    arrays: Mapping[str, Any],
    device: Where | Sharded | Mapping[str, Where | Sharded] = None,
    *,
    dtype: DTypeLike | None = None,
    buffer_type: registry.Memory | Mapping[str, registry.Memory] = None,
) -> Weights:
    """Read-only leaves for a model's parameters.

    Args:
        arrays: name -> array, also of another library (``dict(module.named_parameters())`` of PyTorch), `Blocks`
            (quantized), what `opweave.from_dlpack` made, or `Spec` (shape and dtype only, to plan without bytes).
            Arrays are not copied and must not be changed afterwards.
        device: where to keep them: a device or its name for all; or a mapping of glob patterns to devices, of which
            the first match counts, and each but those of `optional` matches a weight. `Sharded` in place of a device
            splits each weight over several. Weights without a device are uploaded once to each device where programs
            use them; devices that share host memory use them in place.
        dtype: convert floating-point arrays to this float type; ``"bf16"`` halves the memory of f32. (To compute
            products in bf16 with weights and inputs in f32, see ``precision`` of `opweave.Scheduler`.)
        buffer_type: the kind of memory to keep them in, where not the ordinary one of the device: a `BufferType` of
            the device or its name (``"cpu.decoded"``, or ``"decoded"`` where ``device`` says whose) for all; or a
            mapping of glob patterns to these, of which the first match counts, ``None`` for ordinary memory. It places
            weights for which ``device`` is ``None``. `opweave.read` gives their bytes as they were, and devices that do
            not read this memory get a copy.

    Raises:
        UnknownNameError: no such device or kind of memory, or a pattern that matches no name.
        SchedulerError: memory of another device than ``device`` says.
        UnsupportedOpError: memory that is not for weights, or does not keep one of them.
        DTypeError: a dtype that opweave does not have, or values that are not arrays.
        LayoutError: rows that do not consist of whole blocks, or too few blocks to split.
        BoundsError: weights that are to be split along an axis that they do not have.
        ShapeError: `Blocks` whose number of bytes does not fit their shape.
        AllocationError: a device has not enough free memory; nothing stays allocated.
    """
    if not isinstance(arrays, Mapping):
        raise DTypeError(f"weights are made from a mapping of names to arrays, not of {type(arrays).__name__}")
    narrow = None if dtype is None else as_dtype(dtype)
    if narrow is not None and not narrow.is_float:
        raise DTypeError(f"dtype is a float type, to which floating-point arrays are converted, not {narrow}")
    token = object()
    named = {
        str(name): _weight(str(name), _narrowed(str(name), given, narrow), token) for name, given in arrays.items()
    }
    group = Weights(named)
    devices = _matched(group, device, "device", _resolve_or_split)
    memories = _matched(group, buffer_type, "buffer_type", lambda memory: memory)
    by_memory: dict[tuple[Device, BufferType | None], list[Tensor]] = {}
    split: dict[Sharded, list[Tensor]] = {}
    for name, tensor in named.items():
        target = devices.get(name)
        if target is not None and not isinstance(target, Device):
            if memories.get(name) is not None:
                raise SchedulerError(f"weight {name!r} is split over devices and lies in their ordinary memory; leave "
                                     "out its buffer_type")  # fmt: skip
            split.setdefault(target, []).append(tensor)
            continue
        kind = registry.buffer_type(memories.get(name), target)
        if kind is not None:
            kind.check_usage(Usage.WEIGHTS)
            kind.check_tensor(tensor)
        if kind is not None or target is not None:
            by_memory.setdefault((target or kind.device, kind), []).append(tensor)  # type: ignore[union-attr]
    try:
        for (target, kind), tensors in by_memory.items():
            group.buffers += upload([t for t in tensors if _needs_upload(t, target, kind)], target, kind)
        for sharded, tensors in split.items():
            from opweave.sharding.placing import place_shards  # weights of most programs are whole

            group.buffers += place_shards(tensors, sharded)
    except BaseException:
        for buffer in group.buffers:
            buffer.free()
        raise
    return group


def _narrowed(name: str, given: Any, narrow: DType | None) -> Any:
    """The value of a weight; floats converted to ``narrow``, if that is a type."""
    value = _unwrapped(name, given)
    if narrow is None:
        return value
    if isinstance(value, Tensor) and value.dtype.is_float:
        value = read_leaf(value)  # from its device
    if isinstance(value, np.ndarray) and as_dtype(value.dtype).is_float:
        return value.astype(narrow.numpy, copy=False)
    return value


def _matched(group: Weights, given: Any, argument: str, checked: Callable[[Any], T]) -> dict[str, T]:
    """For each weight what an argument says of it, one value for all or by patterns, each checked once."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(group, checked(given))
    patterns = {pattern: checked(value) for pattern, value in given.items()}
    for pattern in patterns:
        if not isinstance(pattern, OptionalPattern) and not any(fnmatchcase(name, pattern) for name in group):
            raise UnknownNameError("weight", pattern, group, f"It is a pattern of {argument}=, and matches none.")
    first = {name: next((p for p in patterns if fnmatchcase(name, p)), None) for name in group}
    return {name: patterns[pattern] for name, pattern in first.items() if pattern is not None}


def _new_values(tensor: Tensor, name: str, value: Any) -> np.ndarray[Any, Any]:
    """New values of a weight as an array of its dtype; of quantized ones the bytes."""
    value = _unwrapped(name, value)
    if isinstance(value, Tensor):
        value = read_leaf(value)  # from its device
    if isinstance(value, Blocks):
        array, shape, dtype = checked_blocks(value, f"weight {name!r}")
        if dtype is not tensor.dtype:
            raise DTypeError(f"{tensor.describe()} takes blocks of {tensor.dtype}, not of {dtype}")
    elif tensor.dtype.block > 1:
        raise DTypeError(f"{tensor.describe()} takes Blocks, which opweave.quantize makes, not {type(value).__name__}")
    else:
        array = values_for(tensor.describe(), value, tensor.dtype)
        shape = array.shape
    if shape != tensor.shape:
        raise ShapeError(f"values of shape {shape} do not fit {tensor.describe()}")
    return array


def _unwrapped(name: str, value: Any) -> Any:
    """A weight's value in a form that `_weight` accepts: converts arrays of other libraries, and leaves made of
    them."""
    if is_foreign(value):
        from opweave.dlpack import from_dlpack

        value = from_dlpack(value, name=name)
    if not isinstance(value, Tensor):
        return value
    leaf = value.leaf
    if leaf is None or leaf.kind not in ("constant", "weight") or (leaf.data is None and leaf.placement is None):
        raise DTypeError(f"weight {name!r} is {value.describe()}; weights are made from arrays")
    if leaf.data is None:
        return value  # in the memory of a device
    return leaf.data if value.dtype.block == 1 else Blocks(leaf.data, value.shape, value.dtype)


def _needs_upload(tensor: Tensor, device: Device, kind: BufferType | None) -> bool:
    """Whether a weight has to be uploaded to ``device``. One in other memory is first downloaded to the host."""
    leaf = tensor.leaf
    assert leaf is not None
    if leaf.placement is None:
        return True
    if leaf.placement.buffer.device is device and kind in (None, leaf.placement.buffer.type):
        return False
    leaf.data, leaf.placement = read_leaf(tensor), None
    return True


def _weight(name: str, value: Any, group: object) -> Tensor:
    if isinstance(value, Tensor):
        assert value.leaf is not None
        leaf = Leaf("weight", name, device=value.leaf.device, group=group)
        leaf.placement = value.leaf.placement
        return new_leaf(leaf, value.shape, value.dtype)
    if isinstance(value, Spec):
        dtype = as_dtype(value.dtype)
        return new_leaf(Leaf("weight", name, group=group), check_shape(value.shape, dtype), dtype)
    if isinstance(value, Blocks):
        data, shape, dtype = checked_blocks(value, f"weight {name!r}")
        return new_leaf(Leaf("weight", name, data, group=group), shape, dtype)
    array = host_array(value, copy=False)
    dtype = as_dtype(array.dtype)
    return new_leaf(Leaf("weight", name, array, group=group), check_shape(array.shape, dtype), dtype)


def _resolve(where: Any) -> Device | None:
    if where is not None and not isinstance(where, (str, Device)):
        raise SchedulerError(f"device= takes a device or its name, not {where!r}")
    return registry.device(where) if isinstance(where, str) else where


def _resolve_or_split(where: Where | Sharded) -> Device | Sharded | None:
    if where is not None and not isinstance(where, (str, Device)):
        from opweave.sharding.placing import Sharded  # weights of most programs are whole

        if isinstance(where, Sharded):
            return where
    return _resolve(where)


def state(
    name: str,
    shape: int | Iterable[int],
    dtype: DTypeLike = f32,
    *,
    device: Where | Sharded = None,
    fill: float = 0,
    buffer_type: registry.Memory = None,
) -> Tensor:
    """A leaf that nodes may write: a cache, an accumulator. It keeps its values from run to run.

    Args:
        name: unique within a graph.
        shape: lengths of up to 8 axes.
        dtype: a `DType` or its name. Of a quantized one nodes write whole rows of blocks (`opweave.index_copy`,
            `opweave.assign`).
        device: a device or its name; an `opweave.Sharded`: each device has a part, which nodes write there; ``None``:
            the first program that uses the state places it.
        fill: initial value of every element; 0 for a quantized dtype.
        buffer_type: the kind of memory to keep it in, where not the ordinary one: as for `weights`.

    Raises:
        UnknownNameError: no such device or kind of memory.
        UnsupportedOpError: memory that is not for values that nodes write, or does not keep the state.
        SchedulerError: memory of another device than ``device`` says.
        DTypeError: a ``fill`` that the dtype does not hold.
        AllocationError: the device has not enough free memory.
        LayoutError: a last axis that does not consist of whole blocks of a quantized dtype; too few blocks to split.
        BoundsError: a state that is to be split along an axis that it does not have.
        ShapeError: a missing name, or a shape that is not possible.
    """
    if not isinstance(name, str) or not name:
        raise ShapeError(f"a state needs a name: ow.state('cache', shape), not {name!r:.60}")
    dtype = as_dtype(dtype)
    shape = check_shape(shape, dtype)
    where = _resolve_or_split(device)
    target = where if isinstance(where, Device) else None
    kind = registry.buffer_type(buffer_type, target)
    if kind is not None and where is not target:
        raise SchedulerError(f"state {name!r} is split over devices and lies in their ordinary memory; leave out its "
                             "buffer_type")  # fmt: skip
    if not dtype.is_quantized:
        values_for(f"the fill of state {name!r}", fill, dtype)
    elif fill != 0:
        raise DTypeError(f"state {name!r}: blocks of {dtype} are filled with 0, not {fill!r:.60}")
    tensor = new_leaf(Leaf("state", name, fill=fill), shape, dtype)
    if kind is not None:
        kind.check_tensor(tensor)
        place_state(tensor, kind.device, kind)
    elif target is not None:
        place_state(tensor, target)
    elif where is not None and not isinstance(where, Device):
        from opweave.sharding.placing import place_state_shards  # most states are whole

        place_state_shards(tensor, where)
    return tensor

"""`Collectives`: an optional procedure of backends that exchange values between their devices themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from opweave.contract.step import Arg, Call
    from opweave.graph.dtypes import DType
    from opweave.runtime.device import Device
    from opweave.runtime.stream import Stream

__all__ = ["CollectiveKind", "CollectiveSupport", "Collectives"]

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter"]
"""Which values each device gets: the sum of all parts, all parts one after the other, its own range of the sum."""


class CollectiveSupport(NamedTuple):
    """How a backend does a collective. Every device gets equal bits.

    Attributes:
        order: in which order partial sums are added: ``"shards"``: in that of the parts, those of half types in f32 and
            rounded once; ``"any"``: otherwise.
        together: one call on a stream of the first device does it for all devices. If not, there is a call for each
            device, on a stream of it, which reads the parts in the memory of the others.
    """

    order: Literal["shards", "any"]
    together: bool


@runtime_checkable
class Collectives(Protocol):
    """The backend exchanges values between several of its devices itself.

    A collective has one part on each device. ``"all_reduce"`` gives each device the element-wise sum of all parts;
    ``"all_gather"`` gives each all parts, one after the other; ``"reduce_scatter"`` gives each of ``n`` devices one of
    ``n`` equal ranges of the sum, in the order of the devices.
    """

    def collective_support(
        self, kind: CollectiveKind, devices: Sequence[Device], dtype: DType, size: int
    ) -> CollectiveSupport | None:
        """Whether and how the backend does a collective; asked when a program is planned.

        Sums in ``"any"`` order are used where the order cannot matter (integers, two parts of a type that is added as
        it is), and where the program may compute the products that it adds less than exactly (``precision=``).

        Args:
            devices: two or more of this backend, in the order of the parts.
            dtype: of all operands.
            size: elements of a part, of the largest one if they differ.

        Returns:
            How; ``None``: the backend does not do it, so that the core does.
        """

    def bind_collective(self, kind: CollectiveKind, stream: Stream, outs: Sequence[Arg], parts: Sequence[Arg]) -> Call:
        """Prepare a collective, or the share of one device in it.

        The call is work of ``stream``: it is queued, or complete on return, as other work of the stream is. The parts
        are complete when the stream reaches it. It must not change them.

        Args:
            stream: of the first device, if the collective is done together, else of the device whose share this is.
            outs: the result of each device, if the collective is done together; then all operands are dense, parts
                have equal sizes, and gathered or scattered ranges lie in memory one after the other. Else the result of
                this device.
            parts: what each device gives. For a device's share in ``"all_reduce"`` and ``"reduce_scatter"`` they have
                the shape of the result, with any strides, and a bias may follow, which is added last; in
                ``"all_gather"`` their shapes differ from that of the result along one axis.

        Returns:
            A function without arguments, which is called in each run.
        """

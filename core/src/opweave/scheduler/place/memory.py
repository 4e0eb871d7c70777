"""`PlacedMemory`: which device runs a node because memory that it reads or writes was placed beforehand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from opweave.contract.memory import Usage

if TYPE_CHECKING:
    from opweave.graph.leaf import Location, Placement
    from opweave.graph.tensor import Signature, Tensor
    from opweave.runtime.buffer import Buffer
    from opweave.scheduler.place.capabilities import Capabilities
    from opweave.scheduler.place.target import Target

__all__ = ["PlacedMemory"]


class PlacedMemory:
    """The placed weights of a graph, and what they and other placed memory decide for nodes.

    Args:
        capabilities: what the devices say of nodes.
        leaves: of the graph.
        readers: leaf -> the nodes that read it or views of it, in order, perhaps several times.
        op_offload: a device may bring weights from host memory for operations that it runs much faster.

    Attributes:
        weights: node -> the placed weights that may decide for it, the largest first; only nodes that have some. A
            small table that several nodes read (of frequencies, say) decides for none but products: only one device
            can hold it.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        leaves: Sequence[Tensor],
        readers: Mapping[Tensor, Sequence[Tensor]],
        op_offload: bool,
    ) -> None:
        self._capabilities: Final = capabilities
        self._op_offload: Final = op_offload
        self.weights: Final[dict[Tensor, list[Tensor]]] = {}
        self._buffers: Final = {leaf: buffer for leaf in leaves if (buffer := _weight_buffer(leaf)) is not None}
        # placed weight -> the nodes that read it
        self._readers: Final[dict[Tensor, Sequence[Tensor]]] = {}
        for weight in self._buffers:
            nodes = readers.get(weight, ())
            self._readers[weight] = nodes if len(nodes) < 2 else list(dict.fromkeys(nodes))
        self._small: Final[dict[Tensor, bool]] = {}
        self._near: Final[dict[object, list[Target]]] = {}
        self._by_signature: Final[dict[tuple[Signature, Buffer], tuple[int, str] | None]] = {}
        for weight, nodes in self._readers.items():
            shared = len(nodes) > 1
            for node in nodes:
                if not (shared and self._is_small(weight, node)):
                    self.weights.setdefault(node, []).append(weight)
        for node, weights in self.weights.items():
            if len(weights) > 1:
                roots = [source.root for source in node.srcs]
                weights.sort(key=lambda weight: (-weight.nbytes, roots.index(weight)))

    def decide(self, node: Tensor, storage: Placement | Location | None) -> tuple[int, str] | None:
        """Target and cause, where placed memory decides: that of the result (``storage``), or of a weight."""
        if storage is not None:
            at = self._where_written(node, storage)
            if at is not None:
                return at.index, "storage"
        signature, known = self._capabilities.signature(node), self._by_signature
        for weight in self.weights.get(node, ()):
            key = signature, self._buffers[weight]
            try:
                decided = known[key]
            except KeyError:
                decided = known[key] = self._by_weight(node, weight)
            if decided is not None:
                return decided
        return None

    def _by_reach(self, buffer: Buffer) -> list[Target]:
        """The targets that reach placed memory: the one that holds it first, those with references last."""
        found = self._near.get(buffer)
        if found is None:
            found = [
                t for t in self._capabilities.targets if t.device is buffer.device or t.device.reaches(buffer.space)
            ]
            found.sort(key=lambda t: (t in self._capabilities.references, t.device is not buffer.device))
            self._near[buffer] = found
        return found

    def _where_written(self, node: Tensor, storage: Placement | Location) -> Target | None:
        """The target that computes ``node`` right into its placed memory; ``None``: its result is written back."""
        target = next((t for t in self._by_reach(storage.buffer) if self._capabilities.supports(t, node)), None)
        if target in self._capabilities.references and node.state is None:
            return None  # a result that the caller placed in the host's memory; a state would be copied there and back
        return target

    def _by_weight(self, node: Tensor, weight: Tensor) -> tuple[int, str] | None:
        """Target and cause that a placed weight decides for a node that reads it, if it does: the same for all nodes of
        one signature and weights of one buffer."""
        capabilities, buffer = self._capabilities, self._buffers[weight]
        near = self._by_reach(buffer)
        home: Target | None = None
        for target in near:
            if capabilities.supports(target, node):
                home = target
                break
        if weight in capabilities.prepared:
            home = self._reader(near, node, weight) or home
        if self._op_offload and buffer.is_host:
            only_references = home is None or home in capabilities.references
            for target in capabilities.computing:
                if not only_references and home is not None and target.index >= home.index:
                    break
                far = target.device.caps.offload and target not in near and capabilities.supports(target, node)
                if far and target.device.offloads(capabilities.step(target, node)):
                    return target.index, "offload"
            if only_references:
                return None  # brought to whichever device computes it
        return None if home is None else (home.index, "weights")

    def _reader(self, near: Sequence[Target], node: Tensor, weight: Tensor) -> Target | None:
        """The first target that reads a prepared weight as it lies."""
        kind = self._capabilities.prepared[weight]
        for target in near:
            if target.device.reads(kind):
                support = self._capabilities.support(target, node)
                if support.reason is None and kind not in support.unpacked:
                    return target
        return None

    def fetched(self, target_of: Mapping[Tensor, int], pins: Mapping[Tensor, int]) -> set[Tensor]:
        """The nodes that begin a split because weights are copied from host memory for them; vectors alone are too
        small for that, and of weights that no target reaches the program keeps a copy."""
        result: set[Tensor] = set()
        for weight, readers in self._readers.items():
            buffer = self._buffers[weight]
            if not buffer.is_host or weight.ndim < 2:
                continue
            near = {target.index for target in self._by_reach(buffer)}
            if near:
                result.update(node for node in readers if target_of[node] not in near and node not in pins)
        return result

    def beside_offloaded(self) -> Iterator[Tensor]:
        """The nodes for which only small weights in host memory decide: not if a device brings others from there."""
        for node, weights in self.weights.items():
            if all(self._buffers[weight].is_host and self._is_small(weight, node) for weight in weights):
                yield node

    def _is_small(self, weight: Tensor, node: Tensor) -> bool:
        """Whether each reader computes or reads a value with more bytes than the weight has, and ``node`` is no product
        with it."""
        small = self._small.get(weight)
        if small is None:
            size = weight.nbytes
            small = self._small[weight] = all(_largest_value(reader) > size for reader in self._readers[weight])
        return small and node.op is not None and not node.op.product


def _largest_value(node: Tensor) -> int:
    """Bytes of the largest value that a node computes or reads, leaves other than inputs left out."""
    read = [s.nbytes for s in node.srcs if s.root.leaf is None or s.root.leaf.kind == "input"]
    return max([node.nbytes, *read])


def _weight_buffer(tensor: Tensor) -> Buffer | None:
    """The buffer that a weight was placed in, ``None`` of other leaves."""
    leaf = tensor.leaf
    if leaf is None or leaf.kind != "weight" or leaf.placement is None:
        return None
    buffer = leaf.placement.buffer
    return buffer if buffer.usage is Usage.WEIGHTS else None

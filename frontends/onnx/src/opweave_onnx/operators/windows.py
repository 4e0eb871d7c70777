"""Windows of convolutions and pooling: their padding, number and elements."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import opweave as ow
from opweave.errors import ShapeError
from opweave.graph.tensor import Tensor
from opweave_onnx.trace import Call

__all__ = ["Windows", "read_windows"]


class Windows(NamedTuple):
    """Windows over the spatial axes.

    Attributes:
        kernel, strides, dilations: for each axis.
        before, after: padding of each axis.
        beyond: by how many elements the last window reaches over the padding.
        places: the number of windows along each axis.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    beyond: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def padded(self) -> bool:
        """Whether any axis is padded, also by ``beyond``."""
        return any(self.before) or any(self.after) or any(self.beyond)

    def pad(self, x: Tensor, value: Any) -> Tensor:
        """``x`` with all the padding."""
        if not self.padded:
            return x
        sides = [(a, b + c) for a, b, c in zip(self.before, self.after, self.beyond, strict=True)]
        return ow.pad(x, ((0, 0), (0, 0), *sides), "constant", value)

    def slices(self, padded: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """For each element of the kernel its index, and a view of this element of all windows."""
        for offset in product(*map(range, self.kernel)):
            cut = [
                slice(o * d, o * d + (n - 1) * s + 1, s)
                for o, d, n, s in zip(offset, self.dilations, self.places, self.strides, strict=True)
            ]
            yield offset, padded[(slice(None), slice(None), *cut)]


def read_windows(call: Call, x: Tensor, kernel: tuple[int, ...]) -> Windows:
    """The windows that the attributes of a node describe, over all axes of ``x`` but the first two.

    Raises:
        ShapeError: they do not fit.
    """
    rank = x.ndim - 2
    lengths = x.shape[2:]
    if call.get("kernel_shape", kernel) != kernel:
        raise ShapeError(f"kernel_shape is {call.get('kernel_shape', kernel)}, and the weights have {kernel}")
    strides = call.get("strides", ()) or (1,) * rank
    dilations = call.get("dilations", ()) or (1,) * rank
    pads = call.get("pads", ()) or (0,) * (2 * rank)
    if rank < 1 or len(pads) != 2 * rank or not len(kernel) == len(strides) == len(dilations) == rank:
        raise ShapeError(
            f"kernel {kernel}, strides {strides}, dilations {dilations} and pads {pads} for {x.describe()}"
        )
    if min(*kernel, *strides, *dilations) < 1 or min(pads) < 0:
        raise ShapeError(f"kernel {kernel}, strides {strides} and dilations {dilations} are at least 1, pads {pads} 0")
    before, after = tuple(pads[:rank]), tuple(pads[rank:])
    auto = call.get("auto_pad", "NOTSET")
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        whole = [max((-(-n // s) - 1) * s + e - n, 0) for n, s, e in zip(lengths, strides, spans, strict=True)]
        small, large = tuple([w // 2 for w in whole]), tuple([w - w // 2 for w in whole])
        before, after = (small, large) if auto == "SAME_UPPER" else (large, small)
    elif auto == "VALID":
        before = after = (0,) * rank
    places, beyond = [], []
    for n, a, b, e, s in zip(lengths, before, after, spans, strides, strict=True):
        room = n + a + b - e
        if room < 0:
            raise ShapeError(f"a window of {e} elements does not fit into {n + a + b} of {x.describe()}")
        count = room // s + 1
        if call.get("ceil_mode", 0) and room % s and count * s < n + a:
            count += 1
        places.append(count)
        beyond.append(max((count - 1) * s + e - (n + a + b), 0))
    return Windows(tuple(kernel), tuple(strides), tuple(dilations), before, after, tuple(beyond), tuple(places))

"""Sessions: made once for a structure, found again for each group that has it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

import numpy as np
import onnxruntime

from opweave_ort.model import ONNX_TYPES, Model
from opweave_ort.runtime import RUNTIME

if TYPE_CHECKING:
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape
    from opweave_ort.providers import Provider

__all__ = ["SESSIONS", "Session", "Sessions", "probe"]

Array = np.ndarray[Any, Any]


class Session:
    """A session with the weights that it was given.

    Args:
        model: the serialized model.
        weights: name -> array of each initializer that the model only declares. The session reads them where they are.
        provider, options: what runs it. What a provider does not run, ONNX Runtime's kernels for the CPU do.
        threads: how many; ``None``: as many as the backend is set to.
        keep: what the weights lie in.
        wide: whether the model computes in f64.
        repacked: bytes of weights in another form, by us or by ONNX Runtime; those by us several sessions may share.

    Raises:
        Exception: ONNX Runtime's, for models that the provider has no kernels for.
    """

    def __init__(
        self,
        model: bytes,
        weights: Mapping[str, Any],
        provider: Provider,
        options: Mapping[str, str],
        threads: int | None,
        keep: Sequence[object] = (),
        wide: bool = False,
        repacked: int = 0,
    ) -> None:
        settings = RUNTIME.options(threads)
        # Both are needed: optimizers read what the first gives, which alone would be copied; kernels read the second.
        settings.add_external_initializers(list(weights), list(weights.values()))
        for name, value in weights.items():
            settings.add_initializer(name, value)
        # This one keeps factors of products in f32.
        disabled = ["MatMulScaleFusion"] if wide else None
        chosen = [(provider.name, dict(options))]
        if provider.id != "cpu":
            chosen.append(("CPUExecutionProvider", {}))
        self.native: Final = onnxruntime.InferenceSession(
            model, settings, providers=chosen, disabled_optimizers=disabled, enable_fallback=False
        )
        self.repacked: Final = repacked
        self._keep = (weights, keep)

    def bind(self, inputs: Sequence[tuple[DType, Shape, int]], outputs: Sequence[tuple[DType, Shape, int]]) -> Any:
        """An io binding on memory: type, shape and address of each input ``in0``, ... and of each output."""
        binding = self.native.io_binding()
        for i, (dtype, shape, address) in enumerate(inputs):
            binding.bind_input(f"in{i}", "cpu", 0, ONNX_TYPES[dtype], shape, address)
        for value, (dtype, shape, address) in zip(self.native.get_outputs(), outputs, strict=True):
            binding.bind_output(value.name, "cpu", 0, ONNX_TYPES[dtype], shape, address)
        return binding


class Sessions:
    """The sessions of the process, by what they compute. One lives as long as a plan uses it."""

    def __init__(self) -> None:
        self._known: Final[WeakValueDictionary[Hashable, Session]] = WeakValueDictionary()
        self._lock: Final = Lock()
        self.made = 0

    def get(self, key: Hashable, make: Callable[[], Session]) -> Session:
        """The session for ``key``, made if there is none."""
        with self._lock:
            found = self._known.get(key)
            if found is None:
                found = self._known[key] = make()
                self.made += 1
            return found


SESSIONS: Final = Sessions()


def probe(provider: Provider, options: Mapping[str, str]) -> Exception | None:
    """What goes wrong when the provider gets a session, ``None`` if nothing does."""
    from opweave.graph.dtypes import f32

    model = Model()
    model.output(model("Add", *[model.input("in0", f32, (1,))] * 2), f32, (1,))
    try:
        Session(model.serialized(), {}, provider, options, None)
    except Exception as error:  # ONNX Runtime's errors have no class in common
        return error
    return None

"""Sessions: made once for a structure, found again for each group that has it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from weakref import ReferenceType, ref

import numpy as np
import onnxruntime

from opweave_ort.model import ONNX_TYPES, Model
from opweave_ort.patterns import Pattern, skeleton_of
from opweave_ort.runtime import RUNTIME

if TYPE_CHECKING:
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape
    from opweave.runtime.host.threads import ThreadPool
    from opweave_ort.providers import Provider

__all__ = ["SESSIONS", "Session", "Sessions", "probe"]

Array = np.ndarray[Any, Any]


class Session:
    """A session with the weights that it was given.

    Args:
        model: the serialized model.
        weights: name -> array of each initializer that the model only declares.
        in_place: the names of those that the session reads where they are; of others it keeps copies.
        provider, options: what runs it. ONNX Runtime's kernels for the CPU run what it does not.
        threads: how many, or the pool that says so.
        keep: objects that own the memory of the weights.
        wide: whether the model computes in f64.
        repacked: bytes of weights repacked by this plugin, which sessions may share, or by ONNX Runtime.
        pattern: the models that it serves; ``None``: only the given one.

    Raises:
        Exception: ONNX Runtime's, for models that the provider has no kernels for.
    """

    def __init__(
        self,
        model: bytes,
        weights: Mapping[str, Any],
        in_place: Collection[str],
        provider: Provider,
        options: Mapping[str, str],
        threads: int | ThreadPool,
        keep: Sequence[object] = (),
        wide: bool = False,
        repacked: int = 0,
        pattern: Pattern | None = None,
    ) -> None:
        self._open = partial(_opened, model, in_place, provider, options, threads, wide)
        self._token: object = None
        self.native = self._open(weights)
        self.repacked: Final = repacked
        self.pattern: Final = pattern
        self._keep = (weights, keep)

    def refresh(self, token: object, weights: Callable[[], Mapping[str, Any]]) -> None:
        """Open the session again after its weights were written, as ONNX Runtime may have packed them; once for each
        token. What was bound to it has to be bound again."""
        if self._token is not token:
            self._token = token
            self._keep = (weights(), self._keep[1])
            self.native = self._open(self._keep[0])

    def bind(
        self,
        inputs: Sequence[tuple[DType, Shape, int]],
        outputs: Sequence[tuple[DType, Shape, int]],
        constants: Mapping[str, Array] = MappingProxyType({}),
    ) -> Any:
        """An io binding on memory: type, shape and address of each input ``in0``, ... and of each output, and the
        constants that are inputs of this session. Whoever binds keeps all of it alive."""
        binding = self.native.io_binding()
        for i, (dtype, shape, address) in enumerate(inputs):
            binding.bind_input(f"in{i}", "cpu", 0, ONNX_TYPES[dtype], shape, address)
        for name, array in constants.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for value, (dtype, shape, address) in zip(self.native.get_outputs(), outputs, strict=True):
            binding.bind_output(value.name, "cpu", 0, ONNX_TYPES[dtype], shape, address)
        return binding


def _opened(
    model: bytes,
    in_place: Collection[str],
    provider: Provider,
    options: Mapping[str, str],
    threads: int | ThreadPool,
    wide: bool,
    weights: Mapping[str, Any],
) -> onnxruntime.InferenceSession:
    """ONNX Runtime's session."""
    settings = RUNTIME.options(threads)
    # Both are needed: optimizers read what the first gives, which alone would be copied; kernels read the second.
    settings.add_external_initializers(list(weights), list(weights.values()))
    for name in in_place:
        settings.add_initializer(name, weights[name])
    # MatMulScaleFusion rounds the factors of products to f32.
    disabled = ["MatMulScaleFusion"] if wide else None
    chosen = [(provider.name, dict(options))]
    if provider.id != "cpu":
        chosen.append(("CPUExecutionProvider", {}))
    return onnxruntime.InferenceSession(
        model, settings, providers=chosen, disabled_optimizers=disabled, enable_fallback=False
    )


class Sessions:
    """The sessions of the process, by what they compute. One lives as long as a plan uses it.

    Attributes:
        made: how many were made so far.
    """

    def __init__(self) -> None:
        self._known: Final[dict[Hashable, list[ReferenceType[Session]]]] = {}
        self._lock: Final = Lock()
        self.made = 0

    def get(self, key: Hashable, model: Model, make: Callable[[Pattern], Session]) -> Session:
        """A session that serves the model; made if there is none.

        Args:
            key: all that sessions depend on besides their models.
        """
        with self._lock:
            for other in [k for k, refs in self._known.items() if not any(r() for r in refs)]:
                del self._known[other]
            known = self._known.setdefault((key, skeleton_of(model)), [])
            alive = [session for known_ref in known if (session := known_ref()) is not None]
            for session in alive:
                if session.pattern is not None and session.pattern.fits(model):
                    return session
            widest = alive[-1].pattern if alive else None
            made = make(Pattern.of(model) if widest is None else widest.widened(model))
            known.append(ref(made))
            self.made += 1
            return made

    def count(self) -> int:
        """How many are in memory."""
        with self._lock:
            return sum(known() is not None for several in self._known.values() for known in several)


SESSIONS: Final = Sessions()


def probe(provider: Provider, options: Mapping[str, str]) -> Exception | None:
    """What goes wrong when the provider gets a session, ``None`` if nothing does."""
    from opweave.graph.dtypes import f32

    model = Model()
    model.output(model("Add", *[model.input("in0", f32, (1,))] * 2), f32, (1,))
    try:
        session = Session(model.serialized(), {}, (), provider, options, 1)
    except Exception as error:  # ONNX Runtime's errors have no class in common
        return error
    if provider.name in session.native.get_providers():
        return None
    return RuntimeError(_left_out(provider))  # ONNX Runtime only logs this, and would compute on the CPU


def _left_out(provider: Provider) -> str:
    """Why ONNX Runtime leaves a provider out, as far as loading its library tells."""
    name = provider.name.removesuffix("ExecutionProvider").lower()
    for library in Path(onnxruntime.__file__).parent.glob(f"capi/*onnxruntime_providers_{name}.*"):
        try:
            ctypes.CDLL(str(library))
        except OSError as error:
            return str(error)
    return "ONNX Runtime left it out: there is no such hardware, or its driver or a library is missing"

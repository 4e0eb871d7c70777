"""Sessions: made once for a structure, found again for each group that has it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakSet, WeakValueDictionary

import onnxruntime

from opweave_ort.model import Model
from opweave_ort.patterns import Pattern, skeleton_of
from opweave_ort.runtime import RUNTIME

if TYPE_CHECKING:
    from opweave.runtime.host.threads import ThreadPool
    from opweave_ort.calls import SessionCall
    from opweave_ort.providers import Provider

__all__ = ["SESSIONS", "Opened", "Session", "Sessions", "open_session", "probe"]


class Opened(NamedTuple):
    """A session of ONNX Runtime.

    Attributes:
        native: the session.
        pattern: the models that it serves.
        keep: what it reads where it lies.
    """

    native: onnxruntime.InferenceSession
    pattern: Pattern
    keep: object


class Session:
    """A session that programs share. Once it is opened again, for more sizes or with weights that were written, the one
    before is freed with all that it has packed: calls are bound to the new one when they next run.

    Args:
        make: opens a session of ONNX Runtime for all models that fit a pattern.
        pattern: the first one.
        repacked: bytes of weights that it packs, beside those that the program counts.

    Attributes:
        opened: what runs now.
    """

    def __init__(self, make: Callable[[Pattern], Opened], pattern: Pattern, repacked: int = 0) -> None:
        self._make = make
        self._token: object = None
        self._calls: Final[WeakSet[SessionCall]] = WeakSet()
        self._lock: Final = Lock()
        self.repacked: Final = repacked
        self.opened = make(pattern)

    def join(self, call: SessionCall) -> None:
        """Tell the call when it has to be bound again."""
        with self._lock:
            self._calls.add(call)

    def widen(self, make: Callable[[Pattern], Opened], model: Model) -> None:
        """Serve another model of the skeleton, too."""
        self._make = make
        self._open(self.opened.pattern.widened(model))

    def refresh(self, token: object) -> None:
        """Open the session again after its weights were written, as ONNX Runtime may have packed them; once for each
        token."""
        if self._token is not token:
            self._token = token
            self._open(self.opened.pattern)

    def _open(self, pattern: Pattern) -> None:
        self.opened = self._make(pattern)
        with self._lock:
            for call in self._calls:
                call.unbind()


def open_session(
    model: bytes,
    weights: Mapping[str, Any],
    in_place: Collection[str],
    provider: Provider,
    options: Mapping[str, str],
    threads: int | ThreadPool,
    wide: bool = False,
    spins: bool = True,
) -> onnxruntime.InferenceSession:
    """A session of ONNX Runtime.

    Args:
        model: the serialized model.
        weights: name -> value of each initializer that the model only declares.
        in_place: the names of those that the session reads where they are, as long as it lives. Of others it makes
            copies, which it frees when it has packed them.
        provider, options: what runs it. ONNX Runtime's kernels for the CPU run what it does not.
        threads: how many, or the pool that says so.
        wide: whether the model computes in f64.
        spins: whether threads wait for work in a loop until a run ends.

    Raises:
        Exception: ONNX Runtime's, for models that the provider has no kernels for.
    """
    settings = RUNTIME.options(threads)
    if not spins:
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
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
        made: how often one was opened so far, for a model of a new skeleton or of sizes that did not fit before.
    """

    def __init__(self) -> None:
        self._known: Final[WeakValueDictionary[Hashable, Session]] = WeakValueDictionary()
        self._lock: Final = Lock()
        self.made = 0

    def get(self, key: Hashable, model: Model, make: Callable[[Pattern], Opened], repacked: int) -> Session:
        """A session that serves the model; made, or opened for more sizes, if there is none.

        Args:
            key: all that sessions depend on besides their models.
            make, repacked: as of `Session`.
        """
        with self._lock:
            known = key, skeleton_of(model)
            session = self._known.get(known)
            if session is None:
                session = self._known[known] = Session(make, Pattern.of(model), repacked)
            elif session.opened.pattern.fits(model):
                return session
            else:
                session.widen(make, model)
            self.made += 1
            return session

    def alive(self) -> list[Session]:
        """Those that are in memory."""
        with self._lock:
            return list(self._known.values())

    @property
    def packed(self) -> int:
        """Bytes of weights that they have packed."""
        return sum([session.repacked for session in self.alive()])

    def count(self) -> int:
        """How many are in memory."""
        return len(self.alive())


SESSIONS: Final = Sessions()


def probe(provider: Provider, options: Mapping[str, str]) -> Exception | None:
    """What goes wrong when the provider gets a session, ``None`` if nothing does."""
    from opweave.graph.dtypes import f32

    model = Model()
    model.output(model("Add", *[model.input("in0", f32, (1,))] * 2), f32, (1,))
    try:
        session = open_session(model.serialized(), {}, (), provider, options, 1)
    except Exception as error:  # ONNX Runtime's errors have no class in common
        return error
    if provider.name in session.get_providers():
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

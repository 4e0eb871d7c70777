"""Over several devices the first steps are timed; where one of the devices would be faster alone, that is said once."""

from __future__ import annotations

import time

import pytest

import opweave as ow
from opweave.contract import Kind, MemorySpace
from opweave.runtime.host.device import ReferenceKernels
from opweave.tracing import TRACE
from tests.support.small_models import make_folder

pytest.importorskip("torch")
pytest.importorskip("transformers")
models = pytest.importorskip("opweave_models")


class Sleeping(ReferenceKernels):
    """Has a memory of its own, and sleeps for each MiB of weights that it multiplies by."""

    kind = Kind.ACCEL

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.space = name, MemorySpace(name)
        self._seconds = seconds

    def _open(self, **params):
        stream = super()._open(**params)
        bind = stream._bind

        def slow(group):
            call = bind(group)
            if group.steps[0].op != "linear":
                return call
            pause = self._seconds * group.steps[0].srcs[1].nbytes / 2**20

            def paused() -> None:
                time.sleep(pause)
                call()

            return paused

        stream._bind = slow  # type: ignore[method-assign]
        return stream


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_folder("llama", path, num_hidden_layers=2)
    return path


@pytest.fixture(params=[(0.2, 0.2), (0.2, 0.6)], ids=["equal", "slow"])  # far more than a busy processor adds
def devices(request):
    names = [ow.register_device(Sleeping(f"sleeping:{i}", seconds)).name for i, seconds in enumerate(request.param)]
    yield names, request.param[0] != request.param[1]
    ow.unload("sleeping")


@pytest.mark.parametrize("holds", [True, False])
def test_a_device_that_is_faster_alone_is_named_once(folder, devices, holds):
    names, differ = devices
    memory = {} if holds else dict.fromkeys(names, "450KiB")
    with models.load(folder, names, context=64, split=(1, 1), memory=memory) as llm:
        stats = []
        for tokens in (10, 2):
            list(llm.generate("in the one", max_tokens=tokens))
            stats.append(llm.stats.advice)
        lines = str(llm.plan).splitlines()
    assert not TRACE.listening
    if not (differ and holds):
        assert not llm.plan.advice
        return
    assert lines[-1] == llm.plan.advice
    assert stats == [llm.plan.advice, ""]
    words = llm.plan.advice.split()
    assert words[:5] == [names[0], "alone", "would", "take", "about"]
    assert 60 < float(words[5]) < 0.9 * float(words[-2].rstrip(":"))

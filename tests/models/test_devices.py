"""A mixture of experts over every placement of the devices that are here: logits near those of `cpu` alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
from tests.support.real_devices import combined
from tests.support.small_models import make_folder

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("opweave_cpu")
models = pytest.importorskip("opweave_models")

PLACEMENTS: list[tuple[list[str], dict[str, Any]]] = [
    (["opencl:0"], {}), (["cpu", "opencl:0"], {"split": [2, 1]}), (["opencl:0"], {"experts": "cpu"}),
    (["torch:cpu"], {}), (["ort:cpu"], {}), (["cpu", "host"], {"patterns": {"*attn*": "host", "*no_such*": "cpu"}}),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3moe")
    make_folder("qwen3moe", path)
    return path


def logits(folder, devices, **options):
    options = {"kv": "f32", "precision": "exact", "context": 128, **options}
    with models.load(folder, devices, **options) as llm, llm.session() as session:
        session.feed(list(range(5, 60)))
        first = session.logits()
        session.feed([7])
        return np.stack([first, session.logits()])


def missing(devices):
    try:
        for device in devices:
            ow.device(device)
    except (ow.PluginError, ow.UnknownNameError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("devices", "options"), PLACEMENTS)
@pytest.mark.parametrize("precision", ["exact", "int8"])
def test_logits_agree(folder, devices, options, precision):
    """Weights in f32 have nothing beside which activations would be rounded."""
    if why := missing(devices):
        pytest.skip(why)
    truth = logits(folder, "cpu")
    found = logits(folder, devices, precision=precision, **options)
    assert np.abs(found - truth).max() < 1e-5 * np.abs(truth).max()


@pytest.fixture
def separate():
    """Devices with memories of their own, registered for the test: two of ``cpu``, and one on a server."""
    pytest.importorskip("opweave_remote")
    from opweave_cpu.device import IsolatedCpuDevice

    with combined("remote") as served:
        devices = [ow.register_device(device) for device in (IsolatedCpuDevice(8), IsolatedCpuDevice(9), *served)]
        yield [device.name for device in devices]
        for backend in {device.name.partition(":")[0] for device in devices}:
            ow.unload(backend)


def test_logits_agree_over_devices_with_memories_of_their_own(folder, separate):
    truth = logits(folder, "cpu")
    first, second, remote = separate
    for devices, options in (
        ([first, second], {"split": [1, 2]}),
        ([remote], {}),
        (["cpu", remote], {"split": [2, 1]}),
    ):
        assert np.abs(logits(folder, devices, **options) - truth).max() < 1e-5 * np.abs(truth).max()


def test_the_same_seed_gives_the_same_text_on_every_device(folder):
    """Two tokens would have to lie nearer to a drawn number than the devices' rounding."""
    sampling = models.Sampling(temperature=1.2, top_k=0, top_p=0.99, min_p=0.0, repeat_penalty=1.1, seed=5)
    texts = {}
    for device in ("host", "cpu", "opencl:0", "torch:cpu", "ort:cpu"):
        if not missing([device]):
            with models.load(folder, device, kv="f32", precision="exact", context=128) as llm:
                texts[device] = [p.token for p in llm.generate("in the one", max_tokens=40, sampling=sampling)]
    assert len(texts) > 1
    assert len(set(texts["cpu"])) > 5
    assert all(text == texts["cpu"] for text in texts.values())

"""A mixture of experts over every placement of the devices that are here: logits near those of `cpu` alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
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


@pytest.mark.parametrize(("devices", "options"), PLACEMENTS)
def test_logits_agree(folder, devices, options):
    try:
        for device in devices:
            ow.device(device)
    except (ow.PluginError, ow.UnknownNameError) as error:
        pytest.skip(str(error))
    truth = logits(folder, "cpu")
    assert np.abs(logits(folder, devices, **options) - truth).max() < 1e-5 * np.abs(truth).max()

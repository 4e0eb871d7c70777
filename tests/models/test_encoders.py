"""Encoders against transformers, on the same folder: embeddings of texts of different lengths in one batch."""

from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import opweave as ow
from tests.support.small_models import available

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("opweave_cpu")
models = pytest.importorskip("opweave_models")

TEXTS = ["the quick fox", "a", "the fox the fox the quick dog a the", "quickest unknown"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "fox", "dog", "a", "##est", "##s"]


@pytest.fixture(scope="module", params=["Bert", "NomicBert"])
def folder(tmp_path_factory, request):
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64,
    )  # fmt: skip
    model = getattr(transformers, f"{request.param}Model")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    write_vocabulary(path)
    return path, model


def write_bert(path, **changed):
    """A folder of a small one, and the model of transformers."""
    config = {"vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
              "intermediate_size": 48, "max_position_embeddings": 64}  # fmt: skip
    model = transformers.BertModel(transformers.BertConfig(**{**config, **changed})).eval()
    model.save_pretrained(path)
    write_vocabulary(path)
    return model


def write_vocabulary(path):
    from tokenizers import BertWordPieceTokenizer

    (path / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    BertWordPieceTokenizer(str(path / "vocab.txt")).save(str(path / "tokenizer.json"))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_embeddings_are_those_of_transformers(folder, pooling):
    path, model = folder
    with models.load(path, "cpu", precision="exact", pooling=pooling) as llm:
        found = llm.embed(TEXTS, normalize=False)
        unit = llm.embed(TEXTS)
        ids = [llm.tokenizer.encode(text) for text in TEXTS]
    for row, tokens in zip(found, ids, strict=True):
        assert (tokens[0], tokens[-1]) == (2, 3)
        with torch.no_grad():
            states = model(torch.tensor([tokens])).last_hidden_state[0].numpy()
        truth = states.mean(0) if pooling == "mean" else states[0]
        assert np.abs(row - truth).max() < 1e-5 * np.abs(truth).max()
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-5)


def test_embedding_is_cancelled_between_texts_and_behind_others(folder, monkeypatch):
    """No step is computed where a request was cancelled while it waited for another one's."""
    with models.load(folder[0], "cpu", pooling="mean") as llm:
        np.testing.assert_array_equal(llm.embed("a", cancelled=None), llm.embed("a"))
        read, asked, over, encode = [], [], threading.Event(), type(llm.tokenizer).encode

        def reading(self, text):
            read.append(text)
            return encode(self, text)

        def cancelled():
            asked.append(over.is_set())
            return asked[-1]

        monkeypatch.setattr(type(llm.tokenizer), "encode", reading)
        with pytest.raises(ow.Cancelled, match="4 of 4"):
            llm.embed(TEXTS, cancelled=lambda: len(read) == 2)
        assert read == TEXTS[:2]
        with monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
            patch.setattr(llm, "step", None)
            with llm.lock:
                found = pool.submit(llm.embed, "a", cancelled=cancelled)
                while len(asked) < 2:  # before the text, and before the step
                    time.sleep(0.01)
                over.set()
            with pytest.raises(ow.Cancelled, match="1 of 1"):
                found.result()


def test_pooling_that_is_not_known_is_refused(folder, tmp_path):
    with pytest.raises(ow.UnknownNameError, match="max"):
        models.load(folder[0], "cpu", pooling="max")
    copy = shutil.copytree(folder[0], tmp_path / "copy")
    (copy / "1_Pooling").mkdir()
    settings = {"pooling_mode_cls_token": False, "pooling_mode_max_tokens": True}
    (copy / "1_Pooling" / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ow.FormatError, match=r"1_Pooling.config\.json: .*pooling_mode_max_tokens"):
        models.open_model(copy)


@pytest.mark.parametrize("named", ["relu", "gelu_new", "silu"])
def test_other_activations_of_bert_are_computed(tmp_path, named):
    torch.manual_seed(0)
    model = write_bert(tmp_path, num_hidden_layers=2, hidden_act=named)
    with models.load(tmp_path, "cpu", precision="exact") as llm, torch.no_grad():
        truth = model(torch.tensor([llm.tokenizer.encode(TEXTS[0])])).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(llm.embed(TEXTS[:1], normalize=False)[0], truth, atol=1e-5)


def test_modules_that_are_not_computed_are_refused(folder, tmp_path):
    copy = shutil.copytree(folder[0], tmp_path / "copy")

    def list_modules(**kinds):
        entries = [{"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
                   for i, (kind, path) in enumerate(kinds.items())]  # fmt: skip
        (copy / "modules.json").write_text(json.dumps(entries), encoding="utf-8")

    list_modules(Transformer="", Pooling="1_Pooling", Normalize="2_Normalize")
    assert models.open_model(copy).config.pooling == "mean"
    for path, kinds in (("2_Dense", {"Dense": "2_Dense"}), ("3_Pooling", {"Pooling": "3_Pooling"})):
        list_modules(Transformer="", **kinds)
        with pytest.raises(ow.FormatError, match=rf"modules\.json: the module '{path}'"):
            models.open_model(copy)
    (copy / "modules.json").write_text("[1", encoding="utf-8")
    with pytest.raises(ow.FormatError, match=r"modules\.json is no valid JSON"):
        models.open_model(copy)


def test_a_file_that_does_not_say_how_to_pool_embeds_where_the_caller_says_it(folder, tmp_path):
    import gguf

    from opweave_models.writing import write_gguf

    write_gguf(folder[0], tmp_path / "mean.gguf")
    reader = gguf.GGUFReader(tmp_path / "mean.gguf", "r+")
    name = models.open_model(folder[0]).config.architecture
    field = reader.fields[f"{name}.pooling_type"]
    field.parts[field.data[0]][0] = 0
    reader.data.flush()
    with (
        models.load(tmp_path / "mean.gguf", "cpu") as llm,
        pytest.raises(ow.UnsupportedOpError, match="pooling='mean'"),
    ):
        llm.embed(TEXTS)
    with models.load(tmp_path / "mean.gguf", "cpu", pooling="mean") as llm:
        assert llm.embed(TEXTS).shape == (4, 32)


def test_a_folder_without_the_embeddings_of_kinds_of_tokens_is_refused(tmp_path):
    """Files may lack them; `transformers` would make random ones."""
    from safetensors.numpy import load_file, save_file

    write_bert(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["embeddings.token_type_embeddings.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ow.FormatError, match=r"lacks the tensor 'token_types\.weight'"):
        models.open_model(tmp_path)


@pytest.mark.parametrize("device", ["cpu", "opencl:0", "torch:cpu", "ort:cpu"])
def test_many_long_texts_take_what_the_plan_says(folder, device, monkeypatch):
    """In as many steps as the bound on the tokens of one asks for, each text as it is alone."""
    available(device)
    for module in ("encoder", "placement"):
        monkeypatch.setattr(f"opweave_models.{module}.TOKENS", 256)
    texts = [("the quick fox " * 30)[: 4 * i + 3] for i in range(70)]
    with models.load(folder[0], device, precision="exact", pooling="mean") as llm:
        found = llm.embed(texts)
        programs = [
            llm.step.program(np.zeros(shape, np.int64), np.ones(shape, np.bool_)) for shape in ((4, 64), (32, 8))
        ]
        most = max(program.memory[device].temporaries for program in programs)
        share = llm.plan.shares[0]
        assert share.total == pytest.approx(share.weights + most, rel=0.1)  # most of it are borders of few bytes here
        alone = [llm.embed(text)[0] for text in texts[::23]]
    np.testing.assert_allclose(found[::23], alone, atol=1e-5)


def test_texts_are_padded_to_the_context_at_most(folder, monkeypatch):
    """That of `load`, for which the plan is, not that of the model."""
    with models.load(folder[0], "cpu", context=50, precision="exact", pooling="mean") as llm:
        shapes, step = [], llm.step

        def recorded(tokens, mask):
            shapes.append(tokens.shape)
            return step(tokens, mask)

        monkeypatch.setattr(llm, "step", recorded)
        llm.embed(["the quick fox " * 30] * 3)
        monkeypatch.undo()
    assert shapes == [(4, 50)]


@pytest.mark.parametrize(("texts", "longest", "shape"), [
    (1, 1, (1, 1)), (3, 5, (4, 8)), (32, 128, (32, 128)), (33, 128, (32, 128)), (32, 129, (16, 256)),
    (100, 512, (8, 512)), (100, 5000, (1, 6000)),
])  # fmt: skip
def test_a_step_has_few_shapes_and_a_bound(texts, longest, shape):
    from opweave_models.encoder import batch_shape

    assert batch_shape(texts, longest, 6000) == shape

"""Damaged and hostile files: a typed error each, and never an allocation beyond the file's size."""

from __future__ import annotations

import json
import tracemalloc

import gguf
import numpy as np
import pytest

import opweave as ow

models = pytest.importorskip("opweave_models")
REFUSALS = (ow.FormatError, ow.UnknownNameError, ow.DTypeError, ow.ShapeError, OSError)


def write_llama(path):
    """A llama of one layer as a GGUF file of some kilobytes."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in ((writer.add_block_count, 1), (writer.add_context_length, 64), (writer.add_embedding_length, 32),
                       (writer.add_feed_forward_length, 32), (writer.add_head_count, 2),
                       (writer.add_head_count_kv, 1), (writer.add_layer_norm_rms_eps, 1e-5)):  # fmt: skip
        add(value)
    writer.add_tokenizer_model("llama")
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_token_list(["<unk>", "<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)], "▁", "a", "b", "▁a", "ab"])
    writer.add_token_scores([0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 5)
    shapes = {"token_embd": (264, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,),
              "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32),
              "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (32, 32), "blk.0.ffn_up": (32, 32),
              "blk.0.ffn_down": (32, 32)}  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_llama(path)
    return path


def test_the_file_is_a_model(good):
    file = models.open_model(good)
    tokenizer = models.read_tokenizer(file)
    assert tokenizer.encode("a ab") == [1, 262, 262, 261]
    assert tokenizer.decode([1, 262, 262, 261]) == "a ab"
    pytest.importorskip("opweave_cpu")
    with models.load(good, "cpu", context=32) as llm:
        assert len(list(llm.generate("a", max_tokens=4))) <= 4


def test_mutated_files_are_refused_or_read(good, tmp_path):
    data = good.read_bytes()
    header = data.index(b"blk.0.ffn_down.weight") + 64
    rng = np.random.default_rng(1)
    path = tmp_path / "m.gguf"
    refused = 0
    tracemalloc.start()
    for _ in range(300):
        broken = bytearray(data)
        kind = rng.integers(4)
        at = int(rng.integers(header))
        if kind == 0:
            broken[at] = int(rng.integers(256))
        elif kind == 1:
            broken[at : at + 8] = rng.bytes(8)
        elif kind == 2:
            broken[at : at + 8] = b"\xff" * 8
        else:
            del broken[int(rng.integers(len(broken))) :]
        path.write_bytes(broken)
        try:
            models.read_tokenizer(models.open_model(path))
        except REFUSALS:
            refused += 1
    assert tracemalloc.get_traced_memory()[1] < 100 * len(data)
    tracemalloc.stop()
    assert refused > 60


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_type": "lama"}, "llama"), ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": "4"}, "num_attention_heads"), ({"num_key_value_heads": 3}, "multiple"),
        ({"hidden_size": 128}, "token_embd.weight"), ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ],
)  # fmt: skip
def test_folders_with_other_numbers_are_refused(tmp_path, changed, said):
    from safetensors.numpy import save_file

    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 9,
        "intermediate_size": 8,
        "max_position_embeddings": 16,
        "num_key_value_heads": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | changed), encoding="utf-8")
    save_file({"model.embed_tokens.weight": np.zeros((9, 64), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(REFUSALS, match=said):
        models.open_model(tmp_path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ow.FormatError, match=r"nothing\.gguf cannot be read"):
        models.open_model(tmp_path / "nothing.gguf")


def test_a_missing_tensor_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "clip")
    writer.add_tensor("a", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ow.UnknownNameError, match="architecture"):
        models.open_model(tmp_path / "m.gguf")

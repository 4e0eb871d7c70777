"""Damaged and hostile files: a typed error each, and never an allocation beyond the file's size."""

from __future__ import annotations

import json
import tracemalloc

import gguf
import numpy as np
import pytest

import opweave as ow
from tests.support.small_models import make_folder

models = pytest.importorskip("opweave_models")
REFUSALS = (ow.FormatError, ow.UnknownNameError, ow.DTypeError, ow.ShapeError, OSError)


def write_llama(path, change=lambda tensors: None, architecture="llama"):
    """A llama of one layer as a GGUF file of some kilobytes; ``change`` is made to its tensors."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
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
    tensors = {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    change(tensors)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
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
        ({"rms_norm_eps": {}}, "rms_norm_eps"), ({"rope_theta": 10**400}, "base"), ({"model_type": ["llama"]}, "llama"),
        ({"num_key_value_heads": [{}]}, "num_key_value_heads"), ({"partial_rotary_factor": 1e9}, "partial_rotary"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -2.0}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                           "original_max_position_embeddings": 10**400}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [10**400] * 8}}, "short_factor"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"config\.json: quantization_config: .*'fp8'"),
        ({"model_type": "gemma3", "text_config": {}, "quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"hidden_act": "quick_gelu"}, r"config\.json: hidden_act .*'quick_gelu'"), ({"hidden_act": [1]}, "hidden_act"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"model_type": "bert", "is_decoder": True}, "is_decoder is True"),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"model_type": "nomic_bert", "prenorm": True}, "prenorm is True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate is false"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5}, "partial_rotary"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"] * 2}, "layer_types"),
        ({"model_type": "gemma2", "layer_types": ["chunked_attention"]}, "layer_types"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        ({"attention_bias": 1}, "attention_bias"), ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
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


def test_queries_keys_and_values_may_be_one_matrix(good, tmp_path):
    pytest.importorskip("opweave_cpu")

    def fuse(tensors):
        parts = [tensors.pop(f"blk.0.attn_{name}.weight") for name in "qkv"]
        tensors["blk.0.attn_qkv.weight"] = np.concatenate(parts)

    def logits(path):
        with models.load(path, "cpu", precision="exact", context=32) as llm, llm.session() as session:
            session.feed("a ab")
            return session.logits()

    write_llama(tmp_path / "m.gguf", fuse)
    np.testing.assert_allclose(logits(tmp_path / "m.gguf"), logits(good), rtol=1e-4, atol=1e-4)


def test_a_tensor_that_nothing_here_uses_is_named(tmp_path):
    write_llama(tmp_path / "m.gguf", lambda tensors: tensors.update({"blk.0.attn_q.scale": np.ones(1, np.float32)}))
    with pytest.raises(ow.FormatError, match=r"m\.gguf: tensor 'blk\.0\.attn_q\.scale'"):
        models.open_model(tmp_path / "m.gguf")


def test_experts_in_blocks_one_by_one_are_refused(tmp_path):
    pytest.importorskip("transformers")
    from safetensors.numpy import load_file

    make_folder("mixtral", tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mixtral")
    for name, values in load_file(tmp_path / "model.safetensors").items():
        kind = gguf.GGMLQuantizationType.Q8_0 if "experts" in name else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ow.FormatError, match=r"ffn_gate_exps.* floats are stacked"):
        models.plan_placement(models.open_model(tmp_path), "cpu")


def test_a_missing_bias_of_qwen2_is_named(tmp_path):
    def biased(tensors, names="qkv"):
        tensors.update({f"blk.0.attn_{n}.bias": np.ones(32 if n == "q" else 16, np.float32) for n in names})

    write_llama(tmp_path / "all.gguf", biased, "qwen2")
    assert "blk.0.attn_k.bias" in models.open_model(tmp_path / "all.gguf").tensors
    write_llama(tmp_path / "m.gguf", lambda tensors: biased(tensors, "qv"), "qwen2")
    with pytest.raises(ow.FormatError, match=r"m\.gguf lacks the tensor 'blk\.0\.attn_k\.bias'"):
        models.open_model(tmp_path / "m.gguf")


def gguf_config(architecture="llama", **changed):
    keys = {"block_count": 4, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32, "vocab_size": 9,
            "attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5} | changed  # fmt: skip
    metadata = {"general.architecture": architecture, **{f"{architecture}.{key}": v for key, v in keys.items()}}
    return models.config.config_from_gguf("m.gguf", metadata, {})


def test_rotary_scaling_is_read_as_llama_cpp_reads_it():
    assert gguf_config(**{"rope.scaling.factor": 4.0}).rope.scale == 0.25  # without a type: linear
    assert gguf_config(**{"rope.scale_linear": 4.0}).rope.scale == 0.25
    assert gguf_config(**{"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}).rope.scale == 1
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5}
    rope = gguf_config(**yarn, **{"rope.scaling.yarn_ext_factor": 0.5, "rope.scaling.yarn_attn_factor": 0.5}).rope
    assert (rope.scale, rope.length, rope.yarn["ext_factor"]) == (0.25, 0.25, 0.5)
    for key in ("rope.scaling.factor", "rope.freq_base"):
        with pytest.raises(ow.FormatError, match=rf"m\.gguf: llama\.{key}"):
            gguf_config(**{key: -4.0})


def test_which_layers_have_a_window_is_read():
    key = "attention.sliding_window_pattern"
    for architecture, given, expected in (
        ("gemma2", {}, (True, False, True, False)), ("gemma2", {key: 3}, (True, True, False, True)),
        ("gemma3", {key: np.array([False, True, True, False])}, (False, True, True, False)),
    ):  # fmt: skip
        found = gguf_config(architecture, **{"attention.sliding_window": 8}, **given)
        assert found.windowed == expected
    with pytest.raises(ow.FormatError, match="sliding_window_pattern"):
        gguf_config("gemma3", **{key: np.array([True])})


def test_a_chat_template_that_is_none_is_left_out(tmp_path):
    from tests.support.small_models import write_tokenizer

    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [[1], {"name": "default"}]}', encoding="utf-8")
    config = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 4, "num_attention_heads": 1,
              "vocab_size": 9, "intermediate_size": 4, "max_position_embeddings": 16,
              "tie_word_embeddings": True}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    from safetensors.numpy import save_file

    names = [f"model.layers.0.{name}" for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj")]  # fmt: skip
    norms = ["model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"]
    tensors: dict[str, np.ndarray] = {f"{name}.weight": np.zeros((4, 4), np.float32) for name in names}
    tensors |= {f"{name}.weight": np.zeros(4, np.float32) for name in norms}
    save_file({**tensors, "model.embed_tokens.weight": np.zeros((9, 4), np.float32)}, tmp_path / "model.safetensors")
    assert models.open_model(tmp_path).chat_template is None
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ow.errors.FormatError, match=r"chat_template\.jinja is no UTF-8"):
        models.open_model(tmp_path)


def test_a_chat_template_that_is_not_valid_is_an_error_that_names_the_file(good):
    from dataclasses import replace

    pytest.importorskip("opweave_cpu")
    model = models.load(replace(models.open_model(good), chat_template="{% for"), "cpu", context=32)
    with model, pytest.raises(ow.FormatError, match=r"of .*m\.gguf\) is not valid"):
        _ = model.template

"""Each decoder against transformers, which reads the same folder: logits of a prompt in chunks and of single steps."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import opweave as ow
from tests.support.small_models import KINDS, YARN, make_folder

torch = pytest.importorskip("torch")
load_file, save_file = (getattr(pytest.importorskip("safetensors.torch"), n) for n in ("load_file", "save_file"))
transformers = pytest.importorskip("transformers")
pytest.importorskip("opweave_cpu")
models = pytest.importorskip("opweave_models")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(kind):
        if kind not in made:
            path = tmp_path_factory.mktemp(kind)
            made[kind] = path, make_folder(kind, path)
        return made[kind]

    return folder


def distance(ours, theirs):
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def expected(reference, ids):
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0].float().numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(folders, kind):
    path, reference = folders(kind)
    ids = np.random.default_rng(1).integers(3, 300, 90).tolist()
    truth = expected(reference, ids)
    with models.load(path, "cpu", kv="f32", precision="exact", context=128) as llm, llm.session() as session:
        session.feed(ids[:37])
        assert distance(session.logits(), truth[36]) < 1e-5
        for at in range(37, 40):
            session.feed([ids[at]])
            assert distance(session.logits(), truth[at]) < 1e-5
        session.feed(ids[40:])
        assert distance(session.logits(), truth[-1]) < 1e-5


def test_contexts_beyond_training_have_the_long_factors(folders):
    path, reference = folders("phi3-long")
    ids = np.random.default_rng(2).integers(3, 300, 200).tolist()
    truth = expected(reference, ids)
    with models.load(path, "cpu", kv="f32", precision="exact", context=256) as llm, llm.session() as session:
        session.feed(ids)
        assert distance(session.logits(), truth[-1]) < 1e-5


def edit_config(path, change):
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    change(values)
    (path / "config.json").write_text(json.dumps(values), encoding="utf-8")


WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}


@pytest.mark.parametrize(
    ("kind", "options", "dropped", "added"),
    [
        ("llama", {"hidden_act": "gelu"}, (), {}), ("llama", {"hidden_act": "relu"}, (), {}),
        ("qwen2", {"hidden_act": "gelu"}, (), {}), ("mixtral", {"hidden_act": "gelu"}, (), {}),
        ("phi3", {"hidden_act": "gelu_new"}, (), {}), ("gemma2", {"hidden_activation": "silu"}, (), {}),
        ("gemma3", {"hidden_activation": "relu"}, (), {}), ("qwen2", WINDOW, ("layer_types",), {}),
        ("qwen3", WINDOW, ("layer_types",), {}), ("qwen3moe", WINDOW, (), {}),
        ("qwen3", WINDOW, ("layer_types",), {"use_sliding_window": False}), ("llama", {}, (), {"sliding_window": 6}),
        ("llama", {}, (), {"partial_rotary_factor": 0.5}),
        ("llama", {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}}, (), {}),
        ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.5, "beta_fast": 16.0}}, (), {}),
        ("gemma2", {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0},
         ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"), {}),
        ("mixtral", {}, ("rope_parameters", "num_experts_per_tok"), {}),
        ("gemma3", {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}, (), {}),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                                        "sliding_attention": {"rope_type": "linear", "factor": 4.0}}}, (), {}),
    ],
)  # fmt: skip
def test_what_a_config_says_or_leaves_out_is_read_as_transformers_reads_it(tmp_path, kind, options, dropped, added):
    make_folder(kind, tmp_path, **options)
    edit_config(tmp_path, lambda values: [values.pop(key) for key in dropped] + [values.update(added)])
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = np.random.default_rng(3).integers(3, 300, 20).tolist()
    with models.load(tmp_path, "cpu", kv="f32", precision="exact", context=64) as llm, llm.session(ids) as session:
        assert distance(session.logits(), expected(reference, ids)[-1]) < 1e-5


@pytest.mark.parametrize(
    ("kind", "given"),
    [(kind, {}) for kind in ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe",
                             "bert", "nomic_bert")]
    + [(kind, {"use_sliding_window": True}) for kind in ("qwen2", "qwen3", "qwen3_moe")]
    + [("gemma3", {"text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                                   "model_type": "gemma3_text", "sliding_window": 1024,
                                   "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}})],
)  # fmt: skip
def test_keys_that_a_config_leaves_out_are_those_of_transformers(kind, given):
    read = models.config.config_from_hugging_face
    whole = transformers.AutoConfig.for_model(kind, **json.loads(json.dumps(given))).to_dict()
    assert read("config.json", {"model_type": kind, **given}) == read("config.json", whole)


def changed(source, path, change):
    """A copy of a folder, with changed tensors."""
    copy = shutil.copytree(source, path / "copy")
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


@pytest.mark.parametrize(
    ("kind", "missing", "said"),
    [("llama", "lm_head.weight", r"lm_head\.weight"),
     ("qwen2", "model.layers.1.self_attn.k_proj.bias", r"blk\.1\.attn_k\.bias"),
     ("llama-bias", "model.layers.1.self_attn.q_proj.bias", r"blk\.1\.attn_q\.bias"),
     ("llama-bias", "model.layers.2.mlp.up_proj.bias", r"blk\.2\.ffn_up\.bias")],
)  # fmt: skip
def test_a_missing_tensor_of_a_folder_is_named(folders, tmp_path, kind, missing, said):
    with pytest.raises(ow.FormatError, match=rf"copy lacks the tensor .*{said}"):
        models.open_model(changed(folders(kind)[0], tmp_path, lambda tensors: tensors.pop(missing)))


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [("llama", "lm_head.bias", r"lm_head\.bias"), ("llama", "score.weight", r"score\.weight"),
     ("llama", "model.layers.0.self_attn.q_proj.lora_A.weight", "lora_A"),
     ("llama", "model.layers.0.self_attn.q_proj.weight_scale_inv", "weight_scale_inv"),
     ("llama", "model.layers.1.self_attn.q_proj.bias", r"blk\.1\.attn_q\.bias"),
     ("mixtral", "model.layers.0.self_attn.q_proj.bias", r"blk\.0\.attn_q\.bias"),
     ("llama", "norm.weight", r"norm\.weight' are the same")],
)  # fmt: skip
def test_a_tensor_of_a_folder_that_nothing_here_uses_is_named(folders, tmp_path, kind, name, said):
    with pytest.raises(ow.FormatError, match=rf"copy: tensor.*{said}"):
        models.open_model(changed(folders(kind)[0], tmp_path, lambda tensors: tensors.update({name: torch.ones(64)})))


def test_a_tensor_that_transformers_computes_anew_is_ignored(folders, tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    copy = changed(folders("llama")[0], tmp_path, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert list(models.open_model(copy).tensors) == list(models.open_model(folders("llama")[0]).tensors)


def test_a_file_beside_the_model_of_a_folder_is_not_read(folders, tmp_path):
    copy = changed(folders("llama")[0], tmp_path, lambda tensors: None)
    save_file({"blk.0.attn_q.bias": torch.ones(64)}, copy / "other.safetensors")
    assert list(models.open_model(copy).tensors) == list(models.open_model(folders("llama")[0]).tensors)
    (copy / "model.safetensors").rename(copy / "weights.safetensors")
    with pytest.raises(ow.FormatError, match=r"copy: tensor 'blk\.0\.attn_q\.bias'"):
        models.open_model(copy)
    (copy / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ow.FormatError, match=r"adapter_config\.json"):
        models.open_model(copy)

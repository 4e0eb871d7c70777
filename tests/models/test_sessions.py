"""Sessions, sampling, ends of answers, batches of several clients, and placements over two devices."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import opweave as ow
from tests.support.small_models import make_folder

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("opweave_cpu")
models = pytest.importorskip("opweave_models")
TEXT = "in the one other"


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Heads of 32 elements, whole blocks."""
    path = tmp_path_factory.mktemp("wide")
    make_folder("llama-wide", path)
    return path


@pytest.fixture(scope="module")
def llm(folder):
    with models.load(folder, "cpu", context=128, sequences=3, kv="f32", template="chatml") as made:
        yield made


def text_of(pieces):
    return "".join(piece.text for piece in pieces)


def test_a_session_goes_on_where_it_was(llm):
    with llm.session() as session:
        session.feed(TEXT)
        first = [piece.token for piece in session.generate(6)]
        rest = [piece.token for piece in session.generate(6)]
    with llm.session() as session:
        session.feed(TEXT)
        assert [piece.token for piece in session.generate(12)] == first + rest


def test_a_prompt_in_pieces_gives_the_logits_of_the_whole(llm):
    ids = np.random.default_rng(0).integers(5, 260, 100).tolist()
    with llm.session() as one, llm.session() as two:
        one.feed(ids)
        for at in range(0, 100, 33):
            two.feed(ids[at : at + 33])
            two.logits()
        np.testing.assert_allclose(one.logits(), two.logits(), rtol=1e-4, atol=1e-5)


def test_a_fork_goes_on_as_its_origin_would(llm):
    with llm.session() as one:
        one.feed(TEXT)
        with one.fork() as other:
            first = [piece.token for piece in other.generate(8)]
            other.feed("the")
            second = [piece.token for piece in other.generate(3)]
        assert [piece.token for piece in one.generate(8)] == first
        one.feed("the")
        assert [piece.token for piece in one.generate(3)] == second


def test_a_saved_session_goes_on_elsewhere(folder, wide, llm, tmp_path):
    path = tmp_path / "session"
    with llm.session() as session:
        session.feed(TEXT)
        list(session.generate(4))
        session.feed(" in")
        session.save(path)
        tokens = session.tokens.copy()
        expected = [piece.token for piece in session.generate(6)]
    with models.load(folder, "host", context=64, kv="f32") as other, other.restore(path) as session:
        assert session.tokens == tokens
        assert [piece.token for piece in session.generate(6)] == expected
    with models.load(wide, "cpu", context=64, kv="f32") as other, pytest.raises(ow.FormatError, match="label 'llama"):
        other.restore(path)
    with pytest.raises(ow.FormatError, match="no saved sequence"):
        llm.restore(folder / "config.json")


def test_warm_steps_build_nothing(folder):
    with models.load(folder, "cpu", context=200, sequences=2) as llm:
        llm.warm()
        with llm.session() as one, llm.session() as two:
            one.feed(list(range(5, 70)))
            two.feed([5])
            llm.advance({s.sequence: s.tokens for s in (one, two)})
            built = llm.step.scheduler.stats.built
            for _ in range(70):
                llm.advance({one.sequence: [7], two.sequence: [9]})
            llm.advance({one.sequence: [7]})
            assert llm.step.scheduler.stats.built == built


def test_the_same_seed_gives_the_same_text_and_another_one_another(llm):
    def written(seed):
        return [
            p.token for p in llm.generate(TEXT, max_tokens=20, sampling=models.Sampling(1.5, 0, 1.0, 0.0, 1.0, seed))
        ]

    assert written(7) == written(7)
    assert written(7) != written(8)


def test_sampling_keeps_to_what_its_limits_leave():
    from opweave_models.sampling import Sampler

    logits = np.array([0, 3, 2.9, -1, 2.8], np.float32)
    for options, allowed in (
        ({"top_k": 2}, {1, 2}), ({"top_k": 0, "top_p": 0.3}, {1}), ({"min_p": 0.85, "top_p": 1.0}, {1, 2}),
        ({"temperature": 0}, {1}), ({"top_k": 1, "repeat_penalty": 2.0}, {2}),
    ):  # fmt: skip
        sampler = Sampler(models.Sampling(**{"temperature": 1.0, **options}), None)  # type: ignore[arg-type]
        assert {sampler.choose(logits, [1]) for _ in range(100)} == allowed
    with pytest.raises(ow.BoundsError, match="top_p"):
        models.Sampling(top_p=2)


def test_stop_strings_end_an_answer_and_are_not_part_of_it(llm):
    whole = text_of(llm.generate(TEXT, max_tokens=24))
    stop = whole[4:7]
    pieces = list(llm.generate(TEXT, max_tokens=24, stop=[stop]))
    assert text_of(pieces) == whole[: whole.index(stop)]
    assert pieces[-1].reason == "stop"


def test_probabilities_are_those_of_the_logits(llm):
    with llm.session() as session:
        session.feed(TEXT)
        wide = session.logits().astype(np.float64)
        piece = next(session.generate(1, logprobs=3))
    shares = wide - np.log(np.exp(wide).sum())
    assert piece.logprob == pytest.approx(shares[piece.token], abs=1e-6)
    assert [token for token, _ in piece.top] == np.argsort(-wide)[:3].tolist()


def test_an_answer_can_be_cancelled(llm):
    with llm.session() as session:
        session.feed(TEXT)
        pieces = []
        for piece in session.generate(50):
            pieces.append(piece)
            if len(pieces) == 3:
                session.cancel()
        assert len(pieces) == 4
        assert pieces[-1].reason == "cancelled"


def test_an_answer_is_held_to_a_schema(llm):
    pytest.importorskip("llguidance")
    import json

    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(text_of(llm.generate(TEXT, max_tokens=60, schema=schema)))["a"] in (1, 2)


def test_what_does_not_fit_is_refused_before_it_is_computed(llm):
    with llm.session() as session, pytest.raises(ow.BoundsError, match="context of 128"):
        session.feed([5] * 129)
    with llm.session() as session, pytest.raises(ow.BoundsError, match="nothing to continue"):
        next(session.generate())
    with pytest.raises(ow.UnsupportedOpError, match="decoder"):
        llm.embed(["a"])
    sessions = [llm.session() for _ in range(3)]
    with pytest.raises(ow.BoundsError, match="in use"):
        llm.session()
    for session in sessions:
        session.close()
    with pytest.raises(ow.FormatError, match="message"):
        next(llm.chat([{"role": "user"}]))


def test_several_clients_get_what_each_alone_would(llm):
    from opweave_models.batching import Batcher

    prompts = [llm.tokenizer.encode(text) for text in (TEXT, "other", "the", "one one one", "in")]
    alone = []
    for ids in prompts:
        with llm.session() as session:
            session.feed(ids)
            alone.append([piece.token for piece in session.generate(10)])
    batcher = Batcher(llm, waiting=5)
    try:
        requests = [batcher.submit(ids, 10, models.Sampling(temperature=0)) for ids in prompts]
        assert [[piece.token for piece in request] for request in requests] == alone
    finally:
        batcher.close()


@pytest.mark.parametrize("kv", ["f16", "bf16", "q8_0", "q4_0"])
def test_caches_of_other_types_are_near(wide, kv):
    found = []
    for dtype in (kv, "f32"):
        with models.load(wide, "cpu", context=128, kv=dtype) as llm, llm.session() as session:
            session.feed(TEXT)
            found.append(session.logits())
    assert 0 < np.abs(found[0] - found[1]).max() / np.abs(found[1]).max() < (0.1 if kv == "q4_0" else 0.02)


def test_a_plan_divides_layers_by_memory_and_by_proportion(folder):
    file = models.open_model(folder)
    whole = models.plan_placement(file, "cpu", context=64)
    assert whole.shares[0].weights == file.nbytes
    assert "cpu" in str(whole)
    cut = models.plan_placement(file, ["host", "cpu"], context=64, split=[1, 2])
    assert cut.layers == ("host", "cpu", "cpu")
    assert sum(share.weights for share in cut.shares) == file.nbytes
    layer = 2 * sum(share.weights for share in cut.shares) // 7
    small = models.plan_placement(
        file, ["host", "cpu"], context=64, memory={"host": cut.shares[0].compute + cut.shares[0].cache + layer}
    )
    assert small.layers[-1] == "cpu"
    with pytest.raises(ow.AllocationError, match="context"):
        models.plan_placement(file, ["cpu"], context=64, memory={"cpu": "10KiB"})
    with pytest.raises(ow.UnknownNameError):
        models.plan_placement(file, ["cpu"], context=64, memory={"host": "1GiB"})


def test_a_budget_is_found_by_any_name_of_its_device(folder, monkeypatch):
    """``cpu`` names the first of two, ``cpu:0``; devices of experts and patterns have budgets too."""
    file = models.open_model(folder)
    monkeypatch.setenv("OPWEAVE_CPU_DEVICES", "2")
    registry = ow.Registry()
    monkeypatch.setattr(ow, "device", registry.device)
    options = {"context": 64, "split": [1, 1], "patterns": {"*ffn_up*": "host"}}
    made = models.plan_placement(file, ["cpu:0", "cpu:1"], **options, memory={"CPU": "1GiB", "host": "1GiB"})
    assert [(share.device, share.budget) for share in made.shares if share.budget == 1 << 30] == [
        ("cpu:0", 1 << 30), ("host", 1 << 30)
    ]  # fmt: skip
    for name in ("cpu", "host"):
        with pytest.raises(ow.AllocationError, match="by the budget that was given"):
            models.plan_placement(file, ["cpu:0", "cpu:1"], **options, memory={name: "10KiB"})


def test_a_model_over_two_devices_says_the_same(folder, llm):
    with models.load(folder, ["cpu", "host"], context=128, kv="f32", split=[2, 1]) as two:
        assert len(two.plan.shares) == 2
        assert text_of(two.generate(TEXT, max_tokens=12)) == text_of(llm.generate(TEXT, max_tokens=12))
    with models.load(folder, ["cpu"], context=128, kv="f32", patterns={"*ffn_up*": "host"}) as moved:
        assert {share.device for share in moved.plan.shares} == {"cpu", "host"}
        assert text_of(moved.generate(TEXT, max_tokens=12)) == text_of(llm.generate(TEXT, max_tokens=12))


def test_weights_are_quantized_while_they_are_loaded(folder, llm):
    with models.load(folder, "cpu", context=128, quantize="q8_0") as small:
        assert isinstance(small.weights["blk.0.attn_q.weight"].dtype, ow.DType)
        assert small.weights["blk.0.attn_q.weight"].dtype.name == "q8_0"
        with small.session() as one, llm.session() as two:
            one.feed(TEXT)
            two.feed(TEXT)
            assert np.abs(one.logits() - two.logits()).max() < 0.1 * np.abs(two.logits()).max()


def test_a_bench_also_measures_each_device_that_holds_the_model_alone(folder, capsys):
    from opweave_models.commands import bench

    total = models.plan_placement(models.open_model(folder), "cpu", context=12, precision="exact").shares[0].total
    options: dict[str, Any] = {"split": "1,1", "prompt": 8, "tokens": 3, "precision": "exact"}
    bench(folder, "cpu,host", memory=[f"cpu={total - 1}"], as_json=True, **options)
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == ["cpu", "host"]
    assert [row["devices"] for row in found["alone"]] == [["host"]]
    assert min(found["prompt"], found["answer"], found["alone"][0]["answer"]) > 0
    bench(folder, "cpu,host", **options)
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in printed[:3]] == ["cpu, host", "cpu", "host"]

"""Wrong arguments from Python get typed errors before anything changes; closed models keep nothing."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import opweave as ow
from opweave.errors import BoundsError, FormatError, LayoutError, LifetimeError, SchedulerError, UnsupportedOpError
from tests.support.small_models import make_folder

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("opweave_cpu")
models = pytest.importorskip("opweave_models")
commands = pytest.importorskip("opweave_models.commands")


@pytest.fixture(scope="module")
def llm(folder):
    with models.load(folder, "cpu", context=64, sequences=2, kv="f32", template="chatml") as made:
        yield made


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0}, {"max_tokens": 2.5}, {"max_tokens": True}, {"max_tokens": "5"}, {"max_tokens": None},
        {"logprobs": -1}, {"logprobs": True}, {"logprobs": "3"}, {"sampling": {"temperature": 0}}, {"sampling": "x"},
        {"stop": None}, {"stop": 5}, {"stop": [5]},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_options_of_an_answer_are_refused_and_take_no_place(llm, options):
    for _ in range(3):
        with pytest.raises(BoundsError, match=next(iter(options))):
            next(iter(llm.generate("in the", **options)))
    with llm.session(), llm.session():
        pass


def test_a_single_stop_string_is_one_text(llm):
    whole = "".join(piece.text for piece in llm.generate("in the one", max_tokens=30))
    stop = whole[8:11]
    for given in (stop, [stop]):
        got = "".join(piece.text for piece in llm.generate("in the one", max_tokens=30, stop=given))
        assert got == whole[: whole.index(stop)]


@pytest.mark.parametrize("ids", ["abc", 5, [None], ["a"], [-1], [10**9], np.zeros((2, 2), int), [1.5]], ids=repr)
def test_what_is_no_token_is_refused_and_takes_no_place(llm, ids):
    for _ in range(3):
        with pytest.raises(BoundsError, match="tokens are ids from 0 to"):
            llm.session(ids)
    with llm.session() as session, llm.session():
        if not isinstance(ids, str):
            with pytest.raises(BoundsError, match="tokens are ids from 0 to"):
                session.feed(ids)
        session.feed(np.array([5, 6]))
        assert session.logits().shape == (llm.config.vocabulary,)


@pytest.mark.parametrize("sequence", [0, 99, -1, "a"])
def test_sequences_that_are_not_in_use_are_not_fed(llm, sequence):
    with llm.session([5, 6]) as session:
        session.logits()
    with pytest.raises(BoundsError, match="not in use"):
        llm.advance({sequence: [5]})


def test_texts_and_messages_of_another_type_are_refused(llm):
    with pytest.raises(BoundsError, match="a text is a str"):
        next(iter(llm.generate(5)))
    for messages in (None, "hi", [5], []):
        with pytest.raises(FormatError, match="message"):
            next(iter(llm.chat(messages)))
    with pytest.raises(BoundsError, match="ids from 0"):
        llm.tokenizer.decode([-1])
    for tokens in ("a", 0):
        with pytest.raises(BoundsError, match="at least one token"):
            llm.warm(tokens)
    schema = {"enum": {1, 2}}
    with pytest.raises((FormatError, ow.errors.Unavailable)):
        next(iter(llm.generate("in", schema=schema)))


@pytest.mark.parametrize("template", ["chatlm", "missing.jinja", "{{", 5])
def test_a_template_that_is_none_is_refused_before_anything_is_loaded(folder, template, monkeypatch):
    monkeypatch.setattr("opweave_models.model._quantized", None)
    with pytest.raises(FormatError, match="template"):
        models.load(folder, "cpu", template=template)


@pytest.mark.parametrize(("precision", "error"), [({"*": "foo"}, ow.UnknownNameError), ({5: "int8"}, ow.SchedulerError),
                                                  ("foo", ow.UnknownNameError), (5, ow.SchedulerError)])  # fmt: skip
def test_a_precision_that_is_none_is_refused_before_anything_is_loaded(folder, precision, error, monkeypatch):
    monkeypatch.setattr("opweave_models.model._quantized", None)
    with pytest.raises(error, match="precision"):
        models.load(folder, "cpu", precision=precision)


@pytest.mark.parametrize("length", [0, -1, 10**9, 1.5])
def test_a_plan_of_a_length_that_the_model_does_not_have_is_refused(folder, length):
    from opweave_models.model import planned

    with pytest.raises(BoundsError, match="made for 1 to"), planned(folder, [ow.device("cpu")], length):
        pass


def test_a_template_that_needs_more_memory_than_there_is_is_refused(folder):
    with models.load(folder, "cpu", context=64, template="{{ bos_token * 4000000000000000000 }}") as model:
        template = model.template
    with pytest.raises(FormatError, match="refuses"):
        template.render([{"role": "user", "content": "hi"}])


def test_a_closed_model_keeps_no_keys_and_its_sessions_say_that_it_was_closed(folder):
    with models.load(folder, "cpu", context=64) as model:
        session = model.session([5, 6, 7])
        session.logits()
        keys = weakref.ref(model.cache)
    gc.collect()
    assert model.cache is None
    assert keys() is None
    with pytest.raises(LifetimeError, match="closed"):
        session.feed([8])
    session.close()
    with pytest.raises(LifetimeError, match="closed"):
        session.feed([8])
    assert session.tokens == [5, 6, 7]


def test_a_sequence_is_not_restored_where_keys_are_rotated_by_other_factors(tmp_path):
    make_folder("phi3-long", tmp_path)
    original = models.open_model(tmp_path).config.rope.original_context
    with models.load(tmp_path, "cpu", context=original) as short, short.session([5, 6, 7]) as session:
        session.save(tmp_path / "saved")
    with models.load(tmp_path, "cpu", context=original) as short, short.restore(tmp_path / "saved") as same:
        assert same.tokens == [5, 6, 7]
    with models.load(tmp_path, "cpu", context=original + 1) as longer, pytest.raises(FormatError):
        longer.restore(tmp_path / "saved")


def test_low_temperatures_choose_the_most_likely_token(llm):
    hot, cold = models.Sampling(temperature=1e-320), models.Sampling(temperature=0)
    texts = ["".join(p.text for p in llm.generate("in the", max_tokens=8, sampling=each)) for each in (hot, cold)]
    assert texts[0] == texts[1]


def refused(folder, error, match, monkeypatch, **options):
    """By plans and by loading, of which nothing but the metadata is read."""
    with pytest.raises(error, match=match):
        models.plan_placement(models.open_model(folder), **options)
    monkeypatch.setattr("opweave_models.model.read_tokenizer", None)
    with pytest.raises(error, match=match):
        models.load(folder, **options)


@pytest.mark.parametrize("kv", ["q8_0", "q4_0"])
def test_keys_and_values_in_blocks_that_are_larger_than_heads_are_refused(folder, monkeypatch, kv):
    match = f"in {kv} are blocks of 32 elements, and the head size of this model is 16: .* such as kv='f16'"
    refused(folder, LayoutError, match, monkeypatch, devices="cpu", kv=kv)


@pytest.mark.parametrize("devices", ["cpu,cpu", "host,cpu,host", ["cpu", "CPU"], "cpu,CPU"], ids=str)
def test_a_device_that_is_named_twice_is_refused(folder, monkeypatch, devices):
    twice = "host" if "host" in devices else "cpu"
    refused(folder, SchedulerError, f"each device is named once, and {twice} more often", monkeypatch, devices=devices)


@pytest.mark.parametrize("command", [
    ["models", "bench", "MODEL", "--prompt", "16"], ["models", "bench", "MODEL", "--prompt", "1", "--tokens", "1"],
    ["generate", "MODEL", "-p", "in", "--context", "81"], ["chat", "MODEL", "--context", "81"],
], ids=" ".join)  # fmt: skip
def test_commands_that_continue_texts_say_that_a_model_is_an_encoder(tmp_path, monkeypatch, command):
    from tests.models.test_encoders import write_bert

    write_bert(tmp_path)
    monkeypatch.setattr("opweave_models.commands.load", None)
    app = typer.Typer()
    commands.add(app)
    done = CliRunner().invoke(app, [str(tmp_path) if each == "MODEL" else each for each in command])
    assert isinstance(done.exception, UnsupportedOpError)
    assert "is an encoder" in str(done.exception)

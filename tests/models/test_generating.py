"""Answers: beginnings that are computed once, prompts between the steps of others, caches of every type that fork and
are saved, sampling by seed, stop strings, steps that build nothing."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import opweave as ow
from opweave.tracing import TRACE
from tests.support.small_models import make_folder

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("opweave_cpu")
models = pytest.importorskip("opweave_models")
Batcher = pytest.importorskip("opweave_models.batching").Batcher

RNG = np.random.default_rng(3)
FIRST, SECOND = (RNG.integers(5, 260, 40).tolist() for _ in range(2))
GREEDY = models.Sampling(temperature=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder and model of transformers, by kind: heads of 32 elements, which are whole blocks."""
    made = {}
    for kind in ("llama", "gemma3"):
        path = tmp_path_factory.mktemp(kind)
        made[kind] = path, make_folder(kind, path, head_dim=32)
    return made


@pytest.fixture(scope="module")
def ringed(folders):
    """Windows of 8 tokens."""
    with models.load(folders["gemma3"][0], "cpu", context=128, sequences=3, kv="f32") as made:
        yield made


@pytest.fixture(scope="module")
def plain(folders):
    with models.load(folders["llama"][0], "cpu", context=128, sequences=3, kv="f32", template="chatml") as made:
        yield made


@pytest.fixture(params=["plain", "ringed"])
def llm(request):
    model = request.getfixturevalue(request.param)
    forget(model)
    return model


def forget(model):
    """Let all kept sequences go."""
    for session in [model.session() for _ in range(model.plan.sequences)]:
        session.close()
    assert model.decoder_cache().free_sequences == model.plan.sequences


@pytest.fixture
def computed(monkeypatch):
    """What `KVCache.feed` gets: a list of ``{sequence: count}``."""
    fed, feed = [], ow.KVCache.feed

    def counted(self, tokens):
        fed.append({sequence: len(ids) for sequence, ids in tokens.items()})
        return feed(self, tokens)

    monkeypatch.setattr(ow.KVCache, "feed", counted)
    return fed


def total(fed):
    return sum(sum(counts.values()) for counts in fed)


def tokens_of(pieces):
    return [piece.token for piece in pieces]


def alone(model, ids, count):
    """The answer to a prompt of which nothing was computed before."""
    with model.session() as session:
        session.feed(ids)
        found = tokens_of(session.generate(count))
    forget(model)
    return found


# --- beginnings that are computed once ------------------------------------------------------------------------------


def test_a_prompt_that_goes_on_from_an_answer_computes_only_what_is_new(llm, computed):
    answer = alone(llm, FIRST, 6)
    longer = [*FIRST, *answer, 9, 8, 7]
    truth = alone(llm, longer, 6)
    with llm.session(FIRST) as session:
        assert tokens_of(session.generate(6)) == answer
    del computed[:]
    with llm.session(longer) as session:
        assert tokens_of(session.generate(6)) == truth
    assert llm.stats.prompt_tokens == 4, "the last token of the answer, and three more"
    assert total(computed) == 4 + 5
    assert llm.decoder_cache().free_sequences == 2


def test_a_beginning_in_common_serves_where_a_ring_still_has_it(llm, computed):
    """A chat in another direction: 30 tokens are the same, of which windows of 8 have forgotten the last."""
    other = [*FIRST[:30], *SECOND[:10]]
    truth = alone(llm, other, 5)
    with llm.session(FIRST) as first, llm.session(FIRST[:5]) as short:
        first.logits()
        short.logits()
        del computed[:]
        with llm.session(other) as second:
            assert tokens_of(second.generate(5)) == truth
        known = 30 if not any(llm.config.windowed) else 5
        assert total(computed) == 40 - known + 4
        assert tokens_of(first.generate(5)) == alone_beside(llm, first, 5)


def alone_beside(llm, session, count):
    """What a session goes on with, computed anew: nothing that was shared has changed."""
    ids = session.tokens[: len(session.tokens) - count]
    with llm.session() as fresh:
        fresh.feed(ids)
        return tokens_of(fresh.generate(count))


def test_the_same_prompt_computes_its_last_token(llm, computed):
    truth = alone(llm, FIRST, 1)
    for expected in (40, 1, 1):
        del computed[:]
        with llm.session(FIRST) as session:
            assert tokens_of(session.generate(1)) == truth
        assert total(computed) == expected


def test_kept_sequences_give_their_places_the_longest_unused_first(plain, computed):
    forget(plain)
    prompts = [FIRST, SECOND, SECOND[::-1]]
    for ids in (*prompts, FIRST):
        with plain.session(ids) as session:
            session.logits()
    with plain.session([3, 3, 3]) as session:  # in the place of the second
        session.logits()
    del computed[:]
    for ids, count in ((FIRST, 1), (prompts[2], 1), (SECOND, 40)):
        with plain.session(ids) as session:
            session.logits()
        assert computed.pop() == {session.sequence: count}
    with plain.session(), plain.session(), plain.session(), pytest.raises(ow.BoundsError, match="in use"):
        plain.session(FIRST)


def test_a_single_sequence_is_cut_to_the_beginning(folders, computed):
    with models.load(folders["llama"][0], "cpu", context=128, kv="f32", template="plain") as llm:
        chat = [{"role": "user", "content": "in the one"}]
        texts = []
        for _ in range(2):
            for more in ([], [{"role": "assistant", "content": "other"}, {"role": "user", "content": "the"}]):
                texts.append(tokens_of(llm.chat([*chat, *more], max_tokens=4)))
                ids = llm.chat_ids(llm.template.render([*chat, *more]))
        assert texts[:2] == texts[2:]
        assert llm.stats.prompt_tokens < len(ids)
        assert alone(llm, ids, 4) == texts[1]
        list(llm.generate("in the one other", max_tokens=2))
        list(llm.generate("in the one other one", max_tokens=2))
        assert llm.stats.prompt_tokens < len(llm.tokenizer.encode(" one")) + 2


def test_restored_and_forked_sessions_take_the_places_of_kept_ones(llm, tmp_path):
    with llm.session(FIRST) as session:
        truth = session.logits()
        session.save(tmp_path / "a")
        for ids in (SECOND, SECOND[::-1]):
            with llm.session(ids) as other:
                other.logits()
        with session.fork() as fork, llm.restore(tmp_path / "a") as restored:
            np.testing.assert_array_equal(fork.logits(), truth)
            np.testing.assert_allclose(restored.logits(), truth, rtol=1e-4, atol=1e-5)


def test_a_beginning_in_common_is_kept_once(folders, monkeypatch):
    """In blocks of 50 tokens, four for each context. Answers are those of sequences that share none, and each sequence
    reaches its context: kept ones leave their blocks with their places."""
    prompts = [[*FIRST, *SECOND, *FIRST, last] for last in (7, 8, 9)]
    answers = []
    for shares in (False, True):
        monkeypatch.setattr(type(ow.device("cpu")), "reads_block_tables", shares)
        with models.load(folders["llama"][0], "cpu", context=200, sequences=3, kv="f32") as llm:
            cache, sessions = llm.decoder_cache(), []
            for ids in prompts:
                sessions.append(llm.session(ids))
                sessions[-1].logits()
            assert cache.free_blocks == (12 - 3 - 1 - 1 if shares else 0)
            answers.append([tokens_of(session.generate(5)) for session in sessions])
            for session in sessions:
                session.close()
            for first in (3, 4, 5) if shares else ():
                llm.session([first] * 200).logits()
                assert cache.free_blocks == {3: 4, 4: 1, 5: 0}[first]
            assert not shares or cache.lengths.tolist() == [200] * 3
    assert answers[0] == answers[1]


# --- several clients ------------------------------------------------------------------------------------------------


@pytest.fixture
def batcher(llm):
    made = Batcher(llm, waiting=8)
    yield made
    made.close()


def test_clients_share_beginnings_and_get_what_each_alone_would(llm, batcher, computed):
    prompts = [[*FIRST[:30], *rest] for rest in (SECOND[:9], [7], SECOND[:9], SECOND[20:])]
    prompts += [[*prompts[0], *SECOND[:30]], [8]]
    truths = [alone(llm, ids, 6) for ids in prompts]
    del computed[:]
    requests = [batcher.submit(ids, 6, GREEDY) for ids in prompts]
    answers = [tokens_of(request) for request in requests]
    assert answers == truths
    cached = [request.cached for request in requests]
    assert cached[0] == cached[5] == 0
    if not any(llm.config.windowed):
        assert min(cached[1:4]) >= 30
        assert cached[4] >= 39
    assert total(computed) == sum(len(ids) for ids in prompts) - sum(cached) + sum(len(a) - 1 for a in answers)


def test_prompts_that_were_never_computed_leave_a_window_as_it_is(folders):
    """Each joins what the one before it had; a window has forgotten what a second cut would need."""
    prompt, found = [*FIRST, *SECOND][:40], []
    with models.load(folders["gemma3"][0], "cpu", context=64, kv="f32", precision="exact") as llm:
        for lengths in ((38,), (40, 40, 39, 38)):
            for i, length in enumerate(lengths):
                with llm.session(prompt[:length]) as session:
                    if i in (0, 3):
                        found.append(session.logits())
            forget(llm)
    np.testing.assert_allclose(found[2], found[0], atol=1e-6)


@pytest.fixture
def chunks(monkeypatch):
    monkeypatch.setattr("opweave_models.model.CHUNK", 8)
    monkeypatch.setattr("opweave_models.batching.CHUNK", 8)


def test_a_long_prompt_stops_the_others_for_one_chunk_at_a_time(chunks, llm, computed, monkeypatch):
    long = [*FIRST, *SECOND]
    truths = [alone(llm, [5, 6, 7], 60), alone(llm, long, 3)]
    del computed[:]
    advance, both = llm.advance, threading.Event()

    def held(tokens):  # on a busy machine the first answer would end before the second prompt comes
        if computed:
            both.wait(60)
        return advance(tokens)

    monkeypatch.setattr(llm, "advance", held)
    batcher = Batcher(llm)
    try:
        first = batcher.submit([5, 6, 7], 60, GREEDY)
        begun = next(iter(first))
        second = batcher.submit(long, 3, GREEDY)
        both.set()
        assert tokens_of(second) == truths[1]
        assert [begun.token, *tokens_of(first)] == truths[0]
    finally:
        batcher.close()
    kinds = ["prompt" if max(counts.values()) > 1 else "step" for counts in computed]
    at = [i for i, kind in enumerate(kinds) if kind == "prompt"][1:]
    assert len(at) == 10, "80 tokens in chunks of 8"
    assert all(kinds[i + 1] == "step" for i in at)
    assert len(computed) == 1 + 10 + 59, "the second answer's tokens come in steps of the first one"


def test_an_answer_is_cancelled_within_its_prompt(chunks, plain, monkeypatch):
    forget(plain)
    advance, session = plain.advance, plain.session()

    def slow(tokens):
        found = advance(tokens)
        session.cancel()
        return found

    session.feed(FIRST)
    monkeypatch.setattr(plain, "advance", slow)
    with session, pytest.raises(ow.Cancelled, match="before its first token"):
        list(session.generate(4))
    assert plain.decoder_cache().lengths[session.sequence] == 8
    monkeypatch.undo()
    batcher, requests = Batcher(plain), list[Any]()

    def cancelling(tokens):
        for request in requests:
            request.cancel()
        return advance(tokens)

    monkeypatch.setattr("opweave_models.batching.CHUNK", 8)
    monkeypatch.setattr(plain, "advance", cancelling)
    try:
        requests.append(batcher.submit(SECOND, 4, GREEDY))
        with pytest.raises(ow.Cancelled):
            list(requests[0])
        monkeypatch.setattr(plain, "advance", advance)
        assert len(list(batcher.submit(SECOND, 4, GREEDY))) == 4
    finally:
        batcher.close()


def test_an_answer_that_fails_ends_alone_and_a_thread_that_fails_ends_all(plain, monkeypatch):
    forget(plain)
    batcher = Batcher(plain)
    good, bad = (batcher.submit(FIRST, 100, GREEDY) for _ in range(2))

    def refuse(logits, cancelled):
        raise ow.ExecutionError("no")

    monkeypatch.setattr(bad.answer, "accept", refuse)
    with pytest.raises(ow.ExecutionError, match="no"):
        list(bad)
    next(iter(good))
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(plain, "advance", None)
    with pytest.raises(ow.LifetimeError):
        list(good)
    with pytest.raises(ow.LifetimeError):
        batcher.submit(FIRST, 4, GREEDY)
    batcher.close()
    for sequence in batcher._running:
        plain.decoder_cache().release(sequence)


# --- caches ---------------------------------------------------------------------------------------------------------

LIMITS = {"f32": 1e-4, "f16": 5e-3, "bf16": 4e-2, "q8_0": 4e-2, "q4_0": 0.5}


@pytest.mark.parametrize("kv", LIMITS)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_cache_of_every_type_forks_and_is_restored(folders, kind, kv, tmp_path):
    """Logits are near those of transformers; those behind a fork, a cut or a file are those of a cache that was never
    touched, but for what chunks of other sizes round otherwise."""
    import torch

    path, theirs = folders[kind]
    with models.load(path, "cpu", context=128, sequences=3, kv=kv, precision="exact") as llm:
        with llm.session() as whole, torch.no_grad():
            whole.feed([*FIRST, 11])
            truth = whole.logits()
            wide = theirs(torch.tensor([whole.tokens])).logits[0, -1].numpy()
        assert np.abs(truth - wide).max() < LIMITS[kv] * np.abs(wide).max()
        forget(llm)
        with llm.session() as session:
            session.feed(FIRST)
            with session.fork() as fork:
                fork.feed([11])
                forked = fork.logits()
                fork.save(tmp_path / "a")
            session.feed([12])
            session.logits()
            llm.decoder_cache().truncate(session.sequence, 40)
            session.tokens[40:] = [11]
            with llm.restore(tmp_path / "a") as restored, llm.session([*FIRST, 11]) as joined:
                found = [forked, session.logits(), restored.logits(), joined.logits()]
        for each in found:
            np.testing.assert_allclose(each, truth, atol=LIMITS[kv] / 10 * np.abs(truth).max())


# --- sampling -------------------------------------------------------------------------------------------------------


def sampler(**options):
    from opweave_models.sampling import Sampler

    return Sampler(models.Sampling(**{"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, **options}), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.3}])
def test_tokens_are_drawn_by_their_probabilities(options):
    logits = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15], np.float32))
    shares = np.exp(logits.astype(np.float64))
    order = np.argsort(-shares)
    kept = {"top_k": order[:4], "top_p": order[:3], "min_p": order[:3]}.get(next(iter(options), ""), order)
    truth = np.zeros(5)
    truth[kept] = shares[kept] ** (1 / options.get("temperature", 1.0))
    one = sampler(**options)
    counts = np.bincount([one.choose(logits, []) for _ in range(20_000)], minlength=5)
    np.testing.assert_allclose(counts / 20_000, truth / truth.sum(), atol=0.015)
    assert not counts[truth == 0].any()


@pytest.mark.parametrize("options", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}])
def test_rounding_changes_no_more_places_than_it_is_large(options):
    """Of 500 places with 2,000 tokens, many of them equal; of those at a limit one may be drawn that comes or goes."""
    rng, changed = np.random.default_rng(0), 0
    one, two, third = sampler(seed=4, **options), sampler(seed=4, **options), sampler(seed=5, **options)
    others = 0
    for _ in range(500):
        logits = np.round(rng.standard_normal(2000) * 3, 1).astype(np.float32)
        token = one.choose(logits, [])
        changed += token != two.choose(logits + rng.uniform(-1e-4, 1e-4, 2000).astype(np.float32), [])
        others += token != third.choose(logits, [])
    assert changed <= (8 if options else 1)
    assert others > 300


def test_equal_scores_at_a_limit_go_by_their_ids():
    from opweave_models.sampling import most_likely

    scores = np.array([1, 3, 2, 3, 2, 2], np.float32)
    assert [most_likely(scores, n).tolist() for n in (0, 1, 3, 4, 9)] == [
        [], [1], [1, 3, 2], [1, 3, 2, 4], [1, 3, 2, 4, 5, 0]
    ]  # fmt: skip
    assert {sampler(top_k=3).choose(scores, []) for _ in range(50)} <= {1, 2, 3}
    assert sampler(top_p=0.0).choose(scores, []) == sampler(temperature=1e-300).choose(scores, []) == 1


def test_logits_that_are_not_finite_are_no_token():
    for bad in ([0, np.nan, 1], [0, np.inf, 1], [-np.inf] * 3):
        for temperature in (0, 1):
            with pytest.raises(ow.ExecutionError, match="not finite"):
                sampler(temperature=temperature).choose(np.array(bad, np.float32), [])
    assert sampler().choose(np.array([-np.inf, 0, -np.inf], np.float32), []) == 1


# --- texts ----------------------------------------------------------------------------------------------------------


def answered(plain, text, cancel=None, **options):
    """The pieces of an answer whose tokens spell a text."""
    ids = plain.tokenizer.encode(text, special=False)
    answer = plain.answer([5], len(ids), GREEDY, **options)
    pieces = []
    for i, token in enumerate(ids):
        logits = np.zeros(plain.config.vocabulary, np.float32)
        logits[token] = 9
        pieces.append(answer.accept(logits, cancelled=i == cancel))
        if pieces[-1].reason is not None:
            break
    return pieces


@pytest.mark.parametrize(
    ("text", "stop", "given", "reason"),
    [
        ("one STOP two", ["STOP"], "one ", "stop"), ("one STO two", ["STOP"], "one STO two", "length"),
        ("one STO", ["STOP"], "one STO", "length"), ("aaab", ["aab"], "a", "stop"),
        ("the end", ["e", "the e"], "th", "stop"), ("abcd", ["cd", "bcd"], "a", "stop"), ("x🦙y", ["🦙"], "x", "stop"),
        ("x🦙y", ["y", ""], "x🦙", "stop"), ("in the", ["in"], "", "stop"),
    ],
)  # fmt: skip
def test_stop_strings_that_span_tokens(plain, text, stop, given, reason):
    pieces = answered(plain, text, stop=stop)
    assert "".join(piece.text for piece in pieces) == given
    assert [piece.reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].reason == reason


def test_a_cancelled_answer_gives_what_was_held_back(plain):
    pieces = answered(plain, "one STOP", cancel=5, stop=["STOP"])
    assert ["".join(piece.text for piece in pieces), pieces[-1].reason] == ["one STO", "cancelled"]


def test_bytes_that_are_no_text_end_nothing(plain):
    """Tokens of single bytes in any order, as hot sampling gives them."""
    for seed in range(30):
        ids = np.random.default_rng(seed).integers(5, 261, 12).tolist()
        stream = plain.tokenizer.stream()
        assert "".join(map(stream.add, ids)) + stream.finish() == plain.tokenizer.decode(ids)


def test_a_text_that_begins_with_a_space_goes_on_with_one():
    """SentencePiece takes the space off that it put before a text."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders
    from tokenizers.models import BPE

    from opweave_models.tokenizer import Tokenizer

    library = Library(BPE(vocab={"<s>": 0, "▁one": 1, "▁two": 2, "s": 3}, merges=[]))
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    library.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(library, 0, None, [], True, False)
    for before, text in (([], "two ones"), ([0], "two ones"), ([0, 1], " two ones")):
        stream = tokenizer.stream(before)
        assert "".join(map(stream.add, [2, 1, 3])) + stream.finish() == text


def test_probabilities_are_shares_of_one(plain):
    forget(plain)
    size = plain.config.vocabulary
    for piece in plain.generate("in the", max_tokens=3, logprobs=size, sampling=models.Sampling(seed=2)):
        assert sum(np.exp([share for _, share in piece.top])) == pytest.approx(1)
        assert dict(piece.top)[piece.token] == piece.logprob
        assert sorted((-share, token) for token, share in piece.top) == [(-share, token) for token, share in piece.top]


def test_a_vocabulary_is_read_for_schemas_once(plain, monkeypatch):
    pytest.importorskip("llguidance")
    schema = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}
    first = "".join(piece.text for piece in plain.generate("in", schema=schema))
    monkeypatch.setattr(type(plain.tokenizer.library), "to_str", None, raising=False)
    assert "".join(piece.text for piece in plain.generate("in", schema=schema)) == first
    for wrong in ({"type": "nothing"}, {"$ref": "#/nowhere"}, "no JSON", "[1]", ""):
        with pytest.raises(ow.FormatError, match="JSON schema"):
            next(plain.generate("in", schema=wrong))


# --- steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "opencl:0"])
def test_five_hundred_steps_trace_build_and_allocate_nothing(folders, device, monkeypatch):
    try:
        ow.device(device)
    except (ow.UnknownNameError, ow.PluginError) as missing:
        pytest.skip(str(missing))
    events: list[str] = []
    with models.load(folders["gemma3"][0], device, context=256, sequences=2) as llm:
        llm.warm()
        with llm.session() as one, llm.session() as two:
            llm.advance({one.sequence: [5], two.sequence: [6]})
            traced, real = SimpleNamespace(count=0), models.model.decode

            def counted(*args):
                traced.count += 1
                return real(*args)

            monkeypatch.setattr(models.model, "decode", counted)
            with TRACE.listen(lambda event: events.append(event.kind)):
                for _ in range(125):
                    llm.advance({one.sequence: [7]})
                    llm.advance({two.sequence: [8]})
                    llm.advance({one.sequence: [7], two.sequence: [9]})
                    llm.decoder_cache().truncate(two.sequence, int(llm.decoder_cache().lengths[two.sequence]) - 1)
                    llm.advance({two.sequence: [8]})
            assert llm.decoder_cache().lengths[one.sequence] == 251
    assert not traced.count
    assert not {"alloc", "build"} & set(events)


# --- commands -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["models", "plan", "MODEL", "--context", "0"], "context is a number"),
        (["models", "plan", "MODEL", "--split", "inf"], "split has a number"),
        (["models", "plan", "MODEL", "--memory", "cpu=" + "9" * 400], "memory is a number"),
        (["generate", "MODEL", "-p", "in", "--schema", "BAD"], "UTF-8"),
        (["generate", "MODEL", "-p", "in", "--schema", "TEXT"], "no JSON schema"),
        (["chat", "MODEL", "--template", "BAD"], "UTF-8"),
        (["serve-model", "MODEL", "--port", "65536"], "--port"),
        (["serve-model", "MODEL", "--port", "-1"], "--port"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_commands_refuse_what_they_cannot_read(folders, tmp_path, command, says):
    """Errors of opweave, which its command line prints, or wrong calls."""
    (tmp_path / "bad").write_bytes(b"\xff\xfe")
    (tmp_path / "text").write_text("no JSON", encoding="utf-8")
    names = {"MODEL": folders["llama"][0], "BAD": tmp_path / "bad", "TEXT": tmp_path / "text"}
    done = called([str(names.get(each, each)) for each in command])
    assert done.exit_code
    assert isinstance(done.exception, (ow.OpweaveError, SystemExit))
    assert says in f"{done.exception} {done.output}"


@pytest.mark.parametrize(("command", "says"), [
    (["generate", "-p", "in", "-n", "0"], "max_tokens"), (["generate", "-p", "in", "--min-p", "-1"], "min_p"),
    (["generate", "-p", "in", "--schema", "SCHEMA"], "JSON schema"), (["chat", "--max-tokens", "0"], "max_tokens"),
    (["chat", "--top-p", "2"], "top_p"), (["serve-model", "--queue", "-1"], "queue"),
    *((["serve-model", "--timeout", value], "timeout") for value in ("nan", "-1", "0")),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_commands_refuse_options_before_anything_is_loaded(folders, tmp_path, monkeypatch, command, says):
    if "SCHEMA" in command:
        pytest.importorskip("llguidance")
    (tmp_path / "schema").write_text('{"type": "nothing"}', encoding="utf-8")
    monkeypatch.setattr("opweave_models.commands.load", None)
    named = [str(tmp_path / "schema") if each == "SCHEMA" else each for each in command]
    done = called([named[0], str(folders["llama"][0]), *named[1:]], input="in")
    assert isinstance(done.exception, ow.BoundsError | ow.FormatError)
    assert says in str(done.exception)


def test_only_the_error_of_a_full_context_lets_a_chat_go_on(folders, monkeypatch):
    def refuse(*given, **options):
        raise ow.BoundsError("another error")

    monkeypatch.setattr(models.Model, "chat", refuse)
    done = called(["chat", str(folders["llama"][0]), "--devices", "cpu", "--template", "plain"], input="in\nthe")
    assert str(done.exception) == "another error"


def test_a_chat_that_outgrows_the_context_goes_on_after_clear(folders):
    lines = ["in the", "one " * 40, "other", "/clear", "other"]
    done = called(["chat", str(folders["llama"][0]), "--devices", "cpu", "--context", "48", "--template", "plain",
                   "--max-tokens", "4", "--temperature", "0"], input="\n".join(lines))  # fmt: skip
    assert done.exit_code == 0, done.output
    assert done.output.count("tokens of answer") == 3
    assert "/clear begins a new chat" in done.output.split("tokens of answer")[1]


def test_a_prompt_that_joins_in_vain_ends_too(plain, monkeypatch):
    forget(plain)
    batcher = Batcher(plain)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(plain, "join", None)
    with pytest.raises(ow.LifetimeError):
        list(batcher.submit(FIRST, 4, GREEDY))
    batcher.close()


def test_a_plan_of_weights_that_will_be_rounded(folders):
    planned = [called(["models", "plan", str(folders["llama"][0]), "--devices", "cpu", "--json", *options])
               for options in ([], ["--quantize", "f16"])]  # fmt: skip
    whole, half = (json.loads(done.stdout)["devices"][0]["weights"] for done in planned)
    assert half < 0.6 * whole


def called(command, **given):
    from opweave_models import commands

    app = typer.Typer()
    commands.add(app)
    return CliRunner().invoke(app, command, **given)

"""The server, by OpenAI's own client: chat, completions, models, streaming, keys and refusals."""

from __future__ import annotations

import itertools
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

import opweave as ow

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("opweave_cpu")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
models = pytest.importorskip("opweave_models")


@contextmanager
def running(llm, **options):
    """A server in a thread, and its address."""
    from opweave_models.server import Server, build

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = Server(build(llm, **options), log_level="warning", log_config=None, lifespan="on")
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.02)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def served(folder):
    with (
        models.load(folder, "cpu", context=128, sequences=2, template="chatml") as llm,
        running(llm, key="secret") as address,
    ):
        yield llm, address


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="secret", max_retries=0) as made:
        yield made


def test_chat_answers_as_the_model_does(served, client):
    messages = [{"role": "user", "content": "in the other one"}]
    truth = "".join(piece.text for piece in served[0].chat(messages, max_tokens=8))
    options = {"model": "m", "messages": messages, "max_tokens": 8, "temperature": 0}
    answer = client.chat.completions.create(**options)
    assert answer.choices[0].message.content == truth
    assert answer.usage.completion_tokens <= 8
    parts = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = list(parts)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == truth
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert client.models.list().data[0].id


def test_a_chat_that_goes_on_tells_what_was_not_computed_again(client):
    messages = [{"role": "user", "content": "the one other in the one"}]
    options = {"model": "m", "max_tokens": 4, "temperature": 0}
    answer = client.chat.completions.create(messages=messages, **options)
    again = client.chat.completions.create(messages=messages, **options)
    assert again.choices[0].message.content == answer.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    messages += [{"role": "assistant", "content": "other"}, {"role": "user", "content": "in"}]
    *_, last = client.chat.completions.create(
        messages=messages, **options, stream=True, stream_options={"include_usage": True}
    )
    known = last.usage.prompt_tokens_details.cached_tokens
    assert answer.usage.prompt_tokens <= known < last.usage.prompt_tokens


def test_completions_list_probabilities(client):
    answer = client.completions.create(model="m", prompt="in the", max_tokens=4, temperature=0, logprobs=2)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert len(answer.choices[0].logprobs.top_logprobs[0]) == 2


def test_probabilities_name_the_bytes_of_tokens(served, client, monkeypatch):
    from opweave_models.sampling import Answer

    ids = served[0].tokenizer.encode("\N{LLAMA}")
    assert [served[0].tokenizer.token_bytes(i) for i in ids] == [bytes([b]) for b in "\N{LLAMA}".encode()]
    assert served[0].tokenizer.token_bytes(served[0].tokenizer.bos) == b"<s>"
    monkeypatch.setattr(Answer, "_probabilities", lambda *_: (-1.0, tuple((i, -1.0) for i in (*ids, 298, 299))))
    options = {"model": "m", "max_tokens": 1, "logprobs": 6}
    (tops,) = client.completions.create(prompt="in", **options).choices[0].logprobs.top_logprobs
    assert set(tops) == {"bytes:\\xf0", "bytes:\\x9f", "bytes:\\xa6", "bytes:\\x99", "", "token_id:299"}
    options |= {"logprobs": True, "top_logprobs": 6}
    answer = client.chat.completions.create(messages=[{"role": "user", "content": "in"}], **options)
    (token,) = answer.choices[0].logprobs.content
    assert b"".join(bytes(top.bytes) for top in token.top_logprobs).decode() == "\N{LLAMA}"
    assert token.top_logprobs[0].token == "\\xf0"


def test_bytes_of_sentencepiece_tokens():
    from tokenizers import Tokenizer, decoders
    from tokenizers import models as kinds

    from opweave_models.tokenizer import Tokenizer as Ours

    library = Tokenizer(kinds.BPE(vocab={"a": 0, "▁a": 1, "<0xF0>": 2, "\ufffd": 3, "<0x20>": 4}, merges=[]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    ours = Ours(library, None, None, (), False, False)
    assert [ours.token_bytes(i) for i in range(6)] == [b"a", b" a", b"\xf0", "\ufffd".encode(), b" ", b""]


def test_log_probabilities_without_alternatives(client):
    options = {"model": "m", "messages": [{"role": "user", "content": "in"}], "max_tokens": 1}
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=None)
    assert answer.choices[0].logprobs.content[0].top_logprobs == []


NEUTRAL: dict[str, object] = {
    "n": None, "best_of": 1, "stream": None, "echo": False, "suffix": None, "logit_bias": {}, "max_tokens": None,
    "frequency_penalty": 0.0, "presence_penalty": 0, "tools": [], "tool_choice": "auto",
}  # fmt: skip


def test_parameters_without_effect_may_be_given(client):
    assert client.completions.create(model="m", prompt="in", extra_body=NEUTRAL).usage.completion_tokens


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": -1}, "max_tokens"), ({"temperature": -3}, "temperature"), ({"prompt": "x " * 200}, "context"),
        *(({name: value}, name) for name, value in [
            ("max_tokens", 0), ("max_tokens", False), ("max_tokens", True), ("n", 3), ("n", True), ("stream", "true"),
            ("stream", 1), ("frequency_penalty", 2), ("presence_penalty", 2), ("logit_bias", {"5": 100}),
            ("echo", True), ("best_of", 3), ("suffix", "x"), ("tools", [{}]), ("tool_choice", "required"),
            ("stop", ["a"] * 20),
        ]), ({"max_completion_tokens": 0, "max_tokens": 2}, "max_completion_tokens"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused(client, options, said):
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        client.completions.create(model="m", prompt=options.pop("prompt", "in"), extra_body=options)
    assert caught.value.param in (None, said)


def test_errors_are_openais(served, client, monkeypatch):
    assert client.models.retrieve(client.models.list().data[0].id).owned_by == "opweave"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/one")
    assert (caught.value.type, caught.value.param) == ("invalid_request_error", "model")
    for path, method, status in [("/nowhere", "GET", 404), ("/chat/completions", "GET", 405)]:
        with pytest.raises(openai.APIStatusError) as other:
            client.get(path, cast_to=object) if method == "GET" else client.post(path, cast_to=object)
        assert (other.value.status_code, other.value.type) == (status, "invalid_request_error")
    assert other.value.response.headers["allow"] == "POST"
    monkeypatch.setattr(type(served[0].template), "render", lambda *_: 1 / 0)
    with pytest.raises(openai.InternalServerError) as failed:
        client.chat.completions.create(model="m", messages=[])
    assert failed.value.type == "server_error"


def test_without_a_queue_answers_that_can_begin_at_once_are_given(served, monkeypatch):
    step = served[0].advance

    def slowly(tokens):
        time.sleep(0.02)
        return step(tokens)

    monkeypatch.setattr(served[0], "advance", slowly)
    options = {"model": "m", "prompt": "in", "temperature": 0}
    with running(served[0], queue=0) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as full:
        streams = [full.completions.create(**options, max_tokens=100, stream=True) for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as busy:
            full.completions.create(**options)
        assert busy.value.type == "rate_limit_error"
        for stream in streams:
            stream.close()
        while httpx.get(f"{url}/health").json()["running"]:
            time.sleep(0.02)
        assert full.completions.create(**options, max_tokens=2).usage.completion_tokens == 2


@pytest.mark.parametrize("options", [{"queue": -1}, {"queue": 1.5}, {"timeout": 0}, {"timeout": float("nan")}], ids=str)
def test_limits_that_are_none_are_refused(served, options):
    from opweave_models.server import build

    with pytest.raises(ow.BoundsError, match=next(iter(options))):
        build(served[0], **options)


@pytest.mark.parametrize("path", ["completions", "chat/completions", "embeddings"])
def test_others_are_served_while_a_text_becomes_tokens(served, encoder, monkeypatch, path):
    from opweave_models.chat import Template
    from opweave_models.tokenizer import Tokenizer

    begun, go, calls = threading.Event(), threading.Event(), []
    owner, name = (Template, "render") if path == "chat/completions" else (Tokenizer, "encode")
    slow = getattr(owner, name)

    def waiting(*given, **options):
        calls.append(given)
        begun.set()
        assert go.wait(30)
        return slow(*given, **options)

    monkeypatch.setattr(owner, name, waiting)
    body = {"prompt": "in", "messages": [{"role": "user", "content": "in"}], "input": ["a", "the fox"], "max_tokens": 2}
    with ThreadPoolExecutor() as pool, running(encoder if path == "embeddings" else served[0]) as url:
        answer = pool.submit(httpx.post, f"{url}/v1/{path}", json=body, timeout=60)
        assert begun.wait(30)
        try:
            busy = httpx.get(f"{url}/health").json()
        finally:
            go.set()
        assert answer.result().status_code == 200
        assert (busy["running"], busy["waiting"]) == (int(path == "embeddings"), 0)
    if path == "embeddings":
        assert len(calls) == 2, "each text becomes tokens once"
        assert answer.result().json()["usage"]["prompt_tokens"] == 3 + 4


def test_other_threads_run_while_a_long_text_becomes_tokens(served):
    text, times, over = "in the one " * 150_000, [time.monotonic()], threading.Event()

    def tick():
        while not over.wait(0.002):
            times.append(time.monotonic())

    with ThreadPoolExecutor() as pool:
        ticks = pool.submit(tick)
        begin = time.monotonic()
        ids = served[0].tokenizer.encode(text, special=False)
        took = time.monotonic() - begin
        over.set()
        ticks.result()
    assert max(after - before for before, after in itertools.pairwise(times)) < took / 2
    assert ids[:100] == served[0].tokenizer.encode(text[:1000], special=False)[:100]


def test_the_end_of_the_server_is_told(served, monkeypatch, caplog):
    step = served[0].advance

    def slowly(tokens):
        time.sleep(0.05)
        return step(tokens)

    monkeypatch.setattr(served[0], "advance", slowly)
    body = {"prompt": "in", "max_tokens": 100, "temperature": 0}
    with ThreadPoolExecutor() as pool:
        with running(served[0]) as url:

            def post(stream):
                return httpx.post(f"{url}/v1/completions", json={**body, "stream": stream}, timeout=60)

            def wait_for(**busy):
                while not busy.items() <= httpx.get(f"{url}/health").json().items():
                    time.sleep(0.02)

            streams = [pool.submit(post, True) for _ in range(2)]
            wait_for(running=2, waiting=0)
            queued = [pool.submit(post, False) for _ in range(2)]
            wait_for(running=2, waiting=2)
        for stream in streams:
            *_, last, done = stream.result().text.split("\n\n")[:-1]
            assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
            assert done == "data: [DONE]"
        for each in queued:
            assert each.result().status_code == 503
            assert "shutting down" in each.result().json()["error"]["message"]
    assert not caplog.records


def test_the_key_is_needed_and_encoders_are_not_decoders(served, client):
    other = openai.OpenAI(base_url=f"{served[1]}/v1", api_key="wrong", max_retries=0)
    with other, pytest.raises(openai.AuthenticationError):
        other.models.list()
    with pytest.raises(openai.BadRequestError, match="decoder"):
        client.embeddings.create(model="m", input=["a"], dimensions=64)
    with pytest.raises(openai.BadRequestError, match="dimensions can only be 64"):
        client.embeddings.create(model="m", input=["a"], dimensions=5)


def test_likely_tokens_are_listed_where_probabilities_are(client):
    options = {"model": "m", "messages": [{"role": "user", "content": "in"}], "max_tokens": 1}
    with pytest.raises(openai.BadRequestError, match="top_logprobs can only be 0"):
        client.chat.completions.create(**options, top_logprobs=2)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    from tests.models.test_encoders import write_bert

    path = tmp_path_factory.mktemp("bert")
    write_bert(path)
    with models.load(path, "cpu", pooling="mean") as llm:
        yield llm


@pytest.mark.parametrize("ends", ["time", "server", "client"])
def test_embedding_ends_with_its_time_its_server_and_its_client(encoder, monkeypatch, ends):
    steps, step = [], encoder.step

    def slowly(*given):
        steps.append(time.monotonic())
        time.sleep(0.1)
        return step(*given)

    monkeypatch.setattr(encoder, "step", slowly)
    body, begin = {"input": ["the fox"] * 2048}, time.monotonic()  # 64 steps
    with ThreadPoolExecutor() as pool:
        with running(encoder, timeout=0.5 if ends == "time" else 60, queue=0) as url:
            answer = pool.submit(httpx.post, f"{url}/v1/embeddings", json=body, timeout=0.5 if ends == "client" else 60)
            while len(steps) < 2:
                time.sleep(0.02)
            assert httpx.post(f"{url}/v1/embeddings", json={"input": "a"}).status_code == 429
            if ends == "time":
                assert (answer.result().status_code, "cancelled" in answer.result().text) == (503, True)
            elif ends == "client":
                with pytest.raises(httpx.ReadTimeout):
                    answer.result()
                while steps[-1] > time.monotonic() - 0.5:
                    time.sleep(0.02)
                monkeypatch.undo()
                assert httpx.post(f"{url}/v1/embeddings", json={"input": "a"}).status_code == 200
        if ends == "server":
            assert (answer.result().status_code, "cancelled" in answer.result().text) == (503, True)
    assert len(steps) < 40
    assert time.monotonic() - begin < 5


def test_a_client_that_goes_away_frees_its_sequence(served, client):
    for _ in range(4):  # twice as many as there are sequences
        stream = client.completions.create(model="m", prompt="in", max_tokens=100, temperature=0, stream=True)
        next(iter(stream))
        stream.close()
    answer = client.completions.create(model="m", prompt="in", max_tokens=2, temperature=0)
    assert answer.usage.completion_tokens == 2
    assert "chat" in httpx.get(served[1]).text


def test_the_page_chats(served, tmp_path):
    from tests.support.chromium import PROGRAM, Chromium

    if PROGRAM is None:
        pytest.skip("needs Chromium")
    browser = Chromium(tmp_path / "profile")
    try:
        browser.open(f"{served[1]}/#key=secret")
        browser.run("document.getElementById('text').value = 'in the one'; document.getElementById('send').click()")
        browser.wait_for("document.getElementById('speed').textContent.includes('tokens a second') && !running")
        assert browser.run("document.querySelectorAll('.message.user').length") == 1
        assert browser.run("document.querySelector('.assistant').textContent")
        assert not browser.run("document.querySelectorAll('.error').length")
        browser.run("document.getElementById('clear').click()")
        assert browser.run("document.querySelectorAll('.message').length") == 0
    finally:
        browser.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("listens", [True, False], ids=["listens", "is bound"])
def test_a_port_in_use_is_told_before_anything_is_loaded(folder, monkeypatch, host, listens):
    monkeypatch.setattr("opweave_models.commands.load", None)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listens:
            other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ow.Unavailable, match=f"cannot listen on {host}:{port}: "):
            serve_model(folder, host=host, port=port)


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid", "a" * 100])
def test_a_host_that_is_none_of_this_machine_is_told_before_anything_is_loaded(folder, monkeypatch, host):
    monkeypatch.setattr("opweave_models.commands.load", None)
    with pytest.raises(ow.Unavailable, match=f"cannot listen on {host}:8080: "):
        serve_model(folder, host=host, port=8080, key="k")


def test_the_port_is_taken_while_a_model_is_loaded_and_free_when_that_fails(folder, monkeypatch):
    from opweave_models.server import listening

    with listening("127.0.0.1", 0) as sockets:
        port = sockets[0].getsockname()[1]
        with pytest.raises(ow.Unavailable, match=str(port)), listening("127.0.0.1", port):
            pass

    def refuse(*given, **options):
        with pytest.raises(ow.Unavailable), listening("127.0.0.1", port):
            pass
        raise ow.FormatError("no model")

    monkeypatch.setattr("opweave_models.commands.load", refuse)
    with pytest.raises(ow.FormatError, match="no model"):
        serve_model(folder, port=port)
    with listening("127.0.0.1", port):
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="processes there are not interrupted alone")
def test_the_command_serves_until_it_is_interrupted(folder):
    command = ["serve-model", str(folder), "--devices", "cpu", "--context", "64", "--template", "plain", "--port", "0"]
    python = [sys.executable, "-c", "from opweave.cli.app import main; main()"]
    running = re.compile(r"Uvicorn running on (http://127\.0\.0\.1:\d+) \(Press CTRL")
    with subprocess.Popen([*python, *command], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            address = next(filter(None, map(running.search, process.stderr)))[1]
            assert httpx.get(f"{address}/health").json()["status"] == "ok"
            process.send_signal(signal.SIGINT)
            assert "Application shutdown complete" in process.stderr.read()
            assert process.wait(60) == 0
        finally:
            process.kill()


def serve_model(folder, **options):
    from opweave_models import commands

    commands.serve_model(folder, "cpu", **options)

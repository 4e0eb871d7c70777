"""The server, by OpenAI's own client: chat, completions, models, streaming, keys and refusals."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from tests.support.small_models import make_folder

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("opweave_cpu")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
openai = pytest.importorskip("openai")
models = pytest.importorskip("opweave_models")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    from opweave_models.server import build

    path = tmp_path_factory.mktemp("llama")
    make_folder("llama", path)
    with models.load(path, "cpu", context=128, sequences=2, template="chatml") as llm, socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(build(llm, key="secret"), log_level="warning", lifespan="on"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.02)
        yield llm, f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": -1}, "max_tokens"), ({"temperature": -3}, "temperature"), ({"n": 3}, "one answer"),
        ({"prompt": "x " * 200}, "context"), ({"stop": ["a"] * 20}, "stop"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused(client, options, said):
    with pytest.raises(openai.BadRequestError, match=said):
        client.completions.create(**{"model": "m", "prompt": "in", **options})


def test_the_key_is_needed_and_encoders_are_not_decoders(served, client):
    other = openai.OpenAI(base_url=f"{served[1]}/v1", api_key="wrong", max_retries=0)
    with other, pytest.raises(openai.AuthenticationError):
        other.models.list()
    with pytest.raises(openai.BadRequestError, match="decoder"):
        client.embeddings.create(model="m", input=["a"])


def test_a_client_that_goes_away_frees_its_sequence(served, client):
    import httpx

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

"""`serve`: OpenAI's endpoints for chat, completions, embeddings and models, and a page to chat, by starlette."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import secrets
import socket
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from importlib.resources import files
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from opweave.errors import BoundsError, Cancelled, FormatError, LifetimeError, OpweaveError, SchedulerError, Unavailable
from opweave_models.batching import Batcher, Request, check_limits
from opweave_models.model import Model
from opweave_models.sampling import Piece, Sampling

__all__ = ["Server", "build", "listening", "serve"]

LARGEST: Final = 4 << 20
"""Bytes of the largest request."""

SUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,), "best_of": (1,), "stream": (False, True), "echo": (False,), "suffix": ("",), "logit_bias": ({},),
    "frequency_penalty": (0,), "presence_penalty": (0,), "tools": ([],), "tool_choice": ("none", "auto"),
}  # fmt: skip
"""All values of parameters of answers that take no others; ``null``, and no value, are the first one."""

Handler = Callable[[HttpRequest], Awaitable[Response]]


@contextmanager
def listening(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Sockets that listen at all addresses of a host, for `serve`: clients that come before it wait.

    Raises:
        Unavailable: the port is in use, or the host is none of this machine.
    """
    with ExitStack() as opened:
        made: list[socket.socket] = []
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
                try:
                    made.append(opened.enter_context(socket.create_server(address, family=family)))
                except OSError as error:
                    missing = error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
                    if not missing or (not made and address == found[-1][-1]):
                        raise  # else localhost has another address, where a system has no IPv6
        except (OSError, UnicodeError) as error:
            why = (getattr(error, "strerror", None) or str(error)).partition(" (while")[0]  # Python adds the address
            raise Unavailable(f"cannot listen on {_address(host, port)}: {why}",
                              remedy="choose another --port or --host") from None  # fmt: skip
        yield made


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def serve(
    model: Model, sockets: list[socket.socket], *, host: str, key: str | None, queue: int, timeout: float
) -> None:
    """Serve until the process is interrupted; then answers in progress are ended."""
    server = Server(build(model, key=key, queue=queue, timeout=timeout), host=host, log_level="info",
                    timeout_graceful_shutdown=5)  # fmt: skip
    with suppress(KeyboardInterrupt):
        server.run(sockets)
    if not server.started:
        sys.exit(3)  # as `uvicorn.run` does


class Server(uvicorn.Server):
    """Runs an application of `build`. When it is told to end, answers end before connections, which would cut them."""

    def __init__(self, app: Starlette, **options: Any) -> None:
        super().__init__(uvicorn.Config(app, **options))
        self._app: Final = app

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if sockets:  # uvicorn tells it only of those that it makes
            address = _address(self.config.host, sockets[0].getsockname()[1])
            logging.getLogger("uvicorn.error").info(f"Uvicorn running on http://{address} (Press CTRL+C to quit)")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._app.state.close)  # the other threads may all wait for answers
        await super().shutdown(sockets)


def build(model: Model, *, key: str | None = None, queue: int = 16, timeout: float = 300.0) -> Starlette:
    """The application, for any ASGI server. Raises `BoundsError` for a queue or a timeout that is none."""
    check_limits(queue, timeout)
    api = _Api(model, key, queue, timeout)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if model.config.causal:
            await run_in_threadpool(model.warm)
        yield
        await run_in_threadpool(api.close)

    app = Starlette(lifespan=lifespan, exception_handlers={HTTPException: _failed, Exception: _failed}, routes=[
        Route("/", api.page),
        Route("/health", api.health),
        Route("/v1/models", api.checked(api.models)),
        Route("/v1/models/{name:path}", api.checked(api.models)),
        Route("/v1/chat/completions", api.checked(api.chat), methods=["POST"]),
        Route("/v1/completions", api.checked(api.completions), methods=["POST"]),
        Route("/v1/embeddings", api.checked(api.embeddings), methods=["POST"]),
    ])  # fmt: skip
    app.state.close = api.close
    return app


class _Refused(Exception):
    """A request that gets an error of HTTP."""

    def __init__(self, status: int, message: str, parameter: str | None = None) -> None:
        self.status, self.parameter = status, parameter
        super().__init__(message)


class _Api:
    def __init__(self, model: Model, key: str | None, queue: int, timeout: float) -> None:
        self.model, self._key = model, key
        self.name: Final = model.config.name or model.file.path.stem
        self._queue, self._timeout = queue, timeout
        self._embedding, self._ended = 0, threading.Event()  # requests of embeddings in progress; they are to end
        self._batcher: Final = Batcher(model, waiting=queue, timeout=timeout) if model.config.causal else None

    def close(self) -> None:
        self._ended.set()
        if self._batcher is not None:
            self._batcher.close()

    def checked(self, handler: Handler) -> Handler:
        """The handler behind the key, with errors as OpenAI's clients read them."""

        async def handle(request: HttpRequest) -> Response:
            try:
                given = request.headers.get("authorization", "").removeprefix("Bearer ")
                if self._key is not None and not secrets.compare_digest(given.encode(), self._key.encode()):
                    raise _Refused(401, "the key is missing or wrong")
                return await handler(request)
            except _Refused as error:
                return _error(error.status, str(error), error.parameter)
            except SchedulerError as error:
                return _error(429, str(error))
            except (Cancelled, LifetimeError) as error:
                return _error(503, str(error))
            except OpweaveError as error:
                return _error(400, str(error))

        return handle

    # --- endpoints --------------------------------------------------------------------------------------------------

    async def page(self, request: HttpRequest) -> Response:
        return HTMLResponse(files("opweave_models").joinpath("chat.html").read_text(encoding="utf-8"))

    async def health(self, request: HttpRequest) -> Response:
        one = min(1, self._embedding)
        running, waiting = self._batcher.busy if self._batcher is not None else (one, self._embedding - one)
        return JSONResponse({"status": "ok", "running": running, "waiting": waiting})

    async def models(self, request: HttpRequest) -> Response:
        about = {"id": self.name, "object": "model", "owned_by": "opweave", "created": 0}
        name = request.path_params.get("name", "")
        if name not in ("", self.name):
            raise _Refused(404, f"the model is {self.name}, not {name:.60}", "model")
        return JSONResponse({"object": "list", "data": [about]} if not name else about)

    async def chat(self, request: HttpRequest) -> Response:
        body = await _body(request)
        messages = [_plain_message(message) for message in _list(body, "messages")]
        _check(
            body, {"logprobs": (False, True)} if body.get("logprobs") else {"logprobs": (False,), "top_logprobs": (0,)}
        )
        count = _given(body, "top_logprobs", 0) if body.get("logprobs") else None

        def prompt() -> list[int]:
            return self.model.chat_ids(self.model.template.render(messages))

        return await self._answer(request, body, prompt, count, chat=True)

    async def completions(self, request: HttpRequest) -> Response:
        body = await _body(request)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            raise _Refused(400, "prompt is one text", "prompt")
        ids = partial(self.model.tokenizer.encode, prompt)
        return await self._answer(request, body, ids, body.get("logprobs"), chat=False)

    async def embeddings(self, request: HttpRequest) -> Response:
        body = await _body(request)
        given = body.get("input")
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise _Refused(400, "input is a text, or a list of texts", "input")
        if len(texts) > 2048:
            raise _Refused(400, "input has 2,048 texts at most", "input")
        _check(body, {"dimensions": (self.model.config.width,), "encoding_format": ("float", "base64")})
        found, count = await self._embedded(request, texts)
        if body.get("encoding_format") == "base64":
            import base64

            rows: list[Any] = [base64.b64encode(row.tobytes()).decode() for row in found]
        else:
            rows = found.tolist()
        return JSONResponse({
            "object": "list", "model": self.name, "usage": {"prompt_tokens": count, "total_tokens": count},
            "data": [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)],
        })  # fmt: skip

    async def _embedded(self, request: HttpRequest, texts: list[str]) -> tuple[Any, int]:
        """The embeddings, and how many tokens the texts have; computing them ends with the request, with the time that
        it has, and with the server."""
        if self._embedding > self._queue:
            raise SchedulerError(f"no more than {self._queue} requests may wait; try again later")
        over, deadline = threading.Event(), time.monotonic() + self._timeout
        work = asyncio.create_task(
            run_in_threadpool(self.model.embed_counted, texts, cancelled=lambda: over.is_set() or self._ended.is_set())
        )
        self._embedding += 1
        try:
            while not (await asyncio.wait({work}, timeout=0.2))[0]:
                if time.monotonic() > deadline or await request.is_disconnected():
                    over.set()
            return work.result()
        finally:
            over.set()
            self._embedding -= 1

    # --- answers ----------------------------------------------------------------------------------------------------

    async def _answer(
        self, request: HttpRequest, body: Mapping[str, Any], prompt: Callable[[], list[int]], logprobs: Any, *,
        chat: bool,
    ) -> Response:  # fmt: skip
        """An answer behind the ids that ``prompt`` makes, in another thread: a long text takes seconds."""
        if (batcher := self._batcher) is None:
            raise _Refused(400, f"{self.name} embeds texts, and continues none")
        _check(body, SUPPORTED)
        if logprobs is not None and (isinstance(logprobs, bool) or not isinstance(logprobs, int) or
                                     not 0 <= logprobs <= 20):  # fmt: skip
            raise _Refused(400, "at most 20 of the most likely tokens are listed",
                           "top_logprobs" if chat else "logprobs")  # fmt: skip
        default = self.model.plan.context if chat else 16
        name = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
        most = _given(body, name, default)
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise _Refused(400, f"{name} is a number from 1 on", name)
        stop = body.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or len(stop) > 16 or not all(isinstance(text, str) for text in stop):
            raise _Refused(400, "stop is a text, or up to 16", "stop")
        sampling, schema = _sampling(body), _schema(body)
        submitted = await run_in_threadpool(
            lambda: batcher.submit(prompt(), most, sampling, stop=stop, logprobs=logprobs, schema=schema)
        )
        about = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time()),
                 "model": self.name}  # fmt: skip
        form = _Form(self.model, about, chat)
        if body.get("stream"):
            options = body.get("stream_options")
            usage = isinstance(options, Mapping) and options.get("include_usage") is True
            return StreamingResponse(self._streamed(request, submitted, form, usage),
                                     media_type="text/event-stream")  # fmt: skip
        pieces: list[Piece] = []
        try:
            async for piece in iterate_in_threadpool(_each(submitted)):
                pieces.append(piece)
                if await request.is_disconnected():
                    break
        finally:
            submitted.cancel()
        return JSONResponse({**form.whole(pieces), "usage": _usage(submitted, len(pieces))})

    async def _streamed(self, request: HttpRequest, submitted: Request, form: _Form, usage: bool) -> AsyncIterator[str]:
        count = 0
        try:
            async for piece in iterate_in_threadpool(_each(submitted)):
                count += 1
                yield f"data: {json.dumps(form.chunk(piece, first=count == 1))}\n\n"
                if await request.is_disconnected():
                    return
            if usage:
                yield f"data: {json.dumps({**form.chunk_about, 'choices': [], 'usage': _usage(submitted, count)})}\n\n"
        except OpweaveError as error:
            yield f"data: {json.dumps(_problem(500, str(error)))}\n\n"
        finally:
            submitted.cancel()  # of a client that went away, too
        yield "data: [DONE]\n\n"


class _Form:
    """Pieces as OpenAI's clients read them."""

    def __init__(self, model: Model, about: Mapping[str, Any], chat: bool) -> None:
        self._model, self._about, self._chat = model, about, chat

    @property
    def chunk_about(self) -> dict[str, Any]:
        return {**self._about, "object": "chat.completion.chunk" if self._chat else "text_completion"}

    def chunk(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": _reason(piece), "logprobs": self._logprobs([piece])}
        if self._chat:
            choice["delta"] = {"role": "assistant", "content": piece.text} if first else {"content": piece.text}
        else:
            choice["text"] = piece.text
        return {**self.chunk_about, "choices": [choice]}

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        choice: dict[str, Any] = {"index": 0, "finish_reason": _reason(pieces[-1]) if pieces else "stop",
                                  "logprobs": self._logprobs(pieces)}  # fmt: skip
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return {**self._about, "object": "chat.completion" if self._chat else "text_completion", "choices": [choice]}

    def _logprobs(self, pieces: list[Piece]) -> Any:
        if not pieces or pieces[0].logprob is None:
            return None

        bytes_of = self._model.tokenizer.token_bytes

        def named(token: int, logprob: float | None) -> dict[str, Any]:
            data = bytes_of(token)
            return {"token": _spelled(data), "logprob": logprob, "bytes": list(data)}

        if self._chat:
            return {"content": [{**named(p.token, p.logprob), "top_logprobs": [named(*each) for each in p.top]}
                                for p in pieces]}  # fmt: skip
        names = [_spelled(bytes_of(piece.token), "bytes:") for piece in pieces]
        tops: list[dict[str, float]] = [{} for _ in pieces]
        for piece, top in zip(pieces, tops, strict=True):
            for token, logprob in piece.top:
                name = _spelled(bytes_of(token), "bytes:")
                top[f"token_id:{token}" if name in top else name] = logprob
        return {"tokens": names, "token_logprobs": [p.logprob for p in pieces], "top_logprobs": tops}


def _spelled(token: bytes, prefix: str = "") -> str:
    """The bytes of a token as a text, as OpenAI spells those that are none (``\\xf0``)."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in token)


def _each(submitted: Request) -> Iterator[Piece]:
    yield from submitted


def _reason(piece: Piece) -> str | None:
    return "length" if piece.reason == "cancelled" else piece.reason  # it took too long


def _usage(submitted: Request, tokens: int) -> dict[str, Any]:
    prompt = len(submitted.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens,
            "prompt_tokens_details": {"cached_tokens": submitted.cached}}  # fmt: skip


def _problem(status: int, message: str, parameter: str | None = None) -> dict[str, Any]:
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": None, "param": parameter}}


def _error(status: int, message: str, parameter: str | None = None) -> JSONResponse:
    return JSONResponse(_problem(status, message, parameter), status)


async def _failed(request: HttpRequest, error: Exception) -> Response:
    """What starlette refuses, and errors of a kind that is not expected."""
    if not isinstance(error, HTTPException):
        return _error(500, "the server failed; its log says why")
    response = _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    response.headers.update(error.headers or {})
    return response


def _given(body: Mapping[str, Any], name: str, default: Any) -> Any:
    return default if body.get(name) is None else body[name]


def _check(body: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse parameters that would have no effect."""
    for name, values in supported.items():
        value = _given(body, name, values[0])
        if not any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in values):
            raise _Refused(400, f"{name} can only be {' or '.join(map(json.dumps, values))} here", name)


async def _body(request: HttpRequest) -> dict[str, Any]:
    """The JSON of a request; it is not read beyond `LARGEST`."""
    read = b""
    async for part in request.stream():
        read += part
        if len(read) > LARGEST:
            raise _Refused(413, f"a request has at most {LARGEST:,} bytes")
    try:
        body = json.loads(read)
    except (ValueError, RecursionError):
        raise _Refused(400, "the body is no JSON") from None
    if not isinstance(body, dict):
        raise _Refused(400, "the body is no JSON object")
    return body


def _list(body: Mapping[str, Any], key: str) -> list[Any]:
    value = body.get(key)
    if not isinstance(value, list):
        raise _Refused(400, f"{key} is a list", key)
    return value


def _plain_message(message: Any) -> Any:
    """A message whose content is parts of text, as newer clients send it, as one text."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
               for part in content):  # fmt: skip
        raise FormatError("only parts of text are understood")
    return {**message, "content": "".join(part["text"] for part in content)}


def _sampling(body: Mapping[str, Any]) -> Sampling:
    """Sampling by OpenAI's names (its default temperature is 1), and llama.cpp's for what these lack."""
    names = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
    options: dict[str, Any] = {name: _given(body, name, default) for name, default in names.items()}
    return Sampling(**options, seed=_given(body, "seed", secrets.randbits(31)))


def _schema(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    form = body.get("response_format")
    if form is None or (isinstance(form, Mapping) and form.get("type") == "text"):
        return None
    if not isinstance(form, Mapping) or form.get("type") not in ("json_object", "json_schema"):
        raise BoundsError("response_format is text, json_object or json_schema")
    if form["type"] == "json_object":
        return {"type": "object"}
    schema = form.get("json_schema")
    if not isinstance(schema, Mapping) or not isinstance(schema.get("schema"), Mapping):
        raise BoundsError("response_format.json_schema has a schema")
    return dict(schema["schema"])

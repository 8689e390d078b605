"""The ASGI application: endpoints of OpenAI's and Anthropic's APIs over a served model."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from lmdecode.decoder.engine.engine import Engine
from lmdecode.serving.anthropic_messages import MessageAnswer, count_tokens
from lmdecode.serving.blocks import BlockAnswer
from lmdecode.serving.chat import CHAT_PROMPT_FIELDS, prompt_of
from lmdecode.serving.chat_completions import ChatCompletion
from lmdecode.serving.completions import Completion
from lmdecode.serving.embeddings import embeddings_body, rerank_body
from lmdecode.serving.errors import BadRequest, RequestError, error_of_step
from lmdecode.serving.fields import Fields, body_of
from lmdecode.serving.http import (
    EventStream,
    JSONAnswer,
    KeyCheck,
    OriginCheck,
    PlainPaths,
    path_of,
    read_body,
    read_form,
    unless_gone,
)
from lmdecode.serving.parameters import check_model, check_names
from lmdecode.serving.responses import ResponseAnswer, StoredResponses
from lmdecode.serving.service import Service
from lmdecode.serving.speech import Speech, SpeechService
from lmdecode.serving.text_model import TextModel
from lmdecode.serving.work import Tally

__all__ = ["Application", "create_app"]

_OPEN_PATHS = ("/", "/health")
_LONG_BODY = 1 << 16  # bytes: longer ones are parsed beside the event loop
_MOST_DETOKENIZED = 1 << 17
_TOKENIZE_FIELDS = CHAT_PROMPT_FIELDS | {
    "model", "content", "prompt", "add_special", "add_special_tokens",
}  # fmt: skip
_GONE = 499  # nginx's word for a client that went away
_Handler = Callable[[Request], Awaitable[Response]]


class Application:
    """Endpoints over a model, which may still be loading: ``app`` is the ASGI application.

    ``service`` has the model of text and ``speech`` the model of speech; requests get status 503
    while both are None, and once ``is_stopping`` is true. ``speech_name`` is ``name`` where it is
    none, an ``api_key`` of None admits anybody, and web pages of ``cors_origins`` may ask. The
    limits are of a request's body; with ``has_page``, ``/`` is a page to chat.
    """

    def __init__(
        self,
        name: str,
        *,
        speech_name: str | None = None,
        api_key: str | None = None,
        cors_origins: Sequence[str] = (),
        max_body_bytes: int = 32 << 20,
        max_audio_bytes: int = 512 << 20,
        body_seconds: float = 60.0,
        has_page: bool = True,
    ) -> None:
        self.name, self.speech_name, self.is_stopping = name, speech_name or name, False
        self.service: Service | None = None
        self.speech: SpeechService | None = None
        self.tally, self.responses = Tally(), StoredResponses()
        self._max_body_bytes, self._max_audio_bytes = max_body_bytes, max_audio_bytes
        self._body_seconds = body_seconds
        self._created = int(time.time())
        routes = [
            self._route("/v1/chat/completions", self._chat, "POST"),
            self._route("/v1/completions", self._completions, "POST"),
            self._route("/v1/responses", self._respond, "POST"),
            self._route("/v1/responses/{id}", self._response, "GET", "DELETE"),
            self._route("/v1/messages", self._message, "POST"),
            self._route("/v1/messages/count_tokens", self._count_tokens, "POST"),
            *(
                self._route(f"/v1/audio/{path}", functools.partial(self._heard, task), "POST")
                for path, task in (("transcriptions", "transcribe"), ("translations", "translate"))
            ),
            self._route("/v1/embeddings", functools.partial(self._beside, embeddings_body), "POST"),
            self._route("/v1/rerank", functools.partial(self._beside, rerank_body), "POST"),
            self._route("/v1/models", self._models, "GET"),
            self._route("/v1/models/{name:path}", self._model, "GET"),
            self._route("/tokenize", self._tokenize, "POST"),
            self._route("/detokenize", self._detokenize, "POST"),
            self._route("/health", self._health, "GET"),
            self._route("/metrics", self._metrics, "GET"),
        ]
        if has_page:
            routes.append(self._route("/", self._page, "GET"))
        has_key = api_key is not None
        middleware = [
            Middleware(PlainPaths),
            Middleware(OriginCheck, origins=tuple(cors_origins), has_key=has_key),
        ]
        if cors_origins:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(cors_origins),
                    allow_methods=["*"],
                    allow_headers=["*"],
                )
            )
        if api_key is not None:
            middleware.append(Middleware(KeyCheck, key=api_key, open_paths=_OPEN_PATHS))
        self.app = Starlette(
            routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error}
        )

    # ---- around the endpoints

    def _route(self, path: str, handler: _Handler, *methods: str) -> Route:
        @functools.wraps(handler)
        async def endpoint(request: Request) -> Response:
            try:
                response = await handler(request)
            except RequestError as error:
                response = JSONAnswer.of_error(error, path)
            except ClientDisconnect:
                response = Response(status_code=_GONE)
            except Exception as error:
                response = JSONAnswer.of_error(error_of_step(error), path)
            self.tally.metrics.requests.add(1, path, str(response.status_code))
            return response

        return Route(path, endpoint, methods=list(methods))

    def _ready(self) -> Service:
        """Return the model, if it takes requests."""
        self._check_open()
        if self.service is None:
            message = f"{self.name!r} is a model of speech; expected /v1/audio/transcriptions"
            raise RequestError(404, message, "model", "model_not_found")
        return self.service

    def _check_open(self) -> None:
        if self.is_stopping:
            raise RequestError(503, "the server is stopping", headers={"Retry-After": "5"})
        if self.service is None and self.speech is None:
            raise RequestError(503, "the model is loading", headers={"Retry-After": "1"})

    async def _fields(self, request: Request) -> Fields:
        data = await read_body(request, self._max_body_bytes, self._body_seconds)
        is_long = len(data) >= _LONG_BODY
        fields = Fields(await asyncio.to_thread(body_of, data) if is_long else body_of(data))
        check_model(fields, self.name)
        return fields

    # ---- endpoints

    async def _completions(self, request: Request) -> Response:
        service, fields = self._ready(), await self._fields(request)
        completion = await Completion.of(fields, service)
        if completion.is_scored:
            await unless_gone(request.receive, completion.score())
        if completion.is_empty:
            body = completion.empty_body()
            if completion.job.parameters.stream:
                return EventStream(_once(body), lambda: None)
            return JSONAnswer(body)
        return await self._answered(request, service, completion)

    async def _chat(self, request: Request) -> Response:
        service, fields = self._ready(), await self._fields(request)
        return await self._answered(request, service, await ChatCompletion.of(fields, service))

    async def _respond(self, request: Request) -> Response:
        service, fields = self._ready(), await self._fields(request)
        asked = await ResponseAnswer.of(fields, service, self.responses)
        return await self._answered(request, service, asked)

    async def _response(self, request: Request) -> Response:
        identity = request.path_params["id"]
        found = self.responses.get(identity)
        if found is None:
            raise RequestError(404, f"there is no stored response {identity!r}", "response_id")
        if request.method == "DELETE":
            self.responses.drop(identity)
            return JSONAnswer({"id": identity, "object": "response", "deleted": True})
        if request.query_params.get("stream", "").lower() == "true":
            raise BadRequest("stream", "stream is true; expected false: the events are not kept")
        return JSONAnswer(found[0])

    async def _message(self, request: Request) -> Response:
        service, fields = self._ready(), await self._fields(request)
        return await self._answered(request, service, await MessageAnswer.of(fields, service))

    async def _count_tokens(self, request: Request) -> Response:
        service, fields = self._ready(), await self._fields(request)
        return JSONAnswer(await count_tokens(fields, service))

    async def _answered(
        self, request: Request, service: Service, asked: Completion | ChatCompletion | BlockAnswer
    ) -> Response:
        work = await service.submit(asked.job)
        try:
            if asked.job.parameters.stream:
                if isinstance(asked, BlockAnswer):
                    return EventStream(asked.stream(work), work.close, True, asked.ping)
                return EventStream(asked.stream(work), work.close)
            try:
                return JSONAnswer(await unless_gone(request.receive, asked.whole(work)))
            finally:
                work.close()
        except BaseException:
            work.close()
            raise

    async def _heard(self, task: str, request: Request) -> Response:
        self._check_open()
        speech = self.speech
        if speech is None:
            message = f"{self.name!r} is a model of text; expected one of speech"
            raise RequestError(404, message, "model", "model_not_found")
        form = await read_form(request, self._max_audio_bytes, self._body_seconds)
        asked = Speech.of(form, task, self.speech_name)
        if asked.streams:
            events = await unless_gone(request.receive, speech.stream(asked))
            return EventStream(events, lambda: None)
        text, media_type = await unless_gone(request.receive, speech.whole(asked))
        return Response(text, media_type=media_type)

    async def _beside(
        self, answer: Callable[[Fields, Service], Awaitable[dict[str, Any]]], request: Request
    ) -> Response:
        service, fields = self._ready(), await self._fields(request)
        body = await unless_gone(request.receive, answer(fields, service))
        return await asyncio.to_thread(JSONAnswer, body)  # of millions of numbers, maybe

    async def _models(self, request: Request) -> Response:
        return JSONAnswer({"object": "list", "data": self._cards()})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for card in self._cards():
            if card["id"] == name:
                return JSONAnswer(card)
        message = f"there is no model {name!r}; expected {self.name!r}"
        raise RequestError(404, message, "model", "model_not_found")

    def _cards(self) -> list[dict[str, Any]]:
        cards: list[dict[str, Any]] = [
            {"id": name, "object": "model", "created": self._created, "owned_by": "lmdecode"}
            for name in dict.fromkeys((self.name, self.speech_name))
        ]
        if self.service is not None:
            cards[0]["max_model_len"] = self.service.context
        return cards

    async def _tokenize(self, request: Request) -> Response:
        service, fields = self._ready(), await self._fields(request)
        check_names(fields, _TOKENIZE_FIELDS, {})
        adds = fields.boolean("add_special_tokens", fields.boolean("add_special", True))
        if "messages" in fields:
            text, _, _ = await prompt_of(fields, service)
            (tokens,) = await service.tokens_of("messages", [text], add_special_tokens=False)
        else:
            name = "content" if "content" in fields else "prompt"
            content = fields.text(name)
            if content is None:
                raise fields.error("content", "a text, or messages")
            (tokens,) = await service.tokens_of(name, [content], add_special_tokens=adds)
        return JSONAnswer(
            {"tokens": tokens, "count": len(tokens), "max_model_len": service.context}
        )

    async def _detokenize(self, request: Request) -> Response:
        service, fields = self._ready(), await self._fields(request)
        check_names(fields, ("model", "tokens"), {})
        tokens = fields.integers("tokens", _MOST_DETOKENIZED, 0, service.vocab - 1)
        text = service.model.tokenizer.decode(tokens, skip_special_tokens=False)
        return JSONAnswer({"content": text, "prompt": text})

    async def _health(self, request: Request) -> Response:
        service = self.service
        if self.is_stopping:
            return JSONAnswer({"status": "stopping"}, 503)
        if service is None:
            status = "loading" if self.speech is None else "ok"
            return JSONAnswer({"status": status}, 503 if self.speech is None else 200)
        if not service.engine.is_started:
            return JSONAnswer({"status": "the engine has stopped"}, 503)
        store = None if service.store is None else service.store.stats()
        content = {
            "status": "ok", "running": True, "answering": service.tally.in_flight,
            "abandoned": service.tally.abandoned, "store": store,
        }  # fmt: skip
        return JSONAnswer(content)

    async def _metrics(self, request: Request) -> Response:
        if self.service is None:
            text = self.tally.metrics.text([])
        else:
            text = self.service.metrics_text()
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _page(self, request: Request) -> Response:
        page = resources.files("lmdecode.serving").joinpath("page.html").read_text("utf-8")
        policy = (
            "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'"
        )
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})


async def _once(body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield one body."""
    yield body


async def _http_error(request: Request, error: Exception) -> Response:
    """Return a path or a method that is not there, in the shape of all errors."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = {404: f"there is no {path}", 405: f"{path} does not take {request.method}"}
    text = message.get(error.status_code, str(error.detail))
    of_request = RequestError(error.status_code, text, headers=dict(error.headers or {}))
    return JSONAnswer.of_error(of_request, path_of(request.scope))


def create_app(
    engine: Engine,
    model: TextModel,
    *,
    name: str | None = None,
    api_key: str | None = None,
    max_waiting: int = 256,
    store: Any = None,
    cors_origins: Sequence[str] = (),
    max_body_bytes: int = 32 << 20,
    body_seconds: float = 60.0,
    has_page: bool = True,
) -> Starlette:
    """Return an ASGI application of OpenAI's and Anthropic's APIs over an engine.

    Parameters
    ----------
    engine : Engine
        Of ``model.decoding``. It is started if it is not.
    model : TextModel
        The model with its tokenizer and chat template.
    name : str, optional
        Of the model, as clients call it. None: the model's.
    api_key : str, optional
        Requests must have it as ``Authorization: Bearer`` or ``x-api-key``.
    max_waiting : int
        Number of requests that wait for a slot of the engine; more get status 429.
    store : KVStore, optional
        The engine's, for ``/health``.
    cors_origins : sequence of str
        Origins of web pages that may ask.
    max_body_bytes, body_seconds : int, float
        Limits of a request's body: status 413, 408.
    has_page : bool
        Whether ``/`` is a page to chat.

    Returns
    -------
    Starlette
        For any ASGI server, in one process: the engine is in it.

    Raises
    ------
    ValueError, TypeError
        Names the argument.

    Examples
    --------
    ::

        model = TextModel.load("SmolLM2-135M-Instruct", dtype="int8")
        engine = model.decoding.engine(max_requests=32, capacity=8192)
        uvicorn.run(create_app(engine, model))
    """
    name = name or model.name
    application = Application(
        name, api_key=api_key, cors_origins=cors_origins, max_body_bytes=max_body_bytes,
        body_seconds=body_seconds, has_page=has_page,
    )  # fmt: skip
    engine.start()
    application.service = Service(model, engine, name, max_waiting, store, application.tally)
    return application.app

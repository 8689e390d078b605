"""``build_app``: completions of OpenAI's API by Ray Serve, requests batched continuously."""

# No annotations as texts here: Ray sends the class to a replica with those globals alone that its
# code uses, where FastAPI could not look "Request" up.
import json
import os
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from ray import serve

from lmdecode._checks import check_format, check_int
from lmdecode.integrations.ray.completions import (
    BadRequest,
    CompletionRequest,
    TextOfTokens,
    answer,
    body_of,
    error_body,
)
from lmdecode.integrations.ray.models import (
    CAPACITY,
    check_is_causal,
    load_model,
    load_tokenizer,
    positions_of,
)
from lmdecode.linear.formats import FORMATS
from lmdecode.store import KVStore

__all__ = ["build_app"]

_OP = "build_app"
_OF_ENGINES = ("capacity", "max_step_tokens")

_api = FastAPI()


@serve.deployment
@serve.ingress(_api)
class Completions:
    """A replica: a model, and the requests that it answers at once."""

    def __init__(self, model: str, tokenizer: str | None, name: str, dtype: str | None,
                 max_requests: int, batching: dict[str, Any],
                 store: dict[str, Any] | None) -> None:  # fmt: skip
        decoding = load_model(_OP, model, dtype)
        packed = check_is_causal(_OP, decoding)
        self._tokenizer = load_tokenizer(_OP, tokenizer, model)
        self._name, self._vocab = name, packed.config.vocab_size
        positions = positions_of(decoding)
        batching = {"capacity": min(positions, CAPACITY), **batching}
        self._max_length = min(positions, batching["capacity"])
        self._store = None
        if store is not None:
            self._store = KVStore(fingerprint=decoding.fingerprint(), **store)
        self._engine = decoding.engine(max_requests=max_requests, store=self._store, **batching)
        self._engine.start()
        self._answering = self._abandoned = 0

    def check_health(self) -> None:
        """Called by Ray Serve, which starts another replica where this raises."""
        if not self._engine.is_started:
            raise RuntimeError("the thread of the engine has ended")

    @_api.get("/v1/models")
    def models(self) -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [{"id": self._name, "object": "model"}]}

    @_api.get("/health")
    def health(self) -> Any:
        """Whether and how many requests are answered, how many clients have gone, and the store."""
        is_well = self._engine.is_started
        content = {
            "running": is_well, "answering": self._answering, "abandoned": self._abandoned,
            "store": None if self._store is None else self._store.stats(),
        }  # fmt: skip
        return JSONResponse(content, 200 if is_well else 503)

    @_api.post("/v1/completions")
    async def completions(self, http: Request) -> Any:
        """One completion."""
        try:
            request = CompletionRequest.of(
                body_of(await http.body()),
                self._tokenizer,
                self._name,
                self._max_length,
                self._vocab,
            )
        except BadRequest as error:
            content = error_body(str(error), "invalid_request_error", error.param)
            return JSONResponse(content, 400)
        pieces = self._pieces(request)
        if request.stream:
            return StreamingResponse(self._events(pieces), media_type="text/event-stream")
        text, last = "", {}
        async for piece in pieces:
            if "error" in piece:
                return JSONResponse(piece, 500)
            text, last = text + piece["choices"][0]["text"], piece
        last["choices"][0]["text"] = text
        return last

    async def _events(self, pieces: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
        async for piece in pieces:
            yield f"data: {json.dumps(piece)}\n\n"
        yield "data: [DONE]\n\n"

    async def _pieces(self, request: CompletionRequest) -> AsyncIterator[dict[str, Any]]:
        """Yield an answer piece by piece; who stops reading frees the request's place."""
        identity, created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        text, tokens, is_wanted = TextOfTokens(self._tokenizer, request.stop), list[int](), False
        written = self._engine.submit(
            request.tokens, max_new_tokens=request.max_tokens, **request.sampling
        )
        self._answering += 1
        try:
            async for token in written:
                assert isinstance(token, int)
                tokens.append(token)
                if written.stats.new_tokens > len(tokens):
                    continue  # further ones are there: all at once
                new = text.feed(tokens, False)
                if text.is_stopped:
                    break
                if new:
                    yield answer(identity, created, self._name, new, None, None)
            new = text.feed(tokens, True) if not text.is_stopped else new
            finish = "length" if written.finish_reason == "length" else "stop"
            usage = (len(request.tokens), len(tokens))
            is_wanted = True
            if text.is_stopped:
                finish = "stop"
            yield answer(identity, created, self._name, new, finish, usage)
        except RuntimeError as error:
            is_wanted = True
            yield error_body(str(error), "server_error")
        finally:
            self._answering -= 1
            self._abandoned += not is_wanted
            if not written.finished:
                written.cancel()


def build_app(
    model: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] | None = None,
    *,
    name: str | None = None,
    dtype: str | None = None,
    num_replicas: int = 1,
    max_requests: int = 64,
    max_waiting: int = 256,
    batching: dict[str, Any] | None = None,
    store: dict[str, Any] | None = None,
    **options: Any,
) -> serve.Application:
    """Return an application of Ray Serve that answers completions of OpenAI's API.

    ``/v1/completions``, streamed or not, ``/v1/models`` and ``/health``. Each replica has an
    ``Engine``: a request with a ``seed`` has the same text alone, in any batch, and on any
    replica, and prompts that begin alike are computed once. A chat's whole text comes
    with each request: a client that lost a replica asks another with the same text. With a
    ``store`` that one does not compute it again.

    Parameters
    ----------
    model, tokenizer
        Folder or name of a decoder-only model of transformers, or a folder that ``Decoding.save``
        wrote; and of its tokenizer; None: of the model's folder.
    name
        What clients call the model; None: the last part of ``model``.
    dtype
        See ``Decoding``: "float32" by default. None for what ``Decoding.save`` wrote.
    num_replicas
        Processes with a model each.
    max_requests
        Answered at once by a replica.
    max_waiting
        Further ones that wait, for each proxy. What is more is refused with status 503.
    batching
        Arguments of ``Decoding.engine``: "capacity", the most tokens of a text, 8192 or what the
        model has by default, and "max_step_tokens".
    store
        Arguments of ``KVStore``, without the fingerprint: "path" and "capacity_bytes" or
        "directory_bytes" are needed. Replicas of a node write the same folder
        (``writers="many"``, ``durability="relaxed"``); those of several nodes share what "remote"
        names, a Redis or Valkey. None: keys and values of a chat stay until their place is needed.
    **options
        Further ones of the deployment, as ``ray_actor_options``.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.

    Examples
    --------
    ::

        serve.run(build_app("model", num_replicas=2))
    """
    op = _OP
    for argument, value in (
        ("num_replicas", num_replicas), ("max_requests", max_requests),
        ("max_waiting", max_waiting),
    ):  # fmt: skip
        check_int(op, argument, value, 1)
    if dtype is not None:
        check_format(op, dtype, FORMATS)
    others = [argument for argument in batching or {} if argument not in _OF_ENGINES]
    if others:
        raise ValueError(
            f"{op}: batching has {others[0]!r}; expected {' and '.join(_OF_ENGINES)} of "
            "Decoding.engine"
        )
    if store is not None:
        if not isinstance(store, dict):
            kind = type(store).__name__
            raise TypeError(f"{op}: store is {kind}; expected a dict of KVStore's arguments")
        if "path" not in store or not {"capacity_bytes", "directory_bytes"} & store.keys():
            raise ValueError(
                f"{op}: store has {', '.join(store) or 'nothing'}; expected path, and "
                "capacity_bytes or directory_bytes"
            )
        store = {"writers": "many", "durability": "relaxed", **store}
    folder = os.fspath(model)
    completions: Any = Completions  # a deployment
    deployment = completions.options(
        num_replicas=num_replicas, max_ongoing_requests=max_requests,
        max_queued_requests=max_waiting, **options,
    )  # fmt: skip
    return deployment.bind(
        folder, None if tokenizer is None else os.fspath(tokenizer),
        name or os.path.basename(folder.rstrip("/")), dtype, max_requests, dict(batching or {}),
        store,
    )  # fmt: skip

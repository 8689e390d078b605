"""``build_app``: completions of OpenAI's API by Ray Serve, requests batched continuously."""

# No annotations as texts here: Ray sends the class to a replica with those globals alone that its
# code uses, where FastAPI could not look "Request" up.
import asyncio
import json
import os
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from ray import serve
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
)

from lmdecode._checks import check_format, check_int
from lmdecode.integrations.ray.completions import (
    BadRequest,
    CompletionRequest,
    TextOfTokens,
    answer,
    body_of,
    error_body,
)
from lmdecode.integrations.transformers import BatchingManager
from lmdecode.store import Fingerprint, KVStore

__all__ = ["build_app"]

_api = FastAPI()


class _Latest:
    """The newest output of a request: who reads slowly misses what lies between."""

    def __init__(self) -> None:
        self._output: Any = None
        self._changed = asyncio.Event()

    def put(self, output: Any) -> None:
        self._output = output
        self._changed.set()

    async def get(self) -> Any:
        await self._changed.wait()
        self._changed.clear()
        return self._output


@serve.deployment
@serve.ingress(_api)
class Completions:
    """A replica: a model, and the requests that it answers at once."""

    def __init__(self, model: str, tokenizer: str, name: str, dtype: str, batching: dict[str, Any],
                 store: dict[str, Any] | None) -> None:  # fmt: skip
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self._name = name
        config = loaded.config.get_text_config()
        self._max_length = getattr(config, "max_position_embeddings", None)
        self._vocab = config.vocab_size
        own = loaded.generation_config
        generation = GenerationConfig(
            do_sample=True, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
        )
        self._store = None
        if store is not None:
            self._store = KVStore(fingerprint=Fingerprint.from_model(loaded), **store)
        self._manager = BatchingManager(
            loaded, generation, ContinuousBatchingConfig(**batching), store=self._store
        )
        self._manager.start()
        self._answering = self._abandoned = 0

    def check_health(self) -> None:
        """Called by Ray Serve, which starts another replica where this raises."""
        if not self._manager.is_running():
            raise RuntimeError("the loop of continuous batching has ended")

    @_api.get("/v1/models")
    def models(self) -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [{"id": self._name, "object": "model"}]}

    @_api.get("/health")
    def health(self) -> Any:
        """Whether and how many requests are answered, how many clients have gone, and the store."""
        is_well = self._manager.is_running()
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
        latest, is_finished, is_wanted = _Latest(), False, False
        self._answering += 1
        text = TextOfTokens(self._tokenizer, request.stop)
        self._manager.register_result_handler(identity, latest.put)
        try:
            self._manager.add_request(
                request.tokens, identity, max_new_tokens=request.max_tokens, streaming=True,
                **request.sampling,
            )  # fmt: skip
            while not is_finished:
                output = await latest.get()
                if output.error is not None:
                    is_wanted = True
                    yield error_body(str(output.error), "server_error")
                    return
                is_finished = output.is_finished()
                tokens = list(output.generated_tokens)
                new = text.feed(tokens, is_finished)
                finish = None
                if text.is_stopped or is_finished:
                    is_short = len(tokens) < request.max_tokens or self._ends(tokens)
                    finish = "stop" if text.is_stopped or is_short else "length"
                is_wanted = finish is not None
                if new or finish:
                    usage = (len(request.tokens), len(tokens)) if finish else None
                    yield answer(identity, created, self._name, new, finish, usage)
                if text.is_stopped:
                    return
        finally:
            self._answering -= 1
            self._abandoned += not is_wanted
            if not is_finished:
                self._manager.cancel_request(identity)

    def _ends(self, tokens: list[int]) -> bool:
        ends = self._manager.generation_config.eos_token_id
        return bool(tokens) and tokens[-1] in (ends if isinstance(ends, list) else [ends])


def build_app(
    model: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] | None = None,
    *,
    name: str | None = None,
    dtype: str = "float32",
    num_replicas: int = 1,
    max_requests: int = 64,
    max_waiting: int = 256,
    batching: dict[str, Any] | None = None,
    store: dict[str, Any] | None = None,
    **options: Any,
) -> serve.Application:
    """Return an application of Ray Serve that answers completions of OpenAI's API.

    ``/v1/completions``, streamed or not, ``/v1/models`` and ``/health``. Each replica batches its
    requests continuously, with the attention and the sampler of lmdecode: a request with a
    ``seed`` has the same text alone, in any batch, and on any replica. A chat's whole text comes
    with each request: a client that lost a replica asks another with the same text. With a
    ``store`` that one does not compute it again.

    Parameters
    ----------
    model, tokenizer
        Folder or name of a decoder-only model of transformers, and of its tokenizer; None: of the
        model's folder.
    name
        What clients call the model; None: the last part of ``model``.
    dtype
        "float32", "bfloat16" or "float16".
    num_replicas
        Processes with a model each.
    max_requests
        Answered at once by a replica.
    max_waiting
        Further ones that wait, for each proxy. What is more is refused with status 503.
    batching
        Arguments of transformers' ``ContinuousBatchingConfig``.
    store
        Arguments of ``KVStore``, without the fingerprint: "path" and "capacity_bytes" or
        "directory_bytes" are needed. Replicas of a node write the same folder
        (``writers="many"``, ``durability="relaxed"``); those of several nodes share what "remote"
        names, a Redis or Valkey. None: keys and values of a chat end with its request. A model
        with sliding windows cannot have one.
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
    op = "build_app"
    for argument, value in (
        ("num_replicas", num_replicas), ("max_requests", max_requests),
        ("max_waiting", max_waiting),
    ):  # fmt: skip
        check_int(op, argument, value, 1)
    check_format(op, dtype, ("float32", "bfloat16", "float16"))
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
        folder, os.fspath(tokenizer) if tokenizer is not None else folder,
        name or os.path.basename(folder.rstrip("/")), dtype, dict(batching or {}),
        store,
    )  # fmt: skip

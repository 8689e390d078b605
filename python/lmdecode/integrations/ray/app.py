"""``build_app``: the application of ``lmdecode.serving``, on Ray Serve."""

from __future__ import annotations

import os
from typing import Any

from ray import serve

from lmdecode._checks import check_format, check_int
from lmdecode.integrations.ray.models import CAPACITY, check_is_causal
from lmdecode.integrations.ray.replica_app import ReplicaApp, set_replica_app
from lmdecode.linear.formats import FORMATS
from lmdecode.models.saved import MANIFEST
from lmdecode.readers.gguf.reader import is_gguf
from lmdecode.serving.app import create_app
from lmdecode.serving.text_model import TextModel, name_of
from lmdecode.store import KVStore

__all__ = ["build_app"]

_OP = "build_app"
_OF_ENGINES = ("capacity", "max_step_tokens")
_OF_SERVING = ("api_key", "cors_origins", "max_body_bytes", "body_seconds", "has_page")


@serve.deployment
@serve.ingress(ReplicaApp())
class Completions:
    """A replica: a model, and the requests that it answers at once."""

    def __init__(self, model: str, tokenizer: str | None, name: str, dtype: str | None,
                 max_requests: int, batching: dict[str, Any], store: dict[str, Any] | None,
                 max_waiting: int, serving: dict[str, Any]) -> None:  # fmt: skip
        found = TextModel.load(model, dtype=dtype, tokenizer=tokenizer)
        check_is_causal(_OP, found.decoding)
        batching = {"capacity": min(found.context_length or CAPACITY, CAPACITY), **batching}
        opened = None
        if store is not None:
            opened = KVStore(fingerprint=found.decoding.fingerprint(found.tokenizer), **store)
        self._engine = found.decoding.engine(max_requests=max_requests, store=opened, **batching)
        # Ray holds back further requests of HTTP; here answers count, of which one may have many.
        set_replica_app(
            create_app(
                self._engine, found, name=name, store=opened, max_waiting=max_waiting, **serving
            )
        )

    def check_health(self) -> None:
        """Called by Ray Serve, which starts another replica where this raises."""
        if not self._engine.is_started:
            raise RuntimeError("the thread of the engine has ended")


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
    serving: dict[str, Any] | None = None,
    **options: Any,
) -> serve.Application:
    """Return an application of Ray Serve with the endpoints of ``lmdecode.serving.create_app``.

    Each replica has a model and an ``Engine``: a request with a ``seed`` has the same text alone,
    in any batch, and on any replica, and common prefixes of prompts are computed once. A chat's
    whole text comes with each request, so that a client that lost a replica may ask another. With a
    ``store`` that one does not compute it again.

    Parameters
    ----------
    model, tokenizer
        See ``TextModel.load``: a decoder-only model, and what has its tokenizer, if that is
        elsewhere.
    name
        Of the model, as clients call it; None: the last part of ``model``.
    dtype
        Format of the weights. None: that of a saved model or a GGUF file, "float32" of others.
    num_replicas
        Number of processes with a model each.
    max_requests
        Number of requests that a replica answers at once.
    max_waiting
        Number of further ones that wait, for each proxy; Ray refuses more with status 503.
    batching
        Arguments of ``Decoding.engine``: "capacity", by default 8192 or the model's context, and
        "max_step_tokens".
    store
        Arguments of ``KVStore``, without the fingerprint: "path" and "capacity_bytes" or
        "directory_bytes" are needed. Replicas of a node write the same folder
        (``writers="many"``, ``durability="relaxed"``); those of several nodes share what "remote"
        names, a Redis or Valkey. None: keys and values of a chat stay until their memory is needed.
    serving
        Further arguments of ``create_app``, such as "api_key".
    **options
        Further ones of the deployment, such as ``ray_actor_options``.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.

    Examples
    --------
    ::

        serve.run(build_app("model", num_replicas=2), blocking=True)
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
    others = [argument for argument in serving or {} if argument not in _OF_SERVING]
    if others:
        raise ValueError(
            f"{op}: serving has {others[0]!r}; expected {', '.join(_OF_SERVING)} of create_app"
        )
    folder = os.fspath(model)
    is_packed = os.path.isfile(os.path.join(folder, MANIFEST)) or is_gguf(folder)
    if dtype is None and not is_packed:
        dtype = "float32"
    completions: Any = Completions  # a deployment
    deployment = completions.options(
        num_replicas=num_replicas, max_ongoing_requests=max_requests,
        max_queued_requests=max_waiting, **options,
    )  # fmt: skip
    return deployment.bind(
        folder, None if tokenizer is None else os.fspath(tokenizer),
        name or name_of(folder), dtype, max_requests, dict(batching or {}),
        store, max_waiting, dict(serving or {}),
    )  # fmt: skip

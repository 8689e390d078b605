"""``/v1/embeddings`` and ``/v1/rerank``: bodies to texts, and vectors and scores to bodies."""

from __future__ import annotations

import base64
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

from lmdecode._memory import bytes_of
from lmdecode.decoder.embedding import check_pooling_of_files, embedded, last_logits
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.serving.completions import prompts_of
from lmdecode.serving.errors import BadRequest, reason_of
from lmdecode.serving.fields import Fields
from lmdecode.serving.parameters import check_names
from lmdecode.serving.service import Service

__all__ = ["embeddings_body", "rerank_body"]

_T = TypeVar("_T")
_EMBEDDING_FIELDS = ("model", "input", "encoding_format", "dimensions", "pooling", "user",
                     "add_special_tokens")  # fmt: skip
_RERANK_FIELDS = (
    "model", "query", "documents", "top_n", "return_documents", "instruction", "user",
)  # fmt: skip
_MOST_TEXTS = 2048  # OpenAI's
_AT_ONCE = 64  # texts between which others have their turn
_LONGEST_INSTRUCTION = 4096

# The prompt of Qwen3-Reranker.
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def _model_of(service: Service) -> PackedCausalModel:
    decoder = service.model.decoding.decoder
    if not isinstance(decoder, PackedCausalModel):
        raise BadRequest("model", "the model reads by an encoder; expected a decoder-only model")
    return decoder


def _check_lengths(service: Service, name: str, texts: Sequence[Sequence[Any]], unit: int) -> None:
    """Raise ``BadRequest`` for a text of more than ``unit`` times the model's context."""
    for i, text in enumerate(texts):
        if len(text) > service.context * unit:
            what = "tokens" if unit == 1 else "characters"
            raise BadRequest(
                name,
                f"{name}[{i}] has {len(text)} {what}; expected at most {service.context} tokens, "
                "the model's context",
                "context_length_exceeded",
            )


def _parts(texts: Sequence[_T]) -> list[Sequence[_T]]:
    return [texts[at : at + _AT_ONCE] for at in range(0, len(texts), _AT_ONCE)]


def _usage(texts: Sequence[Sequence[int]]) -> dict[str, int]:
    count = sum(map(len, texts))
    return {"prompt_tokens": count, "total_tokens": count}


async def embeddings_body(fields: Fields, service: Service) -> dict[str, Any]:
    """Return the answer to a body; raises ``RequestError``, which names the field."""
    check_names(fields, _EMBEDDING_FIELDS, {})
    model, cache_dtype = _model_of(service), service.model.decoding.cache_dtype
    is_base64 = fields.choice("encoding_format", "float", "base64") == "base64"
    dimensions = fields.integer("dimensions", 1, model.config.model_size)
    pooling = fields.choice("pooling", "last", "mean")
    if pooling is None:
        try:
            pooling = check_pooling_of_files("embeddings", service.model.decoding._pooling)
        except ValueError as error:
            raise BadRequest("pooling", reason_of(error)) from error
    given = fields.get("input")
    if isinstance(given, list):
        texts = [text if isinstance(text, str) else "" for text in given]
        _check_lengths(service, "input", texts, service.model.tokenizer.longest_token)
    inputs = await prompts_of(fields, service, "input", _MOST_TEXTS)
    _check_lengths(service, "input", inputs, 1)

    def written(part: Sequence[list[int]]) -> list[Any]:
        vectors = embedded(
            "embeddings", model, cache_dtype, part, pooling=pooling, dimensions=dimensions
        )
        if not is_base64:
            return vectors.tolist()
        return [base64.b64encode(bytes_of(vector)).decode() for vector in vectors.contiguous()]

    found = await service.computed_beside(_parts(inputs), written)
    data = [
        {"object": "embedding", "index": index, "embedding": vector}
        for index, vector in enumerate(itertools.chain(*found))
    ]
    return {"object": "list", "data": data, "model": service.name, "usage": _usage(inputs)}


def _documents(fields: Fields) -> list[str]:
    """Return the texts of documents, which came as texts or as objects with one."""
    given = fields.get("documents")
    expected = f"a list of 1 to {_MOST_TEXTS} texts, or of objects with a text"
    if not isinstance(given, list) or not 1 <= len(given) <= _MOST_TEXTS:
        raise fields.error("documents", expected)
    texts: list[Any] = [one.get("text") if isinstance(one, dict) else one for one in given]
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise BadRequest("documents", f"documents[{i}] is no text; expected {expected}")
    return texts


async def rerank_body(fields: Fields, service: Service) -> dict[str, Any]:
    """Return the answer to a body; raises ``RequestError``, which names the field.

    A score is the probability of "yes", against "no", behind the prompt of Qwen3-Reranker.
    """
    check_names(fields, _RERANK_FIELDS, {})
    model, cache_dtype = _model_of(service), service.model.decoding.cache_dtype
    query, documents = fields.text("query"), _documents(fields)
    if not query:
        raise fields.error("query", "a text")
    top_n = fields.integer("top_n", 1, 1 << 31) or len(documents)
    instruction = fields.text("instruction", _LONGEST_INSTRUCTION) or _INSTRUCTION
    returns_documents = fields.boolean("return_documents")
    _check_lengths(service, "documents", documents, service.model.tokenizer.longest_token)
    encode = functools.partial(service.tokens_of, add_special_tokens=False)
    *words, before, behind = await encode("model", ["yes", "no", _BEFORE, _BEHIND])
    if before[0] not in service.model.tokenizer.special_ids or [len(w) for w in words] != [1, 1]:
        raise BadRequest(
            "model", "the tokenizer lacks <|im_start|>, yes or no; expected a reranker of Qwen3's"
        )
    asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: "
    bodies = await encode("documents", [asked + document for document in documents])
    texts = [before + body + behind for body in bodies]
    _check_lengths(service, "documents", texts, 1)
    tokens = [word[0] for word in words]
    found = await service.computed_beside(
        _parts(texts), lambda part: last_logits(model, cache_dtype, part, tokens).tolist()
    )
    scores = [1 / (1 + math.exp(min(no - yes, 700.0))) for part in found for yes, no in part]
    results = []
    for index in sorted(range(len(scores)), key=lambda i: -scores[i])[:top_n]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if returns_documents:
            result["document"] = {"text": documents[index]}
        results.append(result)
    return {"object": "list", "results": results, "model": service.name, "usage": _usage(texts)}

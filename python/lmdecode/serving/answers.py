"""Bodies of answers, as OpenAI's API has them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmdecode.decoder.engine.request import TokenLogprob
from lmdecode.serving.tokenizer import Tokenizer

__all__ = ["Envelope", "Usage", "chat_logprobs", "completion_logprobs"]


@dataclass
class Usage:
    """Counts of tokens of one request.

    Attributes
    ----------
    prompt, cached, completion : int
        Tokens of the prompts; those that were not computed, as keys and values were there; tokens
        of the answers.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    @property
    def body(self) -> dict[str, Any]:
        """The JSON."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True)
class Envelope:
    """What all pieces of an answer have in common.

    Attributes
    ----------
    kind : str
        Of the object: "chat.completion", "chat.completion.chunk" or "text_completion".
    prefix : str
        Of its id.
    model : str
        Name of the model.
    fingerprint : str
        Of the model and its format.
    """

    kind: str
    prefix: str
    model: str
    fingerprint: str
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, choices: Sequence[Mapping[str, Any]], usage: Usage | None) -> dict[str, Any]:
        """Return an answer, or a piece of one."""
        body: dict[str, Any] = {
            "id": f"{self.prefix}-{self.identity}",
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": list(choices),
        }
        if usage is not None:
            body["usage"] = usage.body
        return body


def _token_text(tokenizer: Tokenizer, token: int) -> tuple[str, list[int]]:
    data = tokenizer.token_bytes(token)
    return data.decode("utf-8", errors="replace"), list(data)


def chat_logprobs(tokenizer: Tokenizer, items: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return log-probabilities of a chat's tokens."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, data = _token_text(tokenizer, token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": data}

    content = [
        {
            **entry(item.token, item.logprob),
            "top_logprobs": [entry(token, logprob) for token, logprob in item.top],
        }
        for item in items
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, items: Sequence[TokenLogprob], offsets: Sequence[int]
) -> dict[str, Any]:
    """Return log-probabilities of a completion's tokens.

    Parameters
    ----------
    tokenizer
        Of the model.
    items
        Of these tokens.
    offsets
        Where the text of each begins.
    """
    texts = [_token_text(tokenizer, item.token)[0] for item in items]
    top = [
        {_token_text(tokenizer, t)[0]: max(logprob, -9999.0) for t, logprob in item.top}
        for item in items
    ]
    return {
        "tokens": texts,
        "token_logprobs": [max(item.logprob, -9999.0) for item in items],
        "top_logprobs": top,
        "text_offset": list(offsets),
    }

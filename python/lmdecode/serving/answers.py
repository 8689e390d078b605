"""Bodies of answers, as OpenAI's API has them."""

from __future__ import annotations

import math
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
    """Token counts of a request: of its prompts, how many of these were cached, of its answers."""

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
    """The fields that all pieces of an answer share.

    ``kind`` is "chat.completion", "chat.completion.chunk" or "text_completion"; ``prefix`` begins
    the id, and ``fingerprint`` names the model and its format.
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


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)


def chat_logprobs(tokenizer: Tokenizer, items: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return log-probabilities of a chat's tokens."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        text = data.decode("utf-8", errors="replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}

    content = [
        {
            **entry(item.token, item.logprob),
            "top_logprobs": [entry(t, logprob) for t, logprob in item.top if t >= 0],
        }
        for item in items
    ]
    return {"content": content, "refusal": None}


def _key(tokenizer: Tokenizer, token: int) -> str:
    r"""Return the text of a token, or ``bytes:\xf0\x9f`` of one that is a part of a character."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"bytes:{str(data)[2:-1]}"


def completion_logprobs(
    tokenizer: Tokenizer, items: Sequence[TokenLogprob], offsets: Sequence[int]
) -> dict[str, Any]:
    """Return log-probabilities of a completion's tokens, whose texts begin at ``offsets``.

    A token whose log-probability is NaN has none. ``top_logprobs`` has the best ones of each token
    and itself by their texts; of tokens with the same text, the most probable one.
    """
    lists: list[list[Any]] = [[], [], []]
    for item in items:
        key, logprob, top = _key(tokenizer, item.token), None, None
        if not math.isnan(item.logprob):
            logprob, top = _finite(item.logprob), dict[str, float]()
            for token, of_token in (*item.top, (item.token, item.logprob)):
                if token >= 0:  # there may be fewer than were asked for
                    other = _key(tokenizer, token)
                    top[other] = max(_finite(of_token), top.get(other, -math.inf))
        for values, value in zip(lists, (key, logprob, top), strict=True):
            values.append(value)
    tokens, logprobs, tops = lists
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }

"""Requests and answers of OpenAI's completions API, without a server around them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmdecode._checks import MAX_INT, is_int

__all__ = ["BadRequest", "CompletionRequest", "TextOfTokens", "answer", "body_of", "error_body"]

# Of OpenAI's API what is not here, and with what value it does nothing.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1), "echo": (None, False), "frequency_penalty": (None, 0, 0.0),
    "logit_bias": (None, {}), "logprobs": (None,), "n": (None, 1),
    "presence_penalty": (None, 0, 0.0), "suffix": (None, ""),
}  # fmt: skip
_KNOWN = (
    "model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "stream", "user",
)  # fmt: skip
_MOST_STOPS = 4


class BadRequest(ValueError):
    """A request that is wrong; ``param`` names the field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def _number(body: Mapping[str, Any], name: str, otherwise: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadRequest(name, f"{name} is {value!r}; expected a number")
    if not low <= value <= high:
        raise BadRequest(name, f"{name} is {value}; expected {low:g} to {high:g}")
    return float(value)


def _integer(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not is_int(value) or not low <= value <= high:
        raise BadRequest(name, f"{name} is {value!r}; expected an int, {low} to {high}")
    return int(value)


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request.

    Attributes
    ----------
    tokens
        Of the prompt.
    max_tokens
        At most so many new ones.
    sampling
        temperature, top_p, top_k, min_p and, where it is given, seed.
    stop
        Texts at which the answer ends, without them.
    stream
        Whether the answer comes piece by piece.
    """

    tokens: list[int]
    max_tokens: int
    sampling: dict[str, Any]
    stop: tuple[str, ...]
    stream: bool

    @staticmethod
    def of(
        body: Any, tokenizer: Any, name: str, max_length: int | None, vocab: int
    ) -> CompletionRequest:
        """Check a request's JSON.

        Parameters
        ----------
        body
            As it came.
        tokenizer
            Of the model.
        name
            Of the model, as clients call it.
        max_length
            Tokens of prompt and answer; None: any number.
        vocab
            Tokens are below it.

        Raises
        ------
        BadRequest
            Names the field, what came and what was expected.
        """
        if not isinstance(body, Mapping):
            raise BadRequest("body", f"the body is a {type(body).__name__}; expected an object")
        for field, values in _WITHOUT_EFFECT.items():
            if field in body and body[field] not in values:
                raise BadRequest(field, f"{field} is {body[field]!r}; it is not supported")
        for field in body:
            if field not in _KNOWN and field not in _WITHOUT_EFFECT:
                raise BadRequest(field, f"{field} is no field; expected one of {', '.join(_KNOWN)}")
        if body.get("model") not in (None, name):
            raise BadRequest("model", f"model is {body['model']!r}; expected {name!r}")
        tokens = _tokens(body.get("prompt"), tokenizer, vocab)
        most = MAX_INT if max_length is None else max_length - len(tokens)
        if most < 1:
            raise BadRequest(
                "prompt", f"prompt has {len(tokens)} tokens; expected less than {max_length}"
            )
        max_tokens = _integer(body, "max_tokens", 1, most)
        sampling: dict[str, Any] = {
            "temperature": _number(body, "temperature", 1.0, 0.0, 100.0),
            "top_p": _number(body, "top_p", 1.0, 0.0, 1.0),
            "min_p": _number(body, "min_p", 0.0, 0.0, 1.0),
            "top_k": _integer(body, "top_k", -1, 2**31 - 1) or 0,
        }
        if (seed := _integer(body, "seed", 0, MAX_INT)) is not None:
            sampling["seed"] = seed
        stream = body.get("stream")
        if stream not in (None, True, False):
            raise BadRequest("stream", f"stream is {stream!r}; expected true or false")
        return CompletionRequest(
            tokens, min(16, most) if max_tokens is None else max_tokens, sampling,
            _stops(body.get("stop")), bool(stream),
        )  # fmt: skip


def body_of(data: bytes) -> Any:
    """Parse the JSON body of a request.

    Raises
    ------
    BadRequest
        It is not JSON, or has a lone surrogate, which no tokenizer takes.
    """
    try:
        body = json.loads(data)
        json.dumps(body, ensure_ascii=False).encode()
        return body
    except (ValueError, RecursionError) as error:
        raise BadRequest("body", f"the body is no JSON: {error}") from error


def _tokens(prompt: Any, tokenizer: Any, vocab: int) -> list[int]:
    if isinstance(prompt, str):
        tokens = list(tokenizer(prompt).input_ids)
    elif isinstance(prompt, list) and all(is_int(token) for token in prompt):
        tokens = prompt
        for token in tokens:
            if not 0 <= token < vocab:
                raise BadRequest("prompt", f"prompt has token {token}; expected 0 to {vocab - 1}")
    else:
        raise BadRequest("prompt", "prompt is no text and no list of tokens; expected one of both")
    if not tokens:
        raise BadRequest("prompt", "prompt is empty; expected a token or more")
    return tokens


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    is_list = isinstance(stops, list) and len(stops) <= _MOST_STOPS
    if not is_list or not all(isinstance(one, str) and one for one in stops):
        raise BadRequest("stop", f"stop is {stop!r}; expected a text, or up to {_MOST_STOPS} texts")
    return tuple(stops)


class TextOfTokens:
    """The text of an answer, as far as it cannot change any more.

    A character of several tokens waits for the last of them, and what may become a stop text for
    what follows.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self.text = ""
        self.is_stopped = False

    def feed(self, tokens: list[int], is_last: bool) -> str:
        """Take all tokens so far, and return what is new of the text."""
        if self.is_stopped:
            return ""
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.is_stopped = True
            text = text[: min(found)]
        elif not is_last:
            text = text.rstrip("\ufffd")
            held = max(
                (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
                default=0,
            )
            text = text[: len(text) - held]
        new = text[len(self.text) :]
        self.text += new
        return new


def answer(
    identity: str, created: int, model: str, text: str, finish: str | None,
    usage: tuple[int, int] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return a completion, or a piece of one.

    Parameters
    ----------
    identity, created, model
        Of the answer: its name, seconds since 1970, the model's name.
    text
        Of this piece.
    finish
        "stop", "length", or None: it goes on.
    usage
        Tokens of prompt and answer.
    """
    body: dict[str, Any] = {
        "id": identity,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish}],
    }
    if usage is not None:
        prompt, completion = usage
        body["usage"] = {
            "prompt_tokens": prompt, "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }  # fmt: skip
    return body


def error_body(message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """Return an error as OpenAI's API has it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}

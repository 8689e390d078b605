"""Requests and answers of the completions API; neither Ray nor a server is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

import ray_stand_in  # noqa: F401

from lmdecode.integrations.ray.completions import (
    BadRequest,
    CompletionRequest,
    TextOfTokens,
    answer,
    body_of,
    error_body,
)


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def __call__(self, text: str) -> Any:
        return SimpleNamespace(input_ids=list(text.encode()))

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode(errors="replace")


def request_of(**body: Any) -> CompletionRequest:
    return CompletionRequest.of({"prompt": "ab", **body}, Bytes(), "m", 20, 256)


def test_what_is_not_given_is_as_openai_has_it() -> None:
    request = request_of()
    assert request.tokens == [97, 98] and request.max_tokens == 16 and not request.stream
    assert request.sampling == {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0}
    assert request.stop == ()
    assert request_of(prompt=[1, 2, 3] * 5).max_tokens == 5  # all that the model has room for


def test_what_is_given() -> None:
    request = request_of(
        prompt=[1, 2], max_tokens=3, temperature=0, top_p=0.5, top_k=7, min_p=0.1, seed=9,
        stop=["x", "yz"], stream=True, model="m", user="u", n=1, logprobs=None, echo=False,
    )  # fmt: skip
    assert request.tokens == [1, 2] and request.max_tokens == 3 and request.stream
    assert request.sampling == {
        "temperature": 0.0, "top_p": 0.5, "min_p": 0.1, "top_k": 7, "seed": 9,
    }  # fmt: skip
    assert request.stop == ("x", "yz") and request_of(stop="x").stop == ("x",)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": [256]}, "prompt"),
        ({"prompt": [-1]}, "prompt"), ({"prompt": ["a"]}, "prompt"), ({"prompt": 5}, "prompt"),
        ({"prompt": [1] * 20}, "prompt"), ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 19}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"), ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"), ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 2}, "top_p"), ({"top_k": "7"}, "top_k"), ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"), ({"stop": [""]}, "stop"), ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [1]}, "stop"), ({"stop": 5}, "stop"), ({"stop": {"a": 1}}, "stop"),
        ({"stop": False}, "stop"), ({"stream": "yes"}, "stream"), ({"n": 2}, "n"),
        ({"logprobs": 1}, "logprobs"), ({"echo": True}, "echo"), ({"model": "other"}, "model"),
        ({"colour": 1}, "colour"), ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest, match=param) as raised:
        request_of(**body)
    assert raised.value.param == param


@pytest.mark.parametrize(
    "data", [b"", b"{", b"{'a': 1}", b'{"a": "\xff"}', b"[" * 100_000, rb'{"prompt": "\ud800"}']
)
def test_a_body_that_is_no_json(data: bytes) -> None:
    with pytest.raises(BadRequest, match="the body is no JSON") as raised:
        body_of(data)
    assert raised.value.param == "body"


def test_a_body_of_json() -> None:
    assert body_of('{"prompt": "\u00e4 \\ud83d\\ude00"}'.encode()) == {
        "prompt": "\u00e4 \U0001f600"
    }


@pytest.mark.parametrize("body", [None, [], "text"])
def test_a_body_that_is_no_object(body: Any) -> None:
    with pytest.raises(BadRequest, match="expected an object"):
        CompletionRequest.of(body, Bytes(), "m", 20, 256)


def pieces_of(text: str, stops: tuple[str, ...] = ()) -> list[str]:
    """What each token of a text adds."""
    stream, tokens = TextOfTokens(Bytes(), stops), list(text.encode())
    return [stream.feed(tokens[: n + 1], n + 1 == len(tokens)) for n in range(len(tokens))]


def test_characters_wait_for_their_last_token() -> None:
    pieces = pieces_of("a\u20acb")
    assert pieces == ["a", "", "", "\u20ac", "b"]


def test_an_answer_ends_before_a_stop_text() -> None:
    assert "".join(pieces_of("one two three", ("tw", "xx"))) == "one "
    assert "".join(pieces_of("one t", ("two",))) == "one t"  # it did not come
    assert "".join(pieces_of("abab abac", ("abac",))) == "abab "
    assert pieces_of("xy", ("xy",)) == ["", ""]
    stream = TextOfTokens(Bytes(), ("b",))
    stream.feed([97, 98], False)
    assert stream.is_stopped and stream.text == "a" and stream.feed([97, 98, 99], True) == ""


def test_answers_have_the_form_of_the_api() -> None:
    piece = answer("id", 5, "m", "text", "length", (2, 3))
    assert piece["object"] == "text_completion" and piece["id"] == "id" and piece["created"] == 5
    assert piece["choices"] == [
        {"index": 0, "text": "text", "logprobs": None, "finish_reason": "length"}
    ]
    assert piece["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert "usage" not in answer("id", 5, "m", "text", None)
    assert error_body("wrong", "kind", "seed")["error"]["param"] == "seed"

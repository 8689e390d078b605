"""Bodies to arguments of the engine, and tokens to texts; no server is needed."""

from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("starlette")

from lmdecode._checks import MAX_INT
from lmdecode.decoder.engine.request import TokenLogprob
from lmdecode.serving.errors import (
    BadRequest,
    RequestError,
    error_of_engine,
    error_of_step,
    reason_of,
)
from lmdecode.serving.fields import Fields, body_of
from lmdecode.serving.parameters import Parameters, read_parameters
from lmdecode.serving.writing import AnswerWriter, StopFinder

VOCAB, END = 300, 7


class Stream:
    """Text of bytes, as far as it is whole characters."""

    def __init__(self) -> None:
        self._held = b""

    def push(self, tokens: list[int]) -> str:
        self._held += bytes(tokens)
        try:
            text, self._held = self._held.decode(), b""
        except UnicodeDecodeError:
            return ""
        return text

    def finish(self) -> str:
        return self._held.decode(errors="replace")


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def stream(self, **_: Any) -> Stream:
        return Stream()


def read(defaults: dict[str, Any] | None = None, **body: Any) -> Parameters:
    tokenizer: Any = Bytes()
    return read_parameters(Fields(body), tokenizer, defaults or {}, (END,), VOCAB)


def test_what_is_not_given_is_as_openai_has_it() -> None:
    got = read()
    assert got.arguments == {"do_sample": True, "eos_token_id": [END], "min_tokens": 0}
    assert (got.n, got.seed, got.stops, got.stream) == (1, None, (), False)
    assert got.skips_special and not got.keeps_stop and not got.is_search


def test_what_is_given() -> None:
    got = read(
        temperature=0.0, top_p=0.5, top_k=7.0, min_p=0.1, seed=9, stop=["x", "yz"], stream=True,
        user="u", n=2, logit_bias={"5": -100}, repeat_penalty=1.1, mirostat=2, bad_words=["ab"],
        dry_sequence_breakers=["\n", "a:"], stop_token_ids=[3, END], ignore_eos=False,
        stream_options={"include_usage": True}, typical=0.9,
    )  # fmt: skip
    assert got.arguments == {
        "temperature": 0.0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "do_sample": False,
        "logit_bias": {5: -100.0}, "repetition_penalty": 1.1, "mirostat_tau": 5.0,
        "bad_words_ids": [[97, 98]], "dry_breakers": [10, 58], "eos_token_id": [END, 3],
        "min_tokens": 0, "typical_p": 0.9,
    }  # fmt: skip
    assert got.stops == ("x", "yz") and read(stop="x").stops == ("x",)
    assert got.stream and got.includes_usage and not got.repeats_usage
    options = {"continuous_usage_stats": True}
    assert read(stream=True, stream_options=options).repeats_usage
    assert [got.seed_of(i) for i in range(2)] == [9, 10]
    assert read(ignore_eos=True, stop_token_ids=[3]).arguments["eos_token_id"] == [3]


def test_seeds_of_any_sign() -> None:
    assert read(seed=-1).seed is None
    assert read(seed=-2).seed == MAX_INT - 1
    assert read(seed=MAX_INT, n=2).seed_of(1) == 0


def test_the_models_own_defaults_count_where_nothing_is_given() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "do_sample": True, "max_length": 20}
    got = read(defaults, top_k=3)
    assert got.arguments["temperature"] == 0.6 and got.arguments["top_k"] == 3
    assert "max_length" not in got.arguments
    assert "temperature" not in read(defaults, num_beams=2).arguments, "a search draws nothing"


def test_mirostat_may_be_off() -> None:
    off = {"do_sample": True, "eos_token_id": [END], "min_tokens": 0}
    assert read(mirostat=0, mirostat_tau=5.0, mirostat_eta=0.1).arguments == off


def test_a_model_that_does_not_draw_by_itself() -> None:
    assert read({"do_sample": False}).arguments["do_sample"] is False
    assert read({"do_sample": False}, temperature=0.5).arguments["do_sample"] is True


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"bad_words_ids": 5, "bad_words": ["a"]}, "bad_words_ids"),
        ({"suppress_tokens": [0] * 5000}, "suppress_tokens"),
        ({"bad_words_ids": [[1] * 100] * 50}, "bad_words_ids"),
        ({"bad_words": ["a"] * 257}, "bad_words"), ({"bad_words": ["a" * 129]}, "bad_words"),
    ],
)  # fmt: skip
def test_lists_that_are_too_long_or_none(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        read(**body)
    assert raised.value.param == param


def test_searches() -> None:
    got = read(num_beams=3, n=2, length_penalty=0.5, early_stopping=True)
    assert got.is_search and got.arguments == {
        "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True,
        "eos_token_id": [END], "min_tokens": 0,
    }  # fmt: skip
    with pytest.raises(BadRequest, match="n is 4; expected at most num_beams, 3"):
        read(num_beams=3, n=4)
    with pytest.raises(BadRequest, match="stop is given; expected none with num_beams above 1"):
        read(num_beams=3, stop="b")
    assert read(num_beams=1, stop="b").stops == ("b",)


class Words(Bytes):
    def encode(self, text: str, **_: Any) -> list[int]:
        known = {"god": [1], " god": [2], "ark": [3], " ark": [4, 3], "ox": [5, 6], " ox": [7, 6],
                 "same": [8], " same": [8], "none": [9], " none": [], "": [], " ": [4]}  # fmt: skip
        return known[text]


def test_bad_words_are_those_of_vllm() -> None:
    """Of vLLM 0.32.0: behind a space, too, if that has as many tokens and another first one."""

    def banned(*words: str) -> Any:
        tokenizer: Any = Words()
        fields = Fields({"bad_words": list(words)})
        return read_parameters(fields, tokenizer, {}, (END,), VOCAB).arguments["bad_words_ids"]

    assert banned("god") == banned(" god") == [[1], [2]]
    assert banned("ark", "same", "none") == [[3], [8], [9]]
    assert banned("ox", "god") == [[5, 6], [7, 6], [1], [2]]
    with pytest.raises(BadRequest, match="bad_words has ' ', which has no token"):
        banned(" ")


def test_tokens_of_a_request_are_named_where_they_end_an_answer() -> None:
    assert read(stop_token_ids=[3, END]).stop_tokens == {3}, "the tokenizer's own end is not"
    assert read(stop_token_ids=[3, END], ignore_eos=True).stop_tokens == {3, END}
    assert read().stop_tokens == frozenset()


@pytest.mark.parametrize(
    "data", [b"", b"{", b"{'a': 1}", b'{"a": "\xff"}', b"[" * 100_000, rb'{"prompt": "\ud800"}',
             rb'{"prompt": "\uDC00"}', b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": "\xed\xa0\x80"}',
             '{"a": 1}'.encode("utf-16")]
)  # fmt: skip
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
        Fields(body)


def pieces_of(text: str, stops: tuple[str, ...] = (), least: int = 0) -> list[str]:
    """Return what each token of a text adds, and what is left at the end."""
    tokenizer: Any = Bytes()
    writer = AnswerWriter(tokenizer, stops=stops, min_tokens=least)
    return [*(writer.push([token]).text for token in text.encode()), writer.finish().text]


def test_characters_wait_for_their_last_token() -> None:
    assert pieces_of("a\u20acb") == ["a", "", "", "\u20ac", "b", ""]


def test_an_answer_ends_before_a_stop_text() -> None:
    assert "".join(pieces_of("one two three", ("tw", "xx"))) == "one "
    assert "".join(pieces_of("one t", ("two",))) == "one t"  # it did not come
    assert "".join(pieces_of("abab abac", ("abac",))) == "abab "
    assert pieces_of("xy", ("xy",)) == ["", "", ""]
    finder = StopFinder(("b",))
    assert finder.push("ab") == "a" and finder.found == "b"
    assert finder.push("c") == finder.finish() == ""
    finder = StopFinder(("bc", "abcd"), keeps_stop=True)
    assert finder.push("xab") + finder.push("cd") == "xabcd" and finder.found == "abcd"


@pytest.mark.parametrize(
    ("text", "stops", "least", "wanted"),
    [
        ("ab ab ab", ("ab",), 0, ""),
        ("ab ab ab", ("ab",), 1, ""),  # it ends in the second token
        ("ab ab ab", ("ab",), 2, "ab "),
        ("ab ab ab", ("ab",), 4, "ab "),
        ("ab ab ab", ("ab",), 5, "ab ab "),
        ("ab ab ab", ("ab",), 8, "ab ab ab"),
        ("xaba!", ("aba",), 3, "x"),
        ("xababa", ("aba",), 4, "xab"),  # it begins in one that was held back
        ("xabd", ("b", "abc"), 3, "xabd"),  # what may begin the longer one has the other in it
        ("xabdb", ("b", "abc"), 3, "xabd"),
        ("a\u20acb", ("\u20ac",), 2, "a"),  # a character is there with its last token
        ("a\u20acb", ("\u20ac",), 4, "a\u20acb"),
    ],
)
def test_no_stop_text_ends_an_answer_before_min_tokens(
    text: str, stops: tuple[str, ...], least: int, wanted: str
) -> None:
    assert "".join(pieces_of(text, stops, least)) == wanted


def test_log_probabilities_wait_for_their_text() -> None:
    tokenizer: Any = Bytes()
    items = [TokenLogprob(token, -1.0, ()) for token in "ab\u20accd".encode()]
    writer = AnswerWriter(tokenizer, stops=("cd",))
    first = writer.push(items[:3])
    assert first.text == "ab" and first.logprobs == items[:3]
    assert first.offsets == [0, 1, 2]
    second = writer.push(items[3:6])
    assert second.text == "\u20ac" and second.logprobs == items[3:5]
    assert writer.push(items[6:]).text == "" and writer.stop == "cd"
    assert writer.finish().logprobs == [], "those of the stop text are left out"


def test_errors_of_the_engine_name_the_field() -> None:
    error = error_of_engine(ValueError("Sampler: top_p is 3; expected 0 to 1"), {})
    assert error.param == "top_p" and str(error) == "top_p is 3; expected 0 to 1"
    names = {"max_new_tokens": "max_tokens"}
    error = error_of_engine(ValueError("Engine.submit: max_new_tokens is 0; expected"), names)
    assert error.param == "max_tokens" and str(error) == "max_tokens is 0; expected"
    failed = RuntimeError("Engine: no token can be chosen: the request has no logit above -inf")
    assert error_of_step(failed).status == 400
    assert error_of_step(RuntimeError("Engine: a step failed")).status == 500


def test_errors_have_the_form_of_the_api() -> None:
    assert RequestError(429, "full", code="c").body == {
        "error": {"message": "full", "type": "rate_limit_error", "param": None, "code": "c"}
    }
    assert BadRequest("seed", "wrong").body["error"]["type"] == "invalid_request_error"


def test_what_an_error_says_is_without_the_op() -> None:
    assert reason_of(ValueError("ChatTemplate.render: the template: no")) == "the template: no"
    assert reason_of(ValueError("the template failed: no")) == "the template failed: no"


@pytest.mark.parametrize("length", [150, 200, 201, 100_000])
def test_no_error_repeats_more_than_200_characters(length: int) -> None:
    message = "a" * (length - 9) + " expected"
    error = BadRequest("prompt", message)
    assert len(str(error)) <= 200 and str(error).endswith(" expected")
    assert (str(error) == message) == (length <= 200)
    assert error.body["error"]["message"] == str(error)

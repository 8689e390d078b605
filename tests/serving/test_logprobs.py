"""Log-probabilities of completions: keys of tokens, and those of prompts."""

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import pytest

from lmdecode.decoder.engine.request import TokenLogprob
from lmdecode.quality import token_logprobs
from lmdecode.serving.answers import chat_logprobs, completion_logprobs
from lmdecode.serving.errors import BadRequest, RequestError
from lmdecode.serving.service import Service
from lmdecode.serving.text_model import TextModel
from tests.serving.servers import events, load_model, post, served

PATH = "/v1/completions"
PROMPT = "And the LORD spake unto Moses"
FACE = "\U0001f642"


@pytest.fixture(scope="module")
def model() -> TextModel:
    return load_model()


@pytest.fixture(scope="module")
def port(model: TextModel) -> Iterator[int]:
    with served(model, max_requests=2, max_waiting=4) as port:
        yield port


def tokens_of(model: TextModel, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_special_tokens=False)


def test_parts_of_a_character_have_keys_of_their_own(model: TextModel) -> None:
    first, second, *_ = tokens_of(model, FACE)
    (word,) = tokens_of(model, "And")
    item = TokenLogprob(second, -1.5, ((first, -0.5), (word, -0.75)))
    got = completion_logprobs(model.tokenizer, [item], [0])
    texts = [f"bytes:\\x{byte:02x}" for byte in FACE.encode()[:2]]
    assert got["tokens"] == [texts[1]]
    assert got["top_logprobs"] == [{texts[0]: -0.5, "And": -0.75, texts[1]: -1.5}]


def test_of_equal_texts_the_more_probable_one_stays(model: TextModel) -> None:
    class Alike:
        def token_bytes(self, token: int) -> bytes:
            return b"same" if token < 9 else b" other"

    tokenizer: Any = Alike()
    item = TokenLogprob(2, -3.0, ((1, -1.0), (9, -2.0)))
    got = completion_logprobs(tokenizer, [item], [0])
    assert got["top_logprobs"] == [{"same": -1.0, " other": -2.0}]
    assert got["token_logprobs"] == [-3.0]


def test_fewer_tokens_than_were_asked_for(model: TextModel) -> None:
    """Where a model has no more above -inf; the rest has the number -1."""
    (word,) = tokens_of(model, "And")
    item = TokenLogprob(word, 0.0, ((word, 0.0), (-1, -math.inf)))
    assert completion_logprobs(model.tokenizer, [item], [0])["top_logprobs"] == [{"And": 0.0}]
    (content,) = chat_logprobs(model.tokenizer, [item])["content"]
    assert [entry["token"] for entry in content["top_logprobs"]] == ["And"]


@pytest.mark.parametrize("logprobs", [0, 3])
def test_the_chosen_token_is_among_the_top_ones(model: TextModel, port: int, logprobs: int) -> None:
    """Streamed, too; here each is a part of a character, which no model would choose."""
    ask = {"prompt": PROMPT, "guided_choice": [FACE], "logprobs": logprobs, "max_tokens": 9}
    got = post(port, PATH, ask)[1]["choices"][0]
    assert got["text"] == FACE
    found = got["logprobs"]
    assert found["tokens"] == [f"bytes:\\x{byte:02x}" for byte in FACE.encode()]
    for token, logprob, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert top[token] == logprob and len(top) == logprobs + 1
    pieces = [
        p["choices"][0]["logprobs"] for p in events(post(port, PATH, {**ask, "stream": True})[1])
    ]
    for name, values in found.items():
        assert [value for piece in pieces for value in piece[name]] == values


def test_a_prompt_has_log_probabilities_where_it_is_echoed(model: TextModel, port: int) -> None:
    ids = model.tokenizer.encode(PROMPT)
    texts = [model.tokenizer.token_bytes(token).decode() for token in ids]
    base = {"prompt": PROMPT, "echo": True, "logprobs": 2, "temperature": 0}
    plain = post(port, PATH, {**base, "echo": False, "max_tokens": 4})[1]["choices"][0]
    wanted = token_logprobs(model.decoding, ids, 2)
    for count in (0, 4):
        for stream in (False, True):
            ask = {**base, "max_tokens": count, "stream": stream}
            got = post(port, PATH, ask)[1]
            choices = [body["choices"][0] for body in (events(got) if stream else [got])]
            found: dict[str, list[Any]] = {}
            for choice in choices:
                for name, values in choice["logprobs"].items():
                    found.setdefault(name, []).extend(values)
            text = "".join(choice["text"] for choice in choices)
            assert text == PROMPT + (plain["text"] if count else "")
            assert found["tokens"][: len(ids)] == texts
            assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
            for item, logprob, top in list(
                zip(wanted, found["token_logprobs"], found["top_logprobs"], strict=False)
            )[1:]:
                assert logprob == item.logprob and set(item.top) <= {
                    (token, top[model.tokenizer.token_bytes(token).decode()])
                    for token, _ in item.top
                }
            for name in ("tokens", "token_logprobs", "top_logprobs"):
                assert found[name][len(ids) :] == (plain["logprobs"][name] if count else [])
            for token, offset in zip(found["tokens"][1:], found["text_offset"][1:], strict=True):
                assert text[offset:].startswith(token)


def test_each_prompt_has_its_own_log_probabilities(model: TextModel, port: int) -> None:
    """As lm-evaluation-harness asks: tokens, and the last one that comes is left out."""
    prompts = [tokens_of(model, PROMPT), tokens_of(model, "In the beginning God")]
    ask = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    choices = post(port, PATH, {**ask, "n": 2})[1]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for choice in choices:
        prompt = prompts[choice["index"] // 2]
        logprobs = choice["logprobs"]["token_logprobs"]
        assert len(logprobs) == len(prompt) + 1
        wanted = [item.logprob for item in token_logprobs(model.decoding, prompt, 1)]
        assert logprobs[1:-1] == wanted[1:]


def test_a_prompt_without_text_has_log_probabilities(model: TextModel, port: int) -> None:
    """Special tokens have no text in the answer, and are tokens all the same."""
    ask = {"prompt": [0, 0], "echo": True, "logprobs": 0, "max_tokens": 0}
    got = post(port, PATH, ask)[1]["choices"][0]
    assert got["text"] == "" and got["logprobs"]["tokens"] == ["<s>", "<s>"]
    assert got["logprobs"]["token_logprobs"][1] < 0 and got["logprobs"]["text_offset"] == [0, 0]


def test_prompts_that_are_read_count_as_requests(model: TextModel, port: int) -> None:
    ask = {"prompt": ["a"] * 6, "echo": True, "logprobs": 1, "max_tokens": 0}
    assert post(port, PATH, ask)[0] == 200
    status, got = post(port, PATH, {**ask, "prompt": ["a"] * 7})
    assert status == 400 and got["error"]["param"] == "prompt"
    service = Service(model, model.decoding.engine(max_requests=1, capacity=64), "m", 1)

    async def scored(*asked: list[list[int]]) -> list[Any]:
        several = (service.scores_of(prompts, 0) for prompts in asked)
        return list(await asyncio.gather(*several, return_exceptions=True))

    first, second = asyncio.run(scored([[5, 6], [7]], [[8]]))
    assert [len(items) for items in first] == [2, 1]
    assert isinstance(second, RequestError) and second.status == 429
    (error,) = asyncio.run(scored([[5], [99999]]))
    assert isinstance(error, BadRequest) and error.param == "prompt", "and none is left"

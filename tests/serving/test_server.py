"""Endpoints of the server, by a client of HTTP: answers, streams, errors."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from lmdecode.serving.chat_template import ChatTemplate
from lmdecode.serving.fields import Fields
from lmdecode.serving.messages import read_messages
from lmdecode.serving.text_model import TextModel
from lmdecode.serving.tokenizer import Tokenizer
from lmdecode.serving.writing import AnswerWriter
from tests.serving.servers import KJV, NAME, TEMPLATE, call, events, load_model, post, served

PROMPT = "And the LORD spake unto Moses"


@pytest.fixture(scope="module")
def model() -> TextModel:
    return load_model()


@pytest.fixture(scope="module")
def port(model: TextModel) -> Iterator[int]:
    with served(model) as port:
        yield port


def expected(model: TextModel, prompt: str, **options: Any) -> str:
    """Return the text of ``generate()`` by an engine alone."""
    engine = model.decoding.engine(max_requests=1, capacity=512)
    tokens = engine.submit(model.tokenizer.encode(prompt), **options).result().tokens
    return model.tokenizer.decode(tokens)


def test_a_completion_is_the_text_of_the_engine(model: TextModel, port: int) -> None:
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 12, "seed": 3, "temperature": 0.9}
    status, got = post(port, "/v1/completions", body)
    wanted = expected(model, PROMPT, max_new_tokens=12, seed=3, temperature=0.9)
    assert status == 200 and got["object"] == "text_completion" and got["model"] == NAME
    assert got["choices"][0]["text"] == wanted
    assert got["choices"][0]["finish_reason"] == "length"
    count = len(model.tokenizer.encode(PROMPT))
    assert got["usage"]["prompt_tokens"] == count
    assert got["usage"]["completion_tokens"] == 12
    assert got["usage"]["total_tokens"] == count + 12
    greedy = post(port, "/v1/completions", {**body, "temperature": 0, "seed": None})[1]
    assert greedy["choices"][0]["text"] == expected(model, PROMPT, max_new_tokens=12)


def test_streams_join_to_the_answer(port: int) -> None:
    asks: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Speak"}]}),
    ]
    for path, ask in asks:
        body = {**ask, "max_tokens": 20, "seed": 5, "n": 3, "logprobs": 1}
        if "messages" in ask:
            body |= {"logprobs": True, "top_logprobs": 1}
        whole = post(port, path, body)[1]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        got = events(post(port, path, {**body, **options})[1])
        assert got[-1]["choices"] == [] and got[-1]["usage"]["completion_tokens"] == 60
        assert len({piece["id"] for piece in got}) == 1
        for index in range(3):
            choices = [c for p in got for c in p["choices"] if c["index"] == index]
            text = "".join(c.get("text", c.get("delta", {}).get("content", "")) for c in choices)
            asked = whole["choices"][index]
            assert text == asked.get("text", asked.get("message", {}).get("content"))
            assert [c["finish_reason"] for c in choices][-1] == "length"
            assert all(c["finish_reason"] is None for c in choices[:-1])
            name = "tokens" if "prompt" in ask else "content"
            pieces = [t for c in choices if c["logprobs"] for t in c["logprobs"][name]]
            assert pieces == asked["logprobs"][name] and len(pieces) == 20
        texts = {
            json.dumps(choice.get("text", choice.get("message"))) for choice in whole["choices"]
        }
        assert len(texts) == 3, "answers differ, each has a seed of its own"


def test_stop_texts(port: int) -> None:
    body = {"prompt": PROMPT, "max_tokens": 24, "seed": 5}
    text = post(port, "/v1/completions", body)[1]["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    for kept in (False, True):
        ask = {**body, "stop": [stop], "include_stop_str_in_output": kept, "logprobs": 0}
        choice = post(port, "/v1/completions", ask)[1]["choices"][0]
        wanted = text[: text.index(stop) + (len(stop) if kept else 0)]
        assert choice["text"] == wanted and choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == stop
        got = events(post(port, "/v1/completions", {**ask, "stream": True})[1])
        assert "".join(p["choices"][0]["text"] for p in got) == wanted
        assert wanted.startswith("".join(choice["logprobs"]["tokens"]))


@pytest.mark.parametrize("beams", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@pytest.mark.parametrize("kept", [False, True])
def test_stop_tokens(model: TextModel, port: int, kept: bool, beams: dict[str, Any]) -> None:
    """As vLLM: ``stop_reason`` is the token, and ``include_stop_str_in_output`` keeps it."""
    asks: list[dict[str, Any]] = [
        {"prompt": PROMPT, "logprobs": 0},
        {"messages": [{"role": "user", "content": "Speak"}], "logprobs": True},
    ]
    for ask in asks:
        path = "/v1/completions" if "prompt" in ask else "/v1/chat/completions"
        body = {**ask, "max_tokens": 8, "temperature": 0}
        if beams:
            body = {**beams, **body}
            del body["logprobs"], body["temperature"]

        def answer(**more: Any) -> tuple[str, Any]:
            whole = post(port, path, {**body, **more})[1]["choices"][0]  # noqa: B023
            text = whole["text"] if "text" in whole else whole["message"]["content"]
            got = events(post(port, path, {**body, **more, "stream": True})[1])  # noqa: B023
            pieces = [piece["choices"][0] for piece in got]
            assert text == "".join(p.get("text") or p.get("delta", {}).get("content", "")
                                   for p in pieces)  # fmt: skip
            assert pieces[-1]["stop_reason"] == whole["stop_reason"]
            assert all(piece.get("stop_reason") is None for piece in pieces[:-1])
            assert whole["finish_reason"] == ("stop" if more else "length")
            return text, whole

        text, _ = answer()
        tokens = model.tokenizer.encode(text, add_special_tokens=False)[3:]
        words = {token: model.tokenizer.decode([token]).strip() for token in tokens}
        stop, word = next((token, word) for token, word in words.items() if word.isalpha())
        cut, whole = answer(stop_token_ids=[stop], include_stop_str_in_output=kept)
        assert (whole["stop_reason"] == stop and text.startswith(cut)) or beams
        assert cut.endswith(word) == kept
        if kept and not beams:
            tokens = whole["logprobs"].get("tokens") or whole["logprobs"]["content"]
            assert len(tokens) == len(model.tokenizer.encode(cut, add_special_tokens=False))
        answered = post(port, path, {**body, "stop_token_ids": [stop], "logit_bias": {"1": 100},
                                     "num_beams": 1})[1]["choices"][0]  # fmt: skip
        assert answered["finish_reason"] == "stop" and answered["stop_reason"] is None


def test_several_prompts_echo_and_tokens(model: TextModel, port: int) -> None:
    prompts = [PROMPT, "In the beginning"]
    tokens = [model.tokenizer.encode(prompt) for prompt in prompts]
    ask = {"max_tokens": 5, "temperature": 0, "n": 2}
    texts = post(port, "/v1/completions", {**ask, "prompt": prompts})[1]
    assert [choice["index"] for choice in texts["choices"]] == [0, 1, 2, 3]
    same = post(port, "/v1/completions", {**ask, "prompt": tokens})[1]
    assert [c["text"] for c in same["choices"]] == [c["text"] for c in texts["choices"]]
    one = post(port, "/v1/completions", {**ask, "prompt": tokens[1], "echo": True, "n": 1})[1]
    assert one["choices"][0]["text"] == prompts[1] + texts["choices"][2]["text"]
    none = post(port, "/v1/completions", {"prompt": PROMPT, "echo": True, "max_tokens": 0})[1]
    assert none["choices"][0]["text"] == PROMPT and none["usage"]["completion_tokens"] == 0


def test_beams(model: TextModel, port: int) -> None:
    ask = {"prompt": PROMPT, "max_tokens": 8, "num_beams": 3, "n": 2, "length_penalty": 0.5}
    got = post(port, "/v1/completions", ask)[1]
    engine = model.decoding.engine(max_requests=3, capacity=512)
    ids = model.tokenizer.encode(PROMPT)
    result = engine.submit(
        ids, max_new_tokens=8, num_beams=3, num_return_sequences=2, length_penalty=0.5
    ).result()
    tokens = [result.beams.new_tokens(i) for i in range(2)]
    assert [choice["text"] for choice in got["choices"]] == list(
        map(model.tokenizer.decode, tokens)
    )
    assert got["usage"]["completion_tokens"] == sum(map(len, tokens))
    word = tokens[0][2]  # beams that end at different lengths: nothing of the padding is written
    ends = {**ask, "stop_token_ids": [word], "skip_special_tokens": False, "n": 3}
    for choice in post(port, "/v1/completions", ends)[1]["choices"]:
        assert model.tokenizer.decode([word]) not in choice["text"]
        assert "<" not in choice["text"]


def test_chats_use_the_template(model: TextModel, port: int) -> None:
    messages = [
        {"role": "developer", "content": "Be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Who"}, {"type": "text", "text": "?"}],
        },
    ]
    ask = {"messages": messages, "max_completion_tokens": 6, "temperature": 0}
    got = post(port, "/v1/chat/completions", ask)[1]
    assert got["object"] == "chat.completion"
    rendered = "<s>system: Be brief\nuser: Who\n?\nassistant:"
    plain = post(port, "/v1/completions", {"prompt": rendered, "max_tokens": 6, "temperature": 0,
                                           "add_special_tokens": False})[1]  # fmt: skip
    assert got["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    tokens = post(port, "/tokenize", {"messages": messages})[1]
    assert tokens["count"] == got["usage"]["prompt_tokens"] == len(tokens["tokens"])
    back = post(port, "/detokenize", {"tokens": tokens["tokens"]})[1]
    assert back["content"] == rendered


def test_parts_of_a_message_are_lines_unless_the_template_writes_them(model: TextModel) -> None:
    """As vLLM 0.32.0, which looks for a loop over a content in the template."""
    talk = [{"role": "system", "content": [{"type": "text", "text": "And it"}]},
            {"role": "user", "content": [{"type": "text", "text": "And it"}, "came"]},
            {"role": "assistant", "content": [{"type": "text", "text": "a"},
                                              {"type": "refusal", "refusal": "b"}]},
            {"role": "tool", "content": [{"type": "text", "text": "c"},
                                         {"type": "text", "text": "d"}]}]  # fmt: skip
    loop = (
        "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
        "{%- for part in m['content'] -%}<{{ part.text }}>{% endfor %}{% endif %};{% endfor %}"
    )
    wanted = {
        TEMPLATE: "<s>system: And it\nuser: And it\ncame\nassistant: a\nb\ntool: c\nd\n",
        loop: "system:And it;user:<And it><came>;assistant:<a><b>;tool:c\nd;",
    }
    for template, text in wanted.items():
        own = ChatTemplate(template, special_tokens={"bos_token": "<s>"})
        with served(dataclasses.replace(model, template=own)) as port:
            body = {"messages": talk, "add_generation_prompt": False}
            tokens = post(port, "/tokenize", body)[1]["tokens"]
            assert post(port, "/detokenize", {"tokens": tokens})[1]["content"] == text


def test_what_clients_echo_in_messages_is_left_aside(port: int) -> None:
    talk = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "He."},
            {"role": "user", "content": "And?"}]  # fmt: skip
    echoed = {"id": "msg_1", "metadata": {"a": [1]}, "refusal": None, "annotations": [], "x": {}}
    rendered = [
        post(port, "/tokenize", {"messages": messages})
        for messages in (talk, [{**message, **echoed} for message in talk])
    ]
    assert rendered[0][0] == 200 and rendered[0] == rendered[1]
    status, got = post(port, "/tokenize", {"messages": talk, "annotations": []})
    assert status == 400 and got["error"]["param"] == "annotations", "of the request"


def test_thoughts_of_a_message_have_any_of_their_names() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        said = {"role": "assistant", "content": "He.", name: "Who was it?"}
        (message,) = read_messages(Fields({"messages": [said]}))
        assert message["reasoning_content"] == "Who was it?" and "thinking" not in message
    (message,) = read_messages(Fields({"messages": [{**said, "thinking": [1], "reasoning": {}}]}))
    assert "reasoning_content" not in message, "of a client's own kind"


def test_system_messages_at_the_beginning_may_be_several(port: int) -> None:
    template = (
        "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
        "{{ raise_exception('a system message must be at the beginning') }}{% endif %}"
        "{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    )
    talk = [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be kind"},
            {"role": "user", "content": "Who?"}]  # fmt: skip
    model = TextModel.load(KJV, dtype="int8", name=NAME, chat_template=template)
    with served(model) as other:
        tokens = post(other, "/tokenize", {"messages": talk})[1]["tokens"]
        text = post(other, "/detokenize", {"tokens": tokens})[1]["content"]
        assert text == "system: Be brief.\n\nBe kind\nuser: Who?\n"
        got = post(other, "/v1/chat/completions", {"messages": talk, "max_tokens": 2})
        assert got[0] == 200 and got[1]["usage"]["prompt_tokens"] == len(tokens)
        ask = {"messages": [*talk, talk[0]], "max_tokens": 2}
        status, got = post(other, "/v1/chat/completions", ask)
        assert status == 400 and got["error"]["param"] == "messages"
        assert got["error"]["message"] == (
            "messages: the chat template failed at messages[3] (system): "
            "a system message must be at the beginning"
        )
    tokens = post(port, "/tokenize", {"messages": talk})[1]["tokens"]
    text = post(port, "/detokenize", {"tokens": tokens})[1]["content"]
    assert text.startswith("<s>system: Be brief.\nsystem: Be kind\n"), "a template that takes two"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_no_stop_text_ends_an_answer_before_min_tokens(port: int, path: str) -> None:
    body = {"max_tokens": 24, "seed": 5, "n": 2}
    body |= {"prompt": PROMPT} if path == "/v1/completions" else {
        "messages": [{"role": "user", "content": "Speak"}]}  # fmt: skip

    def texts(got: Any) -> list[str]:
        parts = [c for body in (events(got) if isinstance(got, str) else [got])
                 for c in body["choices"]]  # fmt: skip
        return [
            "".join(
                c.get("text") or c.get("message", c.get("delta", {})).get("content") or ""
                for c in parts if c["index"] == index
            )
            for index in range(2)
        ]  # fmt: skip

    whole = texts(post(port, path, body)[1])
    for stream in (False, True):
        ask = {**body, "stop": ["e", "a", " "], "stream": stream}
        assert all(len(text) < 12 for text in texts(post(port, path, ask)[1]))
        assert texts(post(port, path, {**ask, "min_tokens": 24})[1]) == whole
        for text, all_of_it in zip(texts(post(port, path, {**ask, "min_tokens": 12})[1]), whole,
                                   strict=True):  # fmt: skip
            assert all_of_it.startswith(text) and len(text) > 20
            assert all_of_it[len(text)] in "ea " and text != all_of_it


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_piece_may_have_the_usage_so_far(port: int, path: str) -> None:
    ask = {"max_tokens": 6, "stream": True, "seed": 1, "ignore_eos": True}
    ask |= {"prompt": PROMPT} if path == "/v1/completions" else {
        "messages": [{"role": "user", "content": "Speak"}]}  # fmt: skip
    options = {"continuous_usage_stats": True}
    got = events(post(port, path, {**ask, "stream_options": options})[1])
    counts = [piece["usage"]["completion_tokens"] for piece in got]
    assert counts == sorted(counts) and counts[-1] == 6 and got[-1]["choices"]
    assert len({piece["usage"]["prompt_tokens"] for piece in got}) == 1
    both = {**options, "include_usage": True}
    last = events(post(port, path, {**ask, "stream_options": both})[1])[-1]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6
    assert not any("usage" in piece for piece in events(post(port, path, ask)[1]))


def test_slashes_that_clients_add_change_nothing(port: int) -> None:
    models = call(port, "GET", "/v1/models")[1]
    for path in ("/v1/models/", "//v1/models", "/v1//models//", "/v1/models?a=/b//"):
        assert call(port, "GET", path)[:2] == (200, models)
    assert call(port, "GET", f"/v1/models//{NAME}/")[1]["id"] == NAME
    assert call(port, "GET", "//")[1] == call(port, "GET", "/")[1]
    for path in ("//v1/completions", "/v1/completions/"):
        assert post(port, path, {"prompt": "a", "max_tokens": 1})[0] == 200
    assert call(port, "GET", "//v1/nothing//")[0] == 404


def test_a_space_at_the_beginning_is_written() -> None:
    """Of tokenizers that drop the first space of a text; a completion is no beginning."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"\u2581a": 0, "\u2581b": 1, "?": 2}, unk_token="?")
    )
    words.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.Fuse(),
         tokenizers.decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    tokenizer = Tokenizer(words)
    writer = AnswerWriter(tokenizer, behind=[0])
    assert writer.push([1, 0]).text + writer.finish().text == " b a"
    assert AnswerWriter(tokenizer).push([1, 0]).text == "b a"


def test_models_health_metrics_and_the_page(port: int) -> None:
    models = call(port, "GET", "/v1/models")[1]
    assert models["data"][0]["id"] == NAME and models["data"][0]["max_model_len"] == 513
    assert call(port, "GET", f"/v1/models/{NAME}")[0] == 200
    assert call(port, "GET", "/v1/models/other")[1]["error"]["code"] == "model_not_found"
    assert call(port, "GET", "/health")[1]["status"] == "ok"
    post(port, "/v1/completions", {"prompt": PROMPT, "max_tokens": 4})
    text = call(port, "GET", "/metrics")[1]
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["lmdecode_generated_tokens_total"]) >= 4
    assert float(values["lmdecode_time_to_first_token_seconds_count"]) >= 1
    assert float(values['lmdecode_requests_total{endpoint="/v1/completions",status="200"}']) >= 1
    status, page, headers = call(port, "GET", "/")
    assert status == 200 and "<title>lmdecode</title>" in page
    assert "http" not in headers["content-security-policy"], "nothing from elsewhere"

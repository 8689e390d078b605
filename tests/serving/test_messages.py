"""Anthropic's own client drives ``/v1/messages``; three protocols write the same text."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

from lmdecode.serving import http  # noqa: E402
from lmdecode.serving.app import Application  # noqa: E402
from lmdecode.serving.reasoning import ReasoningFormat  # noqa: E402
from lmdecode.serving.work import Work  # noqa: E402
from tests.serving.servers import (  # noqa: E402
    AGENT_TEMPLATE,
    NAME,
    call,
    load_model,
    named_events,
    post,
    served,
    serving,
)
from tests.serving.test_openai_client import types_of  # noqa: E402
from tests.serving.test_responses import SHELL as FLAT  # noqa: E402
from tests.serving.test_responses import check_prefixes, prompts_of  # noqa: E402

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TALK: list[Any] = [{"role": "user", "content": "What did the LORD say?"}]
SHELL = {"name": "shell", "input_schema": FLAT["parameters"]}
OTHERS = [{"type": "web_search_20250305", "name": "web_search"},
          {"type": "bash_20250124", "name": "bash"}]  # fmt: skip


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server of a model that thinks where a grammar says so alone."""
    model = load_model("int8", AGENT_TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReasoningFormat, "grammar_prefix", lambda *_: "")
        with served(model, capacity=4096, max_body_bytes=1_000_000) as port:
            yield port


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[Any]:
    with anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0
    ) as client:
        yield client


def options_of(options: dict[str, Any]) -> dict[str, Any]:
    extra = {"seed": 1, **options.pop("extra_body", {})}
    return {"model": NAME, "max_tokens": 12, "messages": TALK, "extra_body": extra, **options}


def ask(client: Any, **options: Any) -> Any:
    return client.messages.create(**options_of(options))


def streamed(client: Any, **options: Any) -> Any:
    with client.messages.stream(**options_of(options)) as stream:
        return stream.get_final_message()


def forced(text: str) -> dict[str, Any]:
    return {"guided_choice": [text]}


def test_a_message_and_its_stream(client: Any) -> None:
    got = ask(client, system="Be brief.", extra_body={"temperature": 0.9, "top_k": 20})
    (block,) = got.content
    assert block.type == "text" and block.text and got.role == "assistant" and got.model == NAME
    assert got.stop_reason == "max_tokens" and got.usage.output_tokens == 12
    type(got).model_validate(got.model_dump(), strict=True)
    options = {"system": "Be brief.", "extra_body": {"temperature": 0.9, "top_k": 20}}
    assert streamed(client, **options).content[0].text == block.text
    kinds = [event.type for event in ask(client, stream=True, **options)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    stop = block.text[3:6]
    for cut in (ask(client, stop_sequences=[stop], **options),
                streamed(client, stop_sequences=[stop], **options)):  # fmt: skip
        assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
        assert cut.content[0].text == block.text[: block.text.index(stop)]
    long = [{"role": "user", "content": "And it came to pass in those days. " * 8}]
    for again in (ask(client, messages=long), streamed(client, messages=long)):
        usage = again.usage
    assert usage.cache_read_input_tokens > 0 and usage.input_tokens > 0
    counted = client.messages.count_tokens(model=NAME, messages=long).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_a_stream_tells_that_it_goes_on_while_a_prompt_is_read(
    client: Any, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a ping of Anthropic's, or a comment; the official clients pass over both."""
    short, talk = {"max_tokens": 4}, {"messages": TALK, "max_tokens": 4}
    bodies: dict[str, dict[str, Any]] = {
        PATH: talk, "/v1/chat/completions": talk, "/v1/completions": {"prompt": "And", **short},
        "/v1/responses": {"input": "And", "max_output_tokens": 4},
    }  # fmt: skip
    fillers = dict.fromkeys(bodies, ": keep-alive\n\n")
    fillers[PATH] = 'event: ping\ndata: {"type":"ping"}\n\n'

    def counts() -> list[int]:
        found = [post(port, path, {**body, "stream": True})[1] for path, body in bodies.items()]
        return [text.count(fillers[path]) for path, text in zip(bodies, found, strict=True)]

    def texts(other: Any) -> list[str]:
        options: dict[str, Any] = {"model": NAME, "temperature": 0, "stream": True}
        _, chat, completion, response = bodies.values()
        chats = other.chat.completions.create(**chat, **options)
        completions = other.completions.create(**completion, **options)
        *_, last = other.responses.create(**response, **options)
        return [
            streamed(client, extra_body={"temperature": 0}).content[0].text,
            "".join(piece.choices[0].delta.content or "" for piece in chats),
            "".join(piece.choices[0].text for piece in completions),
            last.response.output_text,
        ]

    pieces = Work.pieces

    async def late(self: Work) -> AsyncIterator[Any]:
        await asyncio.sleep(0.4)
        async for piece in pieces(self):
            yield piece

    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as other:
        want = texts(other)
        assert counts() == [1, 0, 0, 0]
        monkeypatch.setattr(http, "_MOST_SILENCE", 0.05)
        monkeypatch.setattr(Work, "pieces", late)
        assert all(want) and texts(other) == want
    assert min(counts()) >= 3


def test_an_answer_goes_on_with_a_last_message(client: Any) -> None:
    talk = [*TALK, {"role": "assistant", "content": "And the LORD"}]
    count = client.messages.count_tokens(model=NAME, messages=talk).input_tokens
    got = ask(client, messages=talk, max_tokens=4)
    assert got.usage.input_tokens + got.usage.cache_read_input_tokens == count
    assert got.content[0].text.startswith(" ")


def test_thoughts_are_blocks_and_come_back(client: Any) -> None:
    options: Any = {"extra_body": forced("<think>Who was it?</think>He."), "max_tokens": 2000,
                    "thinking": {"type": "enabled", "budget_tokens": 1024}}  # fmt: skip
    for got in (ask(client, **options), streamed(client, **options)):
        thought, said = got.content
        assert thought.thinking == "Who was it?" and thought.signature and said.text == "He."
        assert got.stop_reason == "end_turn"
    redacted = {"type": "redacted_thinking", "data": "x"}
    talk = [*TALK, {"role": "assistant", "content": [redacted, *got.content]}, *TALK]
    without = [*TALK, {"role": "assistant", "content": [said]}, *TALK]
    counts = [client.messages.count_tokens(model=NAME, messages=m).input_tokens
              for m in (talk, without)]  # fmt: skip
    assert counts[0] > counts[1]


@pytest.mark.parametrize("asks", [ask, streamed])
def test_an_agent_of_twelve_turns(client: Any, asks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    talk: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Build it."}]}]
    options: dict[str, Any] = {"tools": [*OTHERS, SHELL], "max_tokens": 100}
    prompts = prompts_of(monkeypatch)
    for turn in range(12):
        kind = [{"type": "any"}, {"type": "tool", "name": "shell"}][turn % 2]
        options["tool_choice"] = {**kind, "disable_parallel_tool_use": True}
        # Claude Code's system prompt: its first line is another one in each turn.
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={turn:05x};"
        options["system"] = [{"type": "text", "text": header},
                             {"type": "text", "text": "You are an agent.",
                              "cache_control": {"type": "ephemeral"}}]  # fmt: skip
        if turn == 11:
            options |= {"extra_body": forced("It is built."), "tool_choice": {"type": "auto"}}
        got = asks(client, messages=talk, **options)
        if turn == 11:
            break
        (made,) = got.content
        assert got.stop_reason == "tool_use" and made.type == "tool_use" and made.id
        assert made.name == "shell" and made.input["command"] in ("ls", "cat a", "make")
        result = {"type": "tool_result", "tool_use_id": made.id, "content": "done",
                  "is_error": False, "cache_control": {"type": "ephemeral"}}  # fmt: skip
        talk += [{"role": "assistant", "content": got.content},
                 {"role": "user", "content": [result]}]  # fmt: skip
    assert got.content[0].text == "It is built." and got.stop_reason == "end_turn"
    check_prefixes(prompts)


def test_the_line_that_changes_with_each_turn_is_no_part_of_the_prompt(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"x-anthropic-billing-header: cc_version=2.1.{i}; cch={i:05x};" for i in range(2)]
    systems: list[Any] = ["Be brief."]
    for line in lines:
        block = {"type": "text", "text": "Be brief."}
        systems += [f"{line}\nBe brief.", [{"type": "text", "text": line}, block]]
    prompts, bodies = prompts_of(monkeypatch), [{"messages": TALK, "system": s} for s in systems]
    for body in bodies:
        assert post(port, PATH, {**body, "max_tokens": 1})[0] == 200
    assert len(prompts) == 5 and all(prompt == prompts[0] for prompt in prompts)
    counts = [post(port, COUNT, body)[1]["input_tokens"] for body in bodies]
    assert counts == [len(prompts[0])] * 5


def test_the_same_conversation_has_the_same_text_in_three_protocols(port: int) -> None:
    arguments = {"command": "ls"}
    chat = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Build it."},
        {"role": "assistant", "content": "I see.", "reasoning_content": "Hm.", "tool_calls": [
            {"id": "a", "type": "function", "function": {
                "name": "shell", "arguments": '{"command": "ls"}'}}]},
        {"role": "tool", "tool_call_id": "a", "content": "a\nb"},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    items = [
        {"role": "user", "content": "Build it."},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I see."}]},
        {"type": "function_call", "call_id": "a", "name": "shell",
         "arguments": '{"command": "ls"}'},
        {"type": "function_call_output", "call_id": "a",
         "output": [{"type": "input_text", "text": "a\nb"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "And?"}]},
    ]  # fmt: skip
    blocks = [
        {"role": "user", "content": "Build it."},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "text", "text": "I see."},
            {"type": "tool_use", "id": "a", "name": "shell", "input": arguments}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [
                {"type": "text", "text": "a\nb"}]},
            {"type": "text", "text": "And?"}]},
    ]  # fmt: skip
    parameters = FLAT["parameters"]
    nested = {"type": "function", "function": {"name": "shell", "parameters": parameters}}
    for more in ({"seed": 3, "temperature": 0.8}, {"temperature": 0}, {"seed": 4, "top_k": 9}):
        found = post(port, "/v1/chat/completions", {
            "messages": chat, "tools": [nested], "max_tokens": 16, **more})[1]  # fmt: skip
        flat = {name: FLAT[name] for name in ("type", "name", "parameters")}
        of_items = post(port, "/v1/responses", {
            "instructions": "Be brief.", "input": items, "tools": [flat], "max_output_tokens": 16,
            **more})[1]  # fmt: skip
        of_blocks = post(port, PATH, {
            "system": "Be brief.", "messages": blocks, "tools": [SHELL], "max_tokens": 16,
            **more})[1]  # fmt: skip
        text = found["choices"][0]["message"]["content"]
        assert text == of_items["output"][0]["content"][0]["text"]
        assert text == of_blocks["content"][0]["text"]
        used = of_blocks["usage"]
        assert (
            found["usage"]["prompt_tokens"] == of_items["usage"]["input_tokens"]
            == used["input_tokens"] + used["cache_read_input_tokens"]
        )  # fmt: skip
        counted = {"system": "Be brief.", "messages": blocks, "tools": [SHELL]}
        assert post(port, COUNT, counted)[1]["input_tokens"] == found["usage"]["prompt_tokens"]


def test_a_failed_tool_and_parts_in_any_order(port: int) -> None:
    def count(*blocks: Any) -> int:
        body = {"messages": [*TALK, {"role": "user", "content": list(blocks)}]}
        status, got = post(port, COUNT, body)
        assert status == 200, got
        number: int = got["input_tokens"]
        return number

    result = {"type": "tool_result", "tool_use_id": "a", "content": "no"}
    text = {"type": "text", "text": "And?"}
    assert count({**result, "is_error": True}) > count(result) > count({**result, "content": ""})
    assert count({"type": "tool_result", "tool_use_id": "a"}) == count({**result, "content": []})
    assert count(text, result) == count(result, text)


def test_an_answer_of_a_schema(client: Any) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {
        "city": {"enum": ["Ur"]}}, "required": ["city"],
        "additionalProperties": False}}  # fmt: skip
    got = ask(client, output_config={"format": form, "effort": "low"}, max_tokens=200)
    assert "Ur" in got.content[0].text and got.stop_reason == "end_turn"


def test_more_tokens_than_there_is_room_for() -> None:
    with served(load_model("int8")) as other:
        body = {"messages": TALK, "max_tokens": 32_000, "temperature": 0, "ignore_eos": True}
        got = post(other, PATH, body)[1]
        assert got["stop_reason"] == "model_context_window_exceeded"
        assert sum(got["usage"].values()) == 513


WRONG: dict[str, list[Any]] = {
    "messages": [
        None, 5, [], [5], [{}], [{"role": "king", "content": "x"}], [{"role": "user"}],
        [{"role": "user", "content": 5}], [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{"type": "image", "source": {}}]}],
        [{"role": "user", "content": [{"type": "document", "source": {}}]}],
        [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 5}]}],
        [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}],
        [{"role": "user", "content": [{"type": "tool_result", "is_error": 5}]}],
        [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "input": {}}]}],
        [{"role": "assistant", "content": [{"type": "tool_use", "name": "a", "input": 5}]}],
        [{"role": "assistant", "content": [{"type": "thinking", "thinking": 5}]}],
        [{"role": "assistant", "content": [{"type": "server_tool_use"}]}],
        [{"role": "user", "content": "w " * 9999}], TALK * 5000,
    ],
    "max_tokens": [None, 0, -1, "x", 1.5],
    "system": [5, {}, [5], [{"type": "image"}]],
    "stop_sequences": [5, [5], [""], ["a"] * 17],
    "temperature": [-1, "x"],
    "top_p": [2, "x"],
    "top_k": ["x", 1.5],
    "tools": [5, [5], [{}], [{"name": "a b"}], [{"name": "a", "input_schema": 5}],
              [{"name": "a"}] * 2],
    "tool_choice": [5, "auto", {"type": "x"}, {"type": "any"}, {"type": "tool", "name": "a"},
                    {"type": "auto", "disable_parallel_tool_use": 5}],
    "thinking": [5, {"type": "x"}, {"type": "enabled", "budget_tokens": "x"}],
    "output_config": [5, {"effort": 5}, {"format": {"type": "x"}},
                      {"format": {"type": "json_schema", "schema": {"type": "x"}}}],
    "metadata": [5], "stream": ["x"], "stop": ["a"], "no_such_field": [1], "model": [5],
}  # fmt: skip
CASES = [(name, value) for name, values in WRONG.items() for value in values]


def check_error(got: Any, kind: str = "invalid_request_error") -> str:
    assert got["type"] == "error" and got["request_id"] and got["error"]["type"] == kind, got
    message: str = got["error"]["message"]
    assert set(got["error"]) == {"type", "message"} and 0 < len(message) < 250
    return message


@pytest.mark.parametrize(("name", "value"), CASES)
def test_a_wrong_field_is_named(port: int, name: str, value: Any) -> None:
    body = {"messages": TALK, "max_tokens": 3, name: value}
    status, got = post(port, PATH, body)
    assert status == 400 and name in check_error(got), got


@pytest.mark.parametrize("kind", ["image", "document"])
def test_what_is_no_text_is_refused_by_name(port: int, kind: str) -> None:
    content = [{"type": "text", "text": "a"}, {"type": kind, "source": {}}]
    status, got = post(port, PATH, {"messages": [{"role": "user", "content": content}],
                                    "max_tokens": 3})  # fmt: skip
    wanted = f"messages[0].content[1] is '{kind}'; expected text, all it reads"
    assert status == 400 and check_error(got) == wanted


def test_errors_of_all_kinds_have_one_shape(port: int) -> None:
    body = {"messages": TALK, "max_tokens": 3}
    for data in (b"", b"{", b"[]", b"\xff"):
        status, got = post(port, PATH, data)
        assert status == 400 and check_error(got)
    found = {
        404: [post(port, PATH, {**body, "model": "claude"}), call(port, "GET", f"{PATH}/no")[:2]],
        405: [call(port, "GET", PATH)[:2], call(port, "PUT", COUNT)[:2]],
        413: [post(port, PATH, b'{"system": "' + b"a" * 1_000_000 + b'"}')],
        403: [post(port, PATH, body, Origin="http://example.com")],
    }
    with served(load_model("int8"), api_key="k", max_requests=1, max_waiting=0) as other:
        found[401] = [
            post(other, path, body, **headers)
            for path in (PATH, COUNT)
            for headers in ({}, {"x-api-key": "no"}, {"Authorization": "Bearer no"})
        ]
        for headers in ({"x-api-key": "k"}, {"Authorization": "Bearer k"},
                        {"x-api-key": "k", "Authorization": "Bearer other"}):  # fmt: skip
            assert post(other, COUNT, {"messages": TALK}, **headers)[0] == 200
        with anthropic.Anthropic(
            base_url=f"http://127.0.0.1:{other}", api_key="k", max_retries=0
        ) as client, ask(client, stream=True, max_tokens=400) as stream:  # fmt: skip
            next(iter(stream))
            with pytest.raises(anthropic.RateLimitError):
                ask(client)
            found[429] = [post(other, PATH, body, **{"x-api-key": "k"})]
    with serving(Application("m").app) as other:
        found[503] = [post(other, PATH, body)]
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
             405: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error",
             503: "overloaded_error"}  # fmt: skip
    for status, answers in found.items():
        assert {given for given, _ in answers} == {status}
        assert all(check_error(got, kinds[status]) for _, got in answers)


def test_errors_of_the_client(client: Any, port: int) -> None:
    with pytest.raises(anthropic.BadRequestError, match="budget_tokens"):
        ask(client, thinking={"type": "enabled", "budget_tokens": 0})
    with pytest.raises(anthropic.NotFoundError):
        ask(client, model="claude")
    body = {"messages": TALK, "max_tokens": 9, "stream": True, "grammar": 'start: "a"{1000000000}'}
    *_, last = named_events(post(port, PATH, body)[1])
    assert last["type"] == "error" and check_error(last)


READ = ("max_tokens messages metadata model output_config stop_sequences stream system thinking "
        "tool_choice tools")  # fmt: skip
WITHOUT_EFFECT = ("cache_control container diagnostics inference_geo service_tier speed "
                  "user_profile_id workspace_id")  # fmt: skip


def test_each_field_is_read_or_without_effect(port: int) -> None:
    from anthropic.types.message_count_tokens_params import MessageCountTokensParams
    from anthropic.types.message_create_params import MessageCreateParamsStreaming

    known = types_of(MessageCreateParamsStreaming, {})["MessageCreateParamsStreaming"]
    assert known == {*READ.split(), *WITHOUT_EFFECT.split()}
    assert types_of(MessageCountTokensParams, {})["MessageCountTokensParams"] <= known
    plain = {"messages": TALK, "max_tokens": 3, "temperature": 0}
    others = {**dict.fromkeys(WITHOUT_EFFECT.split(), "a"), "metadata": {"user_id": "a"},
              "context_management": {"edits": []}, "mcp_servers": []}  # fmt: skip
    texts = [post(port, PATH, {**plain, **more})[1]["content"] for more in ({}, others)]
    assert texts[0] == texts[1]

"""The official client of OpenAI's API drives every endpoint."""

import json
from collections.abc import Iterator
from typing import Any, get_args

import jsonschema
import pytest

openai = pytest.importorskip("openai")
typing_extensions = pytest.importorskip("typing_extensions")

from lmdecode.serving.errors import BadRequest  # noqa: E402
from lmdecode.serving.fields import Fields  # noqa: E402
from lmdecode.serving.messages import read_messages  # noqa: E402
from lmdecode.serving.speech import Speech  # noqa: E402
from lmdecode.serving.text_model import TextModel  # noqa: E402
from tests.serving.grammar_cases import SCHEMAS, function  # noqa: E402
from tests.serving.servers import (  # noqa: E402
    NAME,
    load_model,
    post,
    served,
)

TALK: list[Any] = [{"role": "user", "content": "What did the LORD say?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Nineveh", "Ur"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def model() -> TextModel:
    return load_model()


@pytest.fixture(scope="module")
def client(model: TextModel) -> Iterator[Any]:
    with served(model, api_key="key") as port:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="key",
                           max_retries=0) as client:  # fmt: skip
            yield client


def chat(client: Any, **options: Any) -> Any:
    options = {"max_completion_tokens": 12, "messages": TALK, "seed": 1, **options}
    return client.chat.completions.create(model=NAME, **options)


def test_a_chat(client: Any) -> None:
    got = chat(client)
    message = got.choices[0].message
    assert message.role == "assistant" and message.content and message.tool_calls is None
    assert got.choices[0].finish_reason == "length"
    assert got.usage.completion_tokens == 12 and got.usage.prompt_tokens > 5
    assert got.system_fingerprint.startswith("lmdecode-")
    assert chat(client).choices[0].message.content == message.content, "of the same seed"
    assert chat(client, seed=2).choices[0].message.content != message.content
    long = [{"role": "user", "content": "And it came to pass in those days. " * 8}]
    again = [chat(client, messages=long).usage for _ in range(2)][1]
    assert 0 < again.prompt_tokens_details.cached_tokens < again.prompt_tokens


def test_a_stream_with_usage(client: Any) -> None:
    whole = chat(client).choices[0].message.content
    pieces = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == whole
    assert pieces[-2].choices[0].finish_reason == "length"
    assert not pieces[-1].choices and pieces[-1].usage.completion_tokens == 12
    with chat(client, stream=True, max_completion_tokens=400) as stream:
        next(iter(stream))  # and it is closed


def test_stops_choices_and_seeds(client: Any) -> None:
    texts = [choice.message.content for choice in chat(client, n=3).choices]
    assert len(set(texts)) == 3 and texts[0] == chat(client).choices[0].message.content
    stop = texts[0][3:6]
    got = chat(client, stop=[stop, "never"]).choices[0]
    assert got.message.content == texts[0][: texts[0].index(stop)]
    assert got.finish_reason == "stop"


def test_logprobs(client: Any) -> None:
    got = chat(client, logprobs=True, top_logprobs=3, temperature=0).choices[0]
    content = got.logprobs.content
    assert len(content) == 12
    assert b"".join(bytes(item.bytes) for item in content).decode() == got.message.content
    for item in content:
        assert len(item.top_logprobs) == 3 and item.logprob <= 0
        assert item.top_logprobs[0].token == item.token, "the most probable is taken"
        assert item.top_logprobs[0].logprob == item.logprob
    text = client.completions.create(model=NAME, prompt="And", max_tokens=5, logprobs=2, seed=1)
    logprobs = text.choices[0].logprobs
    assert "".join(logprobs.tokens) == text.choices[0].text and len(logprobs.tokens) == 5
    assert logprobs.text_offset[0] == 0
    for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
        others = top.keys() - {token}
        assert len(others) in (1, 2) and token in top, "two are the best, or one and itself"


def test_bias_and_penalties(client: Any, model: TextModel) -> None:
    word = model.tokenizer.encode(" Moses", add_special_tokens=False)[0]
    got = client.completions.create(
        model=NAME, prompt="And", max_tokens=4, temperature=0, logit_bias={str(word): 100}
    )
    assert got.choices[0].text == model.tokenizer.decode([word] * 4)
    banned = client.completions.create(
        model=NAME, prompt="And", max_tokens=6, logit_bias={str(word): 100}, frequency_penalty=2,
        presence_penalty=2, temperature=0, extra_body={"no_repeat_ngram_size": 2, "top_k": 5},
    )  # fmt: skip
    assert banned.choices[0].text != model.tokenizer.decode([word] * 6)


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_of_a_schema(client: Any, name: str) -> None:
    schema = SCHEMAS[name]
    response_format = {"type": "json_schema", "json_schema": {
        "name": "answer", "schema": schema, "strict": True}}  # fmt: skip
    for seed in range(5):
        got = chat(
            client, seed=seed, max_completion_tokens=400, temperature=1.2, top_p=0.95,
            response_format=response_format,
        ).choices[0]  # fmt: skip
        assert got.finish_reason == "stop"
        jsonschema.validate(json.loads(got.message.content), schema)


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize("schema", [None, OPEN])
@pytest.mark.parametrize("seed", range(3))
def test_json_objects(client: Any, schema: Any, seed: int) -> None:
    """Whatever keys they have, of which there is no end."""
    response_format: dict[str, Any] = {"type": "json_object"}
    if schema is not None:
        response_format = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        }
    got = chat(client, response_format=response_format, max_completion_tokens=60, seed=seed)
    text = got.choices[0].message.content
    assert text.lstrip().startswith("{")
    if got.choices[0].finish_reason == "stop":
        jsonschema.validate(json.loads(text), schema or {"type": "object"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_forced_calls_of_tools(client: Any, choice: Any, stream: bool) -> None:
    options = {"tools": [WEATHER], "tool_choice": choice, "max_completion_tokens": 400,
               "parallel_tool_calls": False, "temperature": 0.8}  # fmt: skip
    if stream:
        pieces = [p.choices[0] for p in chat(client, stream=True, **options)]
        parts = [call for p in pieces for call in p.delta.tool_calls or []]
        assert parts[0].id and {part.index for part in parts} == {0}
        name = "".join(part.function.name or "" for part in parts)
        arguments = "".join(part.function.arguments or "" for part in parts)
        assert not "".join(p.delta.content or "" for p in pieces)
        reason = pieces[-1].finish_reason
    else:
        got = chat(client, **options).choices[0]
        (call,) = got.message.tool_calls
        name, arguments, reason = call.function.name, call.function.arguments, got.finish_reason
        assert call.type == "function" and call.id and got.message.content is None
    assert name == "weather" and reason == ("tool_calls" if choice == "required" else "stop")
    value = json.loads(arguments)
    assert value["city"] in ("Nineveh", "Ur") and 1 <= value["days"] <= 9


def test_a_call_that_a_request_names_is_made_once(client: Any) -> None:
    """Also where calls may be parallel, and the model would go on."""
    for seed in range(3):
        got = chat(
            client, tools=[WEATHER, CLOCK], max_completion_tokens=400, seed=seed,
            tool_choice={"type": "function", "function": {"name": "weather"}},
            logit_bias={"1": -100},
        ).choices[0]  # fmt: skip
        assert len(got.message.tool_calls) == 1 and got.finish_reason == "stop"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_that_is_cut_is_no_content(client: Any, choice: Any) -> None:
    for length in range(1, 14, 3):
        options = {"tools": [WEATHER], "tool_choice": choice, "max_completion_tokens": length}
        got = chat(client, **options).choices[0]
        assert not got.message.content and not got.message.tool_calls
        assert got.finish_reason == "length"
        pieces = [piece.choices[0] for piece in chat(client, stream=True, **options)]
        assert not any(piece.delta.content or piece.delta.tool_calls for piece in pieces)
        assert pieces[-1].finish_reason == "length"


def test_calls_that_the_model_chooses(client: Any) -> None:
    """With "auto" an answer is text, or calls; here a choice of texts says which."""
    calls = [("weather", {"city": "Ur", "days": 2}), ("clock", {})]
    text = "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )
    options: dict[str, Any] = {"tools": [WEATHER, CLOCK], "max_completion_tokens": 400}
    for choice in ("auto", openai.omit):
        options["tool_choice"] = choice
        for is_parallel in (True, False):
            options["parallel_tool_calls"] = is_parallel
            options["extra_body"] = {"guided_choice": [f"I see.{text}"]}
            got = chat(client, **options).choices[0]
            found = [
                (call.function.name, json.loads(call.function.arguments))
                for call in got.message.tool_calls
            ]
            assert found == calls[: 2 if is_parallel else 1]
            assert got.message.content.strip() == "I see." and got.finish_reason == "tool_calls"
            assert len({call.id for call in got.message.tool_calls}) == len(found)
            with client.chat.completions.stream(
                model=NAME, messages=TALK, seed=1,
                **{name: value for name, value in options.items() if value is not openai.omit},
            ) as stream:  # fmt: skip
                streamed = stream.get_final_completion().choices[0]
            assert streamed.message.content == got.message.content
            assert streamed.finish_reason == "tool_calls"
            assert [
                (call.function.name, json.loads(call.function.arguments))
                for call in streamed.message.tool_calls or ()
            ] == found
        options["extra_body"] = {"guided_choice": ["No tool is needed."]}
        got = chat(client, **options).choices[0]
        assert got.message.content == "No tool is needed." and got.message.tool_calls is None
        assert got.finish_reason == "stop"


def test_several_calls_at_once(client: Any) -> None:
    """Each of the calls that are forced has arguments of its schema."""
    tools = [WEATHER, function("clock", {"type": "object", "properties": {}})]
    most = 0
    for seed in range(5):
        got = chat(
            client, tools=tools, tool_choice="required", max_completion_tokens=300, seed=seed,
            logit_bias={"1": -100},
        ).choices[0]  # fmt: skip
        calls = got.message.tool_calls
        most = max(most, len(calls))
        for call in calls[: len(calls) - (got.finish_reason == "length")]:
            (schema,) = [
                tool["function"]["parameters"] for tool in tools
                if tool["function"]["name"] == call.function.name
            ]  # fmt: skip
            jsonschema.validate(json.loads(call.function.arguments), schema)
    assert most > 1


def test_answers_of_tools_come_back(client: Any) -> None:
    got = chat(client, tools=[WEATHER, CLOCK], tool_choice="required", max_completion_tokens=400)
    message = got.choices[0].message
    assert {call.function.name for call in message.tool_calls} <= {"weather", "clock"}
    talk = [*TALK, message, *({"role": "tool", "tool_call_id": call.id, "content": "dry"}
                              for call in message.tool_calls)]  # fmt: skip
    assert chat(client, messages=talk, tools=[WEATHER, CLOCK]).choices[0].message is not None
    free = chat(client, tools=[WEATHER], tool_choice="none").choices[0]
    assert free.message.tool_calls is None and free.finish_reason == "length"


def test_errors(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        chat(client, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="expected 'kjv'"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=client.base_url, api_key="no", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model=NAME, prompt="a " * 2000)
    assert [card.id for card in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME


def test_at_once(model: TextModel) -> None:
    import asyncio

    async def ask(port: int) -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
        ) as client:

            async def one(seed: int) -> str:
                got = await client.completions.create(
                    model=NAME, prompt=f"And {seed}", max_tokens=8, seed=seed
                )
                text: str = got.choices[0].text
                return text

            together = await asyncio.gather(*map(one, range(16)))
            assert together == [await one(seed) for seed in range(16)]
            return list(together)

    with served(model) as port:
        assert len(set(asyncio.run(ask(port)))) > 8


SAMPLING = (
    "frequency_penalty logit_bias logprobs max_tokens model n presence_penalty seed stop stream "
    "stream_options temperature top_p"
)
# Of each type: fields that are read, and those without effect. All others are refused.
CHAT = {
    "CompletionCreateParamsStreaming": (
        f"{SAMPLING} max_completion_tokens messages modalities parallel_tool_calls top_logprobs "
        "reasoning_effort response_format tool_choice tools",
        "metadata prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier "
        "service_tier store user verbosity",
    ),
    **{
        f"ChatCompletion{role}MessageParam": ("content name role", "")
        for role in ("Developer", "System", "User", "Function")
    },
    "ChatCompletionToolMessageParam": ("content role tool_call_id", ""),
    "ChatCompletionAssistantMessageParam": ("content name role tool_calls", "refusal"),
    "ChatCompletionContentPartTextParam": ("text type", "prompt_cache_breakpoint"),
    "ChatCompletionContentPartRefusalParam": ("refusal type", ""),
    "PromptCacheBreakpoint": ("", "mode ttl"),
    "PromptCacheOptions": ("", "mode ttl"),
    "ChatCompletionMessageFunctionToolCallParam": ("function id type", ""),
    "Function": ("arguments description name parameters", ""),
    "FunctionDefinition": ("description name parameters strict", ""),
    "ChatCompletionFunctionToolParam": ("function type", ""),
    "ChatCompletionNamedToolChoiceParam": ("function type", ""),
    "ChatCompletionAllowedToolChoiceParam": ("allowed_tools type", ""),
    "ChatCompletionAllowedToolsParam": ("mode tools", ""),
    "ResponseFormatText": ("type", ""),
    "ResponseFormatJSONObject": ("type", ""),
    "ResponseFormatJSONSchema": ("json_schema type", ""),
    "JSONSchema": ("schema strict", "description name"),
    "ChatCompletionStreamOptionsParam": ("include_usage", "include_obfuscation"),
}
USER: dict[str, Any] = {"role": "user", "content": "Who?"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
CUSTOM = {"type": "custom", "custom": {"name": "now"}}
PART = {"type": "text", "text": "Who?", "prompt_cache_breakpoint": {"mode": "explicit"}}


def part(kind: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [PART, {"type": kind, kind: {}}]}]}


def said(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", **fields}]}


# Of each type, or field of one, that is refused as a whole: a body, and the field that its error
# names. Types that only stand within one of them are not told apart.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "audio": ({"audio": {"format": "wav", "voice": "a"}}, "audio"),
    "function_call": ({"function_call": "auto"}, "function_call"),
    "functions": ({"functions": [{"name": "now"}]}, "functions"),
    "moderation": ({"moderation": {"model": "a"}}, "moderation"),
    "prediction": ({"prediction": {"type": "content", "content": "a"}}, "prediction"),
    "web_search_options": ({"web_search_options": {}}, "web_search_options"),
    "ChatCompletionContentPartImageParam": (part("image_url"), "messages[0].content"),
    "ChatCompletionContentPartInputAudioParam": (part("input_audio"), "messages[0].content"),
    "File": (part("file"), "messages[0].content"),
    "ChatCompletionAssistantMessageParam.audio": (said(audio={"id": "a"}), "messages[1]"),
    "ChatCompletionAssistantMessageParam.function_call": (
        said(function_call={"name": "now", "arguments": "{}"}), "messages[1]"),
    "ChatCompletionMessageCustomToolCallParam": (
        said(tool_calls=[{"id": "a", "type": "custom", "custom": {"name": "a", "input": "b"}}]),
        "messages[1].tool_calls[0]"),
    "ChatCompletionCustomToolParam": ({"tools": [CUSTOM]}, "tools"),
    "ChatCompletionNamedToolChoiceCustomParam": (
        {"tools": [TOOL], "tool_choice": CUSTOM}, "tool_choice"),
}  # fmt: skip
WITHIN_REFUSED = frozenset(
    "Audio Custom CustomFormatGrammar CustomFormatGrammarGrammar CustomFormatText FileFile "
    "ChatCompletionAudioParam ChatCompletionFunctionCallOptionParam FilePromptCacheBreakpoint "
    "ChatCompletionPredictionContentParam FunctionCall ImageURL InputAudio Moderation "
    "ModerationPolicy ModerationPolicyInput ModerationPolicyOutput VoiceID WebSearchOptions "
    "WebSearchOptionsUserLocation WebSearchOptionsUserLocationApproximate".split()
)
COMPLETION = {
    "CompletionCreateParamsStreaming": (f"{SAMPLING} best_of echo prompt", "user"),
    "ChatCompletionStreamOptionsParam": ("include_usage", "include_obfuscation"),
}
SPEECH = "file language model prompt response_format stream temperature timestamp_granularities"


def types_of(kind: Any, found: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the fields of a type and of all types within, by the types' names."""
    if not typing_extensions.is_typeddict(kind):
        for inner in get_args(kind):
            types_of(inner, found)
        return found
    hints = typing_extensions.get_type_hints(kind)
    known = found.setdefault(kind.__name__, set())
    if not known >= hints.keys():
        known.update(hints)
        for inner in hints.values():
            types_of(inner, found)
    return found


def split(texts: tuple[str, str]) -> set[str]:
    return {*texts[0].split(), *texts[1].split()}


def test_each_field_of_a_chat_is_read_without_effect_or_refused() -> None:
    from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming

    found = types_of(CompletionCreateParamsStreaming, {})
    assert {name for name in found if name not in CHAT} == {
        *WITHIN_REFUSED, *(name for name in REFUSED if name[0].isupper() and "." not in name)
    }  # fmt: skip
    for name, texts in CHAT.items():
        begin = "" if name.startswith("CompletionCreate") else f"{name}."
        others = {field for field in found[name] - split(texts) if f"{begin}{field}" not in REFUSED}
        assert not others and split(texts) <= found[name], (name, others)


def test_each_field_of_a_completion_is_read_without_effect_or_refused() -> None:
    from openai.types.completion_create_params import CompletionCreateParamsStreaming

    found = types_of(CompletionCreateParamsStreaming, {})
    wanted = {name: split(texts) for name, texts in COMPLETION.items()}
    wanted["CompletionCreateParamsStreaming"].add("suffix")
    assert found == wanted


def test_each_field_of_a_transcription_is_read_or_refused() -> None:
    from openai.types.audio.transcription_create_params import TranscriptionCreateParamsStreaming
    from openai.types.audio.translation_create_params import TranslationCreateParams

    for kind in (TranscriptionCreateParamsStreaming, TranslationCreateParams):
        for name in types_of(kind, {})[kind.__name__] - set(SPEECH.split()):
            for sent in (name, f"{name}[]"):  # a list has the second
                with pytest.raises(BadRequest, match="is not supported") as caught:
                    Speech.of([("file", b"a"), (sent, "a")], "transcribe", "m")
                assert caught.value.param == sent


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with served(load_model("int8")) as port:
        yield port


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(port: int, name: str) -> None:
    body, param = REFUSED[name]
    status, got = post(port, "/v1/chat/completions", {"messages": [USER], "max_tokens": 2, **body})
    assert status == 400 and got["error"]["param"] == param, got
    assert "is no field" not in got["error"]["message"]


def test_what_is_without_effect_changes_no_answer(port: int) -> None:
    plain = {"messages": [USER], "max_tokens": 4, "temperature": 0}
    others = {
        "messages": [{"role": "user", "content": [PART]}],
        **dict.fromkeys(CHAT["CompletionCreateParamsStreaming"][1].split(), "a"),
        "metadata": {"a": "b"}, "store": True, "prompt_cache_options": {"mode": "implicit"},
    }  # fmt: skip
    answers = [post(port, "/v1/chat/completions", {**plain, **more}) for more in ({}, others)]
    texts = [got["choices"][0]["message"]["content"] for _, got in answers]
    assert texts[0] == texts[1]
    for path, body in (("/v1/chat/completions", plain), ("/v1/completions", {"prompt": "And"})):
        options = {"include_usage": True, "include_obfuscation": True}
        assert post(port, path, {**body, "stream": True, "stream_options": options})[0] == 200
    assert post(port, "/v1/completions", {"prompt": "A", "suffix": "b"})[1]["error"]["param"] == (
        "suffix"
    )


ECHOED = {
    "content": None, "refusal": None, "role": "assistant", "annotations": None, "audio": None,
    "function_call": None, "parsed": {"a": 1},
    "tool_calls": [{"id": "a", "type": "function", "index": 0, "function": {
        "name": "now", "arguments": '{"a": 1}', "parsed_arguments": {"a": 1}}}],
}  # fmt: skip


def test_a_message_of_parse_comes_back() -> None:
    """``parsed``, and of a stream ``index`` and ``parsed_arguments``, are left aside."""
    (message,) = read_messages(Fields({"messages": [ECHOED]}))
    function = {"name": "now", "arguments": {"a": 1}}
    assert message == {"role": "assistant", "content": "", "tool_calls": [
        {"id": "a", "type": "function", "function": function}]}  # fmt: skip


@pytest.mark.parametrize("streams", [False, True])
def test_the_client_sends_back_what_it_parsed(port: int, streams: bool) -> None:
    pydantic = pytest.importorskip("pydantic")
    from typing import Literal

    answer_type = pydantic.create_model("answer", city=(Literal["Ur"], ...))
    tool = openai.pydantic_function_tool(answer_type, name="weather")
    choice = {"type": "function", "function": {"name": "weather"}}
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
    ) as client:
        chats = client.chat.completions
        common: Any = {"model": "kjv", "temperature": 0, "max_completion_tokens": 100}
        for asked in ({"response_format": answer_type}, {"tools": [tool], "tool_choice": choice}):
            if streams:
                with chats.stream(messages=[USER], **asked, **common) as stream:
                    message = stream.get_final_completion().choices[0].message
            else:
                message = chats.parse(messages=[USER], **asked, **common).choices[0].message
            talk = [USER, message]
            if message.tool_calls:
                (call,) = message.tool_calls
                assert call.function.parsed_arguments.city == "Ur"
                talk.append({"role": "tool", "tool_call_id": call.id, "content": "dry"})
            else:
                assert message.parsed.city == "Ur"
                talk.append(USER)
            assert chats.create(messages=talk, **common).choices

"""Every field of the request types of the installed client: read, without effect, or refused."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest

openai = pytest.importorskip("openai")
typing_extensions = pytest.importorskip("typing_extensions")

from lmdecode.serving.errors import BadRequest  # noqa: E402
from lmdecode.serving.fields import Fields  # noqa: E402
from lmdecode.serving.messages import read_messages  # noqa: E402
from lmdecode.serving.speech import Speech  # noqa: E402
from tests.serving.servers import load_model, post, served  # noqa: E402

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

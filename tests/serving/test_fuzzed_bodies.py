"""Bodies of every kind: an answer or an error in its protocol's shape, no fault of the server."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.serving.servers import call, load_model, named_events, post, served

CASES = 2000

texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", "auto", "none", "required", "json_object", "<s>", "</s>", "\x00", "🙂"]),
)
numbers = st.one_of(
    st.integers(-3, 30), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0, 1, 0.5, 1.0, -0.0, 1e308, 2**63, 10**30]),
)  # fmt: skip
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)
roles = st.sampled_from(["system", "user", "assistant", "tool", "developer", "king"])
contents = st.one_of(
    texts,
    st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=3),
    anything,
)
schemas = st.sampled_from(
    [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": "string", "enum": ["a", "b"]}, {"type": "array", "items": {"type": "boolean"}},
        {"$ref": "#/no"}, {"type": "x"}, {}, True, 5, {"anyOf": []}, {"pattern": "("},
    ]
)  # fmt: skip
tools = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": texts, "parameters": schemas}),
        }
    ),
    max_size=3,
)
formats = st.one_of(
    st.sampled_from([{"type": "json_object"}, {"type": "text"}, {"type": "x"}, {}]),
    schemas.map(lambda s: {"type": "json_schema", "json_schema": {"name": "a", "schema": s}}),
    anything,
)
small = st.one_of(st.integers(1, 6), numbers)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.one_of(st.just("kjv"), texts),
    "prompt": st.one_of(texts, st.lists(texts, max_size=3), st.lists(numbers, max_size=4)),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": roles},
            optional={"content": contents, "name": texts, "id": anything, "reasoning": anything,
                      "images": anything},
        ),
        max_size=3,
    ),
    "max_tokens": small, "max_completion_tokens": small, "n": small, "num_beams": small,
    "temperature": numbers, "top_p": numbers, "top_k": numbers, "min_p": numbers, "seed": numbers,
    "stop": st.one_of(texts, st.lists(texts, max_size=3)), "stream": st.booleans(),
    "stream_options": st.one_of(
        st.fixed_dictionaries({"include_usage": st.booleans()},
                              optional={"continuous_usage_stats": st.booleans()}),
        anything,
    ),
    "logprobs": st.one_of(st.booleans(), numbers), "top_logprobs": numbers, "echo": st.booleans(),
    "logit_bias": st.dictionaries(st.integers(-1, 4100).map(str), numbers, max_size=4),
    "frequency_penalty": numbers, "presence_penalty": numbers,
    "repetition_penalty": numbers, "typical_p": numbers, "mirostat_tau": numbers,
    "mirostat_eta": numbers,
    "xtc_threshold": numbers, "xtc_probability": numbers,
    "dry_multiplier": numbers, "dry_base": numbers,
    "dry_allowed_length": numbers, "no_repeat_ngram_size": numbers, "top_h": numbers,
    "dynamic_temperature_range": numbers, "adaptive_target": numbers, "length_penalty": numbers,
    "early_stopping": anything, "bad_words": st.lists(texts, max_size=3), "ignore_eos": anything,
    "stop_token_ids": st.lists(numbers, max_size=3), "min_tokens": numbers,
    "suppress_tokens": st.lists(st.integers(0, 4095), max_size=5), "tools": tools,
    "tool_choice": st.one_of(texts, anything), "parallel_tool_calls": anything,
    "response_format": formats, "guided_regex": texts, "guided_choice": st.lists(texts, max_size=3),
    "guided_json": schemas, "grammar": texts, "chat_template_kwargs": anything,
    "reasoning_effort": texts, "continue_final_message": st.booleans(), "user": anything,
    "metadata": anything, "skip_special_tokens": st.booleans(), "documents": anything,
}  # fmt: skip
unit = st.floats(0, 1)
words = st.sampled_from(["and", "the LORD", "\n", "🙂", "a b"])
# Values that are taken, each by itself.
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3), "temperature": st.floats(0, 2), "top_p": unit, "min_p": unit,
    "top_k": st.integers(-1, 50), "seed": st.integers(-5, 2**40), "stream": st.booleans(),
    "stop": st.lists(words, max_size=3), "frequency_penalty": st.floats(-2, 2), "user": texts,
    "presence_penalty": st.floats(-2, 2), "repetition_penalty": st.floats(0.5, 2),
    "typical_p": unit, "mirostat": st.sampled_from([0, 2]), "xtc_probability": unit,
    "xtc_threshold": unit, "dry_multiplier": unit, "no_repeat_ngram_size": st.integers(0, 4),
    "logit_bias": st.dictionaries(
        st.integers(0, 4095).map(str), st.floats(-100, 100), max_size=4
    ),
    "bad_words": st.lists(words, max_size=3), "min_tokens": st.integers(0, 4),
    "stop_token_ids": st.lists(st.integers(0, 4095), max_size=3), "ignore_eos": st.booleans(),
    "dynamic_temperature_range": unit, "suppress_tokens": FIELDS["suppress_tokens"],
    "guided_regex": st.sampled_from(["[a-z ]+", "(a|b)*c", "\\d{2}"]), "top_h": unit,
    "guided_choice": st.lists(words, min_size=1, max_size=3),
    "response_format": st.sampled_from([{"type": "json_object"}, {"type": "text"}]),
}  # fmt: skip


def some_of(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.lists(st.sampled_from(sorted(fields)), max_size=5, unique=True)
    return names.flatmap(
        lambda chosen: st.fixed_dictionaries({name: fields[name] for name in chosen})
    )


good, wild = some_of(GOOD), some_of(FIELDS)
extra = st.one_of(good, good, good, wild)
odd = st.dictionaries(st.sampled_from([*sorted(FIELDS), "x", ""]), anything, max_size=3)
talk = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": words}),
    min_size=1, max_size=3,
)  # fmt: skip
asked = st.one_of(
    *(
        st.tuples(
            st.just("/v1/completions"),
            st.fixed_dictionaries(
                {"prompt": prompt}, optional={"echo": st.just(True), "logprobs": st.integers(0, 3)}
            ),
        )
        for prompt in (words, words, FIELDS["prompt"])
    ),
    *(
        st.tuples(st.just("/v1/chat/completions"), st.fixed_dictionaries({"messages": messages}))
        for messages in (talk, talk, FIELDS["messages"])
    ),
    st.tuples(st.just("/tokenize"), st.fixed_dictionaries({"content": texts})),
)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with served(load_model("int8")) as port:
        yield port


# The same for the protocols that write one answer as blocks.
parts = st.one_of(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "input_text", "output_text"]),
                           "text": texts}),
    st.fixed_dictionaries({"type": st.sampled_from(["image", "document", "input_image", "x"])}),
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": texts}),
    st.fixed_dictionaries({"type": st.just("tool_use")},
                          optional={"id": texts, "name": texts, "input": anything}),
    st.fixed_dictionaries(
        {"type": st.just("tool_result")},
        optional={"tool_use_id": texts, "content": contents, "is_error": anything},
    ),
    anything,
)  # fmt: skip
said = st.fixed_dictionaries(
    {"role": roles}, optional={"content": st.one_of(texts, st.lists(parts, max_size=3))}
)
items = st.one_of(
    said,
    st.fixed_dictionaries(
        {"type": st.sampled_from(["function_call", "function_call_output", "reasoning", "message",
                                  "item_reference", "web_search_call"])},
        optional={"call_id": texts, "name": texts, "arguments": texts, "output": contents,
                  "content": st.one_of(contents, st.lists(parts, max_size=2)), "role": roles,
                  "summary": st.one_of(st.lists(parts, max_size=2), anything)},
    ),
    anything,
)  # fmt: skip
kinds = st.sampled_from(["function", "custom", "web_search", "auto", "any", "tool", "none", "x"])
flat_tools = st.lists(
    st.fixed_dictionaries(
        {"name": texts},
        optional={"type": kinds, "parameters": schemas, "input_schema": schemas,
                  "strict": st.booleans(), "description": texts},
    ),
    max_size=3,
)  # fmt: skip
choices = st.one_of(
    st.fixed_dictionaries({"type": kinds}, optional={
        "name": texts, "disable_parallel_tool_use": anything, "tools": anything}),
    texts, anything,
)  # fmt: skip
flat_formats = st.one_of(
    formats, schemas.map(lambda s: {"type": "json_schema", "name": "a", "schema": s})
)
COMMON = ("temperature", "top_p", "top_k", "seed", "stream", "metadata", "guided_regex", "min_p",
          "guided_choice", "chat_template_kwargs", "suppress_tokens", "min_tokens")  # fmt: skip
BLOCKS: dict[str, tuple[str, dict[str, st.SearchStrategy[Any]]]] = {
    "/v1/responses": ("input", {
        **{name: FIELDS[name] for name in COMMON}, "max_output_tokens": small,
        "input": st.one_of(texts, st.lists(items, max_size=4), anything), "instructions": texts,
        "tools": st.one_of(flat_tools, anything), "tool_choice": choices,
        "parallel_tool_calls": anything, "store": st.booleans(), "previous_response_id": texts,
        "text": st.one_of(flat_formats.map(lambda form: {"format": form}), anything),
        "reasoning": st.one_of(texts.map(lambda text: {"effort": text}), anything),
        "include": anything, "top_logprobs": numbers, "background": anything,
        "truncation": anything, "conversation": anything,
    }),
    "/v1/messages": ("messages", {
        **{name: FIELDS[name] for name in COMMON}, "max_tokens": small,
        "messages": st.one_of(st.lists(said, max_size=4), anything),
        "system": st.one_of(contents, st.lists(parts, max_size=2)),
        "tools": st.one_of(flat_tools, anything), "tool_choice": choices,
        "stop_sequences": FIELDS["stop"], "cache_control": anything, "context_management": anything,
        "thinking": st.one_of(
            st.fixed_dictionaries({"type": st.sampled_from(["enabled", "disabled", "adaptive"])},
                                  optional={"budget_tokens": numbers}), anything),
        "output_config": st.one_of(flat_formats.map(lambda form: {"format": form}), anything),
    }),
}  # fmt: skip


def blocks_of(path: str) -> st.SearchStrategy[dict[str, Any]]:
    name, fields = BLOCKS[path]
    first = st.one_of(talk, talk, fields[name])
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    taken = {key: value for key, value in GOOD.items() if key in COMMON}
    return st.tuples(
        st.fixed_dictionaries({name: first, most: st.just(3)}),
        st.one_of(some_of(taken), some_of(fields), some_of(fields)),
        st.dictionaries(st.sampled_from([*sorted(fields), "x", ""]), anything, max_size=3),
    ).map(lambda found: {**found[0], **found[1], **(found[2] if len(found[2]) == 3 else {})})


def check(port: int, path: str, body: dict[str, Any]) -> None:
    """Check the answer to a body: its status and its shape."""
    status, got, headers = call(port, "POST", path, body)
    assert status < 500, (status, got)
    is_anthropic = path.startswith("/v1/messages")
    if status != 200:
        assert status in (400, 404), status
        error, names = got["error"], {"message", "type", "param", "code"}
        if is_anthropic:
            assert got["type"] == "error" and got["request_id"].startswith("req_")
            names = {"type", "message"}
        assert set(error) == names and error["message"]
    elif headers["content-type"].startswith("text/event-stream"):
        if path in BLOCKS:
            last = named_events(got)[-1]
            ends = ("message_stop", "response.completed", "response.incomplete")
            assert last["type"] in (*ends, "error", "response.failed")
            if last["type"] not in ends:
                error = last.get("error") or last["response"]["error"]
                assert error.get("type", error.get("code")) in (
                    "invalid_request_error", "invalid_prompt"), error  # fmt: skip
            return
        lines = [line for line in got.splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        bodies = [json.loads(line[6:]) for line in lines[:-1]]
        kinds = {body["error"]["type"] for body in bodies if "choices" not in body}
        assert kinds <= {"invalid_request_error"}
    elif path == "/v1/responses":
        assert got["status"] in ("completed", "incomplete") and got["usage"]["output_tokens"] > 0
    elif is_anthropic:
        assert got["input_tokens"] if path.endswith("tokens") else got["stop_reason"]
    else:
        assert got.get("choices") or path == "/tokenize"


fuzzed = settings(
    max_examples=CASES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    derandomize=True,
)


@pytest.mark.slow
@fuzzed
@given(asked=asked, extra=extra, odd=odd)
def test_fuzzed_bodies(
    port: int, asked: tuple[str, dict[str, Any]], extra: dict[str, Any], odd: dict[str, Any]
) -> None:
    path, base = asked
    body = {"max_tokens": 3, **base, **extra, **(odd if len(odd) == 3 else {})}
    if path == "/tokenize":
        body.pop("max_tokens")
    check(port, path, body)


@pytest.mark.slow
@fuzzed
@given(body=blocks_of("/v1/responses"))
def test_fuzzed_responses(port: int, body: dict[str, Any]) -> None:
    check(port, "/v1/responses", body)


@pytest.mark.slow
@fuzzed
@given(body=blocks_of("/v1/messages"), counts=st.sampled_from([False, False, True]))
def test_fuzzed_messages(port: int, body: dict[str, Any], counts: bool) -> None:
    check(port, "/v1/messages/count_tokens" if counts else "/v1/messages", body)


def test_the_server_goes_on(port: int) -> None:
    assert post(port, "/v1/completions", {"prompt": "Who", "max_tokens": 3})[0] == 200

"""Bodies that are wrong: each gets an error that names the field, and the server goes on."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from lmdecode.serving.completions import Completion
from lmdecode.serving.fields import Fields
from lmdecode.serving.service import Service
from tests.serving.servers import call, events, load_model, post, served

TALK = [{"role": "user", "content": "Who?"}]
HUGE = 10**400
# field: values that are wrong, for completions and chats alike
WRONG: dict[str, list[Any]] = {
    "model": [5, {}, []],
    "n": [0, -1, 129, 1.5, "2", True, HUGE, [1]],
    "max_tokens": [-1, 1.5, "7", True, HUGE, 600],
    "temperature": [-0.1, "hot", True, HUGE, 1e300, [1]],
    "top_p": [1.1, "x", True, {}],
    "top_k": ["x", 1.5, HUGE, []],
    "min_p": ["x", {}],
    "seed": [1.5, "x", HUGE, True],
    "stop": [5, "", [""], ["a"] * 17, ["a" * 2000], {}, [5], "a" * 1_000_000],
    "stream": [1, "true", {}],
    "stream_options": [{"include_usage": True}, 5, []],
    "logit_bias": [5, {"x": 1}, {"1": "x"}, {"1": 101}, {"999999": 1}, {"-1": 1}, [], {"1": True}],
    "frequency_penalty": [2.1, "x", True],
    "presence_penalty": [-2.1, "x"],
    "repetition_penalty": [0, -1, "x"],
    "no_repeat_ngram_size": [-1, "x", 1.5],
    "typical_p": [2, "x"],
    "mirostat": [1, 3, "x"],
    "mirostat_tau": [-1, "x"],
    "dry_multiplier": [-1, "x"],
    "dry_sequence_breakers": [5, [""]],
    "bad_words": [5, [""], {}],
    "bad_words_ids": [5, [[]], [[99999]]],
    "suppress_tokens": [[-1], [99999], "x"],
    "stop_token_ids": [5, [-1], [99999], "x"],
    "ignore_eos": [1, "x"],
    "min_tokens": [-1, "x", 1.5],
    "num_beams": [0, -1, "x", 1.5, 1000],
    "length_penalty": [1.0],  # without num_beams
    "include_stop_str_in_output": ["x"],
    "skip_special_tokens": [1],
    "no_such_field": [1],
}
OF_COMPLETIONS: dict[str, list[Any]] = {
    "prompt": [None, 5, {}, [], [[]], ["a", 5], [5, "a"], [99999], [-1], [[5, -1]],
               [True], ["a"] * 1025, "word " * 5000, "x" * 10_000_000],
    "logprobs": [-1, 21, "x", True],
    "echo": [1, "x"],
    "best_of": [2, 0, "x"],
    "suffix": ["x"],
}  # fmt: skip
OF_CHATS: dict[str, list[Any]] = {
    "messages": [
        None, 5, [], {}, "x", [5], [{}], [{"role": "king", "content": "x"}],
        [{"role": "user"}], [{"role": "user", "content": 5}], [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": "x", "tool_calls": [{}]}],
        [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "a"}}] * 5000}],
        [{"role": "user", "content": "x", "images": ["x"]}],
        [{"role": "assistant", "content": "x", "prefix": True}],
        [{"role": "assistant", "content": "x", "function_call": {"name": "a"}}],
        [{"role": "assistant", "content": "x", "reasoning_content": 5}],
        [{"role": "user", "content": "w " * 9999}],
        TALK * 5000,
    ],
    "logprobs": [5, "x"],
    "top_logprobs": [5],  # without logprobs
    "max_completion_tokens": [0, "x", 600],
    "tools": [5, {}, [5], [{}], [{"type": "function", "function": {}}],
              [{"type": "function", "function": {"name": "a", "parameters": 5}}],
              [{"type": "function", "function": {"name": "a"}}] * 2,
              [{"type": "function", "function": {"name": "a" * 9999}}],
              [{"type": "a" * 9999, "function": {"name": "a"}}]],
    "tool_choice": ["required", "x", 5, {"type": "function", "function": {"name": "a"}}],
    "parallel_tool_calls": [5],
    "chat_template_kwargs": [5, {"messages": 1}, {"self": 1}],
    "continue_final_message": [5],
    "modalities": [["audio"]],
    "functions": [[]],
    "audio": [{}],
}  # fmt: skip


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with served(load_model(), max_body_bytes=12_000_000, body_seconds=2.0) as port:
        yield port


def cases() -> list[Any]:
    return list(_cases())


def _cases() -> Iterator[Any]:
    for path, base, more in (
        ("/v1/completions", {"prompt": "Who"}, OF_COMPLETIONS),
        ("/v1/chat/completions", {"messages": TALK}, OF_CHATS),
    ):
        for name, values in {**WRONG, **more}.items():
            for i, value in enumerate(values):
                yield pytest.param(path, base, name, value, id=f"{path[4:8]}-{name}-{i}")


@pytest.mark.parametrize(("path", "base", "name", "value"), cases())
def test_a_wrong_field_is_named(
    port: int, path: str, base: dict[str, Any], name: str, value: Any
) -> None:
    body = {"max_tokens": 3, **base, name: value}
    if name == "max_completion_tokens":
        del body["max_tokens"]
    status, got = post(port, path, body)
    assert status == 400, got
    error = got["error"]
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 2000
    assert error["param"].split("[")[0] == name, error


def test_a_server_goes_on_behind_errors(port: int) -> None:
    assert post(port, "/v1/completions", {"prompt": "Who", "max_tokens": 3})[0] == 200


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[1]", b"null", b"5", b'"x"', b'{"prompt": NaN}', b"\xff\xfe", b'{"a": 1}' * 2,
     b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"prompt": 1' + b"0" * 5000 + b"}"],
)  # fmt: skip
def test_a_body_that_is_no_object_of_json(port: int, data: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        status, got = post(port, path, data)
        assert status == 400 and got["error"]["param"] in ("body", "prompt", "content", "messages")


def test_paths_methods_models_and_sizes(port: int) -> None:
    assert call(port, "GET", "/v1/nothing")[:2][0] == 404
    assert call(port, "GET", "/v1/nothing")[1]["error"]["type"] == "not_found_error"
    status, got, headers = call(port, "GET", "/v1/completions")
    assert status == 405 and "POST" in headers["allow"] and got["error"]["message"]
    for path in ("/v1/" + "n" * 9999, "/v1/models/" + "n" * 9999):
        status, got, _ = call(port, "GET", path)
        assert status == 404 and len(got["error"]["message"]) <= 200
    status, got = post(port, "/v1/completions", {"prompt": "a", "model": "gpt-4"})
    assert status == 404 and got["error"]["code"] == "model_not_found"
    assert "'kjv'" in got["error"]["message"]
    large = b'{"prompt": "' + b"a" * 12_000_000 + b'"}'
    assert post(port, "/v1/completions", large)[0] == 413


def test_half_a_body_times_out(port: int) -> None:
    import socket

    with socket.create_connection(("127.0.0.1", port), timeout=30) as sent:
        sent.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n{")
        assert sent.recv(4096).startswith(b"HTTP/1.1 408")


def test_keys() -> None:
    with served(load_model(), api_key="s3cret") as port:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"},
                        {"Authorization": "Bearer \xff"}):  # fmt: skip
            status, got, sent = call(port, "GET", "/v1/models", **headers)
            assert status == 401 and got["error"]["code"] == "invalid_api_key"
            assert sent["www-authenticate"] == "Bearer"
            assert call(port, "POST", "/v1/completions", {"prompt": "a"}, **headers)[0] == 401
        assert call(port, "GET", "/health")[0] == call(port, "GET", "/")[0] == 200
        assert call(port, "GET", "/v1/models", Authorization="Bearer s3cret")[0] == 200


def test_more_answers_than_there_may_be_at_once(port: int) -> None:
    status, got = post(port, "/v1/completions", {"prompt": ["a"] * 300, "n": 1})
    assert status == 400 and got["error"]["param"] == "prompt" and "at most 260" in str(got)


def test_prompts_of_two_kinds(port: int) -> None:
    ask = {"prompt": ["And", [5, 6]], "echo": True, "max_tokens": 2}
    status, got = post(port, "/v1/completions", ask)
    assert status == 200 and got["choices"][0]["text"].startswith("And")
    assert isinstance(got["choices"][1]["text"], str)


def test_no_token_in_a_stream(port: int) -> None:
    ask = {"prompt": "And", "echo": True, "max_tokens": 0, "stream": True}
    (piece,) = events(post(port, "/v1/completions", ask)[1])
    assert piece["choices"][0]["text"] == "And" and piece["usage"]["completion_tokens"] == 0


def test_a_quote_that_does_not_end_takes_no_time(port: int) -> None:
    """A server that scans to the end from each quote would take minutes."""
    for text in ('start: "' + '\\"' * 120_000, "start: /" + "\\/" * 120_000):
        status, got = post(port, "/v1/completions", {"prompt": "a", "grammar": text})
        assert status == 400 and got["error"]["param"] == "grammar"


def test_a_name_of_any_length_makes_a_short_error(port: int) -> None:
    for body in ({"x" * 9999: 1}, {"stream": True, "stream_options": {"x" * 9999: 1}},
                 {"structured_outputs": {"x" * 9999: 1}}):  # fmt: skip
        status, got = post(port, "/v1/completions", {"prompt": "a", **body})
        assert status == 400 and len(str(got)) < 500


@pytest.mark.parametrize("multiple", [HUGE, 1e300, 10**30])
def test_a_multiple_of_any_size(port: int, multiple: float) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": multiple}}}
    tool = {"type": "function", "function": {"name": "a", "parameters": schema}}
    asked = {"messages": TALK, "tools": [tool], "tool_choice": "required"}
    status, got = post(port, "/v1/chat/completions", asked)
    assert status == 400 and got["error"]["param"] == "tools", got
    status, got = post(port, "/v1/completions", {"prompt": "a", "guided_json": schema})
    assert status == 400 and got["error"]["param"] == "guided_json", got


def test_a_grammar_that_needs_too_much_is_no_fault_of_the_server(port: int) -> None:
    ask = {"prompt": "a", "max_tokens": 60, "grammar": 'start: "a"{1000000000}'}
    status, got = post(port, "/v1/completions", ask)
    assert status == 400 and "the grammar" in got["error"]["message"], got
    (piece,) = events(post(port, "/v1/completions", {**ask, "stream": True})[1])[-1:]
    assert piece["error"]["type"] == "invalid_request_error"


def test_a_grammar_of_many_rules_takes_no_time(port: int) -> None:
    rules = "\n".join(f"r{i} ::= r{i + 1} | r{i + 1} r{i + 1}" for i in range(5000))
    ask = {"prompt": "a", "grammar": f'root ::= r0\n{rules}\nr5000 ::= "a"'}
    status, got = post(port, "/v1/completions", ask)
    assert status == 400 and "many ways to go on" in got["error"]["message"]
    rules = "\n".join(f"r{i} ::= r{i + 1}" for i in range(10_000))
    ask = {"prompt": "a", "grammar": f'root ::= r0\n{rules}\nr10000 ::= "a"'}
    status, got = post(port, "/v1/completions", ask)
    assert status == 400 and "more than 10000 rules" in got["error"]["message"]


def test_others_have_a_turn_while_many_answers_are_submitted() -> None:
    """The engine checks the arguments of each, such as long lists of tokens."""
    model = load_model()
    engine = model.decoding.engine(max_requests=4, capacity=512)
    service = Service(model, engine, "m")

    async def turns_of(number: int) -> int:
        fields = Fields({"prompt": "a", "n": number, "max_tokens": 1, "seed": 1})
        completion = await Completion.of(fields, service)
        submitted = asyncio.ensure_future(service.submit(completion.job))
        turns = 0
        while not submitted.done():
            await asyncio.sleep(0)
            turns += 1
        (await submitted).close()
        return turns

    assert asyncio.run(turns_of(64)) >= 64


def test_other_origins_may_not_ask_unless_told(port: int) -> None:
    origin = {"Origin": "http://example.com"}
    asked_by_page = call(port, "POST", "/v1/completions", {"prompt": "a"}, **origin)
    assert asked_by_page[0] == 403 and "origin" in asked_by_page[1]["error"]["message"]
    own = {"Origin": f"http://127.0.0.1:{port}"}
    assert call(port, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}, **own)[0] == 200
    assert "access-control-allow-origin" not in call(port, "GET", "/health", **origin)[2]
    # A page whose name leads here: its Origin and its Host are the same.
    body = {"prompt": "a", "max_tokens": 1}
    rebound = {"Origin": f"http://example.com:{port}", "Host": f"example.com:{port}"}
    assert call(port, "POST", "/v1/completions", body, **rebound)[0] == 403
    for name in ("localhost", "model.localhost", "[::1]"):
        of_here = {"Origin": f"http://{name}:{port}", "Host": f"{name}:{port}"}
        assert call(port, "POST", "/v1/completions", body, **of_here)[0] == 200
    assert call(port, "POST", "/v1/completions", body, Host="example.com")[0] == 200, "no page"
    with served(load_model(), api_key="k") as other:
        with_key = {**rebound, "Authorization": "Bearer k"}
        assert call(other, "POST", "/v1/completions", body, **with_key)[0] == 200
    with served(load_model(), cors_origins=["http://example.com"]) as other:
        headers = call(other, "GET", "/health", **origin)[2]
        assert headers["access-control-allow-origin"] == "http://example.com"
        assert call(other, "POST", "/v1/completions", body, **origin)[0] == 200
        asked = {**origin, "Access-Control-Request-Method": "POST"}
        assert call(other, "OPTIONS", "/v1/completions", **asked)[0] == 200

"""The official client of OpenAI's API drives ``/v1/responses``: items, events, tools, the store."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

from lmdecode.serving.app import Application  # noqa: E402
from lmdecode.serving.reasoning import ReasoningFormat  # noqa: E402
from lmdecode.serving.responses import StoredResponses  # noqa: E402
from lmdecode.serving.service import Service  # noqa: E402
from lmdecode.serving.work import Job, Work  # noqa: E402
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
from tests.serving.test_openai_client import split, types_of  # noqa: E402

PATH = "/v1/responses"
SHELL: dict[str, Any] = {
    "type": "function", "name": "shell", "strict": False, "parameters": {
        "type": "object", "required": ["command"],
        "properties": {"command": {"type": "string", "enum": ["ls", "cat a", "make"]}},
    },
}  # fmt: skip
OTHERS = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"},
          {"type": "local_shell"}, {"type": "mcp", "server_label": "a"}]  # fmt: skip


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
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


def ask(client: Any, input: Any = "What did the LORD say?", **options: Any) -> Any:
    extra = {"seed": 1, **options.pop("extra_body", {})}
    options = {"max_output_tokens": 12, **options}
    return client.responses.create(model=NAME, input=input, extra_body=extra, **options)


def forced(*texts: str) -> dict[str, Any]:
    return {"guided_choice": list(texts)}


def test_a_text_and_its_stream(client: Any) -> None:
    got = ask(client, metadata={"a": "b"}, instructions="Be brief.", temperature=0.9)
    (item,) = got.output
    assert item.type == "message" and item.role == "assistant" and got.output_text
    assert got.status == "incomplete" == item.status
    assert got.incomplete_details.reason == "max_output_tokens" and got.error is None
    assert got.usage.output_tokens == 12 and got.usage.output_tokens_details.reasoning_tokens == 0
    assert got.usage.total_tokens == got.usage.input_tokens + 12
    assert (got.metadata, got.instructions, got.model) == ({"a": "b"}, "Be brief.", NAME)
    assert (got.temperature, got.max_output_tokens) == (0.9, 12) and got.store is True
    type(got).model_validate(got.model_dump(), strict=True)
    found = list(ask(client, stream=True, instructions="Be brief.", temperature=0.9))
    assert [event.sequence_number for event in found] == list(range(len(found)))
    kinds = [event.type.removeprefix("response.") for event in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event.delta for event in found[4:-4]) == got.output_text == found[-4].text
    last = found[-1].response
    assert last.output_text == got.output_text and last.usage.output_tokens == 12
    assert last.output[0].id == found[2].item.id == found[4].item_id
    again = ask(client, "And it came to pass in those days. " * 8)
    again = ask(client, "And it came to pass in those days. " * 8)
    assert 0 < again.usage.input_tokens_details.cached_tokens < again.usage.input_tokens


def test_a_schema_and_what_the_client_parses(client: Any) -> None:
    from typing import Literal

    kind = pydantic.create_model("answer", city=(Literal["Ur"], ...))
    options = {"model": NAME, "input": "Where?", "text_format": kind, "max_output_tokens": 100}
    assert client.responses.parse(**options).output_parsed.city == "Ur"
    with client.responses.stream(**options) as stream:
        got = stream.get_final_response()
    assert got.output_parsed.city == "Ur" and got.status == "completed"
    got = ask(client, text={"format": {"type": "json_object"}, "verbosity": "low"})
    assert got.output_text.lstrip().startswith("{")


def test_thoughts_are_items_and_come_back(client: Any) -> None:
    text = "<think>Who was it?</think>He."
    options = {"extra_body": forced(text), "max_output_tokens": 60, "reasoning": {"effort": "low"}}
    got = ask(client, **options)
    thought, said = got.output
    assert thought.type == "reasoning" and thought.content[0].text == "Who was it?"
    assert said.content[0].text == got.output_text == "He." and got.status == "completed"
    assert 0 < got.usage.output_tokens_details.reasoning_tokens < got.usage.output_tokens
    found = list(ask(client, stream=True, **options))
    deltas = [event.delta for event in found if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Who was it?"
    indices = [e.output_index for e in found if e.type == "response.output_item.done"]
    assert indices == [0, 1] and found[-1].type == "response.completed"
    talk = [{"role": "user", "content": "What did the LORD say?"},
            {"role": "assistant", "content": "He.", "reasoning_content": "Who was it?"},
            {"role": "user", "content": "And?"}]  # fmt: skip
    wanted = client.chat.completions.create(model=NAME, messages=talk, max_tokens=1).usage
    items = [talk[0], *got.output, {"role": "user", "content": "And?"}]
    assert ask(client, items).usage.input_tokens == wanted.prompt_tokens
    next_one = ask(client, "And?", previous_response_id=got.id)
    assert next_one.usage.input_tokens == wanted.prompt_tokens
    assert next_one.previous_response_id == got.id
    other = [items[0], {"type": "reasoning", "id": "a", "encrypted_content": "x", "summary": []}]
    assert ask(client, other).usage.input_tokens < wanted.prompt_tokens


def prompts_of(patch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that gets the tokens of each prompt that a server computes."""
    prompts: list[list[int]] = []
    submit = Service.submit

    async def recorded(self: Service, job: Job) -> Work:
        prompts.extend(job.prompts)
        return await submit(self, job)

    patch.setattr(Service, "submit", recorded)
    return prompts


def check_prefixes(prompts: list[list[int]]) -> None:
    """Check that each of twelve prompts begins with the one before, but for a token at its end."""
    assert len(prompts) == 12
    for before, after in itertools.pairwise(prompts):
        assert after[: len(before) - 1] == before[:-1] and len(after) > len(before)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_of_twelve_turns(
    client: Any, streams: bool, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all items in each turn, or by the id of the last response."""
    options: dict[str, Any] = {"tools": [*OTHERS, SHELL], "parallel_tool_calls": False,
                               "max_output_tokens": 100, "store": keeps}  # fmt: skip
    items: list[Any] = [{"role": "user", "content": "Build it."}]
    new, previous, prompts = list(items), openai.omit, prompts_of(monkeypatch)
    for turn in range(12):
        asked: Any = new if keeps else items
        if turn == 11:
            options["extra_body"] = forced("It is built.")
        choice = ["required", {"type": "function", "name": "shell"}][turn % 2]
        options["tool_choice"] = "auto" if turn == 11 else choice
        options["previous_response_id"] = previous if keeps else openai.omit
        if streams:
            *_, last = ask(client, asked, stream=True, **options)
            assert last.type == "response.completed"
            got = last.response
        else:
            got = ask(client, asked, **options)
        assert got.status == "completed" and [tool.type for tool in got.tools][-1] == "function"
        if turn == 11:
            break
        (made,) = got.output
        assert made.type == "function_call" and made.name == "shell" and made.call_id
        assert json.loads(made.arguments)["command"] in ("ls", "cat a", "make")
        result = {"type": "function_call_output", "call_id": made.call_id, "output": "done"}
        new, previous = [result], got.id
        items += [made, result]
    assert got.output_text == "It is built." and len(got.output) == 1
    check_prefixes(prompts)


def test_calls_beside_text(client: Any) -> None:
    text = 'I see.<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
    options: Any = {"tools": [SHELL], "extra_body": forced(text + text[6:])}
    options["max_output_tokens"] = 200
    for is_parallel in (True, False):
        got = ask(client, parallel_tool_calls=is_parallel, **options)
        kinds = [item.type for item in got.output]
        assert kinds == ["message", "function_call", "function_call"][: 3 if is_parallel else 2]
        assert got.status == "completed" and got.parallel_tool_calls is is_parallel
        with client.responses.stream(
            model=NAME, input="What?", parallel_tool_calls=is_parallel, **options
        ) as stream:
            streamed = stream.get_final_response()
        assert [item.type for item in streamed.output] == kinds
        assert streamed.output[1].arguments == got.output[1].arguments
    free = ask(client, tools=[SHELL], tool_choice="none")
    assert [item.type for item in free.output] == ["message"]
    cut = ask(client, tools=[SHELL], tool_choice="required", max_output_tokens=4)
    assert cut.output == [] and cut.status == "incomplete"


def test_stored_responses(client: Any, port: int) -> None:
    got = ask(client)
    assert client.responses.retrieve(got.id).model_dump() == got.model_dump()
    status, gone, _ = call(port, "DELETE", f"{PATH}/{got.id}")
    assert status == 200 and gone == {"id": got.id, "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        status, error, _ = call(port, method, f"{PATH}/{got.id}")
        assert status == 404 and error["error"]["param"] == "response_id"
    with pytest.raises(openai.NotFoundError, match="no stored response"):
        ask(client, previous_response_id=got.id)
    unkept = ask(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)
    *_, last = ask(client, stream=True)
    assert client.responses.retrieve(last.response.id).output_text == last.response.output_text
    assert call(port, "GET", f"{PATH}/{last.response.id}?stream=true")[0] == 400


def test_the_store_is_bounded() -> None:
    stored = StoredResponses(most=3, most_bytes=1000)
    for i in range(5):
        stored.put({"id": f"r{i}"}, [{"role": "user", "content": "a"}])
    assert len(stored) == 3 and stored.get("r1") is None and stored.get("r2") is not None
    stored.put({"id": "large"}, [{"role": "user", "content": "a" * 900}])
    assert len(stored) == 1 and stored.num_bytes < 1000
    stored.put({"id": "huge"}, [{"role": "user", "content": "a" * 2000}])
    assert len(stored) == stored.num_bytes == 0
    stored.put({"id": "r"}, [])
    assert stored.drop("r") and not stored.drop("r") and stored.num_bytes == 0


# Field: values that are wrong.
WRONG: dict[str, list[Any]] = {
    "input": [
        5, {}, [], [5], [{}], [{"role": "king", "content": "x"}], [{"role": "user"}],
        [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
        [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}],
        [{"type": "function_call", "name": "a", "arguments": "{}"}],
        [{"type": "function_call", "call_id": "a", "name": "a", "arguments": {}}],
        [{"type": "function_call_output", "output": "a"}],
        [{"type": "function_call_output", "call_id": "a", "output": 5}],
        [{"type": "reasoning", "content": 5}], [{"type": "reasoning", "summary": [{"text": 5}]}],
        [{"type": "item_reference", "id": "a"}], [{"type": 5}], "word " * 9999,
        [{"role": "user", "content": "a"}] * 5000,
    ],
    "instructions": [5, []],
    "max_output_tokens": [0, -1, "x", 1.5],
    "temperature": [-1, "x"],
    "top_p": [2, "x"],
    "metadata": [5, "x"],
    "store": ["x", 1],
    "stream": ["x"],
    "background": [True, "x"],
    "include": [["message.output_text.logprobs"]],
    "top_logprobs": [3, "x"],
    "text": [5, {"format": 5}, {"format": {}}, {"format": {"type": "json_schema", "name": "a"}},
             {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}],
    "reasoning": [5, {"effort": 5}, {"effort": "x" * 99}],
    "tools": [5, [5], [{"type": "function"}], [{"type": "function", "name": "a b"}], [{"type": 5}],
              [{"type": "function", "name": "a", "parameters": 5}],
              [{"type": "function", "name": "a"}] * 2],
    "tool_choice": ["required", "x", 5, {"type": "function", "name": "a"}, {"type": "mcp"}],
    "parallel_tool_calls": ["x"],
    "previous_response_id": [5],
    "conversation": ["a"], "prompt": [{"id": "a"}], "moderation": [{}], "no_such_field": [1],
    "model": [5],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in WRONG.items() for v in values])
def test_a_wrong_field_is_named(port: int, name: str, value: Any) -> None:
    status, got = post(port, PATH, {"input": "Who?", "max_output_tokens": 3, name: value})
    assert status == 400, got
    error = got["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 250
    assert error["param"].split("[")[0].split(".")[0] == name, error


def test_errors_of_all_kinds_have_one_shape(port: int) -> None:
    found = [post(port, PATH, data) for data in (b"", b"{", b"[]", b"\xff")]
    assert {status for status, _ in found} == {400}
    for levels in (900, 970, 985, 995, 5000):
        deep = b'{"input": "a", "metadata": {"a": ' + b"[" * levels + b"]" * levels + b"}}"
        assert post(port, PATH, deep)[0] in (200, 400)
    found += [call(port, method, PATH)[:2] for method in ("GET", "PUT")]
    found.append(post(port, PATH, {"input": "a", "model": "other"}))
    found.append(post(port, PATH, b'{"input": "' + b"a" * 1_000_000 + b'"}'))
    with served(load_model("int8"), api_key="k", max_requests=1, max_waiting=0) as other:
        found.append(post(other, PATH, {"input": "a"}))
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{other}/v1", api_key="k", max_retries=0
        ) as client, ask(client, stream=True, max_output_tokens=400) as stream:  # fmt: skip
            next(iter(stream))
            with pytest.raises(openai.RateLimitError):
                ask(client)
    with serving(Application("m").app) as other:
        found.append(post(other, PATH, {"input": "a"}))
    assert [status for status, _ in found][4:] == [405, 405, 404, 413, 401, 503]
    assert all(set(got["error"]) == {"message", "type", "param", "code"} for _, got in found)


def test_a_failure_within_a_stream_is_an_event(port: int) -> None:
    body = {"input": "a", "stream": True, "grammar": 'start: "a"{1000000000}'}
    *_, last = named_events(post(port, PATH, body)[1])
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "invalid_prompt", last


def test_what_is_without_effect_changes_no_answer(port: int) -> None:
    """And an answer has room for what there is, whatever is asked for."""
    plain = {"input": "Who?", "temperature": 0, "max_output_tokens": 4}
    others = {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Who?"}]}],
        "include": ["reasoning.encrypted_content"], "truncation": "auto", "user": "a",
        "service_tier": "auto", "prompt_cache_key": "a", "safety_identifier": "a",
        "client_metadata": {"a": "b"}, "context_management": [{"type": "compaction"}],
        "background": False, "max_tool_calls": 3, "tools": OTHERS, "tool_choice": "auto",
        "reasoning": {"summary": "auto"}, "stream_options": {"include_obfuscation": False},
    }  # fmt: skip
    texts = [post(port, PATH, {**plain, **more})[1]["output"] for more in ({}, others)]
    assert texts[0][0]["content"] == texts[1][0]["content"]
    got = post(port, PATH, {**plain, "max_output_tokens": 100_000, **forced("He.")})[1]
    assert got["status"] == "completed" and got["max_output_tokens"] == 100_000


# Fields that are read, that are without effect, and that are refused.
FIELDS = (
    "background include input instructions max_output_tokens metadata model parallel_tool_calls "
    "previous_response_id reasoning store stream temperature text tool_choice tools top_logprobs "
    "top_p",
    "access_programs context_management image max_tool_calls prompt_cache_key prompt_cache_options "
    "prompt_cache_retention safety_identifier service_tier stream_options truncation user",
    "background_options conversation moderation prompt",
)


def test_each_field_is_read_without_effect_or_refused(port: int) -> None:
    from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

    known = types_of(ResponseCreateParamsStreaming, {})["ResponseCreateParamsStreaming"]
    assert known == split(FIELDS[:2]) | set(FIELDS[2].split())
    for name in FIELDS[2].split():
        status, got = post(port, PATH, {"input": "a", name: {"id": "a"}})
        assert status == 400 and "is not supported" in got["error"]["message"]

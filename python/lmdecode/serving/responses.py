"""``/v1/responses``: items to the messages of a chat, its answer to items, and stored responses."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from lmdecode.serving.blocks import (
    PASSED_FIELDS,
    BlockAnswer,
    Event,
    function_tool,
    new_id,
    own_names,
)
from lmdecode.serving.chat import Chat, ChatPart
from lmdecode.serving.errors import BadRequest, RequestError
from lmdecode.serving.fields import Fields, shown
from lmdecode.serving.messages import read_content, text_of
from lmdecode.serving.parameters import check_names
from lmdecode.serving.service import Service
from lmdecode.serving.tool_calls import CallDelta
from lmdecode.serving.work import Work

__all__ = ["ResponseAnswer", "StoredResponses"]

# Advice to a service, or about what this server does not do by itself: without effect.
_WITHOUT_EFFECT = {
    "access_programs", "client_metadata", "context_management", "image", "max_tool_calls",
    "stream_options", "truncation",
}  # fmt: skip
_FIELDS = PASSED_FIELDS | _WITHOUT_EFFECT | {
    "background", "include", "input", "instructions", "max_output_tokens", "parallel_tool_calls",
    "previous_response_id", "reasoning", "text", "tool_choice", "tools", "top_logprobs",
}  # fmt: skip
_REFUSED = {
    "background_options": "an answer is written while its client waits",
    "conversation": "expected previous_response_id",
    "moderation": "the server judges no text",
    "prompt": "the server keeps no templates",
}
_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens",
          "response_format": "text", "reasoning_effort": "reasoning"}  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"
_SPARE_LEVELS = 64  # those of a response around a field, and of Python's stack
_ROLES = ("user", "assistant", "system", "developer")


class StoredResponses:
    """Responses by their ids, with the conversations that they end; the oldest go first."""

    def __init__(self, most: int = 1024, most_bytes: int = 64 << 20) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._of_id: OrderedDict[str, bytes] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._of_id)

    def put(self, body: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
        """Keep a response; others, or one that is too large itself, are dropped for it."""
        data = json.dumps([body, messages]).encode()
        self._of_id[body["id"]] = data
        self.num_bytes += len(data)
        while len(self) > self._most or self.num_bytes > self._most_bytes:
            self.num_bytes -= len(self._of_id.popitem(last=False)[1])

    def get(self, identity: str) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """Return a response and its conversation, None if it is not there."""
        found = self._of_id.get(identity)
        if found is None:
            return None
        body, messages = json.loads(found)
        return body, messages

    def drop(self, identity: str) -> bool:
        """Forget a response; return whether it was there."""
        found = self._of_id.pop(identity, None)
        self.num_bytes -= len(found or b"")
        return found is not None


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(value := item.get(name), str):
        raise BadRequest(where, f"{where}.{name} is {shown(value)}; expected a text")
    return value


def _thoughts(item: Mapping[str, Any], where: str) -> str:
    """Return the text of a reasoning item: its content, or else its summary."""
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            raise BadRequest(where, f"{where}.{name} is {shown(parts)}; expected a list of parts")
        if parts:
            return "\n".join(_text(part, "text", f"{where}.{name}") for part in parts)
    return ""


def _add_item(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    """Add an item to messages: what an assistant thinks, says and calls in a row is one message."""
    if not isinstance(item, Mapping):
        raise BadRequest(where, f"{where} is {shown(item)}; expected an item")
    kind = item.get("type") or "message"
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "reasoning":
        if thoughts := _thoughts(item, where):
            said = {"role": "assistant", "content": "", "reasoning_content": thoughts}
            messages.append(said)
    elif kind == "function_call":
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
        function = {name: _text(item, name, where) for name in ("name", "arguments")}
        call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = read_content(item.get("output"), f"{where}.output")
        call_id = _text(item, "call_id", where)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    elif kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise BadRequest(where, f"{where}.role is {shown(role)}; expected {', '.join(_ROLES)}")
        content = read_content(item.get("content"), f"{where}.content")
        if role == "assistant":
            content = text_of(content)
            if last is not None and (not last["content"] or "tool_calls" in last):
                last["content"] += content
                return
        messages.append({"role": role, "content": content})
    else:
        raise BadRequest(
            where,
            f"{where}.type is {shown(kind)}; expected message, function_call, "
            "function_call_output or reasoning",
        )


def _add_input(messages: list[dict[str, Any]], fields: Fields) -> None:
    given = fields.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) and ("input" in fields or not messages):
        raise fields.error("input", "a text or a list of items")
    for i, item in enumerate(given or ()):
        _add_item(messages, item, f"input[{i}]")


def _functions(tools: Any) -> Any:
    """Return the functions among tools, as a chat has them: other kinds are left out."""
    if not isinstance(tools, list):
        return tools
    functions: list[Any] = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind == "function" and "function" not in tool:
            tool = function_tool(tool, "parameters")
        if kind == "function" or not isinstance(kind, str):  # an error says what is wrong
            functions.append(tool)
    return functions


def _chat_body(fields: Fields, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the body of a chat; raise ``BadRequest``, which names the field."""
    check_names(fields, _FIELDS, _REFUSED)
    if fields.boolean("background"):
        raise fields.error("background", "false: an answer is written while its client waits")
    if _LOGPROBS in fields.texts("include", 64, 256) or fields.integer("top_logprobs", 0, 20):
        name = "top_logprobs" if "top_logprobs" in fields else "include"
        raise BadRequest(name, f"{name} asks for log-probabilities; /v1/chat/completions has them")
    fields.object("metadata")
    body = {name: fields.get(name) for name in fields.names() if name in PASSED_FIELDS}
    for name in ("tool_choice", "parallel_tool_calls"):
        body[name] = fields.get(name)
    body["max_completion_tokens"] = fields.integer("max_output_tokens", 1, (1 << 31) - 1)
    body["messages"], body["tools"] = messages, _functions(fields.get("tools"))
    if (effort := fields.inner("reasoning").text("effort")) == "none":
        kwargs = fields.object("chat_template_kwargs") or {}
        body["chat_template_kwargs"] = {"enable_thinking": False, **kwargs}
    body["reasoning_effort"] = effort
    form = fields.inner("text").object("format")
    if form is not None and form.get("type") == "json_schema" and "json_schema" not in form:
        form = {"type": "json_schema", "json_schema": {k: form[k] for k in form if k != "type"}}
    body["response_format"] = form
    return body


def _check_levels(fields: Fields) -> None:
    """Raise ``BadRequest`` where a response could not be written that repeats a body's fields."""
    body: Any = {name: fields.get(name) for name in fields.names()}
    for _ in range(_SPARE_LEVELS):
        body = [body]
    try:
        json.dumps(body)
    except RecursionError as error:
        raise BadRequest("body", "the body has too many levels") from error


class ResponseAnswer(BlockAnswer):
    """A checked request, whose answer is a response with its items.

    ``messages`` are the conversation without ``instructions``, which are of one turn.
    """

    def __init__(
        self,
        chat: Chat,
        fields: Fields,
        messages: list[dict[str, Any]],
        stored: StoredResponses | None,
    ) -> None:
        super().__init__(chat)
        self._messages, self._stored = messages, stored
        self._count = 0  # of events
        self._item: dict[str, Any] = {}
        self._thoughts = ""
        self._output: list[dict[str, Any]] = []
        echoed = ("instructions", "max_output_tokens", "previous_response_id", "temperature",
                  "top_p", "user", "prompt_cache_key", "safety_identifier")  # fmt: skip
        self._body: dict[str, Any] = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            **{name: fields.get(name) for name in echoed},
            "metadata": fields.get("metadata") or {},
            "model": chat.service.name,
            "output": [],
            "parallel_tool_calls": chat.is_parallel,
            "reasoning": {"effort": None, "summary": None, **(fields.get("reasoning") or {})},
            "service_tier": "default",
            "store": stored is not None,
            "text": {"format": {"type": "text"}, **(fields.get("text") or {})},
            "tool_choice": fields.get("tool_choice") or "auto",
            "tools": fields.get("tools") or [],
            "truncation": "disabled",
            "usage": None,
        }

    @classmethod
    async def of(cls, fields: Fields, service: Service, stored: StoredResponses) -> ResponseAnswer:
        """Check a body; raise ``RequestError``, which names the field."""
        _check_levels(fields)
        messages: list[dict[str, Any]] = []
        if (previous := fields.text("previous_response_id")) is not None:
            if (found := stored.get(previous)) is None:
                message = f"there is no stored response {shown(previous)}"
                name = "previous_response_id"
                raise RequestError(404, message, name, "previous_response_not_found")
            messages = found[1]
        _add_input(messages, fields)
        instructions = fields.text("instructions")
        first = [{"role": "system", "content": instructions}] if instructions else []
        does_store = fields.boolean("store", True)
        with own_names(_NAMES):
            body = Fields(_chat_body(fields, [*first, *messages]))
            chat = await Chat.of(body, service, may_ask_more=True)
        return cls(chat, fields, messages, stored if does_store else None)

    @property
    def body(self) -> dict[str, Any]:
        """The response."""
        return {**self._body, "output": list(self._output)}

    def _event(self, kind: str, **facts: Any) -> Event:
        self._count += 1
        return {"type": f"response.{kind}", "sequence_number": self._count - 1, **facts}

    def _of_item(self, kind: str, **facts: Any) -> Event:
        """Return an event of what an item has."""
        at = {"item_id": self._item["id"], "output_index": len(self._output)}
        if self._item["type"] != "function_call":
            at["content_index"] = 0
        if kind.startswith("output_text"):
            facts["logprobs"] = []
        return self._event(kind, **at, **facts)

    def _added(self, item: dict[str, Any]) -> Event:
        self._item = item
        return self._event("output_item.added", output_index=len(self._output), item=dict(item))

    def _done(self, **facts: Any) -> Event:
        item = {**self._item, **facts}
        event = self._event("output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return event

    def _part(self, text: str) -> dict[str, Any]:
        if self.thinks:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def start(self, work: Work) -> Iterator[Event]:
        """Return the events before the first item."""
        yield self._event("created", response=self.body)
        yield self._event("in_progress", response=self.body)

    def begin(self) -> Iterator[Event]:
        """Begin an item of reasoning, or a message."""
        item: dict[str, Any] = {"type": "message", "role": "assistant"}
        if self.thinks:
            item = {"type": "reasoning", "summary": []}
        identity = new_id("rs" if self.thinks else "msg")
        yield self._added({"id": identity, **item, "content": [], "status": "in_progress"})
        yield self._of_item("content_part.added", part=self._part(""))

    def add(self, text: str) -> Event:
        """Add to it."""
        return self._of_item(f"{self._part('')['type']}.delta", delta=text)

    def end(self, is_cut: bool) -> Iterator[Event]:
        """End it."""
        part = self._part(self.text)
        if self.thinks:
            self._thoughts += self.text
        yield self._of_item(f"{part['type']}.done", text=self.text)
        yield self._of_item("content_part.done", part=part)
        yield self._done(content=[part], status="incomplete" if is_cut else "completed")

    def call(self, call: CallDelta) -> Iterator[Event]:
        """Write the item of a call."""
        item = {"type": "function_call", "id": new_id("fc"), "call_id": call.id, "name": call.name}
        yield self._added({**item, "arguments": "", "status": "in_progress"})
        yield self._of_item("function_call_arguments.delta", delta=call.arguments)
        yield self._of_item(
            "function_call_arguments.done", name=call.name, arguments=call.arguments
        )
        yield self._done(arguments=call.arguments, status="completed")

    def finish(self, part: ChatPart, work: Work) -> Iterator[Event]:
        """Finish the response, and store it."""
        status = "completed"
        if part.finish_reason == "length":
            status = "incomplete"
            self._body["incomplete_details"] = {"reason": "max_output_tokens"}
        self._body |= {"status": status, "completed_at": int(time.time())}
        usage, tokenizer = work.usage, self.chat.service.model.tokenizer
        # The tokens of the text of thoughts: the words around them are not counted.
        thought = len(tokenizer.encode(self._thoughts, add_special_tokens=False))
        self._body["usage"] = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": min(thought, usage.completion)},
            "total_tokens": usage.prompt + usage.completion,
        }
        if self._stored is not None:
            for i, item in enumerate(self._output):
                _add_item(self._messages, item, f"output[{i}]")
            self._stored.put(self.body, self._messages)
        yield self._event(status, response=self.body)

    def failed(self, error: RequestError) -> Event:
        """Return the event of a failure."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self._body |= {"status": "failed", "error": {"code": code, "message": str(error)}}
        return self._event("failed", response=self.body)

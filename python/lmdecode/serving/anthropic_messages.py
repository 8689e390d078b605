"""``/v1/messages`` of Anthropic: content blocks to the messages of a chat, its answer to blocks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from lmdecode.serving.blocks import (
    PASSED_FIELDS,
    BlockAnswer,
    Event,
    function_tool,
    new_id,
    own_names,
)
from lmdecode.serving.chat import Chat, ChatPart, prompt_of
from lmdecode.serving.errors import BadRequest, RequestError, anthropic_body
from lmdecode.serving.fields import Fields, shown
from lmdecode.serving.messages import part_text, read_content, text_of
from lmdecode.serving.parameters import check_names
from lmdecode.serving.service import Service
from lmdecode.serving.tool_calls import CallDelta
from lmdecode.serving.work import Work

__all__ = ["MessageAnswer", "count_tokens"]

# Advice to a service, or about tools of a server: without effect.
_WITHOUT_EFFECT = {
    "cache_control", "container", "context_management", "diagnostics", "inference_geo",
    "mcp_servers", "speed", "user_profile_id", "workspace_id",
}  # fmt: skip
_FIELDS = (PASSED_FIELDS - {"stop"}) | _WITHOUT_EFFECT | {
    "max_tokens", "messages", "output_config", "stop_sequences", "system", "thinking",
    "tool_choice", "tools",
}  # fmt: skip
_NAMES = {"response_format": "output_config", "reasoning_effort": "output_config.effort",
          "stop": "stop_sequences", "max_completion_tokens": "max_tokens",
          "parallel_tool_calls": "tool_choice"}  # fmt: skip
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = ("enabled", "disabled", "adaptive", "between_tools")
# A line of Claude Code's system prompt with another number in each turn, which would leave no
# prefix of two prompts the same.
_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.MULTILINE)
_SIGNATURE = "lmdecode"  # of thoughts, which clients send back


def _objects(value: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects of a list, each with its place."""
    if not isinstance(value, list):
        raise BadRequest(where, f"{where} is {shown(value)}; expected a list")
    for i, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise BadRequest(where, f"{where}[{i}] is {shown(item)}; expected an object")
        yield f"{where}[{i}]", item


def _system(value: Any) -> list[dict[str, Any]]:
    """Return the system message, without the line that changes with each turn."""
    content = read_content(value, "system")
    parts = [content] if isinstance(content, str) else [part["text"] for part in content]
    texts = [text for part in parts if (text := _BILLING.sub("", part)).strip()]
    blocks = [{"type": "text", "text": text} for text in texts]
    return [{"role": "system", "content": blocks}] if blocks else []


def _of_user(role: str, content: Any, where: str) -> Iterator[dict[str, Any]]:
    """Yield the results of tools and the texts of a message, each as a message of its own."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts: list[dict[str, Any]] = []
    is_empty = True
    for place, block in _objects(blocks, where):
        if block.get("type") != "tool_result":
            texts.append({"type": "text", "text": part_text(block, place, where)})
            continue
        if texts:
            yield {"role": role, "content": texts}
        texts, is_empty = [], False
        result = text_of(read_content(block.get("content") or "", f"{place}.content"), "\n")
        of_block = Fields(block, f"{place}.")
        if of_block.boolean("is_error"):
            result = f"Error: {result}"
        call_id = of_block.text("tool_use_id")
        yield {"role": "tool", "tool_call_id": call_id, "content": result}
    if texts or is_empty:
        yield {"role": role, "content": texts}


def _of_assistant(content: Any, where: str) -> dict[str, Any]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for place, block in _objects(blocks, where):
        kind, of_block = block.get("type"), Fields(block, f"{place}.")
        if kind == "thinking":
            thoughts = message.get("reasoning_content", "") + (of_block.text("thinking") or "")
            message["reasoning_content"] = thoughts
        elif kind == "tool_use":
            function = {"name": of_block.text("name"), "arguments": of_block.object("input") or {}}
            call = {"id": of_block.text("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":  # which nobody but its maker can read
            message["content"] += part_text(block, place, where)
    return message


def _messages(fields: Fields) -> list[dict[str, Any]]:
    messages = _system(fields.get("system")) if "system" in fields else []
    num_systems = len(messages)
    for where, message in _objects(fields.get("messages"), "messages"):
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            messages.append(_of_assistant(content, f"{where}.content"))
        elif role in ("user", "system"):
            messages += _of_user(str(role), content, f"{where}.content")
        else:
            raise BadRequest(where, f"{where}.role is {shown(role)}; expected user, assistant")
    if len(messages) == num_systems:
        raise fields.error("messages", "a list of at least one message")
    return messages


def _tools(fields: Fields) -> list[dict[str, Any]] | None:
    """Return the functions of a chat; tools that a server runs are left out."""
    if "tools" not in fields:
        return None
    tools = [tool for _, tool in _objects(fields.get("tools"), "tools")]
    own = [tool for tool in tools if (tool.get("type") or "custom") == "custom"]
    return [function_tool(tool, "input_schema") for tool in own]


def _chat_body(fields: Fields) -> dict[str, Any]:
    """Return the body of a chat; raise ``BadRequest``, which names the field."""
    check_names(fields, _FIELDS, {})
    body = {name: fields.get(name) for name in fields.names() if name in PASSED_FIELDS}
    fields.object("metadata")
    body["messages"], body["tools"] = _messages(fields), _tools(fields)
    body["max_completion_tokens"] = fields.integer("max_tokens", 1, (1 << 31) - 1)
    body["stop"] = fields.get("stop_sequences") or None
    last = body["messages"][-1]
    body["continue_final_message"] = last["role"] == "assistant" and "tool_calls" not in last
    choice = fields.inner("tool_choice")
    if (kind := choice.choice("type", *_CHOICES, "tool")) == "tool":
        name = {"name": choice.text("name")}
        body["tool_choice"] = {"type": "function", "function": name}
    elif kind is not None:
        body["tool_choice"] = _CHOICES[kind]
    body["parallel_tool_calls"] = not choice.boolean("disable_parallel_tool_use")
    thinking = fields.inner("thinking")
    kind = thinking.choice("type", *_THINKING)
    thinking.integer("budget_tokens", 1, (1 << 31) - 1)  # a model ends its thoughts by itself
    if kind in ("enabled", "disabled"):  # the names that templates have for it
        kwargs = fields.object("chat_template_kwargs") or {}
        does_think = dict.fromkeys(("enable_thinking", "thinking"), kind == "enabled")
        body["chat_template_kwargs"] = {**does_think, **kwargs}
    config = fields.inner("output_config")
    body["reasoning_effort"] = config.get("effort")
    if (form := config.object("format")) is not None:
        body["response_format"] = {**form, "json_schema": {"schema": form.get("schema")}}
    return body


async def count_tokens(fields: Fields, service: Service) -> dict[str, Any]:
    """Return the number of tokens of a body's prompt."""
    with own_names(_NAMES):
        prompt, _, _ = await prompt_of(Fields(_chat_body(fields)), service)
        (tokens,) = await service.tokens_of("messages", [prompt], add_special_tokens=False)
    return {"input_tokens": len(tokens)}


class MessageAnswer(BlockAnswer):
    """A checked request, whose answer is a message with its content blocks."""

    ping: ClassVar[Event] = {"type": "ping"}

    def __init__(self, chat: Chat, max_tokens: int) -> None:
        super().__init__(chat)
        self._max_tokens = max_tokens
        self._content: list[dict[str, Any]] = []
        self._body: dict[str, Any] = {
            "id": new_id("msg"), "type": "message", "role": "assistant",
            "model": chat.service.name, "content": [], "stop_reason": None, "stop_sequence": None,
        }  # fmt: skip

    @classmethod
    async def of(cls, fields: Fields, service: Service) -> MessageAnswer:
        """Check a body; raise ``BadRequest``, which names the field."""
        with own_names(_NAMES):
            body = _chat_body(fields)
            if (most := body["max_completion_tokens"]) is None:
                raise BadRequest("max_tokens", "max_tokens is missing; expected an int")
            return cls(await Chat.of(Fields(body), service, may_ask_more=True), most)

    @property
    def body(self) -> dict[str, Any]:
        """The message."""
        return {**self._body, "content": list(self._content)}

    def _usage(self, work: Work) -> dict[str, int]:
        usage = work.usage
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
        }

    def _event(self, kind: str, **facts: Any) -> Event:
        return {"type": f"content_block_{kind}", "index": len(self._content), **facts}

    def _block(self, text: str, signature: str = "") -> dict[str, Any]:
        if self.thinks:
            return {"type": "thinking", "thinking": text, "signature": signature}
        return {"type": "text", "text": text}

    def start(self, work: Work) -> Iterator[Event]:
        """Return the events before the first block."""
        yield {"type": "message_start", "message": {**self.body, "usage": self._usage(work)}}
        yield self.ping

    def begin(self) -> Iterator[Event]:
        """Begin a block of text or thoughts."""
        yield self._event("start", content_block=self._block(""))

    def add(self, text: str) -> Event:
        """Add to it."""
        kind = "thinking" if self.thinks else "text"
        return self._event("delta", delta={"type": f"{kind}_delta", kind: text})

    def end(self, is_cut: bool) -> Iterator[Event]:
        """End it."""
        if self.thinks:
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            yield self._event("delta", delta=delta)
        yield self._event("stop")
        self._content.append(self._block(self.text, _SIGNATURE))

    def call(self, call: CallDelta) -> Iterator[Event]:
        """Write the block of a call."""
        block: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        yield self._event("start", content_block=block)
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        yield self._event("delta", delta=delta)
        yield self._event("stop")
        self._content.append({**block, "input": json.loads(call.arguments)})

    def _reason(self, part: ChatPart) -> tuple[str, str | None]:
        stop = part.answer.stop_reason
        if isinstance(stop, str) and stop in self.job.parameters.stops:
            return "stop_sequence", stop
        if part.finish_reason == "length":
            is_full = self.job.max_tokens < self._max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens", None
        has_calls = any(block["type"] == "tool_use" for block in self._content)
        return "tool_use" if has_calls else "end_turn", None

    def finish(self, part: ChatPart, work: Work) -> Iterator[Event]:
        """Finish the message."""
        reason, stop = self._reason(part)
        end, usage = {"stop_reason": reason, "stop_sequence": stop}, self._usage(work)
        self._body |= {**end, "usage": usage}
        yield {"type": "message_delta", "delta": end, "usage": usage}
        yield {"type": "message_stop"}

    def failed(self, error: RequestError) -> Event:
        """Return the event of a failure."""
        return anthropic_body(error)

"""Messages of a chat, as templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lmdecode.serving.errors import BadRequest
from lmdecode.serving.fields import Fields, shown

__all__ = ["joined_parts", "part_text", "read_content", "read_messages", "text_of"]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MOST_MESSAGES = 4096
_MOST_CALLS = 4096  # of tools, in one message
# Others that are not read, such as id, refusal and annotations, are what clients echo.
_REFUSED = {
    "audio": "the model reads text",
    "contents": "expected content",
    "function_call": "expected tool_calls",
    "images": "the model reads text",
    "videos": "the model reads text",
    "tool_call": "expected tool_calls",
    "toolcalls": "expected tool_calls",
    "prefix": "expected continue_final_message, a field of the request",
}
_THOUGHTS = ("reasoning", "thinking")  # of other servers and clients, where they may be no text


def joined_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its parts joined to one text, a line each, as in vLLM."""
    if isinstance(message["content"], str):
        return message
    return {**message, "content": text_of(message["content"], "\n")}


def text_of(content: str | list[dict[str, Any]], between: str = "") -> str:
    """Return a content as one text."""
    return content if isinstance(content, str) else between.join(part["text"] for part in content)


def part_text(part: Any, place: str, where: str) -> str:
    """Return the text of a part; raise ``BadRequest``, of the field ``where``, which names it."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text", "output_text", "refusal"):
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            return text
    if isinstance(kind, str) and kind not in ("text", "refusal"):
        raise BadRequest(where, f"{place} is {kind[:40]!r}; expected text, all it reads")
    raise BadRequest(where, f"{place} is {shown(part)}; expected a part with a text")


def read_content(value: Any, where: str) -> str | list[dict[str, Any]]:
    """Return a content: a text, or a list of several parts of text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRequest(where, f"{where} is {shown(value)}; expected a text or a list of parts")
    texts = [part_text(part, f"{where}[{i}]", where) for i, part in enumerate(value)]
    parts = [{"type": "text", "text": text} for text in texts]
    return parts if len(parts) > 1 else "".join(texts)


def _call(value: Any, where: str) -> dict[str, Any]:
    """Return a call of a tool with its arguments as an object, as templates expect it."""
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest(where, f"{where} is {shown(value)}; expected a call of a function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            pass  # a model wrote it: it stays a text
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    identity = value.get("id")
    return {"id": identity, **call} if isinstance(identity, str) else call


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise BadRequest(where, f"{where} is {shown(value)}; expected an object")
    role = value.get("role")
    if role not in _ROLES:
        raise BadRequest(where, f"{where}.role is {shown(role)}; expected {', '.join(_ROLES)}")
    for name, reason in _REFUSED.items():
        if value.get(name):
            raise BadRequest(where, f"{where}.{name} is not supported: {reason}")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    content, calls = value.get("content"), value.get("tool_calls")
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise BadRequest(where, f"{where}.tool_calls is {shown(calls)}; expected a list, in a "
                             "message of the assistant")  # fmt: skip
        if len(calls) > _MOST_CALLS:
            raise BadRequest(
                where, f"{where}.tool_calls has {len(calls)} calls; expected at most {_MOST_CALLS}"
            )
        message["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    if content is None:
        if role != "assistant":
            raise BadRequest(where, f"{where} has no content; expected a text")
        message["content"] = ""
    else:
        message["content"] = read_content(content, f"{where}.content")
        if role == "tool":  # whose parts few templates write
            message = joined_parts(message)
    for name in ("name", "tool_call_id", "reasoning_content"):
        text = value.get(name)
        if text is None:
            continue
        if not isinstance(text, str):
            raise BadRequest(where, f"{where}.{name} is {shown(text)}; expected a text")
        message[name] = text
    for name in _THOUGHTS:
        if isinstance(text := value.get(name), str):
            message.setdefault("reasoning_content", text)
    return message


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """Return the messages of a chat. A content of several parts is a list of them.

    Raises ``BadRequest``, which names the message.
    """
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages or len(messages) > _MOST_MESSAGES:
        raise fields.error("messages", f"a list of 1 to {_MOST_MESSAGES} messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]

"""``/v1/chat/completions``: the bodies of a chat's answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from lmdecode.serving.answers import Envelope, chat_logprobs
from lmdecode.serving.chat import Chat, ChatDelta, ChatPart
from lmdecode.serving.fields import Fields
from lmdecode.serving.reasoning import ReasoningDelta
from lmdecode.serving.service import Service
from lmdecode.serving.tool_calls import ContentDelta
from lmdecode.serving.work import Answer, Job, Work

__all__ = ["ChatCompletion"]


@dataclass
class ChatCompletion:
    """A checked request of a chat, whose answers are OpenAI's choices."""

    chat: Chat
    envelope: Envelope

    @classmethod
    async def of(cls, fields: Fields, service: Service) -> ChatCompletion:
        """Check a body; raise ``BadRequest``, which names the field."""
        chat = await Chat.of(fields, service)
        kind = "chat.completion.chunk" if chat.job.parameters.stream else "chat.completion"
        return cls(chat, Envelope(kind, "chatcmpl", service.name, service.fingerprint))

    @property
    def job(self) -> Job:
        """What is to be written."""
        return self.chat.job

    def _logprobs(self, part: ChatPart) -> dict[str, Any] | None:
        if self.job.logprobs is None:
            return None
        return chat_logprobs(self.chat.service.model.tokenizer, part.logprobs)

    async def whole(self, work: Work) -> dict[str, Any]:
        """Return the body of all answers, when they have ended."""
        choices = [
            {
                "index": part.answer.index,
                "message": _joined(list(map(_delta, part.deltas))),
                "logprobs": self._logprobs(part),
                "finish_reason": part.finish_reason,
                "stop_reason": part.answer.stop_reason,
            }
            for part in await self.chat.wholes(work)
        ]
        return self.envelope.body(choices, work.usage)

    async def stream(self, work: Work) -> AsyncIterator[dict[str, Any]]:
        """Yield the bodies of pieces, as they come."""
        for answer in work.answers:
            delta = {"role": "assistant", "content": ""}
            yield self.envelope.body([_piece(answer, delta)], work.usage_of_piece)
        async for part in self.chat.parts(work):
            deltas: list[dict[str, Any]] = list(map(_delta, part.deltas)) or [{}]
            logprobs = self._logprobs(part)
            for delta in deltas:
                choice = _piece(part.answer, delta, logprobs)
                if part.finish_reason is not None and delta is deltas[-1]:
                    choice["finish_reason"] = part.finish_reason
                    choice["stop_reason"] = part.answer.stop_reason
                yield self.envelope.body([choice], work.usage_of_piece)
                logprobs = None
        if self.job.parameters.includes_usage:
            yield self.envelope.body([], work.usage)


def _delta(part: ChatDelta) -> dict[str, Any]:
    if isinstance(part, ReasoningDelta):
        return {"reasoning_content": part.text}
    if isinstance(part, ContentDelta):
        return {"content": part.text}
    function = {"arguments": part.arguments}
    call: dict[str, Any] = {"index": part.index}
    if part.name is not None:
        call |= {"id": part.id, "type": "function"}
        function = {"name": part.name, **function}
    return {"tool_calls": [{**call, "function": function}]}


def _piece(answer: Answer, delta: Mapping[str, Any], logprobs: Any = None) -> dict[str, Any]:
    return {"index": answer.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _joined(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a message of its parts."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for part in delta.get("tool_calls", ()):
            function = {"name": "", "arguments": ""}
            new = {"id": part["id"], "type": "function", "function": function}
            call = calls.setdefault(part["index"], new)
            for name, text in part.get("function", {}).items():
                call["function"][name] += text
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
        message["content"] = message["content"] or None
    return message

"""Answers of protocols that write text, thoughts and calls as blocks, one after the other."""

from __future__ import annotations

import contextlib
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from lmdecode.serving.chat import Chat, ChatDelta, ChatPart
from lmdecode.serving.errors import RequestError, error_of_step
from lmdecode.serving.parameters import COMMON_FIELDS
from lmdecode.serving.reasoning import ReasoningDelta
from lmdecode.serving.tool_calls import CallDelta
from lmdecode.serving.work import Job, Work

__all__ = ["PASSED_FIELDS", "BlockAnswer", "Event", "function_tool", "new_id", "own_names"]

Event = dict[str, Any]
PASSED_FIELDS = (COMMON_FIELDS | {"chat_template_kwargs"}) - {
    "max_tokens", "n", "response_format", "stream_options"
}  # fmt: skip
"""Fields of a chat that other protocols take as they are. They have one answer."""


def new_id(prefix: str) -> str:
    """Return an id that no other answer has."""
    return f"{prefix}_{uuid.uuid4().hex}"


def function_tool(tool: Mapping[str, Any], schema: str) -> dict[str, Any]:
    """Return a tool as chats have them; ``schema`` is the name of its schema in a protocol."""
    names = {"name": "name", "description": "description", schema: "parameters", "strict": "strict"}
    function = {name: tool[own] for own, name in names.items() if own in tool}
    return {"type": "function", "function": function}


@contextlib.contextmanager
def own_names(names: Mapping[str, str]) -> Iterator[None]:
    """Give errors of a chat's fields the names that these have in a protocol."""
    try:
        yield
    except RequestError as error:
        words = re.compile(rf"\b({'|'.join(names)})\b")
        message = words.sub(lambda found: names[found[0]], str(error))
        param = error.param and words.sub(lambda found: names[found[0]], error.param)
        raise RequestError(error.status, message, param, error.code, error.headers) from error


class BlockAnswer(ABC):
    """The one answer of a chat: ``thinks`` tells of the open block, and ``text`` is what it has.

    A stream and a whole answer are written by the same methods: they return the events of a stream,
    and keep the blocks of ``body``.
    """

    ping: ClassVar[Event | None] = None
    """The event that says no more than that a stream goes on, where the protocol has one."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.thinks: bool | None = None  # no block is open
        self.text = ""

    @property
    def job(self) -> Job:
        """What is to be written."""
        return self.chat.job

    async def whole(self, work: Work) -> dict[str, Any]:
        """Return the body, when the answer has ended."""
        (part,) = await self.chat.wholes(work)
        for _ in self._pushed(part, work):
            pass
        return self.body

    async def stream(self, work: Work) -> AsyncIterator[Event]:
        """Yield events, as the answer comes; the last one may be of its failure."""
        for event in self.start(work):
            yield event
        try:
            async for part in self.chat.parts(work):
                for event in self._pushed(part, work):
                    yield event
        except Exception as error:
            yield self.failed(error_of_step(error))

    def _pushed(self, part: ChatPart, work: Work) -> Iterator[Event]:
        for delta in part.deltas:
            yield from self._put(delta)
        if part.finish_reason is not None:
            yield from self._closed(is_cut=part.finish_reason == "length")
            yield from self.finish(part, work)

    def _put(self, delta: ChatDelta) -> Iterator[Event]:
        if isinstance(delta, CallDelta):  # whole: models' calls are read to their ends
            yield from self._closed()
            yield from self.call(delta)
            return
        thinks = isinstance(delta, ReasoningDelta)
        if thinks is not self.thinks:
            yield from self._closed()
            self.thinks, self.text = thinks, ""
            yield from self.begin()
        self.text += delta.text
        yield self.add(delta.text)

    def _closed(self, is_cut: bool = False) -> Iterator[Event]:
        if self.thinks is not None:
            yield from self.end(is_cut)
            self.thinks = None

    @property
    @abstractmethod
    def body(self) -> dict[str, Any]:
        """The answer as it is."""

    @abstractmethod
    def start(self, work: Work) -> Iterable[Event]:
        """Return the events before the first block."""

    @abstractmethod
    def begin(self) -> Iterable[Event]:
        """Begin a block of text or thoughts."""

    @abstractmethod
    def add(self, text: str) -> Event:
        """Add to the open block."""

    @abstractmethod
    def end(self, is_cut: bool) -> Iterable[Event]:
        """End the open block; ``is_cut``: there was no room for more."""

    @abstractmethod
    def call(self, call: CallDelta) -> Iterable[Event]:
        """Write the block of a call."""

    @abstractmethod
    def finish(self, part: ChatPart, work: Work) -> Iterable[Event]:
        """Finish the answer by its last part."""

    @abstractmethod
    def failed(self, error: RequestError) -> Event:
        """Return the event of a failure."""

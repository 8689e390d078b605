"""Text and calls of tools in an answer as it comes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from lmdecode.serving.tool_readers import CallReader, FoundCalls, NoCall
from lmdecode.serving.tools import check_tools

__all__ = ["CallDelta", "CallWords", "ContentDelta", "MakeReader", "StreamingToolParser"]

_MOST_BEGIN = 1000  # characters of a text that show whether it begins as a call
_NAME_KEYS = ('"name":', '"function":', '"function":{"name":', '"type":"function","name":',
              '"type":"function","function":{"name":')  # fmt: skip
MakeReader = Callable[[int, Mapping[str, Mapping[str, Any]], Collection[str] | None], CallReader]


class ContentDelta(NamedTuple):
    """A piece of the answer's text."""

    text: str


class CallDelta(NamedTuple):
    """A piece of a call.

    Attributes
    ----------
    index : int
        Which call it is of, from 0.
    id, name : str or None
        In the first piece of a call alone.
    arguments : str
        A piece of its JSON.
    """

    index: int  # type: ignore[assignment]  # of a tuple it is a method
    id: str | None
    name: str | None
    arguments: str


class CallWords(Protocol):
    """What begins calls: see ``ToolFormat``."""

    @property
    def markers(self) -> Mapping[str, MakeReader]:
        """What begins a call, and how it goes on."""

    @property
    def bare(self) -> Mapping[str, MakeReader]:
        """What begins a call where it begins the answer."""

    @property
    def new_id(self) -> Callable[[], str]:
        """Makes the id of a call."""


class StreamingToolParser:
    """Text and calls of an answer as it comes. All pieces together are what ``parse`` gives.

    Text is given as soon as it cannot be a call's first word. A call is given when it is complete,
    in one piece.

    Parameters
    ----------
    format : ToolFormat
        How calls are written.
    tools : sequence of dict, optional
        The tools of the request: their names and types. None: any name is one.
    """

    def __init__(self, format: CallWords, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._format = format
        known = None if tools is None else check_tools(tools)
        self._schemas = {tool.name: tool.parameters for tool in known or ()}
        self._names = None if known is None else frozenset(self._schemas)
        self._text = ""
        self._reader: CallReader | None = None
        self._at = 0  # where it begins
        self._marker = 0  # the end of what began it
        self._is_marked = False  # what began it is part of no usual text
        self._can_be_bare = True
        self._space = ""  # before what may follow
        self._has_content = False
        self._calls = 0
        words = sorted(format.markers, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, words))) if words else None

    def push(self, text: str) -> list[ContentDelta | CallDelta]:
        """Take the next piece of text; return what is certain by now."""
        self._text += text
        return self._run(False)

    def finish(self, is_cut: bool = False) -> list[ContentDelta | CallDelta]:
        """Return the rest, when there is no more text.

        Parameters
        ----------
        is_cut : bool
            Whether the model had not ended its answer. A call that it had begun is no text then.
        """
        return self._run(True, is_cut)

    def _run(self, is_last: bool, is_cut: bool = False) -> list[ContentDelta | CallDelta]:
        deltas: list[ContentDelta | CallDelta] = []
        while True:
            if self._reader is None and not self._begin(deltas, is_last, is_cut):
                return deltas
            assert self._reader is not None
            try:
                found = self._reader.read(self._text, is_last and not is_cut)
                if found is None and is_cut:
                    found = self._cut(self._reader)
            except NoCall:
                self._reader, self._can_be_bare = None, False
                self._put(deltas, self._marker)
                continue
            if found is None:
                return deltas
            for name, arguments in found.calls:
                deltas.append(CallDelta(self._calls, self._format.new_id(), name, arguments))
                self._calls += 1
            self._text, self._reader = self._text[found.end :], None
            self._can_be_bare = True

    def _cut(self, reader: CallReader) -> FoundCalls:
        """Return the complete calls of a text that ends within calls, all of which it takes."""
        try:
            calls = reader.read(f"{self._text}\0", True)  # something follows, but no end
            assert calls is not None
            found = calls.calls
        except NoCall:
            if not self._is_marked and not self._may_become_call():
                raise
            found = []
        self._space = ""
        return FoundCalls(found, len(self._text))

    def _may_become_call(self) -> bool:
        """Whether a text that no marker tells from others begins as a call of a tool."""
        text = "".join(self._text[self._at : self._at + _MOST_BEGIN].split()).removeprefix("[")
        begins = [f'{{{key}"' for key in _NAME_KEYS]
        if self._names is not None:
            begins = [f'{begin}{name}"' for begin in begins for name in self._names]
            begins += [f"{name}(" for name in self._names]
        return any(text.startswith(one) or one.startswith(text) for one in begins)

    def _begin(self, deltas: list[ContentDelta | CallDelta], is_last: bool, is_cut: bool) -> bool:
        """Give the text before the next call; return whether there is one."""
        if self._can_be_bare and self._format.bare:
            start = re.match(r"[\s;]*" if self._calls else r"\s*", self._text)
            assert start is not None
            rest = self._text[start.end() :]
            if not rest and (not is_last or (is_cut and self._calls)):
                return False
            make = self._format.bare.get(rest[:1])
            if make is not None:
                self._at, self._marker = start.end(), start.end() + 1
                self._reader = make(self._at, self._schemas, self._names)
                self._is_marked = False
                return True
            self._can_be_bare = False
        found = None if self._pattern is None else self._pattern.search(self._text)
        if found is not None:
            self._put(deltas, found.start())
            self._at = self._marker = len(found[0])
            self._is_marked = found[0][0] in "<["
            make = self._format.markers[found[0]]
            self._reader = make(self._marker, self._schemas, self._names)
            return True
        end = len(self._text) - self._held()
        if is_last and (not is_cut or (self._text[end:].isalpha() and (end or self._has_content))):
            end = len(self._text)  # of words, "f" may begin "functools"
        self._put(deltas, end)
        if is_last and self._space and not self._calls:
            deltas.append(ContentDelta(self._space))
            self._space = ""
        return False

    def _held(self) -> int:
        """Return how many last characters may begin a marker."""
        text = self._text
        longest = max(map(len, self._format.markers), default=1) - 1
        for count in range(min(longest, len(text)), 0, -1):
            end = text[-count:]
            if any(marker.startswith(end) for marker in self._format.markers):
                return count
        return 0

    def _put(self, deltas: list[ContentDelta | CallDelta], count: int) -> None:
        """Give so many characters as text; space at the end waits for what follows."""
        text, self._text = self._space + self._text[:count], self._text[count:]
        end = len(text.rstrip())
        self._space = text[end:]
        text = text[:end]
        if not text:
            return
        if self._calls and not self._has_content:
            text = text.lstrip()
        self._has_content = True
        deltas.append(ContentDelta(text))

"""A model's thoughts and its answer, told apart in its text by the words between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from lmdecode.serving.text_stream import held
from lmdecode.serving.tool_readers import Output
from lmdecode.serving.tools import tokens_of_words, words_of

__all__ = ["ReasoningDelta", "ReasoningFormat", "ReasoningParser"]


class ReasoningDelta(NamedTuple):
    """A piece of text, which is not empty, and its kind: ``"reasoning"`` or ``"content"``."""

    kind: Literal["reasoning", "content"]
    text: str


_Pieces = Iterator[ReasoningDelta | None]


class ReasoningParser:
    """Thoughts and answer of a text as it comes. All pieces together are what ``parse`` gives.

    ``read`` yields pieces of what is written so far, which it takes away, and None for more text.
    """

    def __init__(self, read: Callable[[Output], _Pieces]) -> None:
        self._written = Output()
        self._pieces = read(self._written)

    def push(self, text: str) -> list[ReasoningDelta]:
        """Take the next piece of text; return the certain part."""
        self._written.text += text
        return list(iter(self._pieces.__next__, None))

    def finish(self) -> list[ReasoningDelta]:
        """Return the rest, when there is no more text."""
        self._written.is_last = True
        return self.push("")


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model marks its thoughts: the words ``open`` and ``close``.

    ``words`` may be tokens of their own, and ``token_ids`` has those that are; the special tokens
    ``kept_special_ids`` have to stay in the text that is parsed.
    """

    name: str
    open: str
    close: str
    words: tuple[str, ...]
    token_ids: Mapping[str, int] = field(default_factory=dict)
    kept_special_ids: frozenset[int] = frozenset()

    @staticmethod
    def of_template(template_source: str | None, tokenizer: Any = None) -> ReasoningFormat | None:
        """Return the format of a chat template, None if it has no thoughts.

        The tokenizer tells which words are tokens. A template need not name the words that a model
        writes: a word that is a token counts too.
        """
        source = template_source or ""
        for found in _FORMATS:
            token_ids, kept = dict[str, int](), frozenset[int]()
            if tokenizer is not None:
                token_ids, kept = tokens_of_words(found.words, tokenizer)
            signs = found.words if found.name == "harmony" else (found.close,)
            if all(sign in source for sign in signs) or token_ids.keys() == set(found.words):
                return replace(found, token_ids=token_ids, kept_special_ids=kept)
        return None

    def starts_inside(self, prompt: str) -> bool:
        """Whether a rendered prompt ends within thoughts: its last word opens them."""
        return prompt.rstrip().endswith(self.open)

    def stream(self, starts_inside: bool = False) -> ReasoningParser:
        """Return a parser of one text as it comes; ``starts_inside``: it begins within thoughts."""
        if self.name == "harmony":
            return ReasoningParser(_between_channels)
        return ReasoningParser(lambda written: _between_tags(written, self, starts_inside))

    def grammar_prefix(self, starts_inside: bool) -> str:
        """Return rules of Lark for the text before an answer: see ``GrammarCompiler.compile``.

        ``starts_inside`` is as ``starts_inside(prompt)`` returns it; if False, the answer may begin
        with thoughts.
        """
        if self.name == "harmony":
            return self._harmony_prefix()
        close = self.token_ids.get(self.close)
        if close is None:
            end = re.escape(self.close).replace("/", "\\/")
            thoughts = f"thoughts[lazy]: /(.|\\n)*{end}/"
        else:
            thoughts = f"thoughts: THOUGHTS <[{close}]>\nTHOUGHTS: /(.|\\n)*/"
        rule = "prefix: thoughts SPACE"
        if not starts_inside:
            rule = f"prefix: ({words_of(self.open, self.token_ids)} thoughts SPACE)?"
        return f"{rule}\n{thoughts}\nSPACE: /[ \\n]{{0,2}}/"

    def _harmony_prefix(self) -> str:
        def words(text: str) -> str:
            return words_of(text, self.token_ids)

        end = self.token_ids.get("<|end|>")
        thoughts = f"THOUGHTS <[{end}]>\nTHOUGHTS: /(.|\\n)*/"
        if end is None:
            thoughts = "rest\nrest[lazy]: /(.|\\n)*<\\|end\\|>/"
        start, final = words("<|start|>assistant"), words("<|channel|>final<|message|>")
        first = words("<|channel|>analysis<|message|>")
        return f"prefix: (thoughts {start})? {final}\nthoughts: {first} {thoughts}"

    def parse(self, text: str, starts_inside: bool = False) -> tuple[str | None, str]:
        """Return the thoughts, None if there are none, and the rest.

        Thoughts that do not end are all of the text.
        """
        parser = self.stream(starts_inside)
        deltas = [*parser.push(text), *parser.finish()]
        thoughts = "".join(delta.text for delta in deltas if delta.kind == "reasoning")
        content = "".join(delta.text for delta in deltas if delta.kind == "content")
        return thoughts or None, content


def _between_tags(written: Output, format: ReasoningFormat, is_inside: bool) -> _Pieces:
    """Read thoughts between two words, once, at the beginning of a text."""
    while not is_inside:
        start = written.text.lstrip()
        if start.startswith(format.open):
            written.text, is_inside = start[len(format.open) :], True
        elif format.open.startswith(start) and not written.is_last:
            yield None
        else:
            break
    has_given = not is_inside  # the space of an answer without thoughts is its own
    if is_inside:
        yield from _thoughts(written, format)
    while True:
        text, written.text = written.text, ""
        if not has_given:
            text = text.lstrip()
        if text:
            has_given = True
            yield ReasoningDelta("content", text)
        yield None


def _thoughts(written: Output, format: ReasoningFormat) -> _Pieces:
    """Read thoughts up to the word that closes them."""
    space, has_given = "", False
    is_opened = False  # by the word within the thoughts, which is passed over once
    while True:
        if not has_given:
            written.text = written.text.lstrip()
            if not is_opened:
                if not written.is_last and written.text and format.open.startswith(written.text):
                    yield None
                    continue
                if written.text.startswith(format.open):  # written once more
                    is_opened = True
                    written.text = written.text[len(format.open) :].lstrip()
        end = written.text.find(format.close)
        count = end
        if end < 0:
            count = len(written.text)
            count -= 0 if written.is_last else held(written.text, (format.close,))
        text, written.text = space + written.text[:count], written.text[count:]
        kept = text.rstrip()
        space = text[len(kept) :]
        if kept:
            has_given = True
            yield ReasoningDelta("reasoning", kept)
        if end >= 0:
            written.text = written.text[len(format.close) :]
            return
        yield None


_MESSAGE = "<|message|>"
_ENDS = re.compile(r"<\|(?:end|return|call|start|channel)\|>")
_ENDING = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
_BEGINNING = ("<|start|>", "<|channel|>", "to=")
_MAX_HEADER = 400


def _between_channels(written: Output) -> _Pieces:
    """Read messages with a header that names their channel; calls of tools are content."""
    given: set[str] = set()  # kinds
    while True:
        start = written.text.lstrip()
        is_begun = start.startswith(_BEGINNING)
        end = start.find(_MESSAGE, 0, _MAX_HEADER) if is_begun else -1
        if end < 0:
            is_cut = is_begun and len(start) < _MAX_HEADER
            may_begin = any(word.startswith(start) for word in _BEGINNING)
            if not start or is_cut or (may_begin and not written.is_last):
                if is_cut and written.is_last:
                    written.text = ""
                yield None
                continue
        kind: Literal["reasoning", "content"] = "content"
        is_call = False
        if end >= 0:
            header, written.text = start[:end], start[end + len(_MESSAGE) :]
            name = re.search(r"to=functions\.([\w.\-]+)", header)
            if name is not None:
                is_call = True
                header = f"<|channel|>commentary to=functions.{name[1]}{_MESSAGE}"
                written.text = header + written.text
            elif "<|channel|>analysis" in header:
                kind = "reasoning"
        is_new = True
        while True:
            # The header of a call has been put before it; a text without one may begin with none.
            found = _ENDS.search(written.text, min(1, len(written.text)) if is_new else 0)
            if found is not None:
                count = found.start()
            else:
                count = len(written.text)
                count -= 0 if written.is_last else held(written.text, _ENDING)
            text, written.text = written.text[:count], written.text[count:]
            if text:
                if is_new and kind in given and not is_call:
                    text = "\n" + text
                given.add(kind)
                is_new = False
                yield ReasoningDelta(kind, text)
            if found is not None:
                break
            yield None
        if found[0] in ("<|end|>", "<|return|>", "<|call|>"):
            written.text = written.text[len(found[0]) :]


def _tags(name: str, open: str, close: str) -> ReasoningFormat:
    return ReasoningFormat(name, open, close, (open, close))


_FORMATS = (
    ReasoningFormat(
        "harmony", "<|channel|>analysis<|message|>", "<|end|>",
        ("<|channel|>", "<|message|>", "<|start|>", "<|end|>"),
    ),
    _tags("think", "<think>", "</think>"),
    _tags("think_brackets", "[THINK]", "[/THINK]"),
    ReasoningFormat(
        "gemma4", "<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")
    ),
    _tags("start_thinking", "<|START_THINKING|>", "<|END_THINKING|>"),
    _tags("seed", "<seed:think>", "</seed:think>"),
    _tags("thought", "<thought>", "</thought>"),
    _tags("granite", "Here is my thought process:", "Here is my response:"),
)  # fmt: skip

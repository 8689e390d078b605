"""A model's thoughts and its answer, told apart in its text by the words between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

from lmdecode.serving.tools import tokens_of_words, words_of

__all__ = ["ReasoningDelta", "ReasoningFormat", "ReasoningParser"]


class ReasoningDelta(NamedTuple):
    """A piece of text, which is not empty, and its kind: ``"reasoning"`` or ``"content"``."""

    kind: Literal["reasoning", "content"]
    text: str


class ReasoningParser(Protocol):
    """Thoughts and answer of a text as it comes. All pieces together are what ``parse`` gives."""

    def push(self, text: str) -> list[ReasoningDelta]:
        """Take the next piece of text; return the certain part."""

    def finish(self) -> list[ReasoningDelta]:
        """Return the rest, when there is no more text."""


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
        return _Channels() if self.name == "harmony" else _Tags(self, starts_inside)

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
        rule = f"thoughts: {words('<|channel|>analysis<|message|>')} {thoughts}"
        if end is None:
            rule = (
                f"thoughts: {words('<|channel|>analysis<|message|>')} rest\n"
                "rest[lazy]: /(.|\\n)*<\\|end\\|>/"
            )
        start = words("<|start|>assistant")
        final = words("<|channel|>final<|message|>")
        return f"prefix: (thoughts {start})? {final}\n{rule}"

    def parse(self, text: str, starts_inside: bool = False) -> tuple[str | None, str]:
        """Return the thoughts, None if there are none, and the rest.

        Thoughts that do not end are all of the text.
        """
        parser = self.stream(starts_inside)
        deltas = [*parser.push(text), *parser.finish()]
        thoughts = "".join(delta.text for delta in deltas if delta.kind == "reasoning")
        content = "".join(delta.text for delta in deltas if delta.kind == "content")
        return thoughts or None, content


class _Tags:
    """Thoughts between two words, once, at the beginning of a text."""

    def __init__(self, format: ReasoningFormat, starts_inside: bool = False) -> None:
        self._format = format
        self._is_inside = starts_inside
        self._has_answer = False
        self._text = ""
        self._space = ""
        self._has_given = False  # something of the present part
        self._is_opened = False  # by the word within the thoughts, which is passed over once

    def push(self, text: str) -> list[ReasoningDelta]:
        """Take the next piece of text; return the certain part."""
        self._text += text
        return self._run(False)

    def finish(self) -> list[ReasoningDelta]:
        """Return the rest, when there is no more text."""
        return self._run(True)

    def _run(self, is_last: bool) -> list[ReasoningDelta]:
        deltas: list[ReasoningDelta] = []
        while not self._has_answer:
            if self._is_inside:
                if not self._until_close(deltas, is_last):
                    return deltas
                self._is_inside, self._has_answer = False, True
                self._space, self._has_given = "", False
                continue
            start = self._text.lstrip()
            if start.startswith(self._format.open):
                self._text = start[len(self._format.open) :]
                self._is_inside = True
            elif self._format.open.startswith(start) and not is_last:
                return deltas
            else:
                self._has_answer, self._has_given = True, True  # its space is its own
        text, self._text = self._text, ""
        if not self._has_given:
            text = text.lstrip()
        if text:
            self._has_given = True
            deltas.append(ReasoningDelta("content", text))
        return deltas

    def _until_close(self, deltas: list[ReasoningDelta], is_last: bool) -> bool:
        """Give thoughts; return whether they have ended."""
        close = self._format.close
        if not self._has_given:
            self._text = self._text.lstrip()
        if not self._has_given and not self._is_opened:
            if not is_last and self._format.open.startswith(self._text) and self._text:
                return False
            if self._text.startswith(self._format.open):  # written once more
                self._is_opened = True
                self._text = self._text[len(self._format.open) :].lstrip()
        end = self._text.find(close)
        count = end if end >= 0 else len(self._text) - (0 if is_last else _held(self._text, close))
        text, self._text = self._space + self._text[:count], self._text[count:]
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._has_given = True
            deltas.append(ReasoningDelta("reasoning", kept))
        if end < 0:
            return False
        self._text = self._text[len(close) :]
        return True


_MESSAGE = "<|message|>"
_ENDS = re.compile(r"<\|(?:end|return|call|start|channel)\|>")
_ENDING = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
_BEGINNING = ("<|start|>", "<|channel|>", "to=")
_MAX_HEADER = 400


class _Channels:
    """Messages with a header that names their channel; calls of tools are content as they are."""

    def __init__(self) -> None:
        self._text = ""
        self._kind: Literal["reasoning", "content"] | None = None  # None: in a header
        self._is_call = False
        self._given: set[str] = set()  # kinds
        self._is_new = False

    def push(self, text: str) -> list[ReasoningDelta]:
        """Take the next piece of text; return the certain part."""
        self._text += text
        return self._run(False)

    def finish(self) -> list[ReasoningDelta]:
        """Return the rest, when there is no more text."""
        return self._run(True)

    def _run(self, is_last: bool) -> list[ReasoningDelta]:
        deltas: list[ReasoningDelta] = []
        while self._kind is not None or self._read_header(is_last):
            if not self._read_body(deltas, is_last):
                break
        return deltas

    def _read_header(self, is_last: bool) -> bool:
        """Read a header; return whether a message begins."""
        start = self._text.lstrip()
        if not start:
            return False
        if not start.startswith(_BEGINNING):
            if not is_last and any(word.startswith(start) for word in _BEGINNING):
                return False
            self._begin("content")
            return True
        end = start.find(_MESSAGE)
        if end < 0:
            if not is_last and len(start) < _MAX_HEADER:
                return False
            if is_last and len(start) < _MAX_HEADER:  # it was cut off
                self._text = ""
                return False
            self._begin("content")
            return True
        header, self._text = start[:end], start[end + len(_MESSAGE) :]
        name = re.search(r"to=functions\.([\w.\-]+)", header)
        if name is not None:
            self._begin("content")
            self._is_call = True
            self._text = f"<|channel|>commentary to=functions.{name[1]}{_MESSAGE}" + self._text
        else:
            self._begin("reasoning" if "<|channel|>analysis" in header else "content")
        return True

    def _begin(self, kind: Literal["reasoning", "content"]) -> None:
        self._kind, self._is_call, self._is_new = kind, False, True

    def _read_body(self, deltas: list[ReasoningDelta], is_last: bool) -> bool:
        """Give a message's text; return whether it has ended."""
        assert self._kind is not None
        # The header of a call has been put before it, and a text without one may begin with none.
        begin = min(1, len(self._text)) if self._is_new else 0
        found = _ENDS.search(self._text, begin)
        if found is not None:
            count = found.start()
        else:
            held = 0 if is_last else max(_held(self._text, word) for word in _ENDING)
            count = len(self._text) - held
        text, self._text = self._text[:count], self._text[count:]
        if text:
            if self._is_new and self._kind in self._given and not self._is_call:
                text = "\n" + text
            self._given.add(self._kind)
            self._is_new = False
            deltas.append(ReasoningDelta(self._kind, text))
        if found is None:
            return False
        if found[0] in ("<|end|>", "<|return|>", "<|call|>"):
            self._text = self._text[len(found[0]) :]
        self._kind = None
        return True


def _held(text: str, word: str) -> int:
    """Return how many last characters may begin a word."""
    for count in range(min(len(word) - 1, len(text)), 0, -1):
        if word.startswith(text[-count:]):
            return count
    return 0


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

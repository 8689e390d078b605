"""Turns the tokens of one answer into text: special tokens, stop texts and log-probabilities."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from lmdecode.decoder.engine.request import TokenLogprob
from lmdecode.serving.text_stream import held
from lmdecode.serving.tokenizer import Tokenizer

__all__ = ["AnswerPart", "AnswerWriter", "StopFinder"]


class StopFinder:
    """Ends a text at the first of several texts; ``keeps_stop``: that one is part of it."""

    def __init__(self, stops: Sequence[str], keeps_stop: bool = False) -> None:
        self._stops, self._keeps_stop = tuple(stops), keeps_stop
        self._held, self._num_free = "", 0  # characters at its beginning in which no text may end
        self.found: str | None = None

    @property
    def has_any(self) -> bool:
        """Whether there is any such text."""
        return bool(self._stops)

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Return the part of the text that is certain. What may begin a stop text is held.

        With ``may_end`` of False a stop text that ends in this piece does not end the whole.
        """
        if not self._stops:
            return text
        if self.found is not None:
            return ""
        text = self._held + text
        free = self._num_free if may_end else len(text)
        at, stop = min(
            (
                (at, stop)
                for stop in self._stops
                if (at := text.find(stop, max(0, free + 1 - len(stop)))) >= 0
            ),
            default=(-1, None),
            key=lambda found: (found[0], -len(found[1] or "")),
        )
        if stop is not None:
            self.found, self._held = stop, ""
            return text[: at + len(stop)] if self._keeps_stop else text[:at]
        at = len(text) - held(text, self._stops)
        self._held, self._num_free = text[at:], max(0, free - at)
        return text[:at]

    def finish(self) -> str:
        """Return the held text, at the end of the tokens."""
        held, self._held = self._held, ""
        return held


@dataclass
class AnswerPart:
    """A part of an answer; the last one has the finish reason, "stop" or "length".

    ``logprobs``, if they were requested, are of the tokens whose text is complete with this piece,
    and ``offsets`` says where the text of each of these begins in the answer.
    """

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    offsets: list[int] = field(default_factory=list)


class AnswerWriter:
    """Writes the text of an answer, as its tokens come; for stop texts see ``StopFinder``.

    ``skips_special`` leaves out special tokens, except for ``kept_special_ids``, such as those
    around calls of tools. No stop text may end in the text of the first ``min_tokens`` tokens.
    ``behind`` are the last tokens of a text that the answer goes on with: a space at its beginning
    is written.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        keeps_stop: bool = False,
        skips_special: bool = True,
        kept_special_ids: Collection[int] = (),
        min_tokens: int = 0,
        behind: Sequence[int] = (),
    ) -> None:
        self._stream = tokenizer.stream(
            skip_special_tokens=skips_special, kept_special_ids=kept_special_ids
        )
        if behind:
            self._stream.push(behind)
        self._stops, self._min_tokens = StopFinder(stops, keeps_stop), min_tokens
        # Where the text of each token begins and ends that is not certain yet.
        self._waiting: deque[tuple[int, int, TokenLogprob]] = deque()
        self._read = self._written = 0
        self.num_tokens = 0

    @property
    def has_stops(self) -> bool:
        """Whether a text may end the answer before its tokens do."""
        return self._stops.has_any

    @property
    def stop(self) -> str | None:
        """The text that ended the answer."""
        return self._stops.found

    def push(self, items: Sequence[int | TokenLogprob]) -> AnswerPart:
        """Take tokens, without an end token, and return the text that they add."""
        texts = []
        for item in items:
            token = item if isinstance(item, int) else item.token
            text = self._stream.push([token])
            self.num_tokens += 1
            begin, self._read = self._read, self._read + len(text)
            if not isinstance(item, int):
                self._waiting.append((begin, self._read, item))
            texts.append(self._until_stop(text))
            if self._stops.found is not None:
                break
        return self._piece("".join(texts))

    def finish(self) -> AnswerPart:
        """Return the rest, at the end of the tokens."""
        if self._stops.found is not None:
            return AnswerPart()
        text = self._until_stop(self._stream.finish())
        if self._stops.found is None:
            text += self._stops.finish()
        piece = self._piece(text)
        if self._stops.found is None:
            piece.logprobs += [item for _, _, item in self._waiting]
            piece.offsets += [begin for begin, _, _ in self._waiting]
            self._waiting.clear()
        return piece

    def _until_stop(self, text: str) -> str:
        return self._stops.push(text, may_end=self.num_tokens > self._min_tokens)

    def _piece(self, text: str) -> AnswerPart:
        self._written += len(text)
        piece = AnswerPart(text)
        while self._waiting and self._waiting[0][1] <= self._written:
            begin, _, item = self._waiting.popleft()
            piece.logprobs.append(item)
            piece.offsets.append(begin)
        return piece

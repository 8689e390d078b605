"""Drafts of an ``Engine``: proposed next tokens, which the model reads before they are chosen.

Prompt lookup is here, drafts of models are in ``model_drafts``.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from lmdecode.sampling.drafts import prompt_lookup
from lmdecode.sampling.sampler_rows import RowRules

__all__ = [
    "DraftAsk",
    "DraftSource",
    "Drafting",
    "Drafts",
    "HiddenRows",
    "HiddenSource",
    "LookupDrafts",
    "PromptLookup",
    "ReadAhead",
    "next_size",
]


class DraftAsk(NamedTuple):
    """A text that a draft is asked for.

    ``new`` are the tokens that were chosen since the last ask: first the accepted ones of the last
    draft. ``room`` is the maximum number of tokens of the draft; 0: none is wanted.
    """

    row: int
    new: list[int]
    room: int


class DraftSource(Protocol):
    """Proposes the next tokens of texts, each of which has a row."""

    def begin(
        self, row: int, prompt: Sequence[int], rules: RowRules, ends: Collection[int]
    ) -> None:
        """Begin a text in a row without one; ``rules`` choose its tokens, ``ends`` end it."""

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """Return a draft for each ask, which may be empty; every row is asked for at most once."""

    def end(self, row: int) -> None:
        """End a text."""


class HiddenRows(NamedTuple):
    """Outputs of a model's final norm, [n, D] float32, for tokens of a text that it has read.

    ``begin`` is the number of tokens of the prompt before these. -1: these follow the prompt; they
    are the last chosen token and the draft after it, and ``tokens``, which are of a prompt, is
    empty.
    """

    row: int
    begin: int
    tokens: Sequence[int]
    hidden: Tensor


@runtime_checkable
class HiddenSource(DraftSource, Protocol):
    """A source that sees what the model computes, also of prompts of rows without a text yet."""

    def observe(self, steps: Sequence[HiddenRows]) -> None:
        """Take the hidden rows of a step; every row is there at most once."""

    def share(self, row: int, of: int, length: int) -> None:
        """Let a row begin with the first tokens of the prompt of another, or of itself."""


class Drafting(Protocol):
    """Settings of a kind of drafts."""

    @property
    def most(self) -> int:
        """Maximum number of tokens of a draft."""

    @property
    def most_rows(self) -> int:
        """Maximum number of tokens that a step of an engine reads of texts, drafts included."""

    def new_source(
        self, *, texts: int, rows: int, capacity: int, dialect: str, max_step_tokens: int
    ) -> DraftSource:
        """Return a source for texts of at most ``capacity`` tokens; see ``Engine``.

        There are at most ``texts`` at once, in any of the rows. The others have kept prompts.
        """


class ReadAhead:
    """Draft tokens of one text that were read before they were chosen.

    ``left`` are neither accepted nor rejected yet; ``num_read`` counts all tokens read.
    """

    def __init__(self) -> None:
        self.left: list[int] = []
        self.num_read = 0

    @property
    def num_right(self) -> int:
        """Number of tokens accepted so far."""
        return self.num_read - len(self.left)

    def takes(self, token: int) -> bool:
        """Tell whether ``token`` is the next draft token; if so, count it."""
        if not self.left or self.left[0] != token:
            return False
        self.left = self.left[1:]
        return True

    def begin(self, tokens: Sequence[int]) -> None:
        """Begin with the tokens that are read now."""
        self.left, self.num_read = list(tokens), len(tokens)


class Drafts:
    """Drafts that may fail: texts then go on without them, after a warning.

    The arguments are those of ``Drafting.new_source``; ``most_rows`` is that of the drafting.
    """

    def __init__(
        self,
        drafting: Drafting,
        *,
        texts: int,
        rows: int,
        capacity: int,
        dialect: str,
        max_step_tokens: int,
    ) -> None:
        self._new_source = partial(
            drafting.new_source,
            texts=texts,
            rows=rows,
            capacity=capacity,
            dialect=dialect,
            max_step_tokens=max_step_tokens,
        )
        self.most_rows = drafting.most_rows
        self._take(self._new_source())

    def _take(self, source: DraftSource) -> None:
        self._source: DraftSource | None = source
        self._observer = source if isinstance(source, HiddenSource) else None

    def clear(self) -> None:
        """Begin anew without texts: a call may have been interrupted between any two lines."""
        if self._source is not None:
            self._source = self._observer = None  # its memory is free for the new one
            try:
                self._take(self._new_source())
            except Exception as error:
                self._fail(error)

    def begin(
        self, row: int, prompt: Sequence[int], rules: RowRules, ends: Collection[int]
    ) -> None:
        """See ``DraftSource``."""
        if self._source is not None:
            try:
                self._source.begin(row, prompt, rules, ends)
            except Exception as error:
                self._fail(error)

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """See ``DraftSource``."""
        if self._source is not None:
            try:
                return self._source.propose(asks)
            except Exception as error:
                self._fail(error)
        return [[] for _ in asks]

    def new_hidden(self, tokens: int, model_size: int) -> Tensor | None:
        """Return room for the hidden rows of a step's tokens; None: the source does not see any."""
        if self._observer is None:
            return None
        return torch.empty(tokens, model_size, device="cpu", dtype=torch.float32)

    def observe(self, steps: Sequence[HiddenRows]) -> None:
        """See ``HiddenSource``."""
        if self._observer is not None:
            try:
                self._observer.observe(steps)
            except Exception as error:
                self._fail(error)

    def share(self, row: int, of: int, length: int) -> None:
        """See ``HiddenSource``; nothing for other sources."""
        if self._observer is not None:
            try:
                self._observer.share(row, of, length)
            except Exception as error:
                self._fail(error)

    def end(self, row: int) -> None:
        """See ``DraftSource``."""
        if self._source is not None:
            try:
                self._source.end(row)
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._source = self._observer = None
        warnings.warn(f"Texts go on without drafts: {error}", RuntimeWarning, stacklevel=2)


# --- Prompt lookup --------------------------------------------------------------------------------


def next_size(most: int, num_right: int) -> int:
    """Return how many tokens to propose, given how many of the last ones were accepted."""
    return min(most, 2 * (num_right + 1))


@dataclass(frozen=True)
class PromptLookup:
    """Settings of prompt lookup, a ``Drafting``: see ``prompt_lookup``."""

    num_tokens: int
    max_ngram: int

    @property
    def most(self) -> int:
        """See ``Drafting``."""
        return self.num_tokens

    @property
    def most_rows(self) -> int:
        """See ``Drafting``; nothing is known of what a draft would cost."""
        return 1 << 30

    def new_source(
        self, *, texts: int, rows: int, capacity: int, dialect: str, max_step_tokens: int
    ) -> LookupDrafts:
        """See ``Drafting``."""
        return LookupDrafts(self, rows, capacity)


class LookupDrafts:
    """A ``DraftSource``: the tokens after an earlier occurrence of the last n-gram.

    It proposes fewer tokens after a rejection. A text has at most ``capacity`` tokens, and one more
    that is never read.
    """

    def __init__(self, settings: PromptLookup, rows: int, capacity: int) -> None:
        self._settings = settings
        with torch.inference_mode(False):
            self._tokens = torch.empty(rows, capacity + 1, dtype=torch.int64, device="cpu")
        self._lengths = [0] * rows
        self._sizes = [0] * rows
        self._has_drafted = [False] * rows

    def begin(
        self, row: int, prompt: Sequence[int], rules: RowRules, ends: Collection[int]
    ) -> None:
        """See ``DraftSource``."""
        self._lengths[row], self._sizes[row] = 0, self._settings.num_tokens
        self._has_drafted[row] = False
        self._append(row, prompt)

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """See ``DraftSource``."""
        most, max_ngram = self._settings.num_tokens, self._settings.max_ngram
        for row, new, _ in asks:
            self._append(row, new)
            if self._has_drafted[row]:
                self._sizes[row] = next_size(most, len(new) - 1)
        sizes = [min(ask.room, self._sizes[ask.row]) for ask in asks]
        longest = max(sizes, default=0)
        found: list[list[int]] = [[] for _ in asks]
        if longest > 0:
            lengths = [self._lengths[ask.row] for ask in asks]
            texts = self._tokens[[ask.row for ask in asks], : max(lengths)]
            given = torch.tensor(lengths, device="cpu")
            proposed = prompt_lookup(texts, longest, max_ngram, lengths=given)
            found = [
                [token for token in draft[: max(size, 0)] if token >= 0]
                for draft, size in zip(proposed.tolist(), sizes, strict=True)
            ]
        for ask, draft in zip(asks, found, strict=True):
            self._has_drafted[ask.row] = bool(draft)
        return found

    def end(self, row: int) -> None:
        """See ``DraftSource``; nothing to do."""

    def _append(self, row: int, tokens: Sequence[int]) -> None:
        begin = self._lengths[row]
        end = self._lengths[row] = begin + len(tokens)
        self._tokens[row, begin:end] = torch.as_tensor(tokens, dtype=torch.int64, device="cpu")

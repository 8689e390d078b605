"""Drafts by prompt lookup: the tokens that followed the last n-gram before."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from lmdecode.decoder.engine.drafts import DraftAsk
from lmdecode.sampling.drafts import prompt_lookup
from lmdecode.sampling.sampler_rows import RowRules

__all__ = ["LookupDrafts", "PromptLookup", "next_size"]


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
        self, *, rows: int, capacity: int, dialect: str, max_step_tokens: int
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

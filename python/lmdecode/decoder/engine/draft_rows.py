"""Drafts of texts, chosen from the logits of what drafts with the noise of the texts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from lmdecode.decoder.engine.drafts import DraftAsk
from lmdecode.decoder.engine.places import common_length
from lmdecode.sampling.sampler import CompactSampler
from lmdecode.sampling.sampler_rows import RowRules

__all__ = ["ChosenDrafts", "DraftRows", "DraftedText", "drafts_of"]

_MOST_GROWTH = 4  # of a draft's length, by the heuristic
# 20 rows of a product take 2.4 times as long as 4 on two cores with VNNI, and 5 1.25 times as long
# as 1: see benchmarks/results/drafts.md.
_MOST_ROWS = 16


@dataclass(frozen=True)
class ChosenDrafts:
    """Settings of a ``Drafting`` that chooses its tokens one by one.

    A draft has ``num_tokens``, and ends early with a token of a lower probability than
    ``confidence_threshold``. With the schedule "heuristic_transient" a text's drafts get 2 tokens
    longer, up to 4 times ``num_tokens``, when all were accepted, and else a token shorter; with
    "constant" they do not change.
    """

    num_tokens: int
    confidence_threshold: float
    schedule: Literal["constant", "heuristic_transient"]

    @property
    def most(self) -> int:
        """See ``Drafting``."""
        return self.num_tokens * (1 if self.schedule == "constant" else _MOST_GROWTH)

    @property
    def most_rows(self) -> int:
        """See ``Drafting``."""
        return _MOST_ROWS


class DraftedText:
    """A text with drafts: the tokens that end it, the next draft's size, the last draft."""

    def __init__(self, ends: Collection[int], size: int) -> None:
        self.ends, self.size = ends, size
        self.draft: list[int] = []


def drafts_of(texts: Mapping[int, DraftedText], asks: Sequence[DraftAsk]) -> list[list[int]]:
    """Return copies of the drafts of the rows that were asked for, empty ones of other rows."""
    found = (texts.get(ask.row) for ask in asks)
    return [[] if text is None else list(text.draft) for text in found]


T = TypeVar("T", bound=DraftedText)


class DraftRows(Generic[T]):
    """Up to ``rows`` texts with drafts, a row of a sampler with ``dialect`` each."""

    def __init__(self, settings: ChosenDrafts, rows: int, vocab: int, dialect: str) -> None:
        self._settings, self._vocab = settings, vocab
        self._sampler = CompactSampler(rows, vocab, dialect)
        self._texts: list[T] = []  # by their rows of the sampler
        threshold = settings.confidence_threshold
        self._threshold = math.log(threshold) if threshold else -math.inf

    @property
    def is_empty(self) -> bool:
        """Whether there is no text."""
        return not self._texts and self._sampler.count == 0

    def begin(self, text: T, prompt: Sequence[int], rules: RowRules) -> None:
        """Add a text."""
        self._sampler.begin(torch.tensor(prompt, device="cpu"), rules)
        self._texts.append(text)

    def end(self, text: T) -> None:
        """Remove a text."""
        at = self._texts.index(text)
        self._sampler.end(at)
        self._texts[at] = self._texts[-1]
        self._texts.pop()

    def has_ended(self, text: T, new: Sequence[int]) -> bool:
        """Whether tokens end a text."""
        return any(not 0 <= token < self._vocab or token in text.ends for token in new)

    def take(self, text: T, new: Sequence[int]) -> int:
        """Append the chosen tokens of a text; return how many of its draft are the first ones."""
        right = common_length(text.draft, new)
        at = self._texts.index(text)
        self._sampler.rewind(at, len(text.draft) - right)
        self._sampler.accept(at, new[right:])
        if text.draft and self._settings.schedule != "constant":
            is_right = right == len(text.draft)
            size = text.size + 2 if is_right else text.size - 1
            text.size = max(1, min(size, self._settings.most))
        text.draft = []
        return right

    def draft(self, rooms: dict[T, int], logits_of: Callable[[list[T]], Tensor]) -> None:
        """Draft tokens of texts, at most as many as their ``rooms``.

        ``logits_of`` returns the logits, [n, V], after the drafts of n texts.
        """
        rows = [row for row, text in enumerate(self._texts) if rooms.get(text, 0) > 0]
        while rows:
            logits = logits_of([self._texts[row] for row in rows])
            going: list[int] = []
            begin = 0
            # Rows of the sampler that follow each other are a step of it.
            for _, group in itertools.groupby(enumerate(rows), lambda pair: pair[1] - pair[0]):
                run = [row for _, row in group]
                end = begin + len(run)
                going += self._choose(run, logits[begin:end], rooms)
                begin = end
            rows = going

    def _choose(self, run: list[int], logits: Tensor, rooms: dict[T, int]) -> list[int]:
        """Append a token to the drafts of some rows; return those that go on."""
        has_threshold = self._threshold > -math.inf
        results = self._sampler.step(logits, None, 0 if has_threshold else -1, run[0])
        going = []
        for i, (row, token, status) in enumerate(
            zip(run, results.index.tolist(), results.status.tolist(), strict=True)
        ):
            text = self._texts[row]
            if status:  # NaN: nothing more comes of this text
                rooms[text] = 0
                self._sampler.rewind(row, 1)
                continue
            text.draft.append(token)
            is_sure = results.logprob is None or float(results.logprob[i]) >= self._threshold
            if is_sure and token not in text.ends and len(text.draft) < rooms[text]:
                going.append(row)
        return going

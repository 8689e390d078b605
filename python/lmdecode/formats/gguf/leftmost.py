"""Pieces of sentencepiece's kind some of which have the same score: llama.cpp's merges of them.

Merges of the package tokenizers have an order, so of two pairs with the same score one always goes
first. In llama.cpp it is the one further left.
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import Any

__all__ = ["LeftmostPieces"]

_CACHED = 1 << 16  # words


class LeftmostPieces:
    """Cuts a text into its pieces: a component of the package tokenizers, which calls it.

    Parameters
    ----------
    scores : dict of str to float
        Of the pieces that two others make.
    """

    def __init__(self, scores: dict[str, float]) -> None:
        self._scores = scores
        self._ends = lru_cache(_CACHED)(self._find_ends)

    def pre_tokenize(self, text: Any) -> None:
        """Cut a text, as tokenizers asks for."""
        text.split(lambda _, part: self._cut(part))

    def _cut(self, part: Any) -> list[Any]:
        ends = self._ends(str(part.normalized))
        return [part[begin:end] for begin, end in zip((0, *ends), ends, strict=False)]

    def _find_ends(self, text: str) -> tuple[int, ...]:
        """Return where pieces end: the best score is merged first, of equal ones the leftmost."""
        ends, begins = (
            list(range(1, len(text) + 1)),
            list(range(len(text))),
        )  # begins by last letter
        heap: list[tuple[float, int, int, int]] = []

        def add(begin: int, middle: int) -> None:
            piece = text[begin : ends[middle]] if begin >= 0 and middle < len(text) else ""
            if piece in self._scores:
                heapq.heappush(heap, (-self._scores[piece], begin, middle, ends[middle]))

        for i in range(1, len(text)):
            add(i - 1, i)
        while heap:
            _, begin, middle, end = heapq.heappop(heap)
            if ends[begin] == middle and ends[middle] == end:  # else one is merged with another
                ends[begin], ends[middle], begins[end - 1] = end, 0, begin
                add(begins[begin - 1] if begin else -1, begin)
                add(begin, end)
        found = [0]
        while found[-1] < len(text):
            found.append(ends[found[-1]])
        return tuple(found[1:])

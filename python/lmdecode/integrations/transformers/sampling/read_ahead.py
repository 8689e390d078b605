"""Draft tokens that are read before they are chosen, and how many to propose."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, NamedTuple

from lmdecode._checks import check_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import GenerationConfig

__all__ = ["Lookup", "ReadAhead", "lookup_of"]

_MATCHING_NGRAM = 2  # the default of transformers


class Lookup(NamedTuple):
    """Settings of prompt lookup in ``generate()``; see ``prompt_lookup``."""

    num_tokens: int
    max_ngram: int


def lookup_of(config: GenerationConfig, op: str) -> tuple[GenerationConfig, Lookup | None]:
    """Return a config without prompt lookup, and its ``Lookup``; ``op`` is for errors."""
    num_tokens = getattr(config, "prompt_lookup_num_tokens", None)
    if num_tokens is None:
        return config, None
    num_tokens = check_count(op, "prompt_lookup_num_tokens", num_tokens)
    size = config.max_matching_ngram_size
    size = _MATCHING_NGRAM if size is None else size
    size = check_count(op, "max_matching_ngram_size", size)
    lookup = Lookup(min(num_tokens, config.max_length), size)
    config = copy.copy(config)
    config.prompt_lookup_num_tokens = None
    return config, lookup


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

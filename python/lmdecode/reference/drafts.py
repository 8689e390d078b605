"""Drafts, again in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["prompt_lookup"]


def prompt_lookup(
    tokens: Tensor, num_tokens: int, max_ngram: int = 3, *, lengths: Tensor | None = None
) -> Tensor:
    """See ``lmdecode.prompt_lookup``."""
    if tokens.dim() == 2:
        if lengths is None:
            lengths = torch.full((len(tokens),), tokens.shape[1])
        rows = [
            prompt_lookup(row[:length], num_tokens, max_ngram)
            for row, length in zip(tokens, lengths.tolist(), strict=True)
        ]
        return torch.stack(rows) if rows else torch.empty(0, num_tokens, dtype=torch.int64)
    proposed = torch.full((num_tokens,), -1)
    for size in range(min(max_ngram, len(tokens) - 1), 0, -1):
        windows = tokens[:-1].unfold(0, size, 1)  # each with a token behind it
        places = (windows == tokens[-size:]).all(dim=1).nonzero()
        if len(places):
            first = int(places[0]) + size
            behind = tokens[first : first + num_tokens]
            proposed[: len(behind)] = behind
            break
    return proposed

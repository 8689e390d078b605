"""Greedy choice on a device, without a look at any value from the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lmdecode.beam.types import STATUS_EMPTY, STATUS_NAN, BeamCandidates

__all__ = ["greedy_candidates"]


def greedy_candidates(
    logits: Tensor,
    scores: Tensor,
    *,
    ngram_sizes: Sequence[int],
    sequences: Tensor | None = None,
    lengths: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
    no_repeat_ngram_size: Tensor | None = None,
    forced_tokens: Tensor | None = None,
    suppressed_tokens: Tensor | None = None,
    bias: Tensor | None = None,
) -> BeamCandidates:
    """Return the largest logit of each row after the rules.

    Parameters
    ----------
    logits, scores : Tensor
        [rows, V], [rows] float32.
    ngram_sizes
        All that ``no_repeat_ngram_size`` has.
    sequences, lengths, repetition_penalty, no_repeat_ngram_size, forced_tokens, \
    suppressed_tokens, bias : Tensor, optional
        As ``RuleArguments.of_step`` has them, for a row each.
    """
    log_probs = logits.float().log_softmax(-1)
    ruled = logits.float()
    if bias is not None:
        ruled = ruled + bias
    if repetition_penalty is not None:
        assert sequences is not None and lengths is not None
        places = torch.arange(sequences.shape[1], device=logits.device)
        penalty = repetition_penalty[:, None]
        is_seen = _marked(ruled, sequences.masked_fill(places >= lengths[:, None], -1))
        penalised = torch.where(ruled < 0, ruled * penalty, ruled / penalty)
        ruled = torch.where(is_seen, penalised, ruled)
    if suppressed_tokens is not None:
        ruled = ruled.masked_fill(_marked(ruled, suppressed_tokens), -torch.inf)
    for size in ngram_sizes:
        assert sequences is not None and lengths is not None and no_repeat_ngram_size is not None
        repeating = _repeating_tokens(sequences, lengths, size)
        if repeating is not None:
            repeating = repeating.masked_fill((no_repeat_ngram_size != size)[:, None], -1)
            ruled = ruled.masked_fill(_marked(ruled, repeating), -torch.inf)
    best, token = ruled.max(-1)
    status = torch.where(best == -torch.inf, STATUS_EMPTY, 0)
    if forced_tokens is not None:
        allowed = torch.ones_like(forced_tokens, dtype=torch.bool)
        if suppressed_tokens is not None:
            allowed = (suppressed_tokens != forced_tokens[:, None]).all(-1)
        is_forced = forced_tokens >= 0
        token = torch.where(is_forced, forced_tokens, token)
        status = torch.where(is_forced, torch.where(allowed, 0, STATUS_EMPTY), status)
        best = torch.where(is_forced, 0.0, best)
    is_nan = best.isnan() | logits.isnan().any(-1)
    status = torch.where(is_nan, STATUS_NAN, status).to(torch.uint8)
    failed = status != 0
    token = token.masked_fill(failed, 0)
    log_prob = log_probs.gather(1, token[:, None])[:, 0].masked_fill(failed, 0.0)
    total = (scores + log_prob).masked_fill(failed, -torch.inf)
    return BeamCandidates(
        total[:, None], token[:, None], torch.zeros_like(token)[:, None], status,
        log_prob[:, None],
    )  # fmt: skip


def _repeating_tokens(sequences: Tensor, lengths: Tensor, size: int) -> Tensor | None:
    """[rows, n]: the tokens that would make an n-gram of this size come again, -1: none."""
    if size > sequences.shape[1]:
        return None
    # The last size - 1 tokens, wherever they stood before, and what followed them there.
    places = torch.arange(sequences.shape[1], device=sequences.device)
    windows = sequences.unfold(1, size, 1)
    tail = lengths[:, None] - size + 1 + places[: size - 1]
    tail = sequences.gather(1, tail.clamp(min=0))
    repeats = (windows[..., : size - 1] == tail[:, None]).all(-1)
    repeats &= places[: windows.shape[1]] + size <= lengths[:, None]
    return windows[..., size - 1].masked_fill(~repeats, -1)


def _marked(logits: Tensor, tokens: Tensor) -> Tensor:
    """[rows, V] bool: which tokens are among the row's; those below 0 are none."""
    rows, vocab = logits.shape
    marks = torch.zeros(rows, vocab + 1, dtype=torch.bool, device=logits.device)
    inside = (tokens >= 0) & (tokens < vocab)
    marks.scatter_(1, tokens.where(inside, torch.full_like(tokens, vocab)), True)
    return marks[:, :vocab]

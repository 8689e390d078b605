"""The candidates of a step from whole rows of log-probabilities.

``log_softmax_top_k`` needs no such rows. They are computed if every log-probability is read or
changed: by a logits processor that the op does not have, ``output_scores`` or sampling.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lmdecode.beam.types import STATUS_EMPTY, STATUS_NAN, STATUS_SCORE
from lmdecode.integrations.transformers.generate_call import SORTS_DRAWN

if TYPE_CHECKING:
    from transformers import LogitsProcessorList


class Candidates(NamedTuple):
    """Input of ``beam_step``: some fields of ``lmdecode.BeamCandidates``."""

    scores: Tensor
    tokens: Tensor
    beams: Tensor
    status: Tensor


def processed_log_probs(
    logits: Tensor, input_ids: Tensor, processors: LogitsProcessorList, **arguments: Any
) -> Tensor:
    """Return log-softmax after the processors: [rows, V] float32 from logits of any dtype."""
    log_probs = torch.log_softmax(logits.to(torch.float32), dim=-1)
    return processors(input_ids, log_probs, **arguments).to(torch.float32)  # type: ignore[arg-type]


def accumulate(log_probs: Tensor, beam_scores: Tensor) -> Tensor:
    """Return the candidates' scores, [requests, num_beams * V], from [requests, num_beams]."""
    by_request = log_probs.view(*beam_scores.shape, log_probs.shape[-1])
    return (by_request + beam_scores[..., None]).flatten(1)


def _status_of_best(best: Tensor) -> Tensor:
    """Return [requests] uint8 from each request's largest score, which is NaN if any is."""
    return (
        best.isnan() * STATUS_NAN
        + (best == -math.inf) * STATUS_EMPTY
        + (best == math.inf) * STATUS_SCORE
    ).to(torch.uint8)


def top_k_candidates(accumulated: Tensor, num_candidates: int, vocab_size: int) -> Candidates:
    """Choose the best of [requests, num_beams * V] float32, in ``log_softmax_top_k``'s order.

    ``torch.topk`` does not specify the choice and order of equal scores; here the lowest index
    comes first. If fewer than ``num_candidates`` exist, scores of -inf follow.
    """
    total = accumulated.shape[1]
    count = min(num_candidates, total)
    scores, indices = torch.topk(accumulated, min(count + 1, total))
    status = _status_of_best(scores[:, 0])
    if total > count:
        # One more than requested shows whether the last place has a tie.
        last, next_best = scores[:, count - 1 : count], scores[:, count:]
        scores, indices = scores[:, :count], indices[:, :count]
        contested = ((last == next_best) & (next_best > -math.inf)).flatten()
        for request in contested.nonzero().flatten().tolist():
            # The places of the lowest score go to its lowest indices.
            better = int((scores[request] > last[request]).sum())
            equal = (accumulated[request] == last[request]).nonzero().flatten()
            indices[request, better:] = equal[: count - better]
    indices, order = indices.sort(dim=1)
    scores, order = scores.gather(1, order).sort(dim=1, descending=True, stable=True)
    indices = indices.gather(1, order)
    missing = num_candidates - count
    if missing:
        scores = torch.nn.functional.pad(scores, (0, missing), value=-math.inf)
        indices = torch.nn.functional.pad(indices, (0, missing))
    return Candidates(scores, indices % vocab_size, indices // vocab_size, status)


def drawn_candidates(
    accumulated: Tensor, num_candidates: int, vocab_size: int, done: Tensor
) -> Candidates:
    """Draw candidates without replacement from the softmax of scores, as transformers does.

    ``accumulated`` is [requests, num_beams * V] float32, with at least ``num_candidates`` columns.
    Torch's default generator draws: with the same seed candidates equal those of transformers, in
    the same order: best first since 5.24, before that as drawn. Where ``done``, [requests] uint8,
    is 1, the status is 0 for any scores.
    """
    status = _status_of_best(accumulated.amax(dim=1)) * (1 - done)
    # multinomial would not return for a row without a distribution.
    accumulated = accumulated.masked_fill(~accumulated.amax(dim=1, keepdim=True).isfinite(), 0.0)
    indices = torch.multinomial(torch.softmax(accumulated, dim=-1), num_candidates)
    scores = accumulated.gather(1, indices)
    if SORTS_DRAWN:
        scores, order = scores.sort(dim=1, descending=True)
        indices = indices.gather(1, order)
    return Candidates(scores, indices % vocab_size, indices // vocab_size, status)


def rank_drawn(candidates: Candidates, ends: Tensor, num_beams: int) -> Tensor:
    """Return the order, [requests, K], in which ``beam_step`` takes drawn candidates.

    In transformers a candidate may close a hypothesis if it is among the first ``num_beams``, but
    the best ones continue. So the order is: candidates that may close, candidates that do not end,
    each best first, then candidates that end too late, and last the unused places. ``ends`` is
    [requests, K] bool.
    """
    scores = candidates.scores
    drawn_first = torch.arange(scores.shape[1], device=scores.device) < num_beams
    kind = torch.where(ends, torch.where(drawn_first, 0, 2), 1)
    kind = kind.masked_fill(scores == -math.inf, 3)
    order = scores.argsort(dim=1, descending=True, stable=True)
    return order.gather(1, kind.gather(1, order).argsort(dim=1, stable=True))


def take(candidates: Candidates, order: Tensor) -> Candidates:
    """Return the candidates in another order, [requests, K]."""
    scores, tokens, beams = (part.gather(1, order) for part in candidates[:3])
    return Candidates(scores, tokens, beams, candidates.status)

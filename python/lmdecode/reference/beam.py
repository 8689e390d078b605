"""``log_softmax_top_k`` in plain torch, a row at a time.

A row's log-softmax is ``x - max - log(sum of exp(x - max))`` with the sum taken over integer masses
(see ``arithmetic``), so it does not depend on the order of its terms; the rest is in float64 up to
one rounding to f32, and the beam's score is added in f32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lmdecode.beam_types import BeamCandidates
from lmdecode.reference.arithmetic import (
    exponent_factor,
    log_scalar,
    mass_fraction_bits,
    sum_masses,
    token_mass,
)

STATUS_NAN = 1  # a logit was NaN
STATUS_EMPTY = 2  # a row without a logit above -inf, or no beam alive
STATUS_SCORE = 4  # a beam score was NaN or +inf

_INF = math.inf


def log_softmax_row(x: torch.Tensor) -> torch.Tensor:
    """Return the log-softmax of one row, as the op defines it.

    Parameters
    ----------
    x
        [V] float32 without NaN, at least one element above -inf.

    Returns
    -------
    torch.Tensor
        [V] float32.
    """
    top = x.max().item() + 0.0  # never -0.0
    if top == _INF:
        share = x == _INF
        log_sum = log_scalar(float(share.sum()))
        difference = torch.where(share, 0.0, -_INF).double()
    else:
        bits = mass_fraction_bits(len(x))
        total = sum_masses(token_mass(x, top, exponent_factor(1.0), bits))
        log_sum = log_scalar(float(total) * 2.0**-bits)
        difference = x.double() - top
    return (difference - log_sum).float()


def _request(
    logits: torch.Tensor, beam_scores: torch.Tensor, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Return the fields of the result for one request: logits [beams, V], beam_scores [beams]."""
    beams, vocab = logits.shape
    scores, log_probs = torch.full((2, beams, vocab), -_INF)
    status = 0
    for beam in range(beams):
        x, beam_score = logits[beam].float(), beam_scores[beam].item()
        if math.isnan(beam_score) or beam_score == _INF:
            status |= STATUS_SCORE
        elif beam_score == -_INF:
            continue
        elif x.isnan().any():
            status |= STATUS_NAN
        elif (x == -_INF).all():
            status |= STATUS_EMPTY
        else:
            log_probs[beam] = log_softmax_row(x)
            scores[beam] = (log_probs[beam] + beam_scores[beam]) + 0.0
    if not status and (scores == -_INF).all():
        status = STATUS_EMPTY
    flat = scores.reshape(-1)
    if status:
        flat = flat[:0]
    # Stable: at ties the lowest flat index first.
    order = flat.sort(descending=True, stable=True).indices[:num_candidates]
    order = order[flat[order] > -_INF]
    missing = num_candidates - len(order)
    filler = torch.zeros(missing, dtype=torch.int64)
    none = torch.full((missing,), -_INF)
    return (
        torch.cat((flat[order], none)),
        torch.cat((order % vocab, filler)),
        torch.cat((order // vocab, filler)),
        status,
        torch.cat((log_probs.reshape(-1)[order], none)),
    )


def log_softmax_top_k(
    logits: torch.Tensor,
    beam_scores: torch.Tensor,
    num_candidates: int,
    *,
    num_beams: int | Sequence[int] | torch.Tensor,
) -> BeamCandidates:
    """Find the best continuations of each request's beams; see ``lmdecode.log_softmax_top_k``."""
    logits, beam_scores = logits.cpu(), beam_scores.reshape(-1).cpu()
    if isinstance(num_beams, int):
        widths = [num_beams] * (len(logits) // num_beams)
    else:
        widths = torch.as_tensor(num_beams, dtype=torch.int64).tolist()
    requests = [
        _request(*parts, num_candidates)
        for parts in zip(logits.split(widths), beam_scores.split(widths), strict=True)
    ]
    shape = (len(requests), num_candidates)
    fields = zip(*requests, strict=True) if requests else ((),) * 5
    scores, tokens, beams, status, log_probs = fields
    return BeamCandidates(
        torch.stack(scores) if requests else torch.empty(shape),
        torch.stack(tokens) if requests else torch.empty(shape, dtype=torch.int64),
        torch.stack(beams) if requests else torch.empty(shape, dtype=torch.int64),
        torch.tensor(status, dtype=torch.uint8),
        torch.stack(log_probs) if requests else torch.empty(shape),
    )

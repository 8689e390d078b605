"""Types shared by ``log_softmax_top_k``, ``beam_step``, their references and their callers."""

from __future__ import annotations

from typing import NamedTuple

import torch

# The bits of a request's status.
STATUS_NAN = 1  # a logit was NaN, or a bias or penalty made a NaN of it
STATUS_EMPTY = 2  # a row without a logit above -inf, or no candidate
STATUS_SCORE = 4  # a beam score was NaN or +inf
STATUS_CONTINUATIONS = 8  # fewer candidates that go on than beams (rules "scorer")
STATUS_CAPACITY = 16  # its sequences were full (CUDA; on the CPU an error)

# Where transformers starts every beam but the first, as all are equal then, and what it takes off
# what must not be chosen: such a beam exists in name only. Sums with it stay below the bound.
UNUSED_BEAM_SCORE = -1.0e9
REAL_BEAM_SCORE_BOUND = -1.0e8
# transformers 4 goes on with candidates of score -inf where there are no others; for the rules
# "scorer" they get this score, which is far below all others and which no log-probability changes.
# Sums with it, even where a length penalty divides them, stay below the bound.
MISSING_CANDIDATE_SCORE = -3.0e38
REAL_CANDIDATE_SCORE_BOUND = -1.0e25
# The worst score where there are no hypotheses.
NO_WORST_SCORE = 1.0e9


class BeamCandidates(NamedTuple):
    """The best continuations of each request's beams, best first.

    Attributes
    ----------
    scores
        [requests, num_candidates] float32, descending; ``-inf`` where there is no candidate.
    tokens
        [requests, num_candidates] int64, 0 where there is no candidate.
    beams
        [requests, num_candidates] int64, counted from 0 within the request; 0 where there is no
        candidate.
    status
        [requests] uint8, a sum of bits, 0 if all is well: 1, a logit was NaN, or a bias or penalty
        made a NaN of it; 2, a row had no logit above ``-inf``, or the request no candidate; 4, a
        beam score was NaN or ``+inf``. With any of them the request has no candidates.
    log_probs
        [requests, num_candidates] float32, the log-probability of the token alone, after the
        processors: the score without the beam's; ``-inf`` where there is no candidate.
    """

    scores: torch.Tensor
    tokens: torch.Tensor
    beams: torch.Tensor
    status: torch.Tensor
    log_probs: torch.Tensor

"""Results of samplers, bits of a status and dialects, shared by the ops and the reference."""

from __future__ import annotations

from typing import NamedTuple

import torch

# The bits of a row's status.
STATUS_NAN = 1  # a logit, or the noise of a kept token, was NaN
STATUS_EMPTY = 2  # no logit above -inf
STATUS_PARAMETER = 4  # a parameter was NaN, or the temperature negative
STATUS_NO_SEQUENCE = 8  # of a Sampler: the row has none
STATUS_REFUSED = 16  # of a Sampler on CUDA: what is an error on the CPU

DIALECTS: tuple[str, ...] = (
    "lmdecode",
    "transformers",
    "vllm",
    "ascend_v1",
    "ascend_v2",
    "ascend_v2_probabilities",
)
"""Names of the dialects; the position of a name is the op's ``dialect`` argument."""


class SampleOutput(NamedTuple):
    """Result of ``top_k_top_p_sample``, one entry for each row of the logits.

    Attributes
    ----------
    index
        [B] int64. The chosen token.
    kept_logits
        [B, V] float32 or None. The logits divided by the temperature where they were kept, ``-inf``
        elsewhere, so that ``softmax(kept_logits)`` is the distribution that was sampled from. A
        row of temperature 0 keeps the chosen token alone, with its raw logit.
    logprob
        [B] float32 or None. Log-probability of the chosen token among the kept ones.
    kept_count
        [B] int32. Number of tokens that all stages kept.
    status
        [B] uint8, a sum of bits: 1, a logit or the noise of a kept token was NaN; 2, no logit was
        above ``-inf`` (index 0, nothing kept); 4, a parameter was NaN or the temperature negative.
    """

    index: torch.Tensor  # type: ignore[assignment]  # instead of tuple.index
    kept_logits: torch.Tensor | None
    logprob: torch.Tensor | None
    kept_count: torch.Tensor
    status: torch.Tensor


class KeptSet(NamedTuple):
    """The kept tokens of all rows, one row after the other.

    Row b has the places ``indptr[b]`` to ``indptr[b + 1] - 1``.

    Attributes
    ----------
    indptr
        [B + 1] int64.
    ids
        [N] int64, ascending within a row.
    logprobs
        [N] float32, of each token among the kept ones of its row.
    """

    indptr: torch.Tensor
    ids: torch.Tensor
    logprobs: torch.Tensor


class SamplerOutput(NamedTuple):
    """Result of one step of a ``Sampler``; fields that were not requested are None.

    Attributes
    ----------
    index, kept_logits, kept_count, status
        As of ``SampleOutput``. Rows without a sequence have index -1, rank 0 and status 8; those
        that CUDA refused have status 16.
    logprob
        [B] float32. Log-probability of the chosen token, by ``logprobs_mode``.
    top_ids, top_logprobs
        [B, num_logprobs] int64 and float32, the best first; -1 and ``-inf`` where there are no
        more.
    rank
        [B] int64. 1 + how many of the raw logits stand before the chosen token's.
    kept_set
        The tokens that were drawn from.
    stage_counts
        [B, 11] int32. Tokens that each stage of ``lmdecode.sampling.STAGES`` left, -1 where it is
        off.
    """

    index: torch.Tensor  # type: ignore[assignment]  # instead of tuple.index
    kept_logits: torch.Tensor | None
    logprob: torch.Tensor | None
    kept_count: torch.Tensor
    status: torch.Tensor
    top_ids: torch.Tensor | None
    top_logprobs: torch.Tensor | None
    rank: torch.Tensor | None
    kept_set: KeptSet | None
    stage_counts: torch.Tensor | None


class VerifyOutput(NamedTuple):
    """Result of ``verify_draft``.

    Attributes
    ----------
    num_accepted
        [B] int64. Drafted tokens that were accepted; of a tree, the length of the path.
    tokens
        [B, D + 1] int64. The accepted tokens and the one after them, then -1.
    status
        [B] uint8. The bits of all positions that were looked at.
    path
        [B, D] int64. Which drafted tokens were accepted, as places in ``draft``, then -1.
    """

    num_accepted: torch.Tensor
    tokens: torch.Tensor
    status: torch.Tensor
    path: torch.Tensor

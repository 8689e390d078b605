"""The result and the dialect names of ``top_k_top_p_sample``: one place for op and reference."""

from __future__ import annotations

from typing import NamedTuple

import torch

# The bits of a row's status.
STATUS_NAN = 1  # a logit, or the noise of a kept token, was NaN
STATUS_EMPTY = 2  # no logit above -inf
STATUS_PARAMETER = 4  # a parameter was NaN, or the temperature negative

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
    """What one call of ``top_k_top_p_sample`` gives back, a row of the logits each.

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

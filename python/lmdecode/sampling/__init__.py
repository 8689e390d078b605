"""Sampling: from a row of logits to a token."""

from lmdecode.sampling.drafts import prompt_lookup
from lmdecode.sampling.ops import top_k_top_p_sample
from lmdecode.sampling.types import DIALECTS, SampleOutput

__all__ = [
    "DIALECTS",
    "SampleOutput",
    "prompt_lookup",
    "top_k_top_p_sample",
]

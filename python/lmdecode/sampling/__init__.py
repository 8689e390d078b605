"""Sampling: from a row of logits to a token."""

from lmdecode.sampling.ops import top_k_top_p_sample
from lmdecode.sampling.types import DIALECTS, SampleOutput

__all__ = [
    "DIALECTS",
    "SampleOutput",
    "top_k_top_p_sample",
]

"""Sampling: from a row of logits to a token."""

from lmdecode.sampling.drafts import prompt_lookup, verify_draft
from lmdecode.sampling.ops import top_k_top_p_sample
from lmdecode.sampling.parameters import SamplingParameters
from lmdecode.sampling.sampler import Sampler
from lmdecode.sampling.sampler_rows import SAMPLER_DIALECTS, STAGES
from lmdecode.sampling.types import DIALECTS, KeptSet, SampleOutput, SamplerOutput, VerifyOutput

__all__ = [
    "DIALECTS",
    "SAMPLER_DIALECTS",
    "STAGES",
    "KeptSet",
    "SampleOutput",
    "Sampler",
    "SamplerOutput",
    "SamplingParameters",
    "VerifyOutput",
    "prompt_lookup",
    "top_k_top_p_sample",
    "verify_draft",
]

"""``generate()`` that draws tokens by ``top_k_top_p_sample`` and ``Sampler``."""

from lmdecode.integrations.transformers.sampling.generate_sampling import sample
from lmdecode.integrations.transformers.sampling.logits_process import (
    GrammarLogitsProcessor,
    TopKTopPLogitsProcessor,
)

__all__ = [
    "GrammarLogitsProcessor",
    "TopKTopPLogitsProcessor",
    "sample",
]

"""``generate()`` that draws tokens by ``top_k_top_p_sample``."""

from lmdecode.integrations.transformers.sampling.generation import sample
from lmdecode.integrations.transformers.sampling.logits_process import TopKTopPLogitsProcessor

__all__ = [
    "TopKTopPLogitsProcessor",
    "sample",
]

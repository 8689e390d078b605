"""lmdecode: from a language model's logits to its next token, fused, exact and reproducible.

``top_k_top_p_sample`` is the sampling op, ``reorder_cache_`` lets a KV cache follow its beams;
``lmdecode.integrations.transformers`` puts sampling into ``generate()``; ``lmdecode.reference``
holds every op again in plain torch.
"""

from lmdecode.kv_cache import reorder_cache_
from lmdecode.sampling import DIALECTS, SampleOutput, top_k_top_p_sample
from lmdecode.system import cpu_capability, has_cuda

__version__ = "0.1.0"

__all__ = [
    "DIALECTS",
    "SampleOutput",
    "cpu_capability",
    "has_cuda",
    "reorder_cache_",
    "top_k_top_p_sample",
]

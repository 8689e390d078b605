"""lmdecode inside Hugging Face transformers 5.x.

``sample`` replaces the decoding loop of ``model.generate(custom_generate=sample)`` by one that
draws each token with one fused op; ``TopKTopPLogitsProcessor`` is the filter alone, for any place
that takes a ``LogitsProcessor``.
"""

from lmdecode.integrations.transformers.beam_trace import BeamComparison, compare_with_transformers
from lmdecode.integrations.transformers.generation import sample
from lmdecode.integrations.transformers.logits_process import TopKTopPLogitsProcessor

__all__ = [
    "BeamComparison",
    "TopKTopPLogitsProcessor",
    "compare_with_transformers",
    "sample",
]

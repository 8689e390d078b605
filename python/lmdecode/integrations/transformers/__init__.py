"""lmdecode inside Hugging Face transformers 5.x.

``sample`` replaces the decoding loop of ``model.generate(custom_generate=sample)`` by one that
draws each token with one fused op; ``TopKTopPLogitsProcessor`` is the filter alone, for any place
that takes a ``LogitsProcessor``. ``BeamDynamicCache`` and ``BeamEncoderDecoderCache`` are KV caches
for beam search, and ``beam_cache``, ``reorder_beams`` and ``expand_beams`` do their work on caches
that exist. ``register()`` makes ``attn_implementation="lmdecode"`` known, attention to sliding
windows without masks; ``DynamicRingCache`` and ``StaticRingCache`` are the caches that go with it.
"""

from lmdecode.integrations.transformers.attention import register
from lmdecode.integrations.transformers.cache_utils import (
    BeamDynamicCache,
    BeamEncoderDecoderCache,
    beam_cache,
    expand_beams,
    reorder_beams,
)
from lmdecode.integrations.transformers.generation import sample
from lmdecode.integrations.transformers.logits_process import TopKTopPLogitsProcessor
from lmdecode.integrations.transformers.ring_cache_utils import DynamicRingCache, StaticRingCache

__all__ = [
    "BeamDynamicCache",
    "BeamEncoderDecoderCache",
    "DynamicRingCache",
    "StaticRingCache",
    "TopKTopPLogitsProcessor",
    "beam_cache",
    "expand_beams",
    "register",
    "reorder_beams",
    "sample",
]

"""KV caches of transformers whose layers follow their beams, or hold one window."""

from lmdecode.integrations.transformers.caches.beam_caches import (
    BeamDynamicCache,
    BeamEncoderDecoderCache,
    beam_cache,
    expand_beams,
    reorder_beams,
)
from lmdecode.integrations.transformers.caches.ring_caches import DynamicRingCache, StaticRingCache

__all__ = [
    "BeamDynamicCache",
    "BeamEncoderDecoderCache",
    "DynamicRingCache",
    "StaticRingCache",
    "beam_cache",
    "expand_beams",
    "reorder_beams",
]

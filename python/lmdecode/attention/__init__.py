"""Attention over a sliding window of keys, its masks, and the ring that holds the window."""

from lmdecode.attention.masks import compressed_swa_mask, expand_compressed_swa_mask, swa_mask
from lmdecode.attention.ops import (
    merge_attention_states,
    sliding_window_attention,
    sliding_window_decode,
)
from lmdecode.attention.ring_cache import RingKVCache, RingSnapshot, ring_cache_append_

__all__ = [
    "RingKVCache",
    "RingSnapshot",
    "compressed_swa_mask",
    "expand_compressed_swa_mask",
    "merge_attention_states",
    "ring_cache_append_",
    "sliding_window_attention",
    "sliding_window_decode",
    "swa_mask",
]

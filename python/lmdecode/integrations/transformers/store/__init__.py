"""``generate()`` of conversations that a ``KVStore`` keeps."""

from lmdecode.integrations.transformers.store.cache import cache_from_kv, cache_to_kv, load_cache
from lmdecode.integrations.transformers.store.generate_from_store import (
    generate_with_store,
    prefill,
)
from lmdecode.integrations.transformers.store.request import encoder_context

__all__ = [
    "cache_from_kv",
    "cache_to_kv",
    "encoder_context",
    "generate_with_store",
    "load_cache",
    "prefill",
]

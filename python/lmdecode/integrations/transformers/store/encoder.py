"""The cross-attention of an encoder-decoder model in a store: one input of the encoder, whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lmdecode.integrations.transformers.store.cache import cache_to_kv, load_cache
from lmdecode.integrations.transformers.store.request import EncoderInput

if TYPE_CHECKING:
    from lmdecode.store import KVStore

_CROSS = b"lmdecode.cross_attention.1:"


def load_cross_attention(
    store: KVStore, context: bytes, encoder: EncoderInput, cache: Any, device: torch.device
) -> bool:
    """Fill the cross-attention of an ``EncoderDecoderCache``, if all of it is stored.

    ``context`` names the encoder's input as a whole: its keys and values depend on all of it, so a
    prefix is of no use.
    """
    if store.fingerprint.windows is not None:  # of self-attention; a store has but one shape
        return False
    length = encoder.ids.shape[1]
    hit = store.lookup(range(length), context=_CROSS + context)
    try:
        part = cache.cross_attention_cache
        if hit.num_tokens < length or not load_cache(store, hit, part, device=device):
            return False
    finally:
        hit.release()
    cache.is_updated = dict.fromkeys(range(len(part.layers)), True)
    return True


def store_cross_attention(
    store: KVStore, context: bytes, cache: Any, *, ttl: float | None, pin: bool
) -> bool:
    """Store the cross-attention, once there is one; False: it is not computed yet, or unfit."""
    part = cache.cross_attention_cache
    length = int(part.get_seq_length())
    shape = (store.fingerprint.num_kv_heads, store.fingerprint.head_size)
    if length == 0 or store.readonly or store.fingerprint.windows is not None:
        return False
    kv = cache_to_kv(part)
    if any((states.shape[0], states.shape[2]) != shape for pair in kv for states in pair):
        return False  # heads of another size than those of self-attention
    store.put(range(length), kv, context=_CROSS + context, ttl=ttl, pin=pin)
    return True


def run_encoder(model: Any, encoder: EncoderInput, outputs: dict[str, bool]) -> Any:
    """Return the encoder's outputs."""
    return model.get_encoder()(
        input_ids=encoder.ids, attention_mask=encoder.mask, return_dict=True, **outputs
    )


def stand_in_outputs(model: Any, encoder: EncoderInput) -> Any:
    """Return placeholder encoder outputs, for a cache that already has the cross-attention.

    Their length matters. Their values are never read.
    """
    from transformers.modeling_outputs import BaseModelOutput

    size = model.config.get_text_config(encoder=True).hidden_size
    states = torch.zeros((), dtype=model.dtype, device=model.device)
    return BaseModelOutput(last_hidden_state=states.expand(1, encoder.ids.shape[1], size))

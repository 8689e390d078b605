"""The fingerprint of a decoder-only model's keys and values, by which a ``KVStore`` knows it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from lmdecode.decoder.causal_caches import CacheParts, row_format
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.system import cpu_capability

if TYPE_CHECKING:
    from lmdecode.store import Fingerprint

__all__ = ["causal_fingerprint", "check_causal_store", "weights_hash"]

# To be raised when the bits of keys and values change for the same packed weights.
_BITS = 1
_hashes: WeakKeyDictionary[PackedCausalModel, str] = WeakKeyDictionary()


def weights_hash(packed: PackedCausalModel) -> str:
    """Return the SHA-256 of packed weights: once computed, or the one that they were saved with."""
    if packed.saved_hash is not None:
        return packed.saved_hash
    if packed not in _hashes:
        _hashes[packed] = packed.weights_hash()
    return _hashes[packed]


def causal_fingerprint(decoding: Any, tokenizer: Any = None) -> Fingerprint:
    """See ``Decoding.fingerprint``; raises ValueError for a model that is not decoder-only."""
    from lmdecode.store import Fingerprint
    from lmdecode.store.fingerprint import hash_vocabulary

    packed = decoding.decoder
    if not isinstance(packed, PackedCausalModel):
        raise ValueError(
            "Decoding: the decoder of an encoder-decoder model has no fingerprint; expected a "
            "decoder-only model, or generate_with_store"
        )
    config = packed.config
    dtype, heads = decoding.cache_dtype, packed.cache_heads[0]
    parts = CacheParts.of(packed.cache_heads, dtype)
    kind, _ = row_format(heads.head_size, dtype)
    kind = torch.uint8 if kind == torch.int8 else kind  # as CausalCaches.read has it
    windows = [
        window
        for layer, window in enumerate(config.windows)
        if config.has_attention(layer) and config.shared_keys[layer] is None
        for _ in range(parts.number_of(config.heads(layer), dtype))
    ]
    return Fingerprint(
        model_id=decoding.model_class or type(config).__name__,
        weights_hash=weights_hash(packed),
        dtype=str(kind),
        num_layers=len(windows),  # parts of those with keys and values of their own
        num_kv_heads=parts.kv_heads,
        head_size=parts.row_size,
        rope={"size": heads.rotary_size, "of_layers": list(config.rotary)},
        window=tuple(windows) if any(windows) else None,
        state_size=packed.state_size,
        # Keys are rotated; bits depend on the format of weights and the level of the CPU.
        layout=f"lmdecode.decoding.{_BITS}/{packed.weight_format}/{cpu_capability()}",
        tokenizer_hash=hash_vocabulary(tokenizer),
    )


def check_causal_store(op: str, decoding: Any, store: Any) -> None:
    """Raise TypeError for anything but a store, and an error if it belongs to another model.

    Names of models and tokenizers may differ.
    """
    from lmdecode.store import FingerprintMismatchError, KVStore

    if not isinstance(store, KVStore):
        raise TypeError(f"{op}: store is {type(store).__name__}; expected a KVStore")

    theirs, ours = store.fingerprint, causal_fingerprint(decoding)
    ours = replace(ours, model_id=theirs.model_id, tokenizer_hash=theirs.tokenizer_hash)
    if theirs != ours:
        raise FingerprintMismatchError(
            f"{op}: the store has another fingerprint than Decoding.fingerprint(); the store's "
            f"and the model's:\n{theirs.difference(ours)}"
        )

"""A small model of random weights, made of torch alone."""

from __future__ import annotations

from typing import Any

import torch

from lmdecode.decoder.causal_config import CausalConfig, CausalLayerWeights, CausalWeights
from lmdecode.decoding import Decoding

__all__ = ["CONTEXT", "VOCAB", "random_model"]

#: The longest text that the model is for, and its tokens.
CONTEXT, VOCAB = 2048, 2048
_LAYERS, _SIZE, _HEADS, _KV_HEADS, _HEAD_SIZE, _FFN = 3, 192, 6, 2, 32, 512
_BASE = 10000.0  # of the rotary embedding


def random_model(dtype: str, cache_dtype: str | None = None, seed: int = 0) -> Decoding:
    """Return a model whose layers are as Mistral's, one of them with a window.

    Parameters
    ----------
    dtype, cache_dtype
        As of ``Decoding``.
    seed
        Of the weights, which are the same on every machine with this torch.
    """
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    projected = (_HEADS + 2 * _KV_HEADS) * _HEAD_SIZE
    ones = torch.ones(_SIZE)
    nothing: dict[str, Any] = dict.fromkeys(CausalLayerWeights._fields)
    layers = [
        CausalLayerWeights(**nothing)._replace(
            attention_norm_gamma=ones,
            qkv=weight(projected, _SIZE),
            attention_out=weight(_SIZE, _HEADS * _HEAD_SIZE),
            ffn_norm_gamma=ones,
            ffn_up=weight(_FFN, _SIZE),
            ffn_gate=weight(_FFN, _SIZE),
            ffn_down=weight(_SIZE, _FFN),
        )
        for _ in range(_LAYERS)
    ]
    turns = _BASE ** -(torch.arange(0, _HEAD_SIZE, 2) / _HEAD_SIZE)
    config = CausalConfig(
        num_layers=_LAYERS, model_size=_SIZE, num_heads=_HEADS, num_kv_heads=_KV_HEADS,
        head_size=_HEAD_SIZE, ffn_size=_FFN, vocab_size=VOCAB,
        windows=(None, 64, None), rotary=(0,) * _LAYERS, rotary_scales=(1.0,),
        embedding_scale=_SIZE**0.5,
    )  # fmt: skip
    weights = CausalWeights(
        embedding=weight(VOCAB, _SIZE), positions=None, rotary=(turns,), final_norm_gamma=ones,
        final_norm_beta=None, logits=None, logits_bias=None, layers=layers,
    )  # fmt: skip
    return Decoding(config, weights, dtype=dtype, cache_dtype=cache_dtype)

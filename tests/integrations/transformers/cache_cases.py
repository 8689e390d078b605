"""Caches of each kind with random states, and more tiny models for their tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import DynamicCache, StaticCache

from lmdecode.integrations.transformers import BeamDynamicCache

VOCAB = 61
TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA_LIKE = {
    **TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}


def _marian() -> Any:
    return transformers.MarianMTModel(
        transformers.MarianConfig(
            **TOKENS, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
            max_position_embeddings=128, decoder_start_token_id=0, forced_eos_token_id=None,
            init_std=0.2,
        )
    )  # fmt: skip


def _llama_like(name: str, **options: Any) -> Any:
    kind = "Gemma3Text" if name == "Gemma3" else name
    config = getattr(transformers, f"{kind}Config")(**{**LLAMA_LIKE, **options})
    return getattr(transformers, f"{name}ForCausalLM")(config)


MORE_MODELS: dict[str, Callable[[], Any]] = {
    "gemma2": functools.partial(_llama_like, "Gemma2", query_pre_attn_scalar=8, **SLIDING),
    "gemma3": functools.partial(_llama_like, "Gemma3", query_pre_attn_scalar=8, **SLIDING),
    "gpt_oss": functools.partial(
        _llama_like, "GptOss", num_local_experts=2, num_experts_per_tok=1, **SLIDING
    ),
    "marian": _marian,
}


@functools.cache
def build_cache_model(name: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return MORE_MODELS[name]().eval()


def states(rows: int, length: int, seed: int = 0, heads: int = 2, dim: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, heads, length, dim, generator=generator)


PARENTS = torch.tensor([1, 1, 0, 3])


def hybrid_config() -> Any:
    return transformers.Lfm2Config(
        **{**LLAMA_LIKE, "num_hidden_layers": 3},
        layer_types=["conv", "full_attention", "conv"],
    )


def run(cache: Any, layers: int = 2, length: int = 5) -> Any:
    for number in range(layers):
        cache.update(states(4, length, number), states(4, length, number + 10), number)
    return cache


def mistral_config() -> Any:
    return transformers.MistralConfig(**LLAMA_LIKE, sliding_window=4)


def llama_config() -> Any:
    return transformers.LlamaConfig(**LLAMA_LIKE)


def gemma_config() -> Any:
    return transformers.Gemma2Config(**LLAMA_LIKE, **SLIDING)


CACHES: dict[str, Callable[[], Any]] = {
    "dynamic": lambda: run(DynamicCache()),
    "dynamic, of a config": lambda: run(DynamicCache(config=gemma_config())),
    "sliding": lambda: run(DynamicCache(config=mistral_config())),
    "static": lambda: run(StaticCache(llama_config(), max_cache_len=9)),
    "static, sliding": lambda: run(StaticCache(gemma_config(), max_cache_len=9), length=3),
    "static, sliding and full": lambda: run(StaticCache(gemma_config(), max_cache_len=9)),
    "ours": lambda: run(BeamDynamicCache()),
    "ours, sliding": lambda: run(BeamDynamicCache(config=mistral_config())),
    "not yet used": lambda: DynamicCache(config=llama_config()),
    "one layer used": lambda: run(BeamDynamicCache(config=llama_config()), layers=1),
}


def tensors_of(cache: Any) -> list[torch.Tensor]:
    pairs = [(layer.keys, layer.values) for layer in cache.layers if layer.is_initialized]
    return [tensor for pair in pairs for tensor in pair if tensor is not None]

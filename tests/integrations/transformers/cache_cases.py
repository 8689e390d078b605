"""Caches of each kind with random states."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import DynamicCache, StaticCache

from lmdecode.integrations.transformers import BeamDynamicCache
from tests.support.tiny_models import HYBRID, LLAMA_LIKE


def states(rows: int, length: int, seed: int = 0, heads: int = 2, dim: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, heads, length, dim, generator=generator)


PARENTS = torch.tensor([1, 1, 0, 3])


def hybrid_config() -> Any:
    return transformers.Lfm2Config(
        **{**LLAMA_LIKE, "num_hidden_layers": 3}, layer_types=["conv", "full_attention", "conv"]
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
    return transformers.Gemma2Config(**LLAMA_LIKE, **HYBRID)


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

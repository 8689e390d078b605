"""A whole forward pass of transformers within ``batch_invariant()``, against the same without."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

import lmdecode
from benchmarks.harness import OURS, Case, Contestant, Effort

GROUP = "eager"
SOURCES = ("linear/packed_linear", "attention/sliding_window_attention")
TORCH = "plain torch"
# Qwen2.5-0.5B's, with random weights.
_SHAPE: dict[str, Any] = {
    "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
_CACHED = 64  # tokens of each row that a step reads behind
_PASS = Effort(seconds=20.0, rounds=12, min_calls=3)  # calls of up to two seconds


@functools.lru_cache(maxsize=1)
def _model(dtype: str, layers: int, vocabulary: int) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = {**_SHAPE, "num_hidden_layers": layers, "vocab_size": vocabulary}
    return Qwen2ForCausalLM(Qwen2Config(**shape)).to(getattr(torch, dtype)).eval()


def _forward(model: Any, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a pass over a prompt, or over a token of each row behind a cache, up to logits."""
    if ids.shape[1] > 1:
        return lambda: model(ids, use_cache=False, logits_to_keep=1).logits
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model(ids.expand(-1, _CACHED), past_key_values=cache, logits_to_keep=1)

    def step() -> torch.Tensor:
        logits: torch.Tensor = model(ids, past_key_values=cache).logits
        cache.crop(-1)
        return logits

    return step


def _contestants(
    with_peers: bool, *, dtype: str, rows: int, tokens: int, layers: int, vocabulary: int
) -> list[Contestant]:
    model = _model(dtype, layers, vocabulary)
    ids = torch.randint(vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        forward = _forward(model, ids)

    def turn(context: Callable[[], AbstractContextManager[object]]) -> float:
        with torch.no_grad(), context():
            forward()  # ours packs the weights: the copies go with the context
            start = time.thread_time()
            forward()
            return time.thread_time() - start

    ours = Contestant(OURS, partial(turn, lmdecode.batch_invariant))
    return [ours, Contestant(TORCH, partial(turn, nullcontext))] if with_peers else [ours]


def cases(quick: bool) -> list[Case]:
    """Return a step of 1, 8 and 32 rows and a prompt in two dtypes; ``quick`` has one layer."""
    layers, vocabulary, prompt = (1, 1000, 24) if quick else (24, 151936, 512)
    return [
        Case(
            GROUP,
            name,
            {"dtype": dtype, "rows": rows, "tokens": tokens},
            partial(
                _contestants, dtype=dtype, rows=rows, tokens=tokens, layers=layers,
                vocabulary=vocabulary,
            ),
            threads=1,
            clock="returned",
            effort=None if quick else _PASS,
        )
        for dtype in ("float32", "bfloat16")
        for name, rows, tokens in (
            ("a step", 1, 1), ("a step", 8, 1), ("a step", 32, 1), ("prompt", 1, prompt),
        )
    ]  # fmt: skip


def notes() -> list[str]:
    """Say what the table leaves open."""
    return [
        "eager: Qwen2ForCausalLM of transformers with the shape of Qwen2.5-0.5B and random "
        f"weights, attention sdpa. A step reads a token of each row behind {_CACHED} cached ones; "
        "a prompt has one row. Ours is the same call within batch_invariant(). A turn has two "
        "passes, of which the second is timed: in the first one, ours packs the weights."
    ]

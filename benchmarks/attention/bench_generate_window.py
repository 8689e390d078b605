"""``generate()`` behind a prompt of many windows: a model of random weights, time and memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.goals import Goal, GoalOutcome, evaluate
from benchmarks.harness import OURS, Case, Contestant, Result
from lmdecode.demo.peak_memory import peak_memory

GROUP = "generate, sliding window"
SOURCES = ("attention/sliding_window", "kv_cache/ring_cache_append")
SDPA, EAGER = "sdpa", "eager"
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
LARGEST_EAGER = 4096  # tokens; the scores of more take gigabytes a layer
# Megabytes by case and contestant, of the cases that have been built.
_PEAKS: dict[str, dict[str, float]] = {}


@lru_cache(maxsize=1)
def _model(window: int, dtype: str) -> Any:
    """Return a Mistral of 15 million parameters."""
    from transformers import MistralConfig, MistralForCausalLM

    from lmdecode.integrations.transformers import register

    register()
    config = MistralConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1280, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, sliding_window=window,
        max_position_embeddings=32768, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return MistralForCausalLM(config).eval().to(DTYPES[dtype])


def _generate(name: str, window: int, dtype: str, ids: Tensor) -> Tensor:
    from lmdecode.integrations.transformers import DynamicRingCache

    model = _model(window, dtype)
    model.set_attn_implementation(name)
    cache = {"past_key_values": DynamicRingCache(model.config)} if name == OURS else {}
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, min_new_tokens=2,
        do_sample=False, eos_token_id=2, pad_token_id=0, **cache,
    )  # fmt: skip


def _call(name: str, tokens: int, window: int, dtype: str) -> Callable[[], Tensor]:
    """Build a call of ``generate()``, warmed up."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 8192, (1, tokens), generator=generator)
    _generate(name, window, dtype, ids[:, :16])
    return partial(_generate, name, window, dtype, ids)


def _contestants(
    with_peers: bool, *, tokens: int, window: int, dtype: str, key: str
) -> list[Contestant]:
    peers = [SDPA, EAGER] if tokens <= LARGEST_EAGER else [SDPA]
    names = [OURS, *peers] if with_peers else [OURS]
    if with_peers:
        peaks = {name: peak_memory(_call, name, tokens, window, dtype) / 1e6 for name in names}
        _PEAKS[key] = peaks
    return [Contestant(name, _call(name, tokens, window, dtype)) for name in names]


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` a short one."""
    shapes = [(tokens, 512, dtype) for dtype in DTYPES for tokens in (2048, 4096, 8192)]
    return [
        Case(
            GROUP,
            "prompt and 2 tokens",
            {"S": tokens, "window": window, "dtype": dtype},
            partial(
                _contestants, tokens=tokens, window=window, dtype=dtype,
                key=f"{tokens} tokens, {dtype}",
            ),
        )
        for tokens, window, dtype in ([(256, 32, "f32")] if quick else shapes)
    ]  # fmt: skip


def _versus_best(result: Result) -> float | None:
    best = result.best_peer()
    return None if best is None else best[1]


def _is_long(result: Result) -> bool:
    return int(str(result.case.shape["S"])) >= 8192


GOALS = [
    Goal("prompt and 2 tokens", "warm", "best peer", "at least", 2, _versus_best, [_is_long]),
]  # fmt: skip


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goals on the worst of the cases that each speaks of."""
    return evaluate(GOALS, results)


def notes() -> list[str]:
    """Return the memory of each case, at its peak beyond the model, in a process of its own."""
    return [
        f"Memory of `generate()` beyond the model, at its peak, {key}: "
        + ", ".join(f"{name} {size:.0f} MB" for name, size in peaks.items())
        + "."
        for key, peaks in _PEAKS.items()
    ]

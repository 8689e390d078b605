"""A step of beam search on a cache of transformers: a token a row, then the beams' reorder."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.goals import Goal, GoalOutcome, evaluate
from benchmarks.harness import OURS, Case, Contestant, Result
from benchmarks.kv_cache.bench_reorder_cache import parent_map

GROUP = "beam cache"
SOURCES = ("kv_cache/reorder_cache",)
TRANSFORMERS = "transformers"
LAYERS = 4


@lru_cache(maxsize=1)
def _filled(shape: tuple[int, ...], window: int | None) -> tuple[Any, Any]:
    """Return ours and transformers', with ``shape`` [B, H, S, D] in each layer, bfloat16."""
    from transformers import LlamaConfig, MistralConfig
    from transformers.cache_utils import DynamicCache

    from lmdecode.integrations.transformers import BeamDynamicCache

    config = (
        LlamaConfig(num_hidden_layers=LAYERS)
        if window is None
        else MistralConfig(num_hidden_layers=LAYERS, sliding_window=window)
    )
    caches = BeamDynamicCache(config=config), DynamicCache(config=config)
    prompt = torch.ones(shape, dtype=torch.bfloat16)
    for cache in caches:
        for layer in range(LAYERS):
            cache.update(prompt, prompt, layer)
    return caches


def _step(cache: Any, token: Tensor, parents: Tensor, window: int | None) -> None:
    for layer in range(LAYERS):
        cache.update(token, token, layer)
    cache.reorder_cache(parents)
    if window is None:
        cache.crop(-1)  # so that the next call finds the same length


def _contestants(
    with_peers: bool, *, shape: tuple[int, ...], moved: int, appends: bool, window: int | None
) -> list[Contestant]:
    ours, theirs = _filled(shape, window)
    parents = parent_map(shape[0], moved)
    rows, heads, _, dim = shape
    token = torch.ones((rows, heads, 1, dim), dtype=torch.bfloat16)
    contestants = []
    for name, cache in ((OURS, ours), (TRANSFORMERS, theirs))[: 1 + with_peers]:
        step = partial(_step, cache, token, parents, window)
        contestants.append(
            Contestant(name, step if appends else partial(cache.reorder_cache, parents))
        )
    return contestants


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` small caches."""
    shape = (32, 8, 64 if quick else 1024, 128)
    kinds = (
        ("reorder", False, None),
        ("a step", True, None),
        ("a step, sliding window", True, shape[2] // 2),
    )
    return [
        Case(
            GROUP,
            name,
            {"cache": "x".join(map(str, shape)), "layers": LAYERS, "moved": moved},
            partial(_contestants, shape=shape, moved=moved, appends=appends, window=window),
        )
        for name, appends, window in kinds
        for moved in ((8,) if quick else (0, 8, 32))
    ]


def _versus_transformers(result: Result) -> float | None:
    return result.ratio(TRANSFORMERS)


def _some_stay(result: Result) -> bool:
    return result.case.shape["moved"] == 8


GOALS = [
    Goal(name, "warm", TRANSFORMERS, "at least", 8, _versus_transformers, [_some_stay])
    for name in ("reorder", "a step", "a step, sliding window")
]


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goals on the worst of the cases that each speaks of."""
    return evaluate(GOALS, results)

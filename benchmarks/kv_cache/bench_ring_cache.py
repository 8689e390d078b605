"""A token to a sliding layer of a cache of transformers, and attention to its window."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.goals import Goal, GoalOutcome, evaluate
from benchmarks.harness import LIMIT, OURS, Case, Contestant, Result

GROUP = "ring cache"
SOURCES = ("kv_cache/ring_cache_append", "attention/sliding_window_decode")
DYNAMIC, STATIC = "dynamic layer", "static layer"
SMALLEST = 128
OURS_SMALLEST = f"lmdecode, window {SMALLEST}"
HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128


def _full_layer(name: str, window: int, rows: int) -> Any:
    """Return a layer that holds a window and more, bfloat16 [rows, 8, ..., 128]."""
    from transformers.cache_utils import DynamicSlidingWindowLayer, StaticSlidingWindowLayer

    from lmdecode.integrations.transformers.caches.ring_caches import RingLayer

    layer = {
        OURS: lambda: RingLayer(window),
        DYNAMIC: lambda: DynamicSlidingWindowLayer(window),
        STATIC: lambda: StaticSlidingWindowLayer(2 * window, window),
    }[name]()
    generator = torch.Generator().manual_seed(0)
    shape = (rows, KV_HEADS, window + 7, HEAD_SIZE)
    layer.update(*torch.randn(2, *shape, generator=generator).bfloat16())
    return layer


def _token(rows: int, heads: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, heads, 1, HEAD_SIZE, generator=generator).bfloat16()


def _write(slots: list[Tensor], token: Tensor) -> None:
    for slot in slots:
        slot.copy_(token)


def _update_contestants(with_peers: bool, *, window: int, rows: int) -> list[Contestant]:
    token = _token(rows, KV_HEADS)

    def update(name: str, window: int) -> Callable[[], object]:
        return partial(_full_layer(name, window, rows).update, token, token)

    contestants = [Contestant(OURS, update(OURS, window))]
    if not with_peers:
        return contestants
    rings = torch.zeros(2, rows, KV_HEADS, window, HEAD_SIZE, dtype=torch.bfloat16)
    return [
        *contestants,
        Contestant(LIMIT, partial(_write, [ring[:, :, 3:4] for ring in rings], token)),
        Contestant(DYNAMIC, update(DYNAMIC, window)),
        Contestant(STATIC, update(STATIC, window)),
        Contestant(OURS_SMALLEST, update(OURS, min(window, SMALLEST)), complete=False),
    ]


class _Attention(torch.nn.Module):
    """What attention functions of transformers ask of a module."""

    is_causal = True
    num_key_value_groups = HEADS // KV_HEADS


def _attend(
    module: torch.nn.Module, layer: Any, attention: Callable[..., Any], q: Tensor, token: Tensor,
    window: int,
) -> Tensor:  # fmt: skip
    keys, values = layer.update(token, token)
    out, _ = attention(
        module, q, keys, values, None, scaling=HEAD_SIZE**-0.5, sliding_window=window
    )
    return out


def _step_contestants(with_peers: bool, *, window: int, rows: int) -> list[Contestant]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.mistral.modeling_mistral import eager_attention_forward

    from lmdecode.integrations.transformers.attention import attention_forward

    token, q, module = _token(rows, KV_HEADS), _token(rows, HEADS), _Attention().eval()
    pairs = [
        (OURS, OURS, attention_forward),
        (f"{DYNAMIC}, sdpa", DYNAMIC, sdpa_attention_forward),
        (f"{DYNAMIC}, eager", DYNAMIC, eager_attention_forward),
        (f"{STATIC}, sdpa", STATIC, sdpa_attention_forward),
    ]
    return [
        Contestant(
            name,
            partial(_attend, module, _full_layer(layer, window, rows), attention, q, token, window),
        )
        for name, layer, attention in pairs[: None if with_peers else 1]
    ]


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` small windows."""
    windows = (32, 256) if quick else (128, 512, 1024, 4096)
    return [
        Case(
            GROUP,
            name,
            {"B": rows, "heads": f"{HEADS}/{KV_HEADS}", "window": window},
            partial(contestants, window=window, rows=rows),
        )
        for name, contestants in (
            ("update", _update_contestants),
            ("update and attend", _step_contestants),
        )
        for rows in ((1,) if quick else (1, 8))
        for window in windows
    ]


def _versus_best(result: Result) -> float | None:
    best = result.best_peer()
    return None if best is None else best[1]


def _versus_smallest(result: Result) -> float | None:
    ratio = result.ratio(OURS_SMALLEST)
    return None if ratio is None else 1 / ratio


def _window_is_mistrals(result: Result) -> bool:
    return result.case.shape["window"] == 4096


def _window_is_long(result: Result) -> bool:
    return int(str(result.case.shape["window"])) >= 1024


GOALS = [
    Goal("update", "warm", "best peer", "at least", 20, _versus_best, [_window_is_mistrals]),
    Goal("update", "warm", f"ours at window {SMALLEST}", "at most", 1.25, _versus_smallest),
    Goal("update and attend", "warm", "best peer", "at least", 5, _versus_best, [_window_is_long]),
]


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goals on the worst of the cases that each speaks of."""
    return evaluate(GOALS, results)

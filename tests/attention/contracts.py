"""The attention ops, and calls of them (tests/support/contracts.py)."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lmdecode import merge_attention_states, sliding_window_attention, sliding_window_decode
from tests.attention.attention_cases import DTYPES, Paged, normal
from tests.support.contracts import Call, Contract

QKV = (normal(2, 4, 5, 16), normal(2, 2, 9, 16, seed=1), normal(2, 2, 9, 24, seed=2))
# K and V as blocks of 9, and as rows of a cache.
POOLS = (normal(3, 2, 9, 16, seed=1), normal(3, 2, 9, 24, seed=2))
BLOCKS = torch.tensor([[1, 0], [2, -1]], dtype=torch.int32)
ROWS = (torch.arange(20, dtype=torch.int32).view(2, 10) % 3) % 2
LENGTHS = torch.tensor([9, 4])
A_WINDOW: dict[str, Any] = {"window": 3, "scale": 0.25}
EVERYTHING: dict[str, Any] = {
    "window_right": None, "scale": 0.3, "softcap": 5.0, "sinks": normal(4),
    "alibi_slopes": normal(2, 4).abs(), "q_positions": torch.arange(10).view(2, 5),
    "kv_lengths": LENGTHS, "key_padding_mask": torch.arange(18).view(2, 9) % 3 > 0,
}  # fmt: skip
OF_A_ROW = (
    0, 1, 2, "alibi_slopes", "q_positions", "kv_lengths", "key_padding_mask", "block_table",
    "attn_mask",
)  # fmt: skip


def small_calls(op: Callable[..., Any], half: torch.dtype) -> dict[str, Callable[[], Call]]:
    """Return calls with and without the logarithm of each sum."""
    calls: dict[str, tuple[Any, ...]] = {
        "a window": (QKV, A_WINDOW),
        "everything": ([x.to(half) for x in QKV], EVERYTHING),
        "blocks": (
            (QKV[0], *POOLS), {**A_WINDOW, "block_table": BLOCKS, "kv_lengths": LENGTHS},
        ),
        "indirection": (QKV, {**A_WINDOW, "indirection": ROWS, "kv_lengths": LENGTHS}),
    }  # fmt: skip
    if op is sliding_window_attention:
        mask = torch.arange(45).view(1, 1, 5, 9) % 4 > 0
        calls["a mask"] = (QKV, {"scale": 0.3, "attn_mask": mask, "mask_convention": "visible"})
    return {
        name + ", lse" * lse: partial(Call, op, *given, **options, return_lse=lse)
        for name, (given, options) in calls.items()
        for lse in (False, True)
    }


def ragged(return_lse: bool) -> Call:
    tokens = [x.transpose(1, 2).flatten(0, 1) for x in QKV]
    ends = {"cu_seqlens_q": torch.tensor([0, 2, 10]), "cu_seqlens_kv": torch.tensor([0, 9, 18])}
    return Call(sliding_window_attention, *tokens, **A_WINDOW, **ends, return_lse=return_lse)


def of_blocks(op: Callable[..., Any]) -> Call:
    paged = Paged([1500, 3, 700, 1100])
    options = {"window": 900, "return_lse": True, **paged.options()}
    return Call(op, normal(4, 4, 3, 32, seed=3), paged.k, paged.v, **options)


def large_prompts() -> Iterator[Call]:
    for dtype in DTYPES:
        q, k, v = normal(3, 6, 333, 32, seed=1), *normal(2, 3, 2, 400, 32, seed=2)
        tensors = (x.to(dtype) for x in (q, k, v))
        options = {"window": 90, "sinks": normal(6), "return_lse": True}
        yield Call(sliding_window_attention, *tensors, **options)
    for size in (129, 200, 256, 384, 700):
        yield Call(sliding_window_attention, *normal(3, 2, 4, 90, size, seed=size), window=64)
    yield of_blocks(sliding_window_attention)


def long_caches() -> Iterator[Call]:
    for dtype in DTYPES:
        q, k, v = normal(3, 4, 2, 64, seed=1), *normal(2, 3, 2, 1500, 64, seed=2)
        tensors = (x.to(dtype) for x in (q, k, v))
        options = {"window": 1300, "sinks": normal(4), "return_lse": True}
        yield Call(sliding_window_decode, *tensors, **options)
    yield of_blocks(sliding_window_decode)


def merged(*shape: int, dtype: torch.dtype = torch.float32) -> Call:
    outputs, sums = normal(2, *shape, dtype=dtype), normal(2, *shape[:-1], seed=4) * 5
    return Call(merge_attention_states, outputs[0], sums[0], outputs[1], sums[1])


def merged_ragged() -> Call:
    outputs, sums = normal(2, 5, 4, 16, dtype=torch.bfloat16), normal(2, 4, 5, seed=4)
    return Call(merge_attention_states, outputs[0], sums[0], outputs[1], sums[1])


CONTRACTS = [
    Contract(
        "sliding_window_attention",
        {
            **small_calls(sliding_window_attention, torch.bfloat16),
            "ragged": lambda: ragged(False),
            "ragged, lse": lambda: ragged(True),
        },
        strided=(0, 1, 2),
        many=large_prompts,
        rows=OF_A_ROW,
        without_rows=("ragged", "indirection"),
    ),
    Contract(
        "sliding_window_decode", small_calls(sliding_window_decode, torch.float16),
        strided=(0, 1, 2), many=long_caches, rows=OF_A_ROW, without_rows=("indirection",),
    ),
    Contract(
        "merge_attention_states",
        {"dense": lambda: merged(2, 4, 5, 16), "ragged": merged_ragged},
        strided=(0, 1, 2, 3),
        many=lambda: [merged(4, 8, 300, 64)],
        rows=(0, 1, 2, 3),
        without_rows=("ragged",),
    ),
]  # fmt: skip
